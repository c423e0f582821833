HISTFILE=~/.zsh_history HISTSIZE=10000 SAVEHIST=10000
setopt append_history hist_ignore_all_dups hist_ignore_space interactive_comments auto_cd prompt_subst
bindkey -e

autoload -Uz compinit
# Do not audit the image's functions at every start; they are as trusted as the image.
compinit -C
zstyle ':completion:*' menu select

# Read the branch from the file, because git would need five processes per prompt.
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
# An alias to skip permissions is not needed: settings.json sets bypassPermissions.

# nvm takes half a second to load, so load it at its first call.
if [[ -s /opt/nvm/nvm.sh ]]; then
	nvm() { unfunction nvm; . /opt/nvm/nvm.sh --no-use; nvm "$@" }
fi
[[ -r ~/.zshrc.local ]] && . ~/.zshrc.local
true
