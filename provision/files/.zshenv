# Every zsh reads this, including `ssh HOST COMMAND`: environment only, no output.
emulate sh -c '. /etc/profile.d/agent.sh'
export LANG=${LANG:-C.UTF-8} EDITOR=vim PAGER=less LESS=-FRX
