package console

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agent-sessionizer/agent-sessionizer/test/termtexttest"
)

// TestStreamsAreFilteredForTerminals checks on both streams that a guest's output only
// shows text on a terminal and has no other effect. A pipe gets every byte.
func TestStreamsAreFilteredForTerminals(t *testing.T) {
	hostile := "\x1b[21t\x1b[5i\x1bP$qm\x1b\\\x1b_G\x1b\\\x1b]52;c;?\x07\x1b]0;title\x07\u009b21t\x1b[?1000h\x1b[2J\x05\x1b[31mshown"
	for name, stream := range map[string]func(*Console) io.Writer{
		"out": func(c *Console) io.Writer { return c.Out },
		"err": func(c *Console) io.Writer { return c.Err },
	} {
		master, tty, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		c := New(tty, tty, os.Getenv)
		if _, err := io.WriteString(stream(c), hostile); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if _, err := tty.WriteString("END"); err != nil {
			t.Fatal(err)
		}
		var seen []byte
		for buf := make([]byte, 256); !bytes.HasSuffix(seen, []byte("END")); {
			n, err := master.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			seen = append(seen, buf[:n]...)
		}
		_, _ = tty.Close(), master.Close()
		if got := termtexttest.Effects(string(seen)); len(got) > 0 {
			t.Errorf("%s: the terminal received %q, which has the effects %q, want none", name, seen, got)
		}
		if want := "shown\x1b[0m"; !strings.Contains(string(seen), want) {
			t.Errorf("%s: the terminal received %q, want %q in it", name, seen, want)
		}
		var pipe bytes.Buffer
		c = New(&pipe, &pipe, os.Getenv)
		_, _ = io.WriteString(stream(c), hostile)
		if c.Close(); pipe.String() != hostile {
			t.Errorf("%s: a pipe received %q, want %q", name, pipe.String(), hostile)
		}
	}
}
