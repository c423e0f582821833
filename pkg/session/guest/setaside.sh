# Moves what programs in WORK would run without being asked to WORK/ASIDE, and prints each path: git
# directories and what has one of NAMES. The git directory of CHECKOUT ("" for none) becomes ASIDE/git.
# Nothing else has access to WORK yet. It may be repeated.
# Usage: WORK ASIDE CHECKOUT NAMES...
set -euo pipefail
cd -- "$1"
export aside=$PWD/$2
checkout=$3
shift 3
mkdir -p -m 700 -- "$aside" # its name is random, so that nothing can be there
chown --reference=. -- "$aside"
cat >"$aside/.move" <<'END'
mv -T -- "$1" "$2" 2>/dev/null && exit
chattr -i -a -- "$1" . # which stop a rename
mv -T -- "$1" "$2"
END
exists() { [ -e "$1" ] || [ -L "$1" ]; }
if [ -n "$checkout" ] && exists "$checkout" && { [ -L "$checkout" ] || [ ! -d "$checkout" ]; }; then
	bash "$aside/.move" "$checkout" "$aside/checkout"
	printf '%s\n' "$checkout"
fi
if [ -n "$checkout" ] && exists "$checkout/.git" && ! exists "$aside/git"; then
	(cd -- "$checkout" && bash "$aside/.move" .git "$aside/git")
	printf '%s\n' "$checkout/.git"
fi
done=
if [ -n "$checkout" ] && exists "$checkout/.git"; then
	done=./$checkout # a new repository has been put there since
fi
named=(-iname .git)
for name; do
	named+=(-o -iname "$name")
done
# -execdir, because a path can be longer than a command accepts. find ignores its failures.
find . -xdev -path "./${aside##*/}" -prune -o -path "$done" -prune -o \( "${named[@]}" \) -prune -print \
	-execdir bash -c 'to=$(mktemp -d -- "$aside/XXXXXXXX") && chown --reference="$aside" -- "$to" && bash "$aside/.move" "$1" "$to/${1#./}" || : >"$aside/.failed"' bash {} \;
if [ -e "$aside/.failed" ]; then
	rm -- "$aside/.failed"
	exit 1
fi
rm -- "$aside/.move"
