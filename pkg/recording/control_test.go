package recording

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
	"golang.org/x/time/rate"
)

func TestParseOutput(t *testing.T) {
	for _, c := range []struct {
		line   string
		number int
		data   string
		ok     bool
	}{
		{`%output %3 a\033[1mb\134\015\012`, 3, "a\x1b[1mb\\\r\n", true},
		{`%extended-output %12 17 : a : b`, 12, "a : b", true},
		{`%extended-output %12 17 future args : x`, 12, "x", true},
		{`%output %0 h` + "\xc3\xa9" + `\`, 0, "h\u00e9\\", true},
		{`%output %0 \9zz\777`, 0, `\9zz\777`, true},
		{`%output %x y`, 0, "y", false},
		{`%output %-1 y`, 0, "y", false},
		{`%output %+1 y`, 0, "y", false},
		{`%output %99999999999 y`, 0, "y", false},
		{`%output`, 0, "", false},
		{`%extended-output %1 17`, 0, "", false},
	} {
		number, data, ok := parseOutput([]byte(c.line))
		if ok != c.ok || ok && (number != c.number || string(data) != c.data) {
			t.Errorf("parseOutput(%q) = %d, %q, %t, want %d, %q, %t", c.line, number, data, ok, c.number, c.data, c.ok)
		}
	}
}

// guest plays a guest's tmux: it answers commands as the test says.
type guest struct {
	t *testing.T
	c *Control
	n int
}

func (g *guest) feed(lines ...string) error {
	for _, l := range lines {
		if _, err := io.WriteString(g.c, l+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// reply answers the oldest command.
func (g *guest) reply(lines ...string) error {
	g.n++
	return g.feed(append(append([]string{fmt.Sprintf("%%begin 1 %d 1", g.n)}, lines...), fmt.Sprintf("%%end 1 %d 1", g.n))...)
}

func newGuest(t *testing.T, rec *Recorder) *guest {
	return &guest{t: t, c: NewControl(t.Context(), rec, rate.NewLimiter(rate.Inf, 0))}
}

func TestControl(t *testing.T) {
	s, rec := newStore(t)
	g := newGuest(t, rec)
	check(t, g.feed("%begin 1 0 0", "%end 1 0 0", "%output %0 too early"))
	check(t, g.reply("%0 80 24 my window", "%x 1 1 bad", "bad"))
	check(t, g.feed(`%output %0 before the screen`))
	check(t, g.reply("80 24 2 0 0"))
	check(t, g.reply("$ ls", "%end 1 999 1", ""))
	check(t, g.feed(`%extended-output %0 3 : after\015\012`, "%unknown thing", "%layout-change @0 x"))
	check(t, g.reply("%0 100 30 renamed")) // the list that was stale
	check(t, g.reply("%0 100 30 renamed")) // the list for the layout
	check(t, g.feed("%pause %0"))
	check(t, g.feed(`%output %0 lost`))
	check(t, g.reply()) // refresh-client
	check(t, g.reply("100 30 0 0 1"))
	check(t, g.reply("repainted"))
	check(t, g.feed("%window-close @0"))
	check(t, g.reply())
	if len(rec.open) != 0 {
		t.Errorf("%d tracks are open, want none after the window's end", len(rec.open))
	}
	r := one(t, s)
	want := "\x1b[0m\x1b[H\x1b[2J$ ls\r\n%end 1 999 1\r\n\x1b[0m\x1b[1;3Hafter\r\n\x1b[?1049h\x1b[0m\x1b[H\x1b[2Jrepainted\x1b[0m\x1b[1;1H"
	if got := played(t, r); got != want || r.Title != "my window" {
		t.Errorf("%q shows %q, want %q", r.Title, got, want)
	}
}

func TestControlBounds(t *testing.T) {
	s, rec := newStore(t)
	g := newGuest(t, rec)
	var panes []string
	for i := range 1000 {
		panes = append(panes, fmt.Sprintf("%%%d 80 24 w", i))
	}
	check(t, g.reply(panes...))
	if len(g.c.panes) != maxPanes {
		t.Errorf("%d panes, want %d", len(g.c.panes), maxPanes)
	}
	check(t, g.feed("%begin 1 2 3"))
	for range 2 * maxReply / 1000 {
		check(t, g.feed(strings.Repeat("x", 999)))
	}
	if g.c.reply.size < maxReply || len(g.c.reply.lines) > maxReply/1000+1 {
		t.Errorf("%d lines are kept of a reply of %d bytes", len(g.c.reply.lines), g.c.reply.size)
	}
	check(t, g.feed("%end 1 2 3"))
	var err error
	for i := 0; i < 10_000 && err == nil; i++ {
		err = g.feed("%pause %1", "%layout-change")
	}
	if err == nil {
		t.Error("a guest that answers no command can cause any number of them")
	}
	if _, err := g.c.Write(bytes.Repeat([]byte("x"), maxControlLine+1)); err == nil {
		t.Error("a line without an end is accepted")
	}
	if all, err := s.List(""); err != nil || len(all) != 0 {
		t.Errorf("List = %+v, %v, want none: no pane was captured", all, err)
	}
}

// Once, a recording stopped for good when its part was full of output that always ended like the beginning of a
// secret.
func TestOutputThatEndsLikeASecret(t *testing.T) {
	s, rec := newStore(t)
	rec.Limit = 1 << 20
	g := newGuest(t, rec)
	check(t, g.reply("%0 80 24 w"))
	captures := 0
	answer := func() { // a capture that was requested
		for len(g.c.asked) > 0 {
			check(t, g.reply("80 24 0 1 0"))
			check(t, g.reply("the screen ends with "+theSecret[:5]))
			captures++
		}
	}
	answer()
	half := 0 // halves of a secret that the host has not seen completely
	for i := range 8000 {
		check(t, g.feed(fmt.Sprintf(`%%output %%0 line-%d. %s\015\012line %s`, i, strings.Repeat("x", 60), theSecret[:5])))
		if len(g.c.asked) > 0 { // the rest of the secret arrives before and after the screen
			half++
			check(t, g.feed(`%output %0 `+theSecret[5:9]))
			answer()
			check(t, g.feed(`%output %0 `+theSecret[9:]+`\015\012`))
		}
	}
	if captures < 3 || half < 2 {
		t.Errorf("captures = %d, with %d while text was held back, want some", captures, half)
	}
	r := one(t, s)
	if r.Parts < 3 {
		t.Errorf("parts = %d, want some", r.Parts)
	}
	shown := played(t, r)
	if !strings.Contains(shown, "line-7999.") {
		t.Errorf("the recording ends with %q, want the last line", shown[max(len(shown)-200, 0):])
	}
	for path, content := range contents(t, s) {
		for i := 0; i+6 <= len(theSecret); i++ {
			if strings.Contains(content, theSecret[i:i+6]) {
				t.Errorf("%s contains %q of the secret", path, theSecret[i:i+6])
			}
		}
	}
}

// TestControlPace checks that a fast guest is slowed down instead of filling the disk.
func TestControlPace(t *testing.T) {
	_, rec := newStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	c := NewControl(ctx, rec, rate.NewLimiter(1, 100))
	if _, err := c.Write(append(bytes.Repeat([]byte("x"), 90), '\n')); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := c.Write(append(bytes.Repeat([]byte("x"), 90), '\n')); err == nil {
		t.Error("output above the limit does not wait")
	}
}

func FuzzControl(f *testing.F) {
	f.Add([]byte("%begin 1 1 1\n%0 80 24 w\n%end 1 1 1\n%begin 1 2 1\n80 24 0 0 0\n%end 1 2 1\n%begin 1 3 1\nscreen\n%end 1 3 1\n%output %0 x\\033[1m\n%pause %0\n"), uint8(3))
	f.Add([]byte("%begin\n%end\n%error 1\n%extended-output %1 : \n%layout-change\n"), uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, split uint8) {
		s, rec := newStore(t)
		c := NewControl(t.Context(), rec, rate.NewLimiter(rate.Inf, 0))
		for len(in) > 0 {
			n := min(len(in), int(split)+1)
			if _, err := c.Write(in[:n]); err != nil {
				break
			}
			in = in[n:]
		}
		check(t, c.Close())
		all, err := s.List("")
		check(t, err)
		for _, r := range all {
			played(t, r)
		}
	})
}

// TestTmuxIsNotStarted has no tmux to record yet. A server that the recorder starts, and that ends
// because it has no session, takes a session with it that is created meanwhile.
func TestTmuxIsNotStarted(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	out, err := exec.Command("sh", "-c", strings.Replace(TmuxCommand, "tmux -u", "tmux -f /dev/null -S "+socket+" -u", 1)).CombinedOutput()
	if err == nil {
		t.Errorf("output without a server = %q, want an error", out)
	}
	if _, err := os.Lstat(socket); err == nil {
		t.Error("a server was started")
	}
}

// TestTmux records a real tmux, over its control client.
func TestTmux(t *testing.T) {
	if _, err := exec.LookPath("tmux"); err != nil {
		t.Fatal("the test needs tmux: apt-get install tmux")
	}
	dir, err := os.MkdirTemp("", "rec") // short: the path of a socket
	check(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	tmux := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("tmux", append([]string{"-u", "-f", "/dev/null", "-S", socket}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("tmux %q: %v: %s", args, err, out)
		}
	}
	tmux("new-session", "-d", "-s", "agent", "-n", "first", "-x", "80", "-y", "24", "PS1='$ ' sh")
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", socket, "kill-server").Run() })
	testenv.WaitFor(t, "a prompt", func() bool { // a prompt that comes after the first screen has no end of line
		out, err := exec.Command("tmux", "-S", socket, "capture-pane", "-p", "-t", "agent:first").Output()
		return err == nil && strings.Contains(string(out), "$")
	})

	s, rec := newStore(t)
	ctx, cancel := context.WithCancel(t.Context())
	control := NewControl(ctx, rec, Limiter())
	command := strings.Replace(TmuxCommand, "tmux -u", "tmux -S "+socket+" -u", 1)
	client := exec.CommandContext(ctx, "sh", "-c", command)
	client.Stdin, client.Stdout = control.Commands(), control
	client.WaitDelay = 10 * time.Second
	check(t, client.Start())
	ended := make(chan error, 1)
	go func() { ended <- client.Wait() }()

	find := func(text string) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			found, _, err := s.Search(t.Context(), Query{Text: text, Limit: 10})
			check(t, err)
			if len(found) > 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%q is in no recording: %v", text, contents(t, s))
			}
		}
	}
	find("$")
	tmux("send-keys", "-t", "agent:first", "printf 'gr\\303\\274n \\033[32m%s\\033[m\\n' $((40+2)); echo hunter2-'hunter2'", "Enter")
	find("gr\u00fcn 42")
	find("[redacted]")
	tmux("new-window", "-d", "-t", "agent", "-n", "second one", "echo in the second; cat")
	find("in the second")
	tmux("resize-window", "-t", "agent:first", "-x", "100", "-y", "30")
	tmux("send-keys", "-t", "agent:first", "echo do$((1))ne", "Enter")
	find("do1ne")
	cancel()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Fatal("the control client does not end")
	}
	check(t, rec.Close())
	all, err := s.List(subject)
	check(t, err)
	titles := map[string]string{}
	for _, r := range all {
		titles[r.Title] = played(t, r)
	}
	if !strings.Contains(titles["first"], "\x1b[32m42") || !strings.Contains(titles["second one"], "in the second") {
		t.Errorf("recordings = %q, want both windows", titles)
	}
	for path, content := range contents(t, s) {
		if strings.Contains(content, theSecret) {
			t.Errorf("%s contains the secret: %s", path, content)
		}
		if sc := bufio.NewScanner(strings.NewReader(content)); sc.Scan() && strings.HasSuffix(path, castExt) && !strings.Contains(sc.Text(), `"version":2`) {
			t.Errorf("%s begins with %q", path, sc.Text())
		}
	}
}
