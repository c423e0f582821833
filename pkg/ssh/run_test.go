package ssh_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// guest implements a few commands, most of them misbehaving.
func guest(c channel) {
	switch c.cmd {
	case "cat":
		_, _ = io.Copy(c, c)
		c.exit(0)
	case "true": // never reads its stdin
		c.exit(0)
	case "fail":
		_, _ = io.WriteString(c.Stderr(), "\x1b[31mno\r\nsuch\x00 thing\xff\u202e "+strings.Repeat("x", 1<<20))
		c.exit(3)
	case "huge exit":
		c.exit(1 << 20)
	case "signal":
		c.died("SEGV\x1b[2J")
	case "vanish":
		_ = c.Close()
	case "flood":
		for {
			if _, err := c.Write(make([]byte, 32<<10)); err != nil {
				return
			}
		}
	case "hang":
		if <-c.signals == "TERM" {
			c.died("TERM")
		}
	case "stubborn":
		for range c.signals { // ends when the client hangs up
		}
		_ = c.Close()
	}
}

func TestRun(t *testing.T) {
	serve(t, guest, nil).ways(t, func(t *testing.T, c *ssh.Client) {
		var out bytes.Buffer
		if err := c.Run(t.Context(), "cat", ssh.IO{Stdin: strings.NewReader("in"), Stdout: &out}); err != nil || out.String() != "in" {
			t.Errorf("Run(cat) = %v, output %q, want nil, \"in\"", err, out.String())
		}
		var none *os.File
		out.Reset()
		if err := c.Run(t.Context(), "cat", ssh.IO{Stdin: none, Stdout: &out}); err != nil || out.Len() != 0 {
			t.Errorf("Run(cat) without a file = %v, output %q, want nil, none", err, out.String())
		}
		// Several megabytes of unread input are not an error.
		if err := c.Run(t.Context(), "true", ssh.IO{Stdin: strings.NewReader(strings.Repeat("x", 8<<20))}); err != nil {
			t.Errorf("Run(true) with a large input = %v, want nil", err)
		}
		for cmd, want := range map[string]ssh.ExitError{
			"fail":      {Code: 3},
			"huge exit": {Code: 255},
			"signal":    {Code: 128, Signal: "SEGV"},
		} {
			exit, ok := errors.AsType[*ssh.ExitError](c.Run(t.Context(), cmd, ssh.IO{}))
			if !ok || *exit != want {
				t.Errorf("Run(%s) = %+v, want %+v", cmd, exit, want)
			}
		}
		if err := c.Run(t.Context(), "vanish", ssh.IO{}); !errors.Is(err, ssh.ErrUnreachable) {
			t.Errorf("Run(vanish) = %v, want %v", err, ssh.ErrUnreachable)
		}
	})
}

func TestRunEndsWithItsContext(t *testing.T) {
	serve(t, guest, nil).ways(t, func(t *testing.T, c *ssh.Client) {
		for _, cmd := range []string{"hang", "stubborn", "flood"} {
			t.Run(cmd, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				defer cancel()
				if err := c.Run(ctx, cmd, ssh.IO{Stdout: io.Discard}); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("Run(%s) = %v, want %v", cmd, err, context.DeadlineExceeded)
				}
				if err := c.Run(t.Context(), "true", ssh.IO{}); err != nil {
					t.Fatalf("Run on the same connection afterwards = %v, want nil", err)
				}
			})
		}
	})
}

// The first signal gives a command the chance to clean up.
func TestRunSendsTERMFirst(t *testing.T) {
	first := make(chan string, 1)
	s := serve(t, func(c channel) {
		first <- <-c.signals
		c.died("TERM")
	}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.dial(t).Run(ctx, "hang", ssh.IO{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Run = %v, want %v", err, context.DeadlineExceeded)
	}
	if got := <-first; got != "TERM" {
		t.Errorf("first signal = %q, want TERM", got)
	}
}

// An sshd that never answers a request must not block the caller.
func TestRunOnAGuestThatNeverAnswers(t *testing.T) {
	s := serve(t, guest, nil)
	c := s.dial(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		s.cut()
		<-c.Done()
		cancel()
	}()
	if err := c.Run(ctx, "hang", ssh.IO{}); err == nil {
		t.Fatal("Run on a guest that never answers = nil, want an error")
	}
}

func TestRunTellsATruncatedInput(t *testing.T) {
	serve(t, guest, nil).ways(t, func(t *testing.T, c *ssh.Client) {
		half := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("disk on fire")))
		if err := c.Run(t.Context(), "cat", ssh.IO{Stdin: half}); err == nil || !strings.Contains(err.Error(), "disk on fire") {
			t.Fatalf("Run with a truncated input = %v, want \"disk on fire\"", err)
		}
	})
}

// A command that has ended must not consume the next key press.
func TestRunLeavesTheTerminalsNextKey(t *testing.T) {
	serve(t, guest, nil).ways(t, func(t *testing.T, c *ssh.Client) {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if err := c.Run(t.Context(), "true", ssh.IO{Stdin: r}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, "key"); err != nil {
			t.Fatal(err)
		}
		_ = w.Close()
		if b, err := io.ReadAll(r); err != nil || string(b) != "key" {
			t.Fatalf("bytes left on the terminal = %q, %v, want \"key\"", b, err)
		}
	})
}

