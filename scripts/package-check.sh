#!/usr/bin/env bash
# Installs the deb in dist/ for this machine in a clean Debian root file system, runs the program,
# purges the package, and compares the files before and after. Then it does the same with the rpm in
# an empty root file system, where only the rpm's dependencies are not installed. Needs root,
# mmdebstrap and rpm. SYSTEM=FILE.tar keeps the file system with the dependencies for the next run.
# ARCH=arm64 checks the packages for another architecture, with qemu-user-static.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in mmdebstrap rpm; do
  command -v "$tool" >/dev/null || { echo "package-check: $tool is missing; run: apt-get install $tool" >&2; exit 5; }
done
arch=${ARCH:-$(dpkg --print-architecture)}
only() { # GLOB: the one file that it matches
  local found
  found=($1)
  [ ${#found[@]} = 1 ] && [ -f "${found[0]}" ] || { echo "package-check: $1 must be one file; run: make release-check" >&2; exit 5; }
  echo "${found[0]}"
}
package=$(only "dist/agent-sessionizer_*_$arch.deb")
rpm=$(only "dist/agent-sessionizer_*_$arch.rpm")

check() { # DESCRIPTION COMMAND…
  local what=$1
  shift
  "$@" || { echo "package-check: $what" >&2; exit 1; }
}

# What lintian checks first: modes, owners, paths, fields.
list=$(dpkg-deb -c "$package")
check "files must belong to root" awk '$2 != "root/root" && $2 != "0/0" { exit 1 }' <<<"$list"
check "files must not be writable by others" awk '$1 !~ /^l/ && substr($1, 9, 1) == "w" { exit 1 }' <<<"$list"
check "files must be below /usr" awk '$6 !~ /^\.\/(usr\/.*)?$/ { exit 1 }' <<<"$list"
for field in Package Version Architecture Maintainer Description Depends Section Priority; do
  check "field $field is missing" test -n "$(dpkg-deb -f "$package" "$field")"
done

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
dependencies=$(dpkg-deb -f "$package" Depends | sed -E 's/ *\([^)]*\)//g; s/, */,/g')
system=${SYSTEM:-$root/system.tar}
if [ ! -f "$system" ]; then
  suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
  mmdebstrap --quiet --architectures="$arch" --variant=minbase --aptopt='APT::Install-Recommends "false"' --include="$dependencies" "$suite" "$system"
fi
mkdir "$root/system"
tar -xf "$system" -C "$root/system" --exclude='./dev/*'
in_system() { chroot "$root/system" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"; }
files() { (cd "$root/$1" && find . -path ./var/lib/dpkg -prune -o -path ./var/lib/rpm -prune -o -path ./var/log -prune -o -path ./tmp -prune -o -print | sort); }
installed() { # ROOT ZSH
  for file in bash-completion/completions/agent-sessionizer "zsh/$2/_agent-sessionizer" fish/vendor_completions.d/agent-sessionizer.fish man/man1/agent-sessionizer.1.gz man/man1/agent-sessionizer-open.1.gz doc/agent-sessionizer/copyright; do
    check "/usr/share/$file is missing" test -s "$root/$1/usr/share/$file"
  done
  check "the unit must start the installed program" grep -qx 'ExecStart=/usr/bin/agent-sessionizer serve' "$root/$1/usr/lib/systemd/user/agent-sessionizer.service"
}

files system >"$root/before"
cp "$package" "$root/system/tmp/agent-sessionizer.deb"
in_system dpkg -i /tmp/agent-sessionizer.deb >/dev/null
in_system agent-sessionizer version
check "licences are missing" test "$(in_system agent-sessionizer version --licenses | wc -l)" -gt 1000
installed system vendor-completions
in_system dpkg --purge agent-sessionizer >/dev/null
files system >"$root/after"
check "files differ after the package was purged" diff "$root/before" "$root/after"
echo "package-check: $(basename "$package") was installed and purged; nothing is left of it"

with_rpm() { rpm --root "$root/rpm" --dbpath /var/lib/rpm "$@"; }
mkdir -p "$root"/rpm/{usr/{bin,lib/systemd/user,share/{man/man1,doc,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d}},var/lib/rpm}
with_rpm --initdb
files rpm >"$root/before"
with_rpm --install --nodeps --ignorearch "$rpm"
chroot "$root/rpm" /usr/bin/agent-sessionizer version
installed rpm site-functions
check "the rpm must require QEMU" grep -qx qemu-kvm <(with_rpm --query --requires agent-sessionizer)
with_rpm --erase agent-sessionizer
files rpm >"$root/after"
check "files differ after the rpm was erased" diff "$root/before" "$root/after"
echo "package-check: $(basename "$rpm") was installed and erased; nothing is left of it"
