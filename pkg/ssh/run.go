package ssh

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	stderrBound = 4 << 10                // stderr quoted when Output fails
	termGrace   = 500 * time.Millisecond // between SIGTERM and SIGKILL
	killGrace   = 2 * time.Second        // for a cancelled command to end
)

// IO holds a command's streams. A nil Stdin is empty, nil writers discard. Run does
// not read from a file in Stdin after it has returned. From any other reader, at
// most one pending Read is lost.
type IO struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
}

// ExitError reports a command that ran and failed.
type ExitError struct {
	Code   int    // 0–255; 128 plus the signal's number if a signal ended it
	Signal string // "TERM", "KILL", …; "" if the command exited
}

func (e *ExitError) Error() string {
	if e.Signal != "" {
		return "killed by signal " + e.Signal
	}
	return fmt.Sprintf("exit status %d", e.Code)
}

// Run runs cmd in the guest's login shell. A failing command returns an *ExitError;
// a connection that ends first returns ErrUnreachable. When ctx is done the remote
// process gets SIGTERM, then SIGKILL. Nothing is written to the writers after Run
// has returned.
func (c *Client) Run(ctx context.Context, cmd string, st IO) error {
	return c.run(ctx, cmd, st, nil)
}

// Output runs cmd and returns its stdout. More than limit bytes are an error. The
// error of a failing command includes the start of its stderr.
func (c *Client) Output(ctx context.Context, cmd string, stdin io.Reader, limit int64) ([]byte, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tooMuch := fmt.Errorf("the guest sent more than %d bytes", limit)
	stdout, stderr := pipe.Buffer{Limit: int(limit), Full: func() { cancel(tooMuch) }}, pipe.Buffer{Limit: stderrBound}
	err := c.Run(ctx, cmd, IO{Stdin: stdin, Stdout: &stdout, Stderr: &stderr})
	switch {
	case context.Cause(ctx) == tooMuch: //nolint:errorlint // this error value itself
		return nil, tooMuch
	case err == nil:
		return stdout.Bytes(), nil
	}
	if text := termtext.Line(stderr.String()); text != "" {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	return nil, err
}

// gate passes writes on until it is shut.
type gate struct {
	mu sync.Mutex
	w  io.Writer
}

func (g *gate) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.w == nil {
		return len(p), nil
	}
	return g.w.Write(p)
}

func (g *gate) close() {
	g.mu.Lock()
	g.w = nil
	g.mu.Unlock()
}

// command is one remote command; its methods may block on the guest.
type command struct {
	cmd     string
	in      *input
	out     gate
	err     gate
	prepare func(*ssh.Session) error // requests a terminal; nil for none

	mu       sync.Mutex
	session  *ssh.Session
	killed   bool
	finished chan struct{}
}

func (c *Client) run(ctx context.Context, cmd string, st IO, prepare func(*ssh.Session) error) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	in, err := newInput(st.Stdin)
	if err != nil {
		return err
	}
	r := &command{cmd: cmd, in: in, prepare: prepare, finished: make(chan struct{})}
	r.out.w, r.err.w = st.Stdout, st.Stderr
	defer r.out.close()
	defer r.err.close()
	defer in.cancel()

	result := make(chan error, 1)
	if err := c.spawn(func() {
		err := r.execute(c)
		close(r.finished)
		result <- err
	}); err != nil {
		return err
	}
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	}
	if err := c.spawn(r.kill); err == nil {
		select {
		case <-r.finished:
		case <-time.After(killGrace):
		}
	}
	return context.Cause(ctx)
}

// execute runs the command to its end.
func (r *command) execute(c *Client) error {
	s, err := c.session()
	if err != nil {
		return c.connectionError(err)
	}
	defer s.Close()
	if !r.setSession(s) {
		return context.Canceled
	}
	s.Stdout, s.Stderr = &r.out, &r.err
	stdin, err := s.StdinPipe()
	if err != nil {
		return err
	}
	if r.prepare != nil {
		if err := r.prepare(s); err != nil {
			return c.connectionError(err)
		}
	}
	if err := s.Start(r.cmd); err != nil {
		// Do not wrap the error: the library puts the command line into its text.
		select {
		case <-c.done:
			return c.connectionError(nil)
		default:
			return fmt.Errorf("%w: it refused to start a command", ErrUnreachable)
		}
	}
	// Copy stdin here: with the library's own copying, a command that does not read
	// all of its stdin would fail, and a read error of stdin would be hidden.
	if err := c.spawn(func() { r.feed(stdin) }); err != nil {
		return err
	}
	err = s.Wait()
	if inErr := r.in.failure(); inErr != nil {
		return fmt.Errorf("read the command's input: %w", inErr)
	}
	return c.outcome(err)
}

// feed copies the input and closes the remote stdin. If reading the input fails, it
// kills the command, because a truncated stream must not look complete.
func (r *command) feed(stdin io.WriteCloser) {
	if _, err := io.Copy(stdin, r.in); r.in.failure() != nil && err != nil {
		r.kill()
		return
	}
	_ = stdin.Close() // a command that has ended has no stdin to close
}

// setSession makes the session known to kill. It returns false if kill was called first.
func (r *command) setSession(s *ssh.Session) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.session = s
	return !r.killed
}

// kill ends the remote process as well as SSH allows: first with signals, then by
// closing the session.
func (r *command) kill() {
	r.mu.Lock()
	r.killed = true
	s := r.session
	r.mu.Unlock()
	if s == nil {
		return
	}
	if s.Signal(ssh.SIGTERM) == nil {
		select {
		case <-r.finished:
			return
		case <-time.After(termGrace):
		}
	}
	_ = s.Signal(ssh.SIGKILL) // best effort: closing ends our side
	_ = s.Close()
}

// connectionError distinguishes a connection that ended from a request that the guest refused.
func (c *Client) connectionError(err error) error {
	select {
	case <-c.done:
		return fmt.Errorf("%w: the connection was lost", ErrUnreachable)
	default:
	}
	if err == nil || errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: the connection was lost", ErrUnreachable)
	}
	return fmt.Errorf("%w: %s", ErrUnreachable, brief(err.Error()))
}

// outcome translates the result of a command.
func (c *Client) outcome(err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*ssh.ExitError](err); ok {
		code := e.ExitStatus()
		if code < 0 || code > 255 {
			code = 255
		}
		return &ExitError{Code: code, Signal: brief(e.Signal())}
	}
	if _, ok := errors.AsType[*ssh.ExitMissingError](err); ok {
		return c.connectionError(nil)
	}
	return fmt.Errorf("write the command's output: %w", err)
}
