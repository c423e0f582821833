#!/usr/bin/env bash
# Installs the package in dist/ for this machine in a clean Debian root file system, runs the
# program, purges the package, and compares the files before and after. Needs root and mmdebstrap.
# SYSTEM=FILE.tar keeps the file system with the dependencies for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=$(dpkg --print-architecture)
packages=(dist/agent-sessionizer_*_"$arch".deb)
[ ${#packages[@]} = 1 ] && [ -f "${packages[0]}" ] || { echo "package-check: dist/ must have one package for $arch; run: make release-check" >&2; exit 5; }
package=${packages[0]}

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
  mmdebstrap --quiet --variant=minbase --aptopt='APT::Install-Recommends "false"' --include="$dependencies" "$suite" "$system"
fi
mkdir "$root/system"
tar -xf "$system" -C "$root/system" --exclude='./dev/*'
in_system() { chroot "$root/system" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"; }
files() { (cd "$root/system" && find . -path ./var/lib/dpkg -prune -o -path ./var/log -prune -o -path ./tmp -prune -o -print | sort); }

files >"$root/before"
cp "$package" "$root/system/tmp/agent-sessionizer.deb"
in_system dpkg -i /tmp/agent-sessionizer.deb >/dev/null
in_system agent-sessionizer version
check "licences are missing" test "$(in_system agent-sessionizer version --licenses | wc -l)" -gt 1000
for file in bash-completion/completions/agent-sessionizer zsh/vendor-completions/_agent-sessionizer fish/vendor_completions.d/agent-sessionizer.fish man/man1/agent-sessionizer.1.gz man/man1/agent-sessionizer-open.1.gz doc/agent-sessionizer/copyright; do
  check "/usr/share/$file is missing" test -s "$root/system/usr/share/$file"
done
check "the unit must start the installed program" grep -qx 'ExecStart=/usr/bin/agent-sessionizer serve' "$root/system/usr/lib/systemd/user/agent-sessionizer.service"
in_system dpkg --purge agent-sessionizer >/dev/null
files >"$root/after"
check "files differ after the package was purged" diff "$root/before" "$root/after"
echo "package-check: $(basename "$package") was installed and purged; nothing is left of it"
