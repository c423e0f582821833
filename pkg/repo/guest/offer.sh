# Lists everything that is the agent's. Usage: offer DIR
cd -- "$1"
git rev-parse --git-dir >/dev/null
head=$(git rev-parse -q --verify 'HEAD^{commit}' || :)
[ -z "$head" ] || echo "head $head"
git for-each-ref --format='ref %(objectname) %(refname)' refs/heads refs/tags
git reflog show --format='stash %H' refs/stash 2>/dev/null || :
git worktree list --porcelain | sed -n 's/^HEAD \([0-9a-f]*[1-9a-f][0-9a-f]*\)$/tree \1/p'
echo end