func TestOutput(t *testing.T) {
	serve(t, guest, nil).ways(t, func(t *testing.T, c *ssh.Client) {
		if b, err := c.Output(t.Context(), "cat", strings.NewReader("12345"), 5); err != nil || string(b) != "12345" {
			t.Errorf("Output at the limit = %q, %v, want \"12345\"", b, err)
		}
		if b, err := c.Output(t.Context(), "cat", strings.NewReader("123456"), 5); err == nil || b != nil {
			t.Errorf("Output past the limit = %q, %v, want nil, an error", b, err)
		}
		if _, err := c.Output(t.Context(), "flood", nil, 1<<20); err == nil || !strings.Contains(err.Error(), "more than") {
			t.Errorf("Output(flood) = %v, want \"more than\"", err)
		}
		_, err := c.Output(t.Context(), "fail", nil, 10)
		if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Code != 3 {
			t.Errorf("Output(fail) = %v, want exit status 3", err)
		}
		if text := err.Error(); !strings.HasPrefix(text, "exit status 3: no such thing xxx") || len(text) > 5<<10 {
			t.Errorf("Output(fail) = %.80q (%d bytes), want \"exit status 3: no such thing xxx…\", at most %d bytes", text, len(text), 5<<10)
		}
	})
}

func TestTerminal(t *testing.T) {
	s := serve(t, func(c channel) {
		first, second := <-c.resizes, <-c.resizes
		_, _ = io.WriteString(c, c.cmd)
		c.exit(first.Width + second.Height)
	}, nil)
	s.ways(t, func(t *testing.T, c *ssh.Client) {
		resize := make(chan ssh.Size, 2)
		resize <- ssh.Size{Width: 132, Height: 50}
		resize <- ssh.Size{Width: 90, Height: 10}
		var out bytes.Buffer
		err := c.Terminal(t.Context(), "tmux attach", ssh.Terminal{Out: &out, Resize: resize})
		if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Code != 142 || out.String() != "tmux attach" {
			t.Fatalf("Terminal = %v, output %q, want exit status 142, \"tmux attach\"", err, out.String())
		}
	})
}

// A terminal has a type and a size, and runs a login shell if no command is given.
func TestTerminalAsksFor(t *testing.T) {
	s := serve(t, func(c channel) {
		_, _ = io.Copy(io.Discard, c)
		_, _ = io.WriteString(c, c.term+" "+c.cmd)
		if len(c.resizes) > 0 {
			_, _ = io.WriteString(c, " and an unexpected size")
		}
		c.exit(0)
	}, nil)
	c := s.dial(t)
	closed := make(chan ssh.Size)
	close(closed)
	for _, tt := range []struct {
		cmd      string
		terminal ssh.Terminal
		want     string
	}{
		{"tmux", ssh.Terminal{Term: "screen", Width: 132, Height: 50}, "screen 132x50 tmux"},
		{"tmux", ssh.Terminal{Width: 1, Height: 1, Resize: closed}, "xterm-256color 1x1 tmux"},
		{"", ssh.Terminal{Width: 132}, `xterm-256color 80x24 exec "${SHELL:-/bin/sh}" -l`},
		{"", ssh.Terminal{Height: 50}, `xterm-256color 80x24 exec "${SHELL:-/bin/sh}" -l`},
	} {
		var out bytes.Buffer
		tt.terminal.Out = &out
		if err := c.Terminal(t.Context(), tt.cmd, tt.terminal); err != nil || out.String() != tt.want {
			t.Errorf("Terminal(%+v) = %v, output %q, want %q", tt.terminal, err, out.String(), tt.want)
		}
	}
}

// The user's own terminal is in raw mode while the remote one exists. Afterwards
// its state is restored, and the next key press is not lost.
func TestTerminalRestoresTheLocalOne(t *testing.T) {
	master, slave, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	defer slave.Close()
	before, err := term.GetState(int(slave.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	raw := make(chan struct{})
	c := serve(t, func(c channel) {
		close(raw)
		key := make([]byte, 1)
		_, _ = io.ReadFull(c, key) // arrives without a newline: the terminal is in raw mode
		c.exit(int(key[0]))
	}, nil).dial(t)
	go func() {
		<-raw
		_, _ = master.Write([]byte{3}) // Ctrl-C is an ordinary key in raw mode
	}()
	err = c.Terminal(t.Context(), "", ssh.Terminal{In: slave, Out: io.Discard})
	if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Code != 3 {
		t.Fatalf("Terminal = %v, want exit status 3", err)
	}
	after, err := term.GetState(int(slave.Fd()))
	if err != nil || !reflect.DeepEqual(before, after) {
		t.Errorf("terminal settings after = %+v, %v, want %+v", after, err, before)
	}
	if _, err := master.Write([]byte("next\n")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16)
	if n, err := slave.Read(b); err != nil || string(b[:n]) != "next\n" {
		t.Errorf("next key = %q, %v, want \"next\\n\"", b[:n], err)
	}
}
