# Moves a complete repository to its final name. Usage: finish TMP DIR
tmp=$1 dir=$2
sync # after a crash, a rename without its files would look finished
[ ! -d "$dir" ] || rmdir -- "$dir"
mv -T -n -- "$tmp" "$dir"
[ ! -e "$tmp" ]
