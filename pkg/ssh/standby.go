package ssh

import (
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"
)

// A standby shell is a login shell in the guest that has read its environment and waits for a
// command line. A relay starts one when a command has ended. Commands often come in series, and a
// short command spends most of its time on the start of its shell.

const (
	standbyLife = 10 * time.Minute // of a shell that gets no command
	standbyLine = 4 << 10          // bytes of the longest command line; the shell reads it byte by byte
)

// StandbyCommand is what a standby shell runs: it reads a command line and runs it. If one of the
// files that set the environment is newer than the shell, a new shell runs the line. The variables
// have unusual names and are unset first, so that the command finds the same environment as in a
// new shell.
const StandbyCommand = `_asz_f=${TMPDIR:-/tmp}/.agent-shell-$LOGNAME
{ : >|"$_asz_f"; } 2>/dev/null || exit
IFS= read -r _asz_l || exit
for _asz_i in /run/agent/env /etc/environment /etc/profile.d/agent.sh /etc/zsh/zshenv /etc/bash.bashrc ~/.zshenv ~/.bashrc; do
	if [ "$_asz_i" -nt "$_asz_f" ]; then exec "$SHELL" -c "$_asz_l"; fi
done
eval "unset _asz_f _asz_l _asz_i; $_asz_l"`

// standbyShells starts and holds a relay's standby shells, one at a time.
type standbyShells struct {
	guest *Client

	mu       sync.Mutex
	starting bool
	ready    *half         // the standby shell, nil if there is none
	taken    chan struct{} // closed when ready is taken
}

// start starts a standby shell, unless one exists or is starting. It does not wait for the guest.
func (s *standbyShells) start() {
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
func (s *standbyShells) open() *half {
	shell := s.guest.openChannel("session", nil, func(ssh.RejectionReason, string) {})
	if shell == nil {
		return nil
	}
	if ok, err := shell.SendRequest("exec", true, ssh.Marshal(execRequest{StandbyCommand})); !ok || err != nil {
		shell.abandon()
		return nil
	}
	return shell
}

// putBack makes a shell that was taken, but not used, the standby shell again.
func (s *standbyShells) putBack(shell *half) {
	_ = s.guest.spawn(func() { s.hold(shell) }) // fails if the connection has ended
}

// hold keeps a standby shell until it is taken, has ended or is too old. If another one exists, hold
// closes this one.
func (s *standbyShells) hold(shell *half) {
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
	timer := time.NewTimer(standbyLife)
	defer timer.Stop()
	select {
	case <-taken:
		return
	case <-timer.C:
	case <-shell.reqs: // the shell has ended
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

// take returns the standby shell, which the caller then owns, or nil if there is none.
func (s *standbyShells) take() *half {
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

// standbyInput returns the input with which a standby shell runs the command of a request, or "" if
// a standby shell cannot run it.
func standbyInput(req *ssh.Request) string {
	var exec execRequest
	if req.Type != "exec" || ssh.Unmarshal(req.Payload, &exec) != nil {
		return ""
	}
	line := exec.Command
	if line == "" || len(line) > standbyLine || !utf8.ValidString(line) || strings.ContainsFunc(line, unicode.IsControl) {
		return ""
	}
	return line + "\n"
}
