# Prints what would be lost with this guest. stdin lists the commits that the host
# has, one per line. Usage: work DIR
cd -- "$1"
top=$(git rev-parse --show-toplevel)
cd -- "$top"
tmp=$(mktemp -d)
trap 'rm -rf -- "$tmp"' EXIT
trap 'exit 1' HUP INT TERM
common=$(git rev-parse --git-common-dir)
state=$common/agent-sessionizer
git() { command git -c core.fsmonitor=false -c core.hooksPath=/dev/null "$@"; }

# Only existing objects can be excluded.
cat >"$tmp/have"
[ ! -f "$state/known" ] || cat "$state/known" >>"$tmp/have"
sort -u "$tmp/have" | git cat-file --batch-check='%(objectname)' |
	sed -n 's/^\([0-9a-f]*\)$/^\1/p' >"$tmp/known"
git for-each-ref --format='^%(objectname)' refs/remotes/origin >>"$tmp/known"

count() { { printf '%s\n' "$@"; cat "$tmp/known"; } | git rev-list --count --stdin; }

head=$(checked_out)
[ -z "$head" ] || echo "head $head"
branch=$(optional git symbolic-ref -q --short HEAD)
[ -z "$branch" ] || echo "branch $branch"

git worktree list --porcelain >"$tmp/worktrees"
{
	[ -z "$head" ] || echo "$head"
	git for-each-ref --format='%(objectname)' refs/heads refs/tags
	sed -n 's/^HEAD \([0-9a-f]*[1-9a-f][0-9a-f]*\)$/\1/p' "$tmp/worktrees"
} | sort -u >"$tmp/tips"
cat "$tmp/tips" "$tmp/known" >"$tmp/revs"
if [ -s "$tmp/tips" ]; then
	ahead=$(git rev-list --count --stdin <"$tmp/revs")
	echo "ahead $ahead"
fi
git for-each-ref --count=200 --sort=-committerdate --format='%(objectname) %(refname:lstrip=2)' refs/heads |
	while read -r tip name; do
		own=$(count "$tip")
		echo "ref $tip $own $name"
	done
stashes >"$tmp/stashes"
n=0
while read -r stash; do
	own=$(count "$stash")
	[ "$own" = 0 ] || n=$((n + 1))
done <"$tmp/stashes"
echo "stashes $n"

dirty=0 untracked=0 nested=0
sed -n 's/^worktree //p' "$tmp/worktrees" >"$tmp/trees"
while read -r tree; do
	[ -e "$tree/.git" ] || continue
	d=$(git -C "$tree" status --porcelain=v1 -z --no-renames --untracked-files=no --ignore-submodules=none | tr -cd '\0' | wc -c)
	u=$(git -C "$tree" ls-files --others --exclude-standard -z | tr -cd '\0' | wc -c)
	# Files whose changes git ignores on request: whether there are any is unknown.
	git -C "$tree" ls-files -v >"$tmp/flags"
	sed -n 's/^[a-zS] //p' "$tmp/flags" >"$tmp/flagged"
	while read -r f; do
		[ ! -e "$tree/$f" ] || d=$((d + 1))
	done <"$tmp/flagged"
	dirty=$((dirty + d)) untracked=$((untracked + u))
	# Repositories in it that are not submodules, or not of the main work tree.
	git -C "$tree" ls-files -s >"$tmp/index"
	sed -n 's/^160000 [0-9a-f]* [0-9]	//p' "$tmp/index" >"$tmp/links"
	while read -r f; do
		[ ! -e "$tree/$f/.git" ] || [ "$tree" = "$top" ] && [ -f .gitmodules ] || nested=$((nested + 1))
	done <"$tmp/links"
	for f in rebase-merge:rebase rebase-apply:rebase MERGE_HEAD:merge CHERRY_PICK_HEAD:cherry-pick REVERT_HEAD:revert BISECT_LOG:bisect; do
		p=$(git -C "$tree" rev-parse --path-format=absolute --git-path "${f%%:*}")
		[ ! -e "$p" ] || echo "progress ${f#*:}"
	done
done <"$tmp/trees"
echo "dirty $dirty"
echo "untracked $untracked"

sub=0
if [ -f .gitmodules ]; then
	sub=$(git submodule --quiet foreach --recursive \
		'head=$(git rev-parse -q --verify HEAD) || [ "$?" = 1 ] && { stash=$(git rev-parse -q --verify refs/stash) || [ "$?" = 1 ]; } && git rev-list --count $head $stash --branches --not --remotes' |
		awk '{ n += $1 } END { print n + 0 }')
fi
echo "submodules $((sub + nested))"
echo end
