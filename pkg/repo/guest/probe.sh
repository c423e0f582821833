# What is at DIR: "absent", "foreign", or "done COMMIT BRANCH EXTRAS" ("-" for
# an empty COMMIT or BRANCH). Usage: probe DIR
dir=$1
if [ -d "$dir/.git" ] || [ -f "$dir/.git" ]; then
	if [ -f "$dir/.git/agent-sessionizer/base" ]; then
		extras=no
		[ ! -f "$dir/.git/agent-sessionizer/extras" ] || extras=yes
		printf 'done %s %s\n' "$(head -n 1 "$dir/.git/agent-sessionizer/base")" "$extras"
	else
		commit=$(git -C "$dir" rev-parse -q --verify 'HEAD^{commit}' || echo -)
		branch=$(git -C "$dir" symbolic-ref -q --short HEAD || echo -)
		printf 'done %s %s yes\n' "$commit" "$branch"
	fi
elif [ -e "$dir" ] && { [ ! -d "$dir" ] || [ -n "$(ls -A "$dir")" ]; }; then
	echo foreign
else
	echo absent
fi
