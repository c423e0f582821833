# Makes DIR, whose files lie there without a repository, the working tree of the new repository at TMP.
# The branches and the HEAD of the hostile git directory OLD come along, as far as they can be read. Files
# below SETTINGS become those of the new repository's commit. Prints "warning TEXT" for failures.
# Usage: TMP DIR OLD SETTINGS...
tmp=$1 dir=$2 old=$3
shift 3
[ -d "$dir" ] && [ ! -L "$dir" ]
export GIT_DIR="$tmp/.git" GIT_WORK_TREE="$dir" GIT_NO_LAZY_FETCH=1 GIT_LITERAL_PATHSPECS=1 GIT_LFS_SKIP_SMUDGE=1
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null GIT_CONFIG_KEY_1=core.fsmonitor GIT_CONFIG_VALUE_1=false
commit=$(checked_out)
if [ -d "$old" ] && [ ! -L "$old" ]; then
	# Reading is what git considers safe in a hostile repository. It checks each object.
	if git fetch -q --atomic --no-tags --no-write-fetch-head --update-head-ok --no-recurse-submodules -- "$old" '+refs/heads/*:refs/heads/*'; then
		head=
		[ -L "$old/HEAD" ] || [ ! -f "$old/HEAD" ] || head=$(head -c 1000 -- "$old/HEAD" | tr -d '\0' | head -n 1)
		case $head in
		"ref: refs/heads/"*)
			there=$(git for-each-ref --count=1 --format='%(refname)' "${head#ref: }")
			[ "$there" != "${head#ref: }" ] || git symbolic-ref HEAD "$there"
			;;
		esac
		now=$(checked_out)
		[ -z "$now" ] || git read-tree "$now"
	else
		echo "warning the branches of the earlier session cannot be read; its repository is at $old"
	fi
fi
if [ -n "$commit" ]; then
	git ls-tree -r -z --name-only "$commit" >"$tmp/.git/agent-sessionizer/files"
	while IFS= read -r -d '' path; do
		for name in "$@"; do
			case /$path/ in
			*"/$name/"*) printf '%s\0' "$path" && break ;;
			esac
		done
	done <"$tmp/.git/agent-sessionizer/files" >"$tmp/.git/agent-sessionizer/settings"
	if [ -s "$tmp/.git/agent-sessionizer/settings" ]; then
		git restore --source="$commit" --worktree --pathspec-from-file="$tmp/.git/agent-sessionizer/settings" --pathspec-file-nul
	fi
	rm -- "$tmp/.git/agent-sessionizer/files" "$tmp/.git/agent-sessionizer/settings"
fi
find "$tmp" -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf -- {} +
sync # after a crash, a rename without its files would look finished
mv -T -n -- "$tmp/.git" "$dir/.git"
rmdir -- "$tmp"
