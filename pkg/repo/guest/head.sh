# The commit and the branch that are checked out, each on a line, which is empty
# where there is none. Usage: head DIR
cd -- "$1"
git rev-parse --git-dir >/dev/null
head=$(checked_out)
branch=$(optional git symbolic-ref -q --short HEAD)
printf '%s\n%s\n' "$head" "$branch"
