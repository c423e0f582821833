# Creates a repository at TMP from the archive on stdin, which packs.go describes. checkout.sh follows.
# Usage: receive TMP PREFIX URL KIND REMOTE BRANCH COMMIT DEFAULT SHALLOW FORMAT
# TMP is PREFIX with a unique suffix.
tmp=$1 prefix=$2 url=$3 kind=$4 remote=$5 branch=$6 commit=$7 default=$8
shallow=$9
shift 9
format=$1

rm -rf -- "$prefix".*
mkdir -p -- "$(dirname -- "$tmp")"
trap 'rm -rf -- "$tmp"' EXIT
trap 'exit 1' HUP INT TERM
git init -q --object-format="$format" -- "$tmp"
cd -- "$tmp"
mkdir .git/agent-sessionizer
[ -z "$shallow" ] || printf '%s\n' "$shallow" >.git/shallow

if [ "$kind" != empty ]; then
	tar -xmf - -C .git # not the host's times, because git deletes old garbage
fi
