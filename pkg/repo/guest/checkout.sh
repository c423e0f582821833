# Creates the refs in .git/agent-sessionizer/refs, and checks out a branch. KIND is "mirror"
# (branches are the remote's), "clone" (branches are the user's, refs/remotes/REMOTE the
# remote's) or "empty" (no refs). An empty BRANCH means a detached HEAD.
if [ "$kind" = empty ]; then
	: >.git/agent-sessionizer/known
else
	cut -d' ' -f1 .git/agent-sessionizer/refs | sort -u >.git/agent-sessionizer/known
	if [ "$kind" = mirror ]; then
		sed -n -e 's|^\([0-9a-f]*\) refs/heads/\(.*\)$|create refs/remotes/origin/\2 \1|p' \
			-e 's|^\([0-9a-f]*\) \(refs/tags/.*\)$|create \2 \1|p' .git/agent-sessionizer/refs
	else
		sed -n -e "\\|^[0-9a-f]* refs/remotes/$remote/HEAD\$|d" \
			-e "s|^\\([0-9a-f]*\\) refs/remotes/$remote/\\(.*\\)\$|create refs/remotes/origin/\\2 \\1|p" \
			-e 's|^\([0-9a-f]*\) \(refs/heads/.*\)$|create \2 \1|p' \
			-e 's|^\([0-9a-f]*\) \(refs/tags/.*\)$|create \2 \1|p' .git/agent-sessionizer/refs
	fi | sort -u | git update-ref --stdin # a symbolic ref is listed as what it points to
	rm .git/agent-sessionizer/refs
fi

if [ -n "$url" ]; then
	git remote add -- origin "$url"
	there=
	[ -z "$default" ] || there=$(git for-each-ref --count=1 "refs/remotes/origin/$default")
	if [ -n "$there" ]; then
		git symbolic-ref refs/remotes/origin/HEAD "refs/remotes/origin/$default"
	fi
fi
if [ -n "$branch" ]; then
	git symbolic-ref HEAD "refs/heads/$branch"
	[ -z "$commit" ] || git update-ref "refs/heads/$branch" "$commit"
	if [ -n "$url" ]; then
		git config "branch.$branch.remote" origin
		git config "branch.$branch.merge" "refs/heads/$branch"
	fi
else
	git update-ref --no-deref HEAD "$commit"
fi
if [ -n "$commit" ]; then
	# extras.sh fetches the LFS objects later, if their server is reachable.
	GIT_LFS_SKIP_SMUDGE=1 git -c core.hooksPath=/dev/null reset -q --hard
fi
printf '%s %s\n' "${commit:--}" "${branch:--}" >.git/agent-sessionizer/base
trap - EXIT
