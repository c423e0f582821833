# Fetches submodules and LFS objects over the guest's own network, as far as that
# is possible. Prints "warning TEXT" for failures. Usage: extras DIR SECONDS
cd -- "$1"
seconds=$2
if [ -f .gitmodules ]; then
	echo "step fetching submodules"
	timeout "$seconds" git submodule --quiet update --init --recursive >&2 </dev/null ||
		echo "warning some submodules could not be fetched from inside the guest; if its network allows it, run: git submodule update --init --recursive"
fi
lfs=$(optional git grep -h filter=lfs -- .gitattributes '*/.gitattributes')
if [ -n "$lfs" ]; then
	if ! git lfs version >/dev/null 2>&1; then
		echo "warning this repository uses Git LFS, which the guest does not have; its large files are pointers"
	else
		echo "step fetching LFS objects"
		git lfs install --local --skip-repo >/dev/null 2>&1 || :
		timeout "$seconds" git lfs pull >&2 </dev/null ||
			echo "warning some LFS objects could not be fetched from inside the guest; if its network allows it, run: git lfs pull"
	fi
fi
if [ -d .git/agent-sessionizer ]; then
	: >.git/agent-sessionizer/extras
fi
