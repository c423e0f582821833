#!/usr/bin/env bash
# Node LTS and npm, in /usr/local/bin for all users.
. "$PROVISION_DIR/lib.sh"

node_is() { [ "$(/usr/local/bin/node --version 2>/dev/null)" = "v$NODE_VERSION" ]; }

from_nvm() {
	local dir=/opt/nvm done=/var/lib/agent-sessionizer/nvm-commit
	# Compare a stamp: the user owns the directory, so root's git refuses to work in it.
	if [ ! -s "$dir/nvm.sh" ] || [ "$(cat "$done" 2>/dev/null)" != "$NVM_COMMIT" ]; then
		say "nvm $NVM_VERSION"
		rm -rf "$dir"
		retry quiet git clone -q --depth 1 --branch "$NVM_VERSION" https://github.com/nvm-sh/nvm.git "$dir"
		# A tag can be moved; the commit cannot.
		[ "$(git -C "$dir" rev-parse HEAD)" = "$NVM_COMMIT" ] || {
			say "nvm $NVM_VERSION must be commit $NVM_COMMIT"
			exit 1
		}
		put 644 "$done" <<<"$NVM_COMMIT"
	fi
	say "node $NODE_VERSION from nvm"
	# nvm does not work with set -e.
	retry quiet bash -c "export NVM_DIR=$dir; . $dir/nvm.sh --no-use; nvm install $NODE_VERSION && nvm alias default $NODE_VERSION"
	local bin=$dir/versions/node/v$NODE_VERSION/bin b
	for b in node npm npx; do ln -sfn "$bin/$b" "/usr/local/bin/$b"; done
	# Make the user its owner, so that `nvm install` and `npm install -g` need no sudo.
	if id "$AGENT_USER" >/dev/null 2>&1; then chown -R "$AGENT_USER:" "$dir"; fi
}

from_registry() {
	local arch
	case $(uname -m) in
	x86_64) arch=x64 ;;
	aarch64) arch=arm64 ;;
	*)
		say "no Node build for $(uname -m)"
		exit 1
		;;
	esac
	say "node $NODE_VERSION from the npm registry (no nvm on Debian images)"
	# The distribution's npm only installs the real one. Its 380 packages are removed
	# below.
	if ! command -v npm >/dev/null; then
		say "installing the distribution's npm temporarily"
		apt_install nodejs npm
	fi
	say "downloading node and npm"
	npm_global "npm@$NPM_VERSION" "node-linux-$arch@$NODE_VERSION"
	# npm copied the built-in configuration of the distribution's npm to the new one.
	rm -f /usr/local/lib/node_modules/npm/npmrc
}

node_is || case $AGENT_SOURCE in
debian) from_registry ;;
*) from_nvm ;;
esac
hash -r
node_is || {
	say "node must be v$NODE_VERSION, got $(node --version 2>&1)"
	exit 1
}
# Also after a run that was interrupted after the download.
if [ "$AGENT_SOURCE" = debian ] && [ -e /usr/share/nodejs/npm ]; then
	say "removing the distribution's npm"
	apt_get purge --autoremove nodejs npm
fi
say "node $(node --version), npm $(npm --version)"
