package fake

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/creack/pty"
	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// session is one SSH session: one command, shell or subsystem.
type session struct {
	*guest
	ctx  context.Context
	conn net.Conn
	ch   xssh.Channel

	term string
	size pty.Winsize
	tty  *os.File     // the terminal's master, when a terminal was requested
	pid  atomic.Int64 // of the command's process group
}

// signals returns the signals that a client may send, by their SSH names.
func signals() map[string]syscall.Signal {
	return map[string]syscall.Signal{
		"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "KILL": syscall.SIGKILL,
		"TERM": syscall.SIGTERM, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
	}
}

func (s *session) serve(reqs <-chan *xssh.Request) {
	started := false
	for r := range reqs {
		ok := false
		switch r.Type {
		case "pty-req":
			var m struct {
				Term       string
				W, H, X, Y uint32
				Modes      string
			}
			if ok = xssh.Unmarshal(r.Payload, &m) == nil && !started; ok {
				s.term, s.size = m.Term, pty.Winsize{Cols: uint16(m.W), Rows: uint16(m.H)}
			}
		case "window-change":
			var m struct{ W, H, X, Y uint32 }
			if ok = xssh.Unmarshal(r.Payload, &m) == nil && s.tty != nil; ok {
				ok = pty.Setsize(s.tty, &pty.Winsize{Cols: uint16(m.W), Rows: uint16(m.H)}) == nil
			}
		case "signal":
			var m struct{ Name string }
			sig, known := syscall.Signal(0), false
			if xssh.Unmarshal(r.Payload, &m) == nil {
				sig, known = signals()[m.Name]
			}
			if pid := int(s.pid.Load()); known && pid > 0 {
				ok = syscall.Kill(-pid, sig) == nil
			}
		case "exec", "shell":
			var m struct{ Command string }
			if started || r.Type == "exec" && xssh.Unmarshal(r.Payload, &m) != nil {
				break
			}
			started = true
			// Before the command runs, as in sshd: the reply must precede the output.
			_ = r.Reply(true, nil)
			if m.Command == ssh.StandbyCommand {
				s.tasks.Go(s.standby)
			} else {
				s.exec(m.Command)
			}
			continue
		case "subsystem":
			var m struct{ Name string }
			if !started && xssh.Unmarshal(r.Payload, &m) == nil && m.Name == "sftp" {
				ok, started = true, true
				s.tasks.Go(s.sftp)
			}
		}
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
	}
	// The channel is closed: a terminal hangs up, other commands continue.
	if pid := int(s.pid.Load()); s.tty != nil && pid > 0 {
		_ = syscall.Kill(-pid, syscall.SIGHUP)
	}
}

// standby waits for a command line, as the login shell that a relay starts does, so that faults are
// found by the command.
func (s *session) standby() {
	var line []byte
	for b := make([]byte, 1); ; line = append(line, b[0]) {
		if _, err := io.ReadFull(s.ch, b); err != nil {
			_ = s.ch.Close()
			return
		}
		if b[0] == '\n' {
			s.exec(string(line))
			return
		}
	}
}

// exec starts the command, or a shell when it is empty, and handles its end.
func (s *session) exec(command string) {
	trouble, _, err := s.faults.at("exec", command)
	if err == nil {
		err = trouble.happen(s.ctx)
	}
	switch {
	case err != nil:
		s.refuse(err, max(1, int(trouble.Code)))
		return
	case trouble.Die:
		killSelf(true)
	case trouble.Freeze:
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	}
	args := []string{"-c", command}
	if command == "" {
		args = nil
	}
	// Without s.ctx: commands end at power-off, which reaps them with their children.
	cmd := exec.CommandContext(context.WithoutCancel(s.ctx), "/bin/sh", args...)
	cmd.Dir = filepath.Join(s.root(), "home", s.spec.User)
	cmd.Env = s.environment()
	var stream io.ReadWriter = s.ch
	if trouble.DropAfter > 0 {
		stream = &breaking{ReadWriter: s.ch, conn: s.conn, limit: trouble.DropAfter}
	}
	if s.term != "" {
		err = s.onTerminal(cmd, stream)
	} else {
		err = s.onPipes(cmd, stream)
	}
	if err != nil {
		s.refuse(err, 127)
	}
}

