# shellcheck shell=bash
# The part of nvm that provision/30-node.sh uses.
nvm() {
	case $1 in
	install)
		local arch name to=$NVM_DIR/versions/node/v$2
		case $(uname -m) in x86_64) arch=x64 ;; aarch64) arch=arm64 ;; esac
		name=node-v$2-linux-$arch
		mkdir -p "$to" && curl -fsS -o "/tmp/$name.tar.gz" "https://nodejs.org/dist/v$2/$name.tar.gz" &&
			tar -C "$to" --strip-components=1 -xzf "/tmp/$name.tar.gz"
		;;
	alias) mkdir -p "$NVM_DIR/alias" && echo "$3" >"$NVM_DIR/alias/$2" ;;
	esac
}
