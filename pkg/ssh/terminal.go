package ssh

import (
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/crypto/ssh"
	"golang.org/x/term"
)

// Size is the size of a terminal in characters.
type Size struct{ Width, Height int }

// Terminal is the local end of a remote terminal.
type Terminal struct {
	In            io.Reader // an *os.File that is a terminal is in raw mode while cmd runs
	Out           io.Writer
	Term          string // "" means xterm-256color
	Width, Height int
	Resize        <-chan Size // may be nil
}

// Terminal runs cmd on a terminal in the guest until cmd ends, ctx is done, or the
// connection is lost. Its errors are those of Run. An empty cmd means the login
// shell. The guest's output reaches Out unfiltered, as a terminal requires.
func (c *Client) Terminal(ctx context.Context, cmd string, t Terminal) (err error) {
	if t.Term == "" {
		t.Term = "xterm-256color"
	}
	if t.Width <= 0 || t.Height <= 0 {
		t.Width, t.Height = 80, 24
	}
	if f, ok := t.In.(*os.File); ok && f != nil && term.IsTerminal(int(f.Fd())) {
		state, rawErr := term.MakeRaw(int(f.Fd()))
		if rawErr != nil {
			return fmt.Errorf("put the terminal into raw mode: %w", rawErr)
		}
		defer func() {
			if restoreErr := term.Restore(int(f.Fd()), state); restoreErr != nil && err == nil {
				err = fmt.Errorf("restore the terminal: %w", restoreErr)
			}
		}()
	}
	if cmd == "" {
		cmd = `exec "${SHELL:-/bin/sh}" -l`
	}
	resizing, stop := context.WithCancel(ctx)
	defer stop()
	return c.run(ctx, cmd, IO{Stdin: t.In, Stdout: t.Out, Stderr: t.Out}, func(s *ssh.Session) error {
		if err := s.RequestPty(t.Term, t.Height, t.Width, ssh.TerminalModes{}); err != nil {
			return err
		}
		return c.spawn(func() {
			for {
				select {
				case <-resizing.Done():
					return
				case <-c.done:
					return
				case size, ok := <-t.Resize:
					if !ok || s.WindowChange(size.Height, size.Width) != nil {
						return
					}
				}
			}
		})
	})
}
