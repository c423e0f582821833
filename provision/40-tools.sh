#!/usr/bin/env bash
# The tools gh and lazygit.
. "$PROVISION_DIR/lib.sh"

apt_update
say "gh"
apt_install gh

lazygit_release() {
	local arch sum
	case $(uname -m) in
	x86_64) arch=x86_64 sum=$LAZYGIT_SHA256_X86_64 ;;
	aarch64) arch=arm64 sum=$LAZYGIT_SHA256_ARM64 ;;
	*) return 1 ;;
	esac
	local dir url
	dir=$(mktemp -d)
	url=https://github.com/jesseduffield/lazygit/releases/download/v$LAZYGIT_VERSION/lazygit_${LAZYGIT_VERSION}_Linux_$arch.tar.gz
	retry quiet curl -fsSL --proto '=https' --max-time 120 -o "$dir/lazygit.tar.gz" "$url" &&
		echo "$sum  $dir/lazygit.tar.gz" >"$dir/sum" &&
		quiet sha256sum -c "$dir/sum" &&
		tar -C "$dir" -xzf "$dir/lazygit.tar.gz" lazygit &&
		install -m 755 "$dir/lazygit" /usr/local/bin/lazygit
	local code=$?
	rm -rf "$dir"
	return "$code"
}

if apt_has lazygit; then
	say "lazygit"
	apt_install lazygit
elif [ "$AGENT_SOURCE" = debian ]; then
	say "NOTE: this Debian release has no lazygit package; the git window shows git status"
elif [ "$(/usr/local/bin/lazygit --version 2>/dev/null | grep -o "version=$LAZYGIT_VERSION,")" ]; then
	say "lazygit $LAZYGIT_VERSION is already installed"
else
	say "lazygit $LAZYGIT_VERSION"
	lazygit_release || {
		say "download lazygit $LAZYGIT_VERSION: the download failed or the digest differs"
		exit 1
	}
fi
