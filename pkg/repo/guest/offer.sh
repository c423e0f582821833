# Lists everything that belongs to the agent. Usage: offer DIR
cd -- "$1"
git rev-parse --git-dir >/dev/null
head=$(checked_out)
[ -z "$head" ] || echo "head $head"
git for-each-ref --format='ref %(objectname) %(refname)' refs/heads refs/tags
stashes | sed 's/^/stash /'
git worktree list --porcelain | sed -n 's/^HEAD \([0-9a-f]*[1-9a-f][0-9a-f]*\)$/tree \1/p'
echo end
