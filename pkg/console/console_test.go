package console

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func env(kv ...string) func(string) string {
	return func(name string) string {
		for _, e := range kv {
			if n, v, _ := strings.Cut(e, "="); n == name {
				return v
			}
		}
		return ""
	}
}

func bare(kv ...string) (*Console, *bytes.Buffer, *bytes.Buffer) {
	var out, conv bytes.Buffer
	return New(&out, &conv, env(kv...)), &out, &conv
}

func TestPlainSteps(t *testing.T) {
	c, out, conv := bare()
	v := c.Steps()
	for _, s := range []Step{
		{Name: "clone the repository", State: Start},
		{Name: "boot the VM", State: Start},
		{Name: "boot the VM", State: Progress, Detail: "kernel"},
		{Name: "boot the VM", State: Done, Elapsed: 12345 * time.Millisecond, Detail: "ready"},
		{Name: "clone the repository", State: Done, Elapsed: 125 * time.Second},
		{Name: "secrets", State: Skip, Detail: "none are configured"},
		{Name: "evil\x1b[2J\r\x1b]52;c;AAAA\x07name", State: Failed, Elapsed: time.Second, Detail: "line one\nline two \u202etxt.exe"},
	} {
		v.Update(s)
	}
	v.Say("a notice")
	v.Close()
	v.Close()
	v.Update(Step{Name: "late", State: Done})
	const want = `✓ boot the VM  12.3s
✓ clone the repository  2m05s
– secrets  none are configured
✗ evil name  1.0s  line one line two txt.exe
a notice
`
	if diff := cmp.Diff(want, conv.String()); diff != "" {
		t.Errorf("stderr mismatch (-want +got):\n%s", diff)
	}
	if out.Len() != 0 {
		t.Errorf("stdout = %q, want none", out)
	}
}

// TestPlainStepsThatTakeLong checks that, without a terminal, a long step is reported now
// and then with its current detail.
func TestPlainStepsThatTakeLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, conv := bare()
		v := c.Steps()
		v.Update(Step{Name: "quick", State: Start})
		v.Update(Step{Name: "provision", State: Start})
		v.Update(Step{Name: "provision", State: Progress, Detail: "installing docker"})
		time.Sleep(9 * time.Second)
		v.Update(Step{Name: "quick", State: Done})
		time.Sleep(8 * time.Second)
		v.Update(Step{Name: "provision", State: Progress, Detail: "installing node\x1b[2J"})
		time.Sleep(17 * time.Second)
		v.Update(Step{Name: "provision", State: Done})
		v.Close()
		const want = `✓ quick  9.0s
… provision: installing docker  10.0s
… provision: installing node  25.0s
✓ provision  34.0s
`
		if diff := cmp.Diff(want, conv.String()); diff != "" {
			t.Errorf("stderr mismatch (-want +got):\n%s", diff)
		}
	})
}

