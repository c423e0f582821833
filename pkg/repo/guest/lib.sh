# Every script begins with this file. A failed command ends the script, so that a
# failure is never read as "nothing found". For the same reason, no script hides
# the exit status of a command in an argument or a condition. "optional" runs a
# git command whose exit status 1 means that nothing was found.
set -euo pipefail
optional() { "$@" || [ "$?" = 1 ]; }
# Prints the stash's entries, one per line, even if its log is missing.
stashes() {
	local tip
	tip=$(git for-each-ref --format='%(objectname)' refs/stash)
	[ -n "$tip" ] || return 0
	{ printf '%s\n' "$tip" && git reflog show --format='%H' refs/stash; } | sort -u
}
# Prints the checked-out commit, or nothing if none exists. A detached HEAD has one.
checked_out() {
	local ref
	ref=$(optional git symbolic-ref -q HEAD)
	if [ -z "$ref" ]; then
		git rev-parse -q --verify 'HEAD^{commit}'
	else
		git for-each-ref --count=1 --format='%(objectname)' "$ref"
	fi
}
