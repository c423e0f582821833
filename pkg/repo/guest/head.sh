# Prints the commit and the branch that are checked out, each on its own line. A
# line is empty if there is none. Usage: head DIR
cd -- "$1"
git rev-parse --git-dir >/dev/null
head=$(checked_out)
branch=$(optional git symbolic-ref -q --short HEAD)
printf '%s\n%s\n' "$head" "$branch"
