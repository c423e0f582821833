// Package attach joins the user's terminal to a command in the guest, usually
// its tmux, and keeps them joined: it follows the window's size, notices a dead
// connection, and connects again until the user has had enough.
//
// It stands between a hostile guest and the user's terminal: clipboard writes
// are handed to the caller, plain.Filter drops all else that would do more than
// draw, and at the end the terminal is put back in order, with no answer or key
// left for the user's shell. It does not know what a session is.
package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/plain"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Options say what to attach to what.
type Options struct {
	// Dial connects anew each time. An error that is ssh.ErrUnreachable is
	// tried again, any other ends Run. It should look up where the VM is now.
	Dial    func(context.Context) (*ssh.Client, error)
	Command string   // runs on the terminal in the guest; repeating it must rejoin what was left
	In, Out *os.File // the user's terminal
	Term    string   // the user's $TERM
	Title   string   // of the window, and the name in notices

	// OnCopy takes what the guest puts on the clipboard, at most 768 KiB, one
	// call at a time; when the guest copies faster, only the last counts. nil:
	// it goes to the user's terminal, in the one plain form.
	OnCopy func([]byte)

	// Bounds that tests shorten; 0 means the usual.
	keepEvery, keepWait, retryMin, answerWait time.Duration
}

const (
	keepEvery = 3 * time.Second
	keepWait  = 5 * time.Second
	retryMin  = 250 * time.Millisecond
	retryMax  = 5 * time.Second
	steady    = 10 * time.Second // a connection that lasted so long resets the backoff

	answerWait = time.Second // for a terminal to answer, also a distant one
)

// Run attaches until the command ends, and returns its exit code. It returns
// an Interrupted error when the user gives up (q or Ctrl-C) while there is no
// connection, and ctx's error when that ends first.
func Run(ctx context.Context, o Options) (int, error) {
	o.defaults()
	out, err := prepare(o)
	if err != nil {
		return 0, err
	}
	clean := false
	defer func() { out.restore(clean) }()

	copies := newCopier(o.OnCopy)
	defer copies.stop()
	out.filter = plain.NewScreenFilter(out, copies.offer())

	var wait time.Duration
	for attempt := 1; ; attempt++ { // since the last connection
		began := time.Now()
		connected, err := o.once(ctx, out)
		var exit *ssh.ExitError
		switch {
		case err == nil:
			clean = true
			return 0, nil
		case errors.As(err, &exit):
			clean = true
			return exit.Code, nil
		case ctx.Err() != nil:
			return 0, fmt.Errorf("attach: %w", context.Cause(ctx))
		case !errors.Is(err, ssh.ErrUnreachable):
			return 0, err
		}
		lasted := time.Duration(0)
		if connected {
			attempt, lasted = 1, time.Since(began)
		}
		wait = o.nextPause(wait, lasted)
		out.notice(fmt.Sprintf("%s: connection lost, trying again (%d); q or Ctrl-C gives up", o.Title, attempt))
		if err := o.pause(ctx, wait); err != nil {
			return 0, err
		}
	}
}

// nextPause returns the pause after a connection that lasted so long: twice the last
// one, and the shortest at the start and after a connection that was steady.
func (o *Options) nextPause(last, lasted time.Duration) time.Duration {
	if lasted > steady {
		return o.retryMin
	}
	return min(max(last*2, o.retryMin), retryMax)
}

func (o *Options) defaults() {
	if o.keepEvery == 0 {
		o.keepEvery, o.keepWait, o.retryMin, o.answerWait = keepEvery, keepWait, retryMin, answerWait
	}
	if o.Title == "" {
		o.Title = "VM"
	}
	o.Title = plain.Line(o.Title)
}

var errGaveUp = fail.New(fail.Interrupted, "gave up reconnecting; the session goes on in its VM")

// once is one connection; connected says whether it came about. Before it is
// there the user's keys are ours, and may end the attempt.
func (o *Options) once(ctx context.Context, out *screen) (connected bool, err error) {
	var client *ssh.Client
	err = o.listening(ctx, func(ctx context.Context) (dialErr error) {
		client, dialErr = o.Dial(ctx)
		return dialErr
	})
	if client == nil || err != nil {
		if client != nil { // it came as the user gave up
			_ = client.Close()
		}
		return false, err
	}
	defer client.Close()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client.KeepAlive(ctx, o.keepEvery, o.keepWait)
	width, height := out.size()
	sizes, stop := o.follow(out)
	defer stop()
	out.title(o.Title)
	defer out.filter.Close() // a sequence that was cut off does not go on with the next connection
	return true, client.Terminal(ctx, o.Command, ssh.Terminal{
		In: o.In, Out: out.filter, Term: GuestTerm(o.Term), Width: width, Height: height, Resize: sizes,
	})
}

