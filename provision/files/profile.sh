# For all login shells (sh, bash). zsh reads ~/.zshenv instead.
# Secrets are delivered only to this file, on a tmpfs.
if [ -r /run/agent/env ]; then
	set -a
	. /run/agent/env
	set +a
fi
case :$PATH: in
*:"$HOME/.local/bin":*) ;;
*) PATH=$HOME/.local/bin:$PATH ;;
esac
# nvm does not work together with a prefix; without nvm, `npm install -g` needs one.
if [ -s /opt/nvm/nvm.sh ]; then
	export NVM_DIR=/opt/nvm
else
	export NPM_CONFIG_PREFIX="$HOME/.local"
fi
export PATH
