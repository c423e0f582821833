# Gives a complete repository its name. Usage: finish TMP DIR
tmp=$1 dir=$2
sync # a rename that outlives the files it names would look finished
[ ! -d "$dir" ] || rmdir -- "$dir"
mv -T -n -- "$tmp" "$dir"
[ ! -e "$tmp" ]