// pause waits between two attempts.
func (o *Options) pause(ctx context.Context, d time.Duration) error {
	err := o.listening(ctx, func(ctx context.Context) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	if ctx.Err() != nil {
		return fmt.Errorf("attach: %w", context.Cause(ctx))
	}
	return err
}

// listening runs f while the user's keys are watched; q or Ctrl-C cancels it.
func (o *Options) listening(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop, err := watchKeys(o.In, func() { cancel(errGaveUp) })
	if err != nil {
		return err
	}
	err = f(ctx)
	stop()
	if errors.Is(context.Cause(ctx), errGaveUp) {
		return errGaveUp
	}
	return err
}

// follow tells the guest the window's size whenever it changes.
func (o *Options) follow(out *screen) (sizes <-chan ssh.Size, stop func()) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGWINCH)
	ch := make(chan ssh.Size)
	quit := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-quit:
				return
			case <-signals:
			}
			width, height := out.size()
			select {
			case <-quit:
				return
			case ch <- ssh.Size{Width: width, Height: height}:
			}
		}
	})
	return ch, func() {
		signal.Stop(signals)
		close(quit)
		done.Wait()
	}
}

// GuestTerm is the TERM to use in a guest: the user's own when every Debian and
// Ubuntu knows it (ncurses-base), else xterm-256color, which the terminals
// with names of their own (ghostty, kitty, alacritty, foot, …) all understand.
func GuestTerm(term string) string {
	if slices.Contains([]string{
		"linux", "rxvt", "rxvt-unicode", "rxvt-unicode-256color", "screen", "screen-256color", "screen.xterm-256color",
		"tmux", "tmux-256color", "vt100", "vt220", "xterm", "xterm-256color", "xterm-color",
	}, term) {
		return term
	}
	return "xterm-256color"
}

// screen is the user's terminal, in raw mode.
type screen struct {
	out   *os.File
	tty   bool
	in    *os.File
	saved *term.State // nil when In is no terminal

	filter     *plain.Filter // of what the guest writes
	answerWait time.Duration
}

func prepare(o Options) (*screen, error) {
	s := &screen{out: o.Out, tty: term.IsTerminal(int(o.Out.Fd())), in: o.In, answerWait: o.answerWait}
	if term.IsTerminal(int(o.In.Fd())) {
		// For the whole time, so that Ctrl-C is a key between connections too.
		saved, err := term.MakeRaw(int(o.In.Fd()))
		if err != nil {
			return nil, fmt.Errorf("put the terminal into raw mode: %w", err)
		}
		s.saved = saved
	}
	return s, nil
}

func (s *screen) Write(p []byte) (int, error) { return s.out.Write(p) }

func (s *screen) size() (width, height int) {
	width, height, err := term.GetSize(int(s.out.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

const (
	// modes turns off what full-screen programs turn on, all that plain.Filter
	// passes: mouse and focus reports, bracketed paste, other reports, application
	// keys, kitty's and xterm's key protocols, margins, inserting, reverse video;
	// and shows the cursor, as it was, in the usual characters and colours.
	modes = "\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l" +
		"\x1b[?2026l\x1b[?2031l\x1b[?2048l\x1b[?7727l\x1b[?1l\x1b>" + keys + "\x1b[?5l\x1b[?6l\x1b[?69l\x1b[4l\x1b[?12l\x1b[?7h\x1b[?25h" +
		"\x1b[0 q\x1b[0m\x1b(B\x1b)B\x0f\x1b[r"
	keys       = "\x1b[<99u\x1b[>4m" // all that was pushed; each screen has a stack
	mainScreen = "\x1b[?1049l\x1b[?47l"
)

// restore puts the terminal back in order. After a clean end the guest's tmux
// has left the alternate screen itself; leaving it twice would move the cursor.
func (s *screen) restore(clean bool) {
	if s.tty {
		reset := modes
		if clean && !s.filter.AltScreen() {
			// Resetting the scroll region moves the cursor; put it back.
			reset = "\x1b7" + modes + "\x1b8\x1b[0m"
		} else {
			reset += mainScreen + keys + "\r\n"
		}
		_, _ = io.WriteString(s.out, reset) // a terminal that is gone needs none
	}
	if s.saved != nil {
		if s.tty && s.filter.Asked() {
			s.drain()
		}
		discardInput(int(s.in.Fd()))
		_ = term.Restore(int(s.in.Fd()), s.saved)
	}
}

// notice shows one line at the bottom, over what the guest had there.
func (s *screen) notice(text string) {
	if !s.tty {
		return
	}
	width, height := s.size()
	runes := []rune(" " + text + " ")
	if len(runes) > width {
		runes = runes[:width]
	}
	_, _ = fmt.Fprintf(s.out, "%s\x1b[%d;1H\x1b[2K\x1b[7m%s\x1b[0m", modes, height, string(runes))
}

func (s *screen) title(text string) {
	if s.tty {
		_, _ = fmt.Fprintf(s.out, "\x1b]2;%s\x07", text)
	}
}
