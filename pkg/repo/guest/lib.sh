# Every script begins with this. A command that fails ends the script: what is
# not known must not read as "there is nothing". So the status of a command is
# never hidden in an argument or a condition; git gets here by "optional" where
# its exit status 1 means that there is nothing.
set -euo pipefail
optional() { "$@" || [ "$?" = 1 ]; }
# The stash's entries, one a line, also where its log is missing.
stashes() {
	local tip
	tip=$(git for-each-ref --format='%(objectname)' refs/stash)
	[ -n "$tip" ] || return 0
	{ printf '%s\n' "$tip" && git reflog show --format='%H' refs/stash; } | sort -u
}
# What is checked out, "" where there is no commit. A detached HEAD has one.
checked_out() {
	local ref
	ref=$(optional git symbolic-ref -q HEAD)
	if [ -z "$ref" ]; then
		git rev-parse -q --verify 'HEAD^{commit}'
	else
		git for-each-ref --count=1 --format='%(objectname)' "$ref"
	fi
}
