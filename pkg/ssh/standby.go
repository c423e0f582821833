package ssh

import (
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"
)

// A spare is a login shell in the guest that has started, has read its environment, and waits for
// a command line. A relay starts one when a command has ended, because commands often come in
// series, and a shell's start takes most of the time of a short command.

const (
	spareLife = 10 * time.Minute // without a command
	spareLine = 4 << 10          // the longest command line; the shell reads it byte by byte
)

// SpareCommand reads a command line and runs it. If a file that the environment comes from is
// newer than the shell, a new shell runs the line. The names of the variables are not used
// otherwise, because the command must not see the difference.
const SpareCommand = `_asz_f=${TMPDIR:-/tmp}/.agent-shell-$LOGNAME
{ : >|"$_asz_f"; } 2>/dev/null || exit
IFS= read -r _asz_l || exit
for _asz_i in /run/agent/env /etc/environment /etc/profile.d/agent.sh /etc/zsh/zshenv /etc/bash.bashrc ~/.zshenv ~/.bashrc; do
	if [ "$_asz_i" -nt "$_asz_f" ]; then exec "$SHELL" -c "$_asz_l"; fi
done
eval "unset _asz_f _asz_l _asz_i; $_asz_l"`

// spares holds a relay's spare.
type spares struct {
	guest *Client

	mu       sync.Mutex
	starting bool
	ready    *half
	taken    chan struct{} // closed when ready is taken
}

// start starts a spare unless there is one. It returns immediately.
func (s *spares) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.starting || s.ready != nil {
		return
	}
	s.starting = s.guest.spawn(func() {
		shell := s.open()
		s.mu.Lock()
		s.starting = false
		s.mu.Unlock()
		if shell != nil {
			s.hold(shell)
		}
	}) == nil
}

// open starts a shell in the guest. It returns nil if the guest does not start one.
func (s *spares) open() *half {
	shell := s.guest.openChannel("session", nil, func(ssh.RejectionReason, string) {})
	if shell == nil {
		return nil
	}
	if ok, err := shell.SendRequest("exec", true, ssh.Marshal(execRequest{SpareCommand})); !ok || err != nil {
		shell.abandon()
		return nil
	}
	return shell
}

// keep makes a shell the spare again, which was taken and not used.
func (s *spares) keep(shell *half) {
	_ = s.guest.spawn(func() { s.hold(shell) }) // fails if the connection has ended
}

// hold keeps a spare until it is taken, ends or is too old.
func (s *spares) hold(shell *half) {
	taken := make(chan struct{})
	s.mu.Lock()
	other := s.ready
	if other == nil {
		s.ready, s.taken = shell, taken
	}
	s.mu.Unlock()
	if other != nil {
		shell.abandon()
		return
	}
	timer := time.NewTimer(spareLife)
	defer timer.Stop()
	select {
	case <-taken:
		return
	case <-timer.C:
	case <-shell.reqs: // it has ended
	}
	s.mu.Lock()
	ours := s.ready == shell
	if ours {
		s.ready = nil
	}
	s.mu.Unlock()
	if ours {
		shell.abandon()
	}
}

// take returns the spare, which the caller then owns, or nil.
func (s *spares) take() *half {
	s.mu.Lock()
	defer s.mu.Unlock()
	shell := s.ready
	if shell != nil {
		close(s.taken)
		s.ready = nil
	}
	return shell
}

// execRequest is the payload of a request "exec", RFC 4254, section 6.5.
type execRequest struct{ Command string }

// spareInput returns what a spare must read to run the command of a request, or "" if it cannot.
func spareInput(req *ssh.Request) string {
	var exec execRequest
	if req.Type != "exec" || ssh.Unmarshal(req.Payload, &exec) != nil {
		return ""
	}
	line := exec.Command
	if line == "" || len(line) > spareLine || !utf8.ValidString(line) || strings.ContainsFunc(line, unicode.IsControl) {
		return ""
	}
	return line + "\n"
}
