#!/usr/bin/env bash
# Node LTS and npm, both in /usr/local/bin for everyone.
. "$PROVISION_DIR/lib.sh"

node_is() { [ "$(/usr/local/bin/node --version 2>/dev/null)" = "v$NODE_VERSION" ]; }

from_nvm() {
	local dir=/opt/nvm done=/var/lib/agent-sessionizer/nvm-commit
	# The directory becomes the user's, in which root's git refuses to work.
	if [ ! -s "$dir/nvm.sh" ] || [ "$(cat "$done" 2>/dev/null)" != "$NVM_COMMIT" ]; then
		say "nvm $NVM_VERSION"
		rm -rf "$dir"
		retry quiet git clone -q --depth 1 --branch "$NVM_VERSION" https://github.com/nvm-sh/nvm.git "$dir"
		# A tag can be moved; the commit cannot.
		[ "$(git -C "$dir" rev-parse HEAD)" = "$NVM_COMMIT" ] || {
			say "nvm $NVM_VERSION is not commit $NVM_COMMIT"
			exit 1
		}
		put 644 "$done" <<<"$NVM_COMMIT"
	fi
	say "node $NODE_VERSION through nvm"
	# nvm is not written for set -e.
	retry quiet bash -c "export NVM_DIR=$dir; . $dir/nvm.sh --no-use; nvm install $NODE_VERSION && nvm alias default $NODE_VERSION"
	local bin=$dir/versions/node/v$NODE_VERSION/bin b
	for b in node npm npx; do ln -sfn "$bin/$b" "/usr/local/bin/$b"; done
	# The user owns it, so that `nvm install` and `npm install -g` need no sudo.
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
	# The distribution's npm is only the way to fetch the real one: 380 packages,
	# gone again below.
	if ! command -v npm >/dev/null; then
		say "borrowing the distribution's npm"
		apt_install nodejs npm
	fi
	say "fetching node and npm"
	npm_global "npm@$NPM_VERSION" "node-linux-$arch@$NODE_VERSION"
	# npm copied the borrowed one's built-in configuration to the new one.
	rm -f /usr/local/lib/node_modules/npm/npmrc
}

node_is || case $AGENT_SOURCE in
debian) from_registry ;;
*) from_nvm ;;
esac
hash -r
node_is || {
	say "node is $(node --version 2>&1), wanted v$NODE_VERSION"
	exit 1
}
# Also when a run was cut short after fetching.
if [ "$AGENT_SOURCE" = debian ] && [ -e /usr/share/nodejs/npm ]; then
	say "giving the distribution's npm back"
	apt_get purge --autoremove nodejs npm
fi
say "node $(node --version), npm $(npm --version)"