func (s *session) environment() []string {
	home := filepath.Join(s.root(), "home", s.spec.User)
	env := []string{
		"HOME=" + home, "USER=" + s.spec.User, "LOGNAME=" + s.spec.User, "SHELL=/bin/sh", "LANG=C.UTF-8",
		"PATH=" + filepath.Join(s.root(), "bin") + ":" + os.Getenv("PATH"),
		"TMPDIR=" + filepath.Join(s.root(), "tmp"),
		// Otherwise the guest's tmux would be the host's.
		"TMUX_TMPDIR=" + filepath.Join(s.root(), "tmp"),
		"AGENT_FAKE_VM=" + strconv.Itoa(os.Getpid()),
		rootVariable + "=" + s.root(),
		// Identifies the connection, as sshd does.
		"SSH_CONNECTION=" + strings.ReplaceAll(s.conn.RemoteAddr().String()+" "+s.conn.LocalAddr().String(), ":", " "),
	}
	if s.term != "" {
		env = append(env, "TERM="+s.term)
	}
	return env
}

func (s *session) onPipes(cmd *exec.Cmd, stream io.ReadWriter) error {
	// Use a pipe of our own: with cmd.Stdin, Wait would wait for the end of the
	// client's input, even after the command has ended.
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = stream, s.ch.Stderr()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.pid.Store(int64(cmd.Process.Pid))
	s.tasks.Go(func() {
		_, _ = io.Copy(stdin, stream)
		_ = stdin.Close()
	})
	s.tasks.Go(func() { s.exit(cmd.Wait()) })
	return nil
}

func (s *session) onTerminal(cmd *exec.Cmd, stream io.ReadWriter) error {
	tty, err := pty.StartWithSize(cmd, &s.size)
	if err != nil {
		return err
	}
	s.tty = tty
	s.pid.Store(int64(cmd.Process.Pid))
	s.tasks.Go(func() { _, _ = io.Copy(tty, stream) }) // ends with the channel
	s.tasks.Go(func() {
		_, _ = io.Copy(stream, tty) // a terminal ends with EIO
		s.exit(cmd.Wait())
		_ = tty.Close()
	})
	return nil
}

// exit reports how the command ended.
func (s *session) exit(err error) {
	s.pid.Store(0)
	var status syscall.WaitStatus
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		status, _ = e.Sys().(syscall.WaitStatus)
	}
	if status.Signaled() {
		for name, sig := range signals() {
			if sig == status.Signal() {
				_, _ = s.ch.SendRequest("exit-signal", false, xssh.Marshal(struct {
					Name        string
					Core        bool
					Error, Lang string
				}{Name: name}))
			}
		}
	} else {
		s.status(status.ExitStatus())
	}
	_ = s.ch.Close()
}

func (s *session) status(code int) {
	_, _ = s.ch.SendRequest("exit-status", false, xssh.Marshal(struct{ Code uint32 }{uint32(code)}))
}

// refuse ends the session as a shell that cannot run the command.
func (s *session) refuse(err error, code int) {
	_, _ = io.WriteString(s.ch.Stderr(), err.Error()+"\n")
	s.status(code)
	_ = s.ch.Close()
}

// breaking drops the connection after limit bytes, counted in both directions.
type breaking struct {
	io.ReadWriter
	conn  net.Conn
	limit int64
	seen  atomic.Int64
}

func (b *breaking) count(n int) {
	if b.seen.Add(int64(n)) >= b.limit {
		_ = b.conn.Close()
	}
}

func (b *breaking) Read(p []byte) (int, error) {
	n, err := b.ReadWriter.Read(p)
	b.count(n)
	return n, err
}

func (b *breaking) Write(p []byte) (int, error) {
	n, err := b.ReadWriter.Write(p)
	b.count(n)
	return n, err
}
