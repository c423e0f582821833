# Packs what stdin requests: "COMMIT" for its whole history, "^COMMIT" for what
# the host has already. Usage: pack DIR
cd -- "$1"
tmp=$(mktemp)
trap 'rm -f -- "$tmp"' EXIT
trap 'exit 1' HUP INT TERM
cat >"$tmp"
{
	sed -n '/^[0-9a-f]/p' "$tmp"
	sed -n 's/^^//p' "$tmp" | git cat-file --batch-check='%(objectname)' | sed -n 's/^\([0-9a-f]*\)$/^\1/p'
} | git pack-objects --revs --thin --stdout --delta-base-offset --progress
