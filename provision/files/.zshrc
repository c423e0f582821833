HISTFILE=~/.zsh_history HISTSIZE=10000 SAVEHIST=10000
setopt append_history hist_ignore_all_dups hist_ignore_space interactive_comments auto_cd prompt_subst
bindkey -e

autoload -Uz compinit vcs_info
# The image's own functions are as trusted as the image: no audit at every start.
compinit -C
zstyle ':completion:*' menu select
zstyle ':vcs_info:git:*' formats ' %F{yellow}%b%f'
precmd() { vcs_info }
PROMPT='%F{cyan}%m%f %F{blue}%~%f${vcs_info_msg_0_} %(?..%F{red}%?%f )%# '

alias ls='ls --color=auto' ll='ls -lah' gs='git status -sb' gd='git diff' lg=lazygit
# No short way to skip permissions is needed: settings.json says bypassPermissions.

# nvm takes half a second to load; only those who call it pay.
if [[ -s /opt/nvm/nvm.sh ]]; then
	nvm() { unfunction nvm; . /opt/nvm/nvm.sh --no-use; nvm "$@" }
fi
[[ -r ~/.zshrc.local ]] && . ~/.zshrc.local
true
