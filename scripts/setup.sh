#!/usr/bin/env bash
# Installs missing tools for the build, the tests and the demo: with apt on Debian and
# Ubuntu, with brew on macOS. On other systems it prints what to install.
#
#   setup.sh           what "make test" and "make demo" need
#   setup.sh foreign   what "make arm64" needs in addition, on Debian and Ubuntu
set -euo pipefail

say() { printf 'setup: %s\n' "$*" >&2; }

# foreign installs QEMU for the guests and the programs of aarch64. The kernel must know how to
# run its programs (binfmt_misc), because the packages of an image run while it is built.
foreign() {
  local missing=() sudo=() entry=/proc/sys/fs/binfmt_misc/qemu-aarch64
  command -v apt-get >/dev/null || {
    say "not Debian or Ubuntu; install: qemu-system-aarch64, its UEFI firmware, qemu-aarch64-static with binfmt_misc"
    exit 5
  }
  command -v qemu-system-aarch64 >/dev/null || missing+=(qemu-system-arm)
  [ -e /usr/share/AAVMF/AAVMF_CODE.fd ] || missing+=(qemu-efi-aarch64)
  command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
  command -v update-binfmts >/dev/null || missing+=(binfmt-support)
  if [ ${#missing[@]} -eq 0 ] && grep -qsx enabled "$entry"; then return; fi
  [ "$(id -u)" = 0 ] || {
    command -v sudo >/dev/null || { say "neither root nor sudo is available; run as root: scripts/setup.sh foreign"; exit 5; }
    sudo=(sudo)
  }
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
  fi
  # Where systemd does not run, as in a container, nothing has mounted it.
  [ -e "${entry%/*}/register" ] || "${sudo[@]}" mount -t binfmt_misc binfmt_misc "${entry%/*}"
  grep -qsx enabled "$entry" || "${sudo[@]}" update-binfmts --enable qemu-aarch64
  grep -qsx enabled "$entry" || { say "the kernel does not run programs for aarch64; see: update-binfmts --display qemu-aarch64"; exit 5; }
}

case ${1-} in
'') ;;
foreign)
  [ "$(uname -s)" = Linux ] || { say "only Linux hosts run VMs of another architecture"; exit 5; }
  [ "$(uname -m)" = aarch64 ] || foreign
  exit
  ;;
*) say "the argument must be foreign or missing, got $1"; exit 2 ;;
esac

# command → package
case "$(uname -s)" in
Linux)
  command -v apt-get >/dev/null || {
    say "not Debian or Ubuntu; install: qemu, qemu-img, UEFI firmware, mmdebstrap, e2fsprogs, sfdisk, mtools, zstd, tmux, git, ssh, iproute2, iptables, dbus, gnome-keyring, nodejs, npm, chromium, promtool (prometheus)"
    exit 5
  }
  arch=$(dpkg --print-architecture)
  case $arch in
  amd64) qemu=qemu-system-x86_64 qemu_package=qemu-system-x86 firmware=/usr/share/OVMF/OVMF_CODE_4M.fd:ovmf ;;
  arm64) qemu=qemu-system-aarch64 qemu_package=qemu-system-arm firmware=/usr/share/AAVMF/AAVMF_CODE.fd:qemu-efi-aarch64 ;;
  *) say "unsupported architecture $arch"; exit 5 ;;
  esac
  want="$qemu:$qemu_package qemu-img:qemu-utils mmdebstrap:mmdebstrap mkfs.ext4:e2fsprogs sfdisk:fdisk mcopy:mtools zstd:zstd tmux:tmux git:git ssh:openssh-client
    ip:iproute2 iptables:iptables make:make gcc:gcc jq:jq curl:curl zsh:zsh fish:fish mandoc:mandoc
    dbus-daemon:dbus gnome-keyring-daemon:gnome-keyring node:nodejs npm:npm chromium:chromium"
  missing=()
  for pair in $want; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  [ -e "${firmware%%:*}" ] || missing+=("${firmware##*:}")
  [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
  [ -e /usr/share/bash-completion/bash_completion ] || missing+=(bash-completion)
  [ -e /usr/include/stdlib.h ] || missing+=(libc6-dev) # the race detector links with C
  [ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
  command -v go >/dev/null || missing+=(golang-go)
  # Images are built in a user namespace when not root.
  [ "$(id -u)" = 0 ] || command -v newuidmap >/dev/null || missing+=(uidmap)
  promtool=$(cd "$(dirname "$0")/.." && pwd)/.tools/promtool
  command -v promtool >/dev/null && promtool=
  [ -x "$promtool" ] && promtool=
  sudo=()
  if [ ${#missing[@]} -gt 0 ] || [ -n "$promtool" ]; then
    if [ "$(id -u)" != 0 ]; then
      command -v sudo >/dev/null || { say "neither root nor sudo is available; run as root: apt-get update && apt-get install ${missing[*]} prometheus"; exit 5; }
      sudo=(sudo)
    fi
    "${sudo[@]}" apt-get update -qq
  fi
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
  fi
  if [ -n "$promtool" ]; then
    # Its package, once installed, would run a Prometheus on this machine.
    say "downloading promtool"
    package=$(mktemp -d)
    (cd "$package" && apt-get -o APT::Sandbox::User=root download -qq prometheus >&2 && dpkg-deb -x prometheus_*.deb .)
    mkdir -p "$(dirname "$promtool")"
    mv "$package/usr/bin/promtool" "$promtool"
    rm -rf "$package"
  fi
  ;;
Darwin)
  command -v brew >/dev/null || { say "Homebrew is missing: https://brew.sh"; exit 5; }
  command -v cc >/dev/null || { say "the C compiler is missing: xcode-select --install"; exit 5; }
  for pair in tmux:tmux git:git jq:jq go:go node:node promtool:prometheus; do
    command -v "${pair%%:*}" >/dev/null || { say "installing ${pair##*:}"; brew install "${pair##*:}" >&2; }
  done
  ;;
*)
  say "unsupported system $(uname -s)"
  exit 5
  ;;
esac
# Since version 1.21, Go downloads the toolchain that go.mod requires.
version=$(go env GOVERSION 2>/dev/null | sed 's/^go//')
case ${version:-missing} in
missing | 0.* | 1.[0-9] | 1.[0-9].* | 1.1[0-9] | 1.1[0-9].* | 1.20 | 1.20.*)
  say "Go must be 1.21 or newer, got ${version:-none}; install it from https://go.dev/dl and put it first in PATH"
  exit 5
  ;;
esac
