# Applies the pack on stdin to TMP as uncommitted changes. Its commit CHANGES
# contains the work tree. Usage: dirty TMP CHANGES
cd -- "$1"
changes=$2
git index-pack --stdin --fix-thin >/dev/null
head=$(checked_out)
if [ -n "$head" ]; then
	GIT_LFS_SKIP_SMUDGE=1 git read-tree -m -u HEAD "$changes"
	optional git -c core.hooksPath=/dev/null reset -q --mixed # old versions of git exit with 1 when files differ
else
	GIT_LFS_SKIP_SMUDGE=1 git read-tree -m -u "$changes"
	git read-tree --empty
fi
