#!/usr/bin/env bash
# The agent's user, its shell environment and its dotfiles.
. "$PROVISION_DIR/lib.sh"

home=/home/$AGENT_USER
files=$PROVISION_DIR/files
# The files that we installed last, to recognise files that the user has edited.
ours=/var/lib/agent-sessionizer/dotfiles

if ! id "$AGENT_USER" >/dev/null 2>&1; then
	say "user $AGENT_USER"
	quiet useradd --uid 1000 --user-group --create-home --home-dir "$home" --shell /usr/bin/zsh "$AGENT_USER"
fi
quiet usermod --shell /usr/bin/zsh --append --groups docker "$AGENT_USER"
# sshd accepts a locked password ("!") only with PAM; it accepts "*" in both cases.
quiet usermod --password '*' "$AGENT_USER"
[ ! -d /opt/nvm ] || chown -R "$AGENT_USER:" /opt/nvm

put 440 /etc/sudoers.d/90-agent <<X2
$AGENT_USER ALL=(ALL) NOPASSWD:ALL
X2
quiet visudo -cf /etc/sudoers.d/90-agent

# dotfile PATH installs our PATH as ~/PATH, unless the user has changed it.
dotfile() {
	local from=$files/$1 to=$home/$1 last=$ours/$1
	if [ -e "$to" ] && ! cmp -s "$to" "$from" && ! cmp -s "$to" "$last" && [ -e "$last" ]; then
		say "~/$1 was edited, not replaced"
		return
	fi
	# Write as the user, so that a link in the home directory cannot misdirect root.
	runuser -u "$AGENT_USER" -- sh -c 'mkdir -p "$(dirname "$1")" && cat >"$1.new" && chmod 644 "$1.new" && mv -f "$1.new" "$1"' sh "$to" <"$from"
	put 644 "$last" <"$from"
}
say "dotfiles"
for f in .zshenv .zshrc .bashrc .tmux.conf .gitconfig .vimrc .claude/settings.json .codex/config.toml; do dotfile "$f"; done
# Not a dotfile: Claude Code keeps its state in it. Write it only if it is missing.
[ -e "$home/.claude.json" ] || runuser -u "$AGENT_USER" -- sh -c 'umask 077; cat >"$1"' sh "$home/.claude.json" <"$files/claude-state.json"

put 644 /etc/codex/requirements.toml <"$files/codex-requirements.toml"

say "completions"
# Otherwise the first shell would need seconds to find them all.
runuser -u "$AGENT_USER" -- env -C / HOME="$home" sh -c 'rm -f ~/.zcompdump && zsh -ic exit && test -s ~/.zcompdump' </dev/null

say "shell environment"
put 644 /etc/profile.d/agent.sh <"$files/profile.sh"
# Set it up system-wide too, because the user's own dotfiles may replace those above.
grep -qsF profile.d/agent.sh /etc/zsh/zshenv || echo "emulate sh -c '. /etc/profile.d/agent.sh'" >>/etc/zsh/zshenv
grep -qsF profile.d/agent.sh /etc/bash.bashrc || echo ". /etc/profile.d/agent.sh" >>/etc/bash.bashrc
put 644 /etc/tmux.conf <"$files/.tmux.conf"
put 755 /usr/local/bin/ready-tmux <"$files/ready-tmux"
put 644 /etc/default/locale <<X2
LANG=C.UTF-8
X2
# Lowest priority: commits work without a configured identity, and contain no personal
# address. The setting of a session or a repository overrides it.
put 644 /etc/gitconfig <<X2
[user]
	name = agent
	email = agent@localhost.invalid
[credential "https://github.com"]
	helper = !/usr/local/bin/agent-guest credential
X2
