# Brings the repository at DIR to the history of another time: adds the pack on stdin, and
# removes all refs. .git/agent-sessionizer/refs lists the new ones. Files that git does not
# track stay. checkout.sh follows.
# Usage: renew DIR URL KIND REMOTE BRANCH COMMIT DEFAULT FORMAT
cd -- "$1"
url=$2 kind=$3 remote=$4 branch=$5 commit=$6 default=$7
[ "$(git rev-parse --show-object-format)" = "$8" ]
git index-pack --stdin --fix-thin >/dev/null
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
rm -rf .git/logs .git/rebase-apply .git/rebase-merge .git/sequencer .git/*_HEAD .git/agent-sessionizer/extras
optional git config --remove-section remote.origin 2>/dev/null || :
