#!/usr/bin/env bash
# Builds what a release would publish for Linux, into dist/, and checks the signature and the
# checksums. Its key is made for this run and removed.
set -euo pipefail
cd "$(dirname "$0")/.."

key=$(mktemp -d)
trap 'rm -rf "$key"' EXIT
minisign=$PWD/.tools/minisign-v0.3.0
export MINISIGN_PASSWORD=$RANDOM$RANDOM
printf '%s\n' "$MINISIGN_PASSWORD" | "$minisign" -G -p "$key/key.pub" -s "$key/key" >/dev/null

SKIP_DARWIN=1 MINISIGN_KEY=$key/key .tools/goreleaser-v2.15.1 release --snapshot --clean --skip=publish,homebrew

"$minisign" -V -q -p "$key/key.pub" -m dist/checksums.txt
(cd dist && sha256sum --quiet -c checksums.txt)
for file in dist/*.deb; do dpkg-deb -I "$file" >/dev/null; done
echo "release-check: $(wc -l <dist/checksums.txt) files in dist/, checksums and signature correct"
