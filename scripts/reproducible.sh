#!/usr/bin/env bash
# Builds the current commit twice, in two directories of different names, the second time with an
# empty build cache, and compares the programs byte by byte.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
build() { # DIRECTORY
  git clone --quiet . "$1"
  git -C "$1" checkout --quiet --detach "$(git rev-parse HEAD)"
  make --silent --no-print-directory -C "$1" build VERSION=reproducible >/dev/null
}
build "$work/first"
GOCACHE=$work/cache build "$work/second-directory-with-a-longer-name"
sha256sum "$work"/*/bin/agent-sessionizer "$work"/*/pkg/guestclient/bin/*.gz | sed "s|$work/||"
for file in bin/agent-sessionizer pkg/guestclient/bin/agent-guest-linux-amd64.gz pkg/guestclient/bin/agent-guest-linux-arm64.gz; do
  cmp "$work/first/$file" "$work/second-directory-with-a-longer-name/$file"
done
echo "reproducible: two builds of $(git rev-parse --short HEAD) are identical"
