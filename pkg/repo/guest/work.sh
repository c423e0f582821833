# What would be lost with this guest. Commits that the host has stand on stdin,
# one a line. Usage: work DIR
cd -- "$1"
cd -- "$(git rev-parse --show-toplevel)"
tmp=$(mktemp -d)
trap 'rm -rf -- "$tmp"' EXIT
trap 'exit 1' HUP INT TERM
state=$(git rev-parse --git-common-dir)/agent-sessionizer
git() { command git -c core.fsmonitor=false -c core.hooksPath=/dev/null "$@"; }

# Only objects that are here can be excluded.
{ cat; cat "$state/known" 2>/dev/null || :; } | sort -u | git cat-file --batch-check='%(objectname)' |
	sed -n 's/^\([0-9a-f]*\)$/^\1/p' >"$tmp/known"
git for-each-ref --format='^%(objectname)' refs/remotes/origin >>"$tmp/known"

count() { { printf '%s\n' "$@"; cat "$tmp/known"; } | git rev-list --count --stdin; }

head=$(git rev-parse -q --verify 'HEAD^{commit}' || :)
[ -z "$head" ] || echo "head $head"
branch=$(git symbolic-ref -q --short HEAD || :)
[ -z "$branch" ] || echo "branch $branch"

{
	[ -z "$head" ] || echo "$head"
	git for-each-ref --format='%(objectname)' refs/heads refs/tags
	git worktree list --porcelain | sed -n 's/^HEAD \([0-9a-f]*[1-9a-f][0-9a-f]*\)$/\1/p'
} | sort -u >"$tmp/tips"
cat "$tmp/tips" "$tmp/known" >"$tmp/revs"
if [ -s "$tmp/tips" ]; then
	echo "ahead $(git rev-list --count --stdin <"$tmp/revs")"
fi
git for-each-ref --count=200 --sort=-committerdate --format='%(objectname) %(refname:lstrip=2)' refs/heads |
	while read -r tip name; do
		echo "ref $tip $(count "$tip") $name"
	done
git reflog show --format='%H' refs/stash 2>/dev/null >"$tmp/stashes" || :
n=0
while read -r stash; do
	[ "$(printf '%s\n' "$stash" | cat - "$tmp/known" | git rev-list --count --stdin)" = 0 ] || n=$((n + 1))
done <"$tmp/stashes"
echo "stashes $n"

dirty=0 untracked=0
git worktree list --porcelain | sed -n 's/^worktree //p' >"$tmp/trees"
while read -r tree; do
	[ -e "$tree/.git" ] || continue
	d=$(git -C "$tree" status --porcelain=v1 -z --no-renames --untracked-files=no | tr -cd '\0' | wc -c)
	u=$(git -C "$tree" ls-files --others --exclude-standard -z | tr -cd '\0' | wc -c)
	dirty=$((dirty + d)) untracked=$((untracked + u))
	for f in rebase-merge:rebase rebase-apply:rebase MERGE_HEAD:merge CHERRY_PICK_HEAD:cherry-pick REVERT_HEAD:revert BISECT_LOG:bisect; do
		p=$(git -C "$tree" rev-parse --path-format=absolute --git-path "${f%%:*}")
		[ ! -e "$p" ] || echo "progress ${f#*:}"
	done
done <"$tmp/trees"
echo "dirty $dirty"
echo "untracked $untracked"

if [ -f .gitmodules ]; then
	sub=$(git submodule --quiet foreach --recursive \
		'git rev-list --count HEAD --branches --not --remotes 2>/dev/null || echo 0' | awk '{ n += $1 } END { print n + 0 }')
	echo "submodules $sub"
fi
echo end
