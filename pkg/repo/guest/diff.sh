# Prints the difference between BASE and the work tree, including untracked files.
# Uses its own index and object directory. Usage: diff DIR BASE OPTION...
cd -- "$1"
top=$(git rev-parse --show-toplevel)
cd -- "$top"
base=$2
shift 2
tmp=$(mktemp -d)
trap 'rm -rf -- "$tmp"' EXIT
trap 'exit 1' HUP INT TERM
index=$(git rev-parse --git-path index)
# Keep the modification time, from which git tells which files it must read.
[ ! -f "$index" ] || cp -p -- "$index" "$tmp/index"
objects=$(git rev-parse --path-format=absolute --git-path objects)
mkdir "$tmp/objects"
[ -n "$base" ] || base=$(git hash-object -t tree /dev/null)
export GIT_INDEX_FILE="$tmp/index" GIT_OBJECT_DIRECTORY="$tmp/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$objects"
git() { command git -c core.fsmonitor=false -c core.splitIndex=false -c core.hooksPath=/dev/null "$@"; }
git add -u
git ls-files --others --exclude-standard -z | git update-index --add --remove --replace -z --stdin
git diff --cached --no-ext-diff --no-textconv --no-color --find-renames --ignore-submodules=none \
	--src-prefix=a/ --dst-prefix=b/ "$@" "$base" --
