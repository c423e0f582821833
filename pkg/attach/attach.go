// Package attach connects the user's terminal to a command in the guest, usually the
// guest's tmux, and keeps them connected. It follows the size of the window, detects a dead
// connection, and reconnects until the user gives up.
//
// It protects the user's terminal from a hostile guest. It passes clipboard writes to the
// caller, and termtext.Filter drops everything else that does more than draw. At the end
// it restores the terminal and discards pending answers and keys, so that the user's
// shell does not read them. It does not know what a session is.
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

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Options describe what to attach, and to which terminal.
type Options struct {
	// Dial makes a new connection at each call. An ssh.ErrUnreachable error is retried; any
	// other error ends Run. Dial should look up the VM's current address.
	Dial    func(context.Context) (*ssh.Client, error)
	Command string   // runs on a terminal in the guest; a second run must rejoin what the first left
	In, Out *os.File // the user's terminal
	Term    string   // the user's $TERM
	Title   string   // of the window; notices start with it

	// OnCopy receives what the guest copies to the clipboard, at most 768 KiB per call and
	// one call at a time. If the guest copies faster, only the latest copy is delivered. If
	// OnCopy is nil, copies go to the user's terminal as a plain OSC 52 sequence.
	OnCopy func([]byte)

	// Time limits that tests shorten; 0 means the default.
	keepEvery, keepWait, retryMin, answerWait time.Duration
}

const (
	keepEvery = 3 * time.Second
	keepWait  = 5 * time.Second
	retryMin  = 250 * time.Millisecond
	retryMax  = 5 * time.Second
	steady    = 10 * time.Second // a connection that lasted this long resets the backoff

	answerWait = time.Second // for a terminal to answer, even over a slow link
)

// Run attaches until the command ends, and returns its exit code. It returns an Interrupted
// error if the user presses q or Ctrl-C while there is no connection. If ctx ends first, it
// returns ctx's error.
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
	out.filter = termtext.NewScreenFilter(out, copies.offer())

	pauses := &backoff.ExponentialBackOff{InitialInterval: o.retryMin, Multiplier: 2, MaxInterval: retryMax}
	for attempt := 1; ; attempt++ { // counts since the last connection
		began := time.Now()
		connected, err := o.connectOnce(ctx, out)
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
		if connected {
			attempt = 1
		}
		if connected && time.Since(began) > steady {
			pauses.Reset()
		}
		out.notice(fmt.Sprintf("%s: connection lost, reconnecting (%d); press q or Ctrl-C to give up", o.Title, attempt))
		if err := o.waitBeforeRetry(ctx, pauses.NextBackOff()); err != nil {
			return 0, err
		}
	}
}

func (o *Options) defaults() {
	if o.keepEvery == 0 {
		o.keepEvery, o.keepWait, o.retryMin, o.answerWait = keepEvery, keepWait, retryMin, answerWait
	}
	if o.Title == "" {
		o.Title = "VM"
	}
	o.Title = termtext.Line(o.Title)
}

var errGaveUp = fail.New(fail.Interrupted, "gave up reconnecting; the session continues in its VM")

// connectOnce makes one connection and uses it until it ends. connected reports whether the
// connection was established. Until then q or Ctrl-C cancels the attempt.
func (o *Options) connectOnce(ctx context.Context, out *screen) (connected bool, err error) {
	var client *ssh.Client
	err = o.readKeys(ctx, func(ctx context.Context) (dialErr error) {
		client, dialErr = o.Dial(ctx)
		return dialErr
	})
	if client == nil || err != nil {
		if client != nil { // the dial succeeded just as the user gave up
			_ = client.Close()
		}
		return false, err
	}
	defer client.Close()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client.KeepAlive(ctx, o.keepEvery, o.keepWait)
	width, height := out.size()
	sizes, stop := o.followSize(out)
	defer stop()
	out.title(o.Title)
	defer out.filter.Close() // an incomplete sequence must not continue on the next connection
	return true, client.Terminal(ctx, o.Command, ssh.Terminal{
		In: o.In, Out: out.filter, Term: GuestTerm(o.Term), Width: width, Height: height, Resize: sizes,
	})
}

// waitBeforeRetry waits between two attempts.
func (o *Options) waitBeforeRetry(ctx context.Context, d time.Duration) error {
	err := o.readKeys(ctx, func(ctx context.Context) error {
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

// readKeys runs f and watches the keyboard; q or Ctrl-C cancels f.
func (o *Options) readKeys(ctx context.Context, f func(context.Context) error) error {
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

// followSize sends the size of the window whenever it changes.
func (o *Options) followSize(out *screen) (sizes <-chan ssh.Size, stop func()) {
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

// GuestTerm returns the TERM to use in a guest. It is the user's own if every Debian and
// Ubuntu has its terminfo entry (ncurses-base). Otherwise it is xterm-256color, which the
// terminals with entries of their own (ghostty, kitty, alacritty, foot, …) understand.
func GuestTerm(term string) string {
	if slices.Contains([]string{
		"linux", "rxvt", "rxvt-unicode", "rxvt-unicode-256color", "screen", "screen-256color", "screen.xterm-256color",
		"tmux", "tmux-256color", "vt100", "vt220", "xterm", "xterm-256color", "xterm-color",
	}, term) {
		return term
	}
	return "xterm-256color"
}

// screen is the user's terminal in raw mode.
type screen struct {
	out   *os.File
	tty   bool
	in    *os.File
	saved *term.State // nil if In is not a terminal

	filter     *termtext.Filter // filters the guest's output
	answerWait time.Duration
}

func prepare(o Options) (*screen, error) {
	s := &screen{out: o.Out, tty: term.IsTerminal(int(o.Out.Fd())), in: o.In, answerWait: o.answerWait}
	if term.IsTerminal(int(o.In.Fd())) {
		// Raw mode stays on between connections, so that Ctrl-C is always read as a key.
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
	// modes turns off every mode that full-screen programs turn on and termtext.Filter
	// passes: mouse and focus reports, bracketed paste, other reports, application keys,
	// kitty's and xterm's key protocols, margins, insert mode and reverse video. It also
	// shows the cursor in its default style, and restores the default character sets and
	// colours.
	modes = "\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2004l" +
		"\x1b[?2026l\x1b[?2031l\x1b[?2048l\x1b[?7727l\x1b[?1l\x1b>" + keys + "\x1b[?5l\x1b[?6l\x1b[?69l\x1b[4l\x1b[?12l\x1b[?7h\x1b[?25h" +
		"\x1b[0 q\x1b[0m\x1b(B\x1b)B\x0f\x1b[r"
	keys       = "\x1b[<99u\x1b[>4m" // pops all pushed entries; each screen has its own stack
	mainScreen = "\x1b[?1049l\x1b[?47l"
)

// restore resets the terminal. After a clean end, the guest's tmux has left the alternate
// screen itself; leaving it again would move the cursor.
func (s *screen) restore(clean bool) {
	if s.tty {
		reset := modes
		if clean && !s.filter.AltScreen() {
			// Resetting the scroll region moves the cursor, so save and restore its
			// position.
			reset = "\x1b7" + modes + "\x1b8\x1b[0m"
		} else {
			reset += mainScreen + keys + "\r\n"
		}
		_, _ = io.WriteString(s.out, reset) // the terminal may be gone
	}
	if s.saved != nil {
		if s.tty && s.filter.Asked() {
			s.drain()
		}
		discardInput(int(s.in.Fd()))
		_ = term.Restore(int(s.in.Fd()), s.saved)
	}
}

// notice shows a line at the bottom of the screen, over the guest's output.
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
