# Applies the pack on stdin, whose commit CHANGES holds a work tree, to TMP as
# uncommitted changes. Usage: dirty TMP CHANGES
cd -- "$1"
changes=$2
git index-pack --stdin --fix-thin >/dev/null
head=$(checked_out)
if [ -n "$head" ]; then
	GIT_LFS_SKIP_SMUDGE=1 git read-tree -m -u HEAD "$changes"
	optional git -c core.hooksPath=/dev/null reset -q --mixed # says 1 in old gits when files differ
else
	GIT_LFS_SKIP_SMUDGE=1 git read-tree -m -u "$changes"
	git read-tree --empty
fi
