# For login shells of every kind (sh, bash). zsh reads ~/.zshenv instead.
# Secrets are delivered to this file, on a tmpfs, and never anywhere else.
if [ -r /run/agent/env ]; then
	set -a
	. /run/agent/env
	set +a
fi
case :$PATH: in
*:"$HOME/.local/bin":*) ;;
*) PATH=$HOME/.local/bin:$PATH ;;
esac
# nvm refuses to work beside a prefix; without nvm, `npm install -g` needs one.
if [ -s /opt/nvm/nvm.sh ]; then
	export NVM_DIR=/opt/nvm
else
	export NPM_CONFIG_PREFIX="$HOME/.local"
fi
export PATH