func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.0s", 440 * time.Millisecond: "0.4s", 59940 * time.Millisecond: "59.9s", 59970 * time.Millisecond: "1m00s",
		125 * time.Second: "2m05s", 62 * time.Minute: "1h02m",
	} {
		if got := seconds(d); got != want {
			t.Errorf("seconds(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestTableJSONAndMessages(t *testing.T) {
	c, out, conv := bare()
	c.Table([]string{"NAME", "STATE", "REPO"}, [][]string{{"a", "ready", "o/r"}, {"日本", "", "x\x1b[31m\ny"}, {"long-name"}})
	if err := c.JSON(map[string]any{"b": "<&>", "a": []int{1}}); err != nil {
		t.Fatal(err)
	}
	const want = `NAME       STATE  REPO
a          ready  o/r
日本       -      x y
long-name  -      -
{
  "a": [
    1
  ],
  "b": "<&>"
}
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("stdout mismatch (-want +got):\n%s", diff)
	}
	c.Say("hello %s", "wor\x07ld")
	c.Warn("slow")
	c.Fail(fail.New(fail.Host, "no tmux").WithHint("apt install tmux"))
	if diff := cmp.Diff("hello world\nwarning: slow\nerror: no tmux\n hint: apt install tmux\n", conv.String()); diff != "" {
		t.Errorf("stderr mismatch (-want +got):\n%s", diff)
	}
}

func TestColours(t *testing.T) {
	master, tty := openPTY(t)
	_ = master
	for _, c := range []struct {
		env     []string
		tty     bool
		colored bool
	}{
		{nil, true, true},
		{nil, false, false},
		{[]string{"NO_COLOR=1"}, true, false},
		{[]string{"NO_COLOR=1", "CLICOLOR_FORCE=1"}, true, false},
		{[]string{"CLICOLOR_FORCE=1"}, false, true},
		{[]string{"CLICOLOR_FORCE=0"}, false, false},
		{[]string{"CLICOLOR_FORCE=1", "TERM=dumb", "CLICOLOR=0"}, false, true},
		{[]string{"FORCE_COLOR=1"}, false, true},
		{[]string{"FORCE_COLOR=0"}, false, false},
		{[]string{"NO_COLOR=1", "FORCE_COLOR=3"}, true, false},
		{[]string{"TERM=dumb"}, true, false},
		{[]string{"CLICOLOR=0"}, true, false},
	} {
		var w io.Writer = &bytes.Buffer{}
		if c.tty {
			w = tty
		}
		if got := colored(w, env(c.env...)); got != c.colored {
			t.Errorf("colored(tty %v, %v) = %v, want %v", c.tty, c.env, got, c.colored)
		}
	}
	con, _, conv := bare("CLICOLOR_FORCE=1")
	con.Warn("x")
	if got := conv.String(); !strings.Contains(got, "\x1b[") || !strings.HasSuffix(got, "\x1b[m x\n") {
		t.Errorf("warning with CLICOLOR_FORCE=1 = %q, want colours and the end %q", got, "\x1b[m x\n")
	}
}

// TestColoursOfAResult checks that each stream is decided separately: a pipe gets no
// colours while the terminal beside it does.
func TestColoursOfAResult(t *testing.T) {
	_, tty := openPTY(t)
	var out bytes.Buffer
	if c := New(&out, tty, env()); c.Color() || c.Paint(Bad, "x") != "x" || !c.color.err {
		t.Errorf("stdout in a pipe, stderr a terminal: Color() %t, Paint() %q, colours on stderr %t, want false, %q, true", c.Color(), c.Paint(Bad, "x"), c.color.err, "x")
	}
	tint := Tint{Column: "STATE", Of: func(cell string) Tone {
		if cell == "ready" {
			return Good
		}
		return Plain
	}}
	rows := func() [][]string { return [][]string{{"ready", "ready"}, {"b", "stopped"}} }
	New(&out, &out, env()).Table([]string{"NAME", "STATE"}, rows(), tint)
	if got, want := out.String(), "NAME   STATE\nready  ready\nb      stopped\n"; got != want {
		t.Errorf("table without colours = %q, want %q", got, want)
	}
	out.Reset()
	New(&out, &out, env("FORCE_COLOR=1")).Table([]string{"NAME", "STATE"}, rows(), tint)
	lines := strings.Split(out.String(), "\n")
	want := []string{"ready  \x1b[32mready\x1b[m", "b      stopped"}
	if diff := cmp.Diff(want, lines[1:min(3, len(lines))]); diff != "" {
		t.Errorf("rows of a table with colours mismatch (-want +got):\n%s", diff)
	}
}

func openPTY(t *testing.T) (master, tty *os.File) {
	t.Helper()
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = master.Close(), tty.Close() })
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 24, Cols: 40}); err != nil {
		t.Fatal(err)
	}
	return master, tty
}

func TestTerminalSteps(t *testing.T) {
	master, tty := openPTY(t)
	c := New(io.Discard, tty, env("TERM=xterm"))
	v := c.Steps()
	v.Update(Step{Name: "boot", State: Start, Detail: strings.Repeat("long ", 30)})
	v.Update(Step{Name: "clone", State: Start})
	seen := readUntil(t, master, "⠙ ", "0.1s") // the spinner advances on its own
	if !strings.Contains(seen, "\x1b[2A\r\x1b[J") {
		t.Errorf("output of two running steps = %q, want %q in it, which redraws them", seen, "\x1b[2A\r\x1b[J")
	}
	for line := range strings.SplitSeq(seen, "\r\n") {
		if n := cells(line); n > 39 {
			t.Errorf("line %q has %d cells, want at most 39 on a terminal of 40", line, n)
		}
	}
	v.Update(Step{Name: "boot", State: Done, Elapsed: 3 * time.Second})
	v.Update(Step{Name: "clone", State: Failed, Detail: "no network"})
	seen = readUntil(t, master, "no network")
	if !strings.Contains(seen, "✓\x1b[m boot") || !strings.Contains(seen, "3.0s") || !strings.Contains(seen, "✗") {
		t.Errorf("output at the end of the steps = %q, want %q, %q and %q in it", seen, "✓\x1b[m boot", "3.0s", "✗")
	}
	v.Update(Step{Name: "unfinished", State: Start})
	v.Close()
	if seen = readUntil(t, master, "unfinished", "\x1b[1A\r\x1b[J"); strings.HasSuffix(seen, "unfinished") {
		t.Errorf("output after Close = %q, want the running step erased", seen)
	}
}

// readUntil reads the terminal until all of want have appeared.
func readUntil(t *testing.T, f *os.File, want ...string) string {
	t.Helper()
	if err := f.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	var got []byte
	buf := make([]byte, 4096)
	for {
		missing := false
		for _, w := range want {
			missing = missing || !strings.Contains(string(got), w)
		}
		if !missing {
			return string(got)
		}
		n, err := f.Read(buf)
		if err != nil {
			t.Fatalf("the terminal shows %q, %v, want %q in it", got, err, want)
		}
		got = append(got, buf[:n]...)
	}
}

func TestConfirm(t *testing.T) {
	for answer, want := range map[string]bool{"y\n": true, "YES \n": true, "n\n": false, "\n": false, "yep\n": false, "": false} {
		rw := struct {
			io.Reader
			io.Writer
		}{strings.NewReader(answer), &bytes.Buffer{}}
		if got, err := ask(rw, "Destroy\n  two\x1b[2J things?"); got != want || err != nil {
			t.Errorf("ask with the answer %q = %v, %v, want %v", answer, got, err, want)
		}
		if got, want := rw.Writer.(*bytes.Buffer).String(), "Destroy\n  two things? [y/N] "; got != want {
			t.Errorf("ask printed %q, want %q", got, want)
		}
	}
	if _, err := os.OpenFile("/dev/tty", os.O_RDWR, 0); !errors.Is(err, syscall.ENXIO) {
		return // this test has a terminal; runs without one cover the case below
	}
	c, _, _ := bare()
	if _, err := c.Confirm("Destroy?", "--yes"); fail.CodeOf(err) != fail.Usage || !strings.Contains(fail.HintOf(err), "--yes") {
		t.Errorf("Confirm without a terminal: error %v, hint %q, want code %v, a hint with %q", err, fail.HintOf(err), fail.Usage, "--yes")
	}
}
