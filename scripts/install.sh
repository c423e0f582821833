#!/bin/sh
# Installs a release of agent-sessionizer for this user. Needs curl or wget, tar and sha256sum or
# shasum, but not root. The archive must have the checksum that the release lists. If minisign is
# installed and "key" is set below, the list must also have a valid signature by that key.
#
#   sh install.sh [--dir DIR] [--version VERSION]      DIR is ~/.local/bin by default
set -eu

repository=https://github.com/agent-sessionizer/agent-sessionizer/releases
base=${AGENT_SESSIONIZER_RELEASES:-$repository}
key=${AGENT_SESSIONIZER_RELEASE_KEY:-} # the public key of the releases; the first release sets it here
dir=$HOME/.local/bin
version=

fail() {
  printf 'install: %s\n' "$*" >&2
  exit 1
}
usage() {
  printf 'usage: install.sh [--dir DIR] [--version VERSION]\n' >&2
  exit 2
}
fetch() { # URL FILE
  if command -v curl >/dev/null; then
    curl -fsSL --retry 2 -o "$2" "$1" || fail "download $1: curl failed"
  elif command -v wget >/dev/null; then
    wget -q -O "$2" "$1" || fail "download $1: wget failed"
  else
    fail "neither curl nor wget is installed"
  fi
}

while [ $# -gt 0 ]; do
  case $1 in
  --dir | --version) [ $# -ge 2 ] || usage ;;
  *) usage ;;
  esac
  case $1 in
  --dir) dir=$2 ;;
  --version) version=${2#v} ;;
  esac
  shift 2
done

case $(uname -s) in
Linux) os=linux ;;
Darwin) os=darwin ;;
*) fail "the system must be Linux or macOS, got $(uname -s)" ;;
esac
case $(uname -m) in
x86_64 | amd64) arch=amd64 ;;
aarch64 | arm64) arch=arm64 ;;
*) fail "the processor must be amd64 or arm64, got $(uname -m)" ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

if [ -n "$version" ]; then files=$base/download/v$version; else files=$base/latest/download; fi
fetch "$files/checksums.txt" "$work/checksums.txt"
if command -v minisign >/dev/null && [ -n "$key" ]; then
  fetch "$files/checksums.txt.minisig" "$work/checksums.txt.minisig"
  minisign -V -q -P "$key" -m "$work/checksums.txt" || fail "the signature of checksums.txt is wrong"
else
  printf 'install: the signature was not checked: minisign is not installed, or the public key of the releases is not set\n' >&2
fi

# The list names one archive for each system.
line=$(grep -E "^[0-9a-f]{64}  agent-sessionizer_[0-9A-Za-z.+~-]+_${os}_${arch}\.tar\.gz\$" "$work/checksums.txt") ||
  fail "checksums.txt lists no archive for $os $arch"
[ "$(printf '%s\n' "$line" | wc -l)" -eq 1 ] || fail "checksums.txt lists several archives for $os $arch"
archive=${line#*  }
fetch "$files/$archive" "$work/$archive"
printf '%s\n' "$line" >"$work/sum"
if command -v sha256sum >/dev/null; then
  (cd "$work" && sha256sum -c sum >/dev/null 2>&1) || fail "the checksum of $archive is wrong"
elif command -v shasum >/dev/null; then
  (cd "$work" && shasum -a 256 -c sum >/dev/null 2>&1) || fail "the checksum of $archive is wrong"
else
  fail "neither sha256sum nor shasum is installed"
fi

tar -xzf "$work/$archive" -C "$work" agent-sessionizer
mkdir -p "$dir"
cp "$work/agent-sessionizer" "$dir/.agent-sessionizer.new"
chmod 755 "$dir/.agent-sessionizer.new"
mv -f "$dir/.agent-sessionizer.new" "$dir/agent-sessionizer"
printf 'installed %s\n' "$dir/agent-sessionizer"
case :$PATH: in
*:"$dir":*) ;;
*) printf 'install: %s is not in PATH; add it to run agent-sessionizer by its name\n' "$dir" >&2 ;;
esac
