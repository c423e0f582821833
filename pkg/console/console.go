// Package console owns what a person or a script sees: stdout for results, stderr for
// messages, colours, progress, tables, JSON, questions on the terminal, and the log.
//
// It decides nothing about the product, and it never prints a guest's text unchanged.
// Control characters and escape sequences are removed first, and everything written to a
// terminal passes through termtext.Filter.
package console

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"charm.land/lipgloss/v2"
	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Console is the two output streams and their capabilities. A stream that is a terminal
// receives text and colours only; any other stream receives every byte.
type Console struct {
	Out io.Writer // results
	Err io.Writer // messages

	screen struct{ out, err io.Writer } // the unfiltered streams, for this package's own drawing

	env   func(string) string
	width func() int // of Err; nil if Err is not a terminal
	color struct{ out, err bool }
}

// New decides about colours for the whole program. NO_COLOR turns them off; CLICOLOR_FORCE
// and FORCE_COLOR turn them on. Otherwise a stream has colours if it is a terminal, TERM is
// not "dumb" and CLICOLOR is not 0.
func New(out, err io.Writer, env func(string) string) *Console {
	c := &Console{Out: forTerminal(out), Err: forTerminal(err), env: env}
	c.screen.out, c.screen.err = out, err
	c.color.out = colored(out, env)
	c.color.err = colored(err, env)
	if f, ok := terminal(err); ok && env("TERM") != "dumb" {
		c.width = func() int {
			w, _, sizeErr := term.GetSize(int(f.Fd()))
			if sizeErr != nil || w < 20 {
				return 80
			}
			return w
		}
	}
	return c
}

// forTerminal returns w, with a filter in front if w is a terminal.
func forTerminal(w io.Writer) io.Writer {
	if _, ok := terminal(w); ok {
		return termtext.NewLineFilter(w)
	}
	return w
}

// Close resets the colours of the terminals, in case the printed text changed them.
func (c *Console) Close() {
	for _, w := range []io.Writer{c.Out, c.Err} {
		if f, ok := w.(*termtext.Filter); ok {
			_ = f.Close() // the terminal may be gone
		}
	}
}

// Clear clears the screen of the result stream, if running steps are redrawn in place.
func (c *Console) Clear() {
	if c.Live() {
		_, _ = io.WriteString(c.screen.out, "\x1b[H\x1b[2J")
	}
}

func terminal(w io.Writer) (*os.File, bool) {
	f, ok := w.(*os.File)
	return f, ok && f != nil && term.IsTerminal(int(f.Fd()))
}

func colored(w io.Writer, env func(string) string) bool {
	if env("NO_COLOR") != "" {
		return false
	}
	for _, name := range []string{"CLICOLOR_FORCE", "FORCE_COLOR"} {
		if force := env(name); force != "" && force != "0" && force != "false" {
			return true
		}
	}
	_, tty := terminal(w)
	return tty && env("TERM") != "dumb" && env("CLICOLOR") != "0"
}

// Live reports whether running steps are redrawn in place.
func (c *Console) Live() bool { return c.width != nil }

// Color reports whether the result may have colours, for programs such as git that produce
// a part of it.
func (c *Console) Color() bool { return c.color.out }

// Tone is the meaning of a colour. All tones are among the terminal's own sixteen colours.
type Tone string

// The tones.
const (
	Plain  Tone = ""
	Good   Tone = "2" // green
	Bad    Tone = "1" // red
	Notice Tone = "3" // yellow
	Faint  Tone = "8" // grey
)

// Paint colours a part of the result, if results have colours.
func (c *Console) Paint(t Tone, s string) string { return paint(c.color.out, t, s) }

func paint(on bool, t Tone, s string) string {
	if !on || s == "" || t == Plain {
		return s
	}
	return lipgloss.NewStyle().Foreground(lipgloss.Color(string(t))).Render(s)
}

// Say writes a line to the message stream.
func (c *Console) Say(format string, args ...any) {
	c.line(c.Err, termtext.Line(fmt.Sprintf(format, args...)))
}

// Warn writes a warning to the message stream.
func (c *Console) Warn(format string, args ...any) {
	c.line(c.Err, paint(c.color.err, Notice, "warning:")+" "+termtext.Line(fmt.Sprintf(format, args...)))
}

// Fail writes an error and its hint, if any, to the message stream.
func (c *Console) Fail(err error) {
	c.line(c.Err, paint(c.color.err, Bad, "error:")+" "+termtext.Line(err.Error()))
	if hint := fail.HintOf(err); hint != "" {
		c.line(c.Err, paint(c.color.err, Faint, " hint:")+" "+termtext.Line(hint))
	}
}

// line writes one line. It ignores errors: if the stream is gone, there is nowhere to
// report them.
func (c *Console) line(w io.Writer, s string) { _, _ = io.WriteString(w, s+"\n") }

// JSON writes v as the result: indented, without HTML escapes, and with a final newline.
func (c *Console) JSON(v any) error {
	e := json.NewEncoder(c.Out)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}

// Confirm asks on the terminal, not on stdin, and accepts only y or yes. Without a terminal
// it returns a usage error that names the flag to use instead.
func (c *Console) Confirm(question, flag string) (bool, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return false, fail.New(fail.Usage, "cannot ask %q: no terminal", termtext.Line(question)).WithHint("repeat the command with %s", flag)
	}
	defer tty.Close()
	return ask(tty, question)
}

func ask(tty io.ReadWriter, question string) (bool, error) {
	if _, err := fmt.Fprintf(tty, "%s [y/N] ", strings.Join(cleanLines(question), "\n")); err != nil {
		return false, fmt.Errorf("write the question: %w", err)
	}
	answer, err := bufio.NewReader(io.LimitReader(tty, 256)).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("read the answer: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true, nil
	}
	return false, nil
}
