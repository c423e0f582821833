# Prints what is at DIR: "absent", "foreign", or "done COMMIT BRANCH EXTRAS" ("-"
# for an empty COMMIT or BRANCH). Usage: probe DIR
dir=$1
if [ -d "$dir/.git" ] || [ -f "$dir/.git" ]; then
	if [ -f "$dir/.git/agent-sessionizer/base" ]; then
		extras=no
		[ ! -f "$dir/.git/agent-sessionizer/extras" ] || extras=yes
		base=$(head -n 1 "$dir/.git/agent-sessionizer/base")
		printf 'done %s %s\n' "$base" "$extras"
	else
		cd -- "$dir"
		commit=$(checked_out)
		branch=$(optional git symbolic-ref -q --short HEAD)
		printf 'done %s %s yes\n' "${commit:--}" "${branch:--}"
	fi
elif [ -d "$dir" ]; then
	files=$(ls -A "$dir")
	[ -n "$files" ] && echo foreign || echo absent
elif [ -e "$dir" ]; then
	echo foreign
else
	echo absent
fi
