# Moves what programs in WORK would run without being asked to WORK/.set-aside/TIME, and prints each path:
# git hooks, settings of git that name programs, and settings of agents and direnv.
# Usage: WORK TIME
set -eu
cd -- "$1"
to=.set-aside/$2
aside() {
	[ -e "$1" ] || [ -L "$1" ] || return 0
	mkdir -p -- "$to/$(dirname -- "$1")"
	mv -T -- "$1" "$to/$1"
	printf '%s\n' "$1"
}
list() { find . -xdev -path ./.set-aside -prune -o "$@" -print0; }
list -type f -name HEAD | while IFS= read -r -d '' head; do
	git=${head%/HEAD}
	[ -e "$git/objects" ] || [ -e "$git/commondir" ] || continue
	aside "$git/hooks"
	aside "$git/config.worktree"
	aside "$git/info/attributes"
	[ -e "$git/config" ] || [ -L "$git/config" ] || continue
	aside "$git/config"
	# Only these settings come back; they name no program.
	git config --file "$to/$git/config" --no-includes --null --list 2>/dev/null | while IFS= read -r -d '' setting; do
		name=${setting%%$'\n'*} value=${setting#*$'\n'}
		case $name in
		core.repositoryformatversion | core.bare | core.filemode | extensions.objectformat | branch.*.remote | branch.*.merge | remote.*.fetch | user.name | user.email) ;;
		remote.*.url) [[ $value =~ ^(https?|ssh)://|^[A-Za-z0-9._-]+@[A-Za-z0-9.-]+: ]] || continue ;;
		*) continue ;;
		esac
		git config --file "$git/config" --add "$name" "$value"
	done
done
list \( -name .envrc -o -name .mcp.json -o -name .claude -o -name .codex -o -name .gemini -o -name .cursor -o -name .opencode -o -name .vscode \) -prune | while IFS= read -r -d '' path; do
	aside "$path"
done
