//go:build bench

package bench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	thePicker = "the picker"
	plainFzf  = "tmux list-sessions, piped to fzf"
	theSwitch = "open of a session that is ready, inside tmux"
	plainTmux = "tmux switch-client"
	rowPaint  = "first paint, ms"
	rowSwitch = "until the client shows it, ms"
	pickable  = 20 // sessions
	perTurn   = 5
)

// TestPicker measures what a user waits for after the hotkey: until the rows appear,
// and until the terminal shows the picked session. The VMs are fake, the measured
// program is the shipped one, and tmux is real.
func TestPicker(t *testing.T) {
	table := results.table(table{title: titlePicker, rows: []row{
		{name: rowPaint, unit: "ms", comparisons: []comparison{{key: "picker_first_paint", mine: thePicker, other: plainFzf}}},
		{name: rowSwitch, unit: "ms", comparisons: []comparison{{key: "switch_session", mine: theSwitch, other: plainTmux}}},
	}})
	b := realvm.NewBox(t)
	b.Env = append(b.Env, "AGENT_SESSIONIZER_PREPARE=none")
	fake, fzf := filepath.Join(b.Home, "fake"), filepath.Join(b.Home, "fzf")
	if err := realvm.Build(t.Context(), fake, "../../cmd/agent-sessionizer", "-tags=fakevm"); err != nil {
		t.Fatal(err)
	}
	if err := realvm.Build(t.Context(), fzf, "github.com/junegunn/fzf"); err != nil {
		t.Fatal(err)
	}
	var names []string
	t.Cleanup(func() {
		if len(names) > 0 {
			b.Run(append([]string{fake, "destroy", "--force"}, names...)...)
		}
		b.Run("tmux", "kill-server")
	})
	for i := range pickable {
		repo := fmt.Sprintf("repo%02d", i)
		b.Repo(repo)
		r := b.Run(fake, "open", "-d", "--cpus=1", "--memory=512MiB", "--disk=4GiB", "./"+repo)
		if r.Code != 0 {
			t.Fatalf("open %s = exit %d\n%s\nwant exit 0", repo, r.Code, r.All())
		}
		names = append(names, strings.TrimSpace(r.Stdout))
		if i >= atOnce {
			b.Run(fake, "stop", names[i])
		}
		// These do nothing: fzf lists them, and the test switches between them.
		if r := b.Run("tmux", "-f", "/dev/null", "new-session", "-d", "-s", "plain-"+repo, "sleep infinity"); r.Code != 0 {
			t.Fatalf("tmux new-session plain-%s = exit %d\n%s\nwant exit 0", repo, r.Code, r.All())
		}
	}
	last := fmt.Sprintf("repo%02d", pickable-1)
	for range runs() * perTurn {
		table.add(thePicker, sample{rowPaint: paints(t, b, last, realvm.Binary())})
		table.add(plainFzf, sample{rowPaint: paints(t, b, last, "sh", "-c", "tmux list-sessions -F '#S' | "+fzf)})
	}

	// A terminal on the first session, which switches to the second one and back.
	term := terminal(t, b, "tmux", "attach-session", "-t", "=plain-repo00:")
	sees(t, term, "[plain-rep") // the status line shows no more
	if err := term.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, term) //nolint:errcheck // keeps reading, as a user would, until it is closed
	client := strings.TrimSpace(b.Run("tmux", "list-clients", "-F", "#{client_name}").Stdout)
	shows := func() string { return b.Run("tmux", "list-clients", "-F", "#{session_name}").Stdout }
	b.Run("tmux", "set-hook", "-g", "client-session-changed", "wait-for -S shown")
	// switches returns how many milliseconds pass until the terminal shows another session.
	switches := func(argv ...string) float64 {
		shown := make(chan struct{})
		go func() { b.Run("tmux", "wait-for", "shown"); close(shown) }()
		time.Sleep(50 * time.Millisecond) // it waits by then
		began := time.Now()
		ended := make(chan struct{})
		go func() { b.Run(argv...); close(ended) }()
		<-shown
		ms := time.Since(began).Seconds() * 1000
		<-ended
		return ms
	}
	home := func() { switches("tmux", "switch-client", "-c", client, "-t", "=plain-repo00:") }
	for i := range runs()*perTurn + 1 {
		ours := switches(realvm.Binary(), "--client", client, names[0])
		if now := shows(); !strings.HasPrefix(now, "repo00") {
			t.Fatalf("terminal = %q, want repo00…", now)
		}
		home()
		theirs := switches("tmux", "switch-client", "-c", client, "-t", "=plain-repo01:")
		if now := shows(); !strings.HasPrefix(now, "plain-repo01") {
			t.Fatalf("terminal = %q, want plain-repo01…", now)
		}
		home()
		if i > 0 { // the first one creates the local session, which a switch finds
			table.add(theSwitch, sample{rowSwitch: ours})
			table.add(plainTmux, sample{rowSwitch: theirs})
		}
	}
	table.done(t, runs(), thePicker, plainFzf, theSwitch, plainTmux)
}

// terminal runs a program on a terminal of 120 columns and 40 lines, until the test
// ends.
func terminal(t *testing.T, b *realvm.Box, argv ...string) *os.File {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = b.Env, b.Home
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 40, Cols: 120})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait()
		_ = tty.Close()
	})
	return tty
}

// paints returns how many milliseconds a program takes until text is on its terminal.
func paints(t *testing.T, b *realvm.Box, text string, argv ...string) float64 {
	t.Helper()
	var ms float64
	t.Run("", func(t *testing.T) { // a subtest, so that one ends before the next begins
		began := time.Now()
		sees(t, terminal(t, b, argv...), text)
		ms = time.Since(began).Seconds() * 1000
	})
	return ms
}

// sees reads a terminal until text appears.
func sees(t *testing.T, tty *os.File, text string) {
	t.Helper()
	reads(t, tty, time.Minute, regexp.MustCompile(regexp.QuoteMeta(text)))
}

// reads reads a terminal until its output, with escape sequences, matches.
func reads(t *testing.T, tty *os.File, limit time.Duration, want *regexp.Regexp) {
	t.Helper()
	if err := tty.SetReadDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	var seen []byte
	buf := make([]byte, 64<<10)
	for !want.Match(seen) {
		n, err := tty.Read(buf)
		if err != nil {
			t.Fatalf("terminal = %q, %v, want %q", seen, err, want)
		}
		seen = append(seen, buf[:n]...)
		if bytes.Contains(buf[:n], []byte("\x1b[6n")) { // a terminal reports its cursor position and its modes
			if _, err := tty.WriteString("\x1b[1;1R\x1b[?2004;2$y\x1b[1;1R"); err != nil {
				t.Fatal(err)
			}
		}
	}
}
