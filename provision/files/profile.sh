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
# The gateway's certificate authority is in the system's store, which these programs
# would not read.
for name in SSL_CERT_FILE NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE CURL_CA_BUNDLE GIT_SSL_CAINFO AWS_CA_BUNDLE; do
	eval "export $name=\"\${$name:-/etc/ssl/certs/ca-certificates.crt}\""
done
unset name
