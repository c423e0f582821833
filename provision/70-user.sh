#!/usr/bin/env bash
# The agent's user, its shell environment and its dotfiles.
. "$PROVISION_DIR/lib.sh"

home=/home/$AGENT_USER
files=$PROVISION_DIR/files
# What we installed last, to tell a file that the user edited from one that is ours.
ours=/var/lib/agent-sessionizer/dotfiles

if ! id "$AGENT_USER" >/dev/null 2>&1; then
	say "user $AGENT_USER"
	quiet useradd --uid 1000 --user-group --create-home --home-dir "$home" --shell /usr/bin/zsh "$AGENT_USER"
fi
quiet usermod --shell /usr/bin/zsh --append --groups docker "$AGENT_USER"
# A locked password ("!") would be fine for sshd with PAM; "*" is without, too.
quiet usermod --password '*' "$AGENT_USER"
[ ! -d /opt/nvm ] || chown -R "$AGENT_USER:" /opt/nvm

put 440 /etc/sudoers.d/90-agent <<X2
$AGENT_USER ALL=(ALL) NOPASSWD:ALL
X2
quiet visudo -cf /etc/sudoers.d/90-agent

# dotfile PATH: ours/PATH to ~/PATH, unless the user changed it since.
dotfile() {
	local from=$files/$1 to=$home/$1 last=$ours/$1
	if [ -e "$to" ] && ! cmp -s "$to" "$from" && ! cmp -s "$to" "$last" && [ -e "$last" ]; then
		say "kept your ~/$1"
		return
	fi
	# As the user: a link that it planted in its home leads root nowhere.
	runuser -u "$AGENT_USER" -- sh -c 'mkdir -p "$(dirname "$1")" && cat >"$1.new" && chmod 644 "$1.new" && mv -f "$1.new" "$1"' sh "$to" <"$from"
	put 644 "$last" <"$from"
}
say "dotfiles"
for f in .zshenv .zshrc .bashrc .tmux.conf .gitconfig .vimrc .claude/settings.json .codex/config.toml; do dotfile "$f"; done
# Not a dotfile: Claude Code keeps its state in it. Only the first run is ours.
[ -e "$home/.claude.json" ] || runuser -u "$AGENT_USER" -- sh -c 'umask 077; cat >"$1"' sh "$home/.claude.json" <"$files/claude-state.json"

put 644 /etc/codex/requirements.toml <"$files/codex-requirements.toml"

say "completions"
# The first shell would take seconds to find them all.
runuser -u "$AGENT_USER" -- env -C / HOME="$home" sh -c 'rm -f ~/.zcompdump && zsh -ic exit && test -s ~/.zcompdump' </dev/null

say "shell environment"
put 644 /etc/profile.d/agent.sh <"$files/profile.sh"
# Also for everybody: the user's own dotfiles may replace each of those above.
grep -qsF profile.d/agent.sh /etc/zsh/zshenv || echo "emulate sh -c '. /etc/profile.d/agent.sh'" >>/etc/zsh/zshenv
grep -qsF profile.d/agent.sh /etc/bash.bashrc || echo ". /etc/profile.d/agent.sh" >>/etc/bash.bashrc
put 644 /etc/tmux.conf <"$files/.tmux.conf"
put 755 /usr/local/bin/ready-tmux <"$files/ready-tmux"
put 644 /etc/default/locale <<X2
LANG=C.UTF-8
X2
# Lowest priority: commits work when nobody set an identity, and carry no
# person's address. A session's or a repository's own setting wins.
put 644 /etc/gitconfig <<X2
[user]
	name = agent
	email = agent@localhost.invalid
[credential "https://github.com"]
	helper = !/usr/local/bin/agent-guest credential
X2
