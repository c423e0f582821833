HISTFILE=~/.zsh_history HISTSIZE=10000 SAVEHIST=10000
setopt append_history hist_ignore_all_dups hist_ignore_space interactive_comments auto_cd prompt_subst
bindkey -e

autoload -Uz compinit
# The image's own functions are as trusted as the image: no audit at every start.
compinit -C
zstyle ':completion:*' menu select

# The branch is read, not asked of git: a prompt is no reason for five processes.
precmd() {
	local dir=$PWD git head=
	while [[ -n $dir && ! -e $dir/.git ]]; do dir=${dir%/*}; done
	git=$dir/.git
	if [[ -f $git ]]; then # of a worktree or submodule
		read -r head git <$git
		[[ $git == /* ]] || git=$dir/$git
	fi
	branch=
	[[ -r $git/HEAD ]] && read -r head <$git/HEAD || return 0
	[[ $head == ref:* ]] && branch=${head#ref: refs/heads/} || branch=${head[1,7]}
	branch=" %F{yellow}${${(V)branch}//\%/%%}%f"
}
PROMPT='%F{cyan}%m%f %F{blue}%~%f$branch %(?..%F{red}%?%f )%# '

alias ls='ls --color=auto' ll='ls -lah' gs='git status -sb' gd='git diff' lg=lazygit
# No short way to skip permissions is needed: settings.json says bypassPermissions.

# nvm takes half a second to load; only those who call it pay.
if [[ -s /opt/nvm/nvm.sh ]]; then
	nvm() { unfunction nvm; . /opt/nvm/nvm.sh --no-use; nvm "$@" }
fi
[[ -r ~/.zshrc.local ]] && . ~/.zshrc.local
true
