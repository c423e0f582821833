package screen

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
)

// terminal is what a program has written to a pseudo-terminal.
type terminal struct {
	*testing.T
	keys io.Writer
	mu   sync.Mutex
	text strings.Builder
	got  chan struct{} // something
}

// start runs a review on a pseudo-terminal, and returns its result.
func start(ctx context.Context, t *testing.T, w work, env ...string) (*terminal, <-chan error) {
	t.Helper()
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(master, &pty.Winsize{Rows: 24, Cols: 80}); err != nil {
		t.Fatal(err)
	}
	term := &terminal{T: t, keys: master, got: make(chan struct{}, 1)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			term.mu.Lock()
			term.text.Write(buf[:n])
			term.mu.Unlock()
			select {
			case term.got <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	result := make(chan error, 1)
	go func() {
		result <- run(ctx, Options{In: tty, Out: tty, Env: append([]string{"TERM=xterm-256color"}, env...)}, w)
		_ = tty.Close()
	}()
	t.Cleanup(func() {
		_ = master.Close()
		<-read
	})
	return term, result
}

func (t *terminal) written() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}

// await waits until the program has written a text.
func (t *terminal) await(text string) {
	t.Helper()
	end := time.After(20 * time.Second)
	for !strings.Contains(t.written(), text) {
		select {
		case <-t.got:
		case <-end:
			t.Fatalf("the terminal lacks %q:\n%q", text, t.written())
		}
	}
}

func (t *terminal) press(keys string) {
	t.Helper()
	if _, err := io.WriteString(t.keys, keys); err != nil {
		t.Fatal(err)
	}
}

func await(t *testing.T, result <-chan error) error {
	t.Helper()
	select {
	case err := <-result:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("the review does not end")
		return nil
	}
}

func TestRun(t *testing.T) {
	a := newAttempt("repo", patch("a.go"), patch("b.go"))
	term, result := start(t.Context(), t, &fakeWork{attempts: []*fakeAttempt{a}})
	term.await("const")
	term.press(" ")
	term.await("●")
	term.press("q")
	if err := await(t, result); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	for _, text := range []string{"\x1b[?1049h", "\x1b[?1049l", "\x1b[3"} { // the other screen and back, and colours
		term.await(text)
	}
	if len(a.marks) != 5 {
		t.Errorf("%d lines are chosen, want 5", len(a.marks))
	}
}

// Without colours, marks and changed lines are visible.
func TestRunWithoutColours(t *testing.T) {
	term, result := start(t.Context(), t, &fakeWork{attempts: []*fakeAttempt{newAttempt("repo", patch("a.go"))}}, "NO_COLOR=1")
	term.await("return")
	term.press("q")
	if err := await(t, result); err != nil {
		t.Errorf("Run = %v, want nil", err)
	}
	for _, sequence := range []string{"\x1b[31m", "\x1b[32m", "\x1b[90m", ";31m", ";41", ";42"} {
		if strings.Contains(term.written(), sequence) {
			t.Errorf("the terminal gets a colour: %q", sequence)
		}
	}
	term.await("\x1b[4m") // changed words
}

// Run returns after the landing that it cancels, so that the caller may close the review.
func TestRunWaits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	w := &fakeWork{attempts: []*fakeAttempt{newAttempt("repo", patch("a.go"))}, hold: make(chan struct{}), begun: make(chan struct{}), ended: make(chan struct{})}
	term, result := start(ctx, t, w)
	term.await("return")
	term.press(" L\r")
	term.await("branch: ")
	term.press("\r")
	select {
	case <-w.begun:
	case <-time.After(20 * time.Second):
		t.Fatalf("nothing lands:\n%q", term.written())
	}
	cancel()
	if err := await(t, result); !errors.Is(err, context.Canceled) {
		t.Errorf("Run = %v, want a cancellation", err)
	}
	select {
	case <-w.ended:
	default:
		t.Error("Run returned while the landing ran")
	}
}
