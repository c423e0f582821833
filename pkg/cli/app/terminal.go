package app

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Printf writes to the result stream.
func (a *App) Printf(format string, args ...any) { fmt.Fprintf(a.Con.Out, format, args...) }

// Pairs writes names and values, one pair per line.
func (a *App) Pairs(p [][2]string) {
	width := 0
	for _, kv := range p {
		width = max(width, len(kv[0]))
	}
	for _, kv := range p {
		a.Printf("%-*s  %s\n", width, kv[0], termtext.Line(kv[1]))
	}
}

// JsonLine writes a value on one line, for streams without an end.
func (a *App) JsonLine(v any) error {
	e := json.NewEncoder(a.Con.Out)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Interactive reports whether stdin and stdout are terminals.
func Interactive() bool {
	return term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd()))
}

// Ask reads one line from the terminal, even if stdin is redirected.
func (a *App) Ask(question string) (string, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return "", fail.New(fail.Usage, "open terminal to ask: %w", err)
	}
	defer tty.Close()
	fmt.Fprint(tty, question)
	line, err := bufio.NewReader(io.LimitReader(tty, 4096)).ReadString('\n')
	if err != nil {
		return "", fail.New(fail.Interrupted, "read answer: %w", err)
	}
	return strings.TrimSpace(line), nil
}

// Key waits until one of keys is pressed. Ctrl-C counts as the last of them.
func (a *App) Key(question, keys string) (byte, error) {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return 0, fail.New(fail.Usage, "open terminal to ask: %w", err)
	}
	defer tty.Close()
	fmt.Fprint(tty, question)
	before, err := term.MakeRaw(int(tty.Fd()))
	if err != nil {
		return 0, fail.New(fail.Host, "read key: %w", err)
	}
	defer func() {
		_ = term.Restore(int(tty.Fd()), before)
		fmt.Fprintln(tty)
	}()
	var pressed [1]byte
	for {
		if _, err := tty.Read(pressed[:]); err != nil {
			return 0, fail.New(fail.Interrupted, "read answer: %w", err)
		}
		if pressed[0] == 3 { // Ctrl-C, an ordinary key in raw mode
			return keys[len(keys)-1], nil
		}
		if strings.IndexByte(keys, pressed[0]) >= 0 {
			return pressed[0], nil
		}
	}
}

// Transfer shows the progress of a copy on a terminal.
func (a *App) Transfer() (ssh.Progress, func()) {
	if !term.IsTerminal(int(os.Stderr.Fd())) {
		return nil, func() {}
	}
	view := a.Con.Steps()
	files, bytes := 0, int64(0)
	return func(i ssh.Item) {
		files, bytes = files+1, bytes+i.Size
		view.Update(console.Step{Name: "copy", State: console.Progress, Detail: fmt.Sprintf("%d files, %v, %s", files, config.Size(bytes), i.Name)})
	}, view.Close
}

// CopyClean prints a log that the guest can write to.
func CopyClean(w io.Writer, r io.Reader) error {
	lines := bufio.NewReaderSize(r, 64<<10)
	for {
		line, _, err := lines.ReadLine() // an overlong line arrives in parts, which is fine
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(w, termtext.Line(string(line))); err != nil {
			return err
		}
	}
}
