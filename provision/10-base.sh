#!/usr/bin/env bash
# Packages that all other steps need.
. "$PROVISION_DIR/lib.sh"

say "base packages"
apt_install \
	ca-certificates curl git git-lfs gnupg iproute2 iptables jq less \
	openssh-client openssh-server openssh-sftp-server patch procps psmisc ripgrep \
	rsync sudo tmux unzip vim xz-utils zsh bash-completion file make netbase \
	ncurses-term tzdata
