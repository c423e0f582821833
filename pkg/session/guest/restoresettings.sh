# Writes the settings of agents and direnv in the checkout DIR as they are in COMMIT, if it has that.
# Usage: DIR COMMIT
set -eu
cd -- "$1" 2>/dev/null || exit 0
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null GIT_CONFIG_KEY_1=core.fsmonitor GIT_CONFIG_VALUE_1=false
git ls-tree -r -z --name-only "$2" 2>/dev/null | while IFS= read -r -d '' path; do
	case /$path in
	*/.envrc | */.mcp.json | */.claude/* | */.codex/* | */.gemini/* | */.cursor/* | */.opencode/* | */.vscode/*)
		mkdir -p -- "$(dirname -- "$path")"
		git cat-file blob "$2:$path" >"$path"
		;;
	esac
done
