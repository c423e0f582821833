# bash reads this for interactive shells and for `ssh HOST COMMAND`.
. /etc/profile.d/agent.sh
case $- in *i*) ;; *) return ;; esac
PS1='\h \w \$ '
alias ls='ls --color=auto' ll='ls -lah' gs='git status -sb' gd='git diff' lg=lazygit
if [ -s /opt/nvm/nvm.sh ]; then nvm() { unset -f nvm; . /opt/nvm/nvm.sh --no-use; nvm "$@"; }; fi
