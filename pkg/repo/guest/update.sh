# Brings the repository at DIR to the history of another time: adds the pack on stdin, and
# removes all refs. .git/agent-sessionizer/refs lists the new ones. Files that git does not
# track stay. checkout.sh follows.
# Usage: DIR URL KIND REMOTE BRANCH COMMIT DEFAULT FORMAT
cd -- "$1"
[ -d .git ]
[ ! -L .git ]
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null GIT_CONFIG_KEY_1=core.fsmonitor GIT_CONFIG_VALUE_1=false
url=$2 kind=$3 remote=$4 branch=$5 commit=$6 default=$7
[ "$(git rev-parse --show-object-format)" = "$8" ]
git index-pack --stdin --fix-thin >/dev/null
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git worktree prune
[ ! -f .gitmodules ] || git submodule --quiet deinit --all --force >/dev/null 2>&1 || :
rm -rf .git/logs .git/rebase-apply .git/rebase-merge .git/sequencer .git/*_HEAD .git/BISECT_* .git/agent-sessionizer/extras
git config --remove-section remote.origin 2>/dev/null || :
