#!/usr/bin/env bash
# Checks that every tool runs. An image is published, and a session counts as
# provisioned, only after this check passes.
. "$PROVISION_DIR/lib.sh"

missing=0
check() {
	local out
	if out=$(timeout 120 runuser -u "$AGENT_USER" -- env -C / HOME="/home/$AGENT_USER" "$@" 2>&1 </dev/null); then
		say "$1: $(printf '%s' "$out" | head -n 1 | cut -c 1-80)"
	else
		say "$* failed: $(printf '%s' "$out" | tail -n 1 | cut -c 1-200)"
		missing=1
	fi
}
check docker --version
if [ -e /usr/libexec/docker/cli-plugins/docker-compose ] || [ -e /usr/lib/docker/cli-plugins/docker-compose ]; then
	check docker compose version
else
	check docker-compose --version
fi
check node --version
check npm --version
check git --version
check vim --version
check tmux -V
check zsh --version
check gh --version
check jq --version
check claude --version
check codex --version
check devcontainer --version
# A kernel that runs the programs of another architecture without their credentials (binfmt_misc)
# ignores setuid. Then only sudo's settings can be checked.
copy=/usr/local/bin/.setuid-id
install -m 4755 "$(command -v id)" "$copy"
if [ "$(runuser -u "$AGENT_USER" -- "$copy" -u)" = 0 ]; then
	check sudo -n true
else
	say "sudo: this kernel ignores setuid for emulated programs"
	visudo -cq || missing=1
fi
rm "$copy"
exit "$missing"
