package recording

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

// checkRedaction records a stream that contains secrets, in random pieces and with random sequences within the
// secrets, and looks for them in every file.
func checkRedaction(t *testing.T, value, around string, seed uint64) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 1))
	between := []string{"\x1b[31m", "\x1b[m", "\r\n", "\x1b[5;1H", "\x1b]0;t\x07", "\x1b[?25l", "\a", "\x1bPx\x1b\\", "\x1b[K", "\x00"}
	var stream bytes.Buffer
	for range 1 + rnd.IntN(4) {
		stream.WriteString(around)
		broken := rnd.IntN(2) == 0
		for i := range len(value) {
			if stream.WriteByte(value[i]); broken && i > 0 && rnd.IntN(4) == 0 {
				stream.WriteString(between[rnd.IntN(len(between))])
			}
		}
	}
	stream.WriteString(around)
	s, rec := newStore(t)
	rec.Redact = secret.NewRedactor(secret.NewValue(value))
	sc := screen{Width: 20, Height: 5, Title: "x" + value, Lines: [][]byte{[]byte("a"), []byte(value[:4]), []byte(value[4:])}}
	tr := rec.track(0)
	check(t, tr.draw(sc))
	for rest := stream.Bytes(); len(rest) > 0; {
		n := 1 + rnd.IntN(min(len(rest), 8))
		check(t, tr.write(rest[:n]))
		rest = rest[n:]
		if rnd.IntN(10) == 0 {
			check(t, tr.draw(sc))
		}
		if rnd.IntN(10) == 0 && !tr.clean.holds() {
			tr.size = 2 * maxPart // the next draw begins a part
			check(t, tr.draw(sc))
		}
	}
	check(t, tr.clean.Close())
	check(t, tr.flush())
	check(t, rec.Close())
	for path, content := range contents(t, s) {
		if strings.Contains(content, value) {
			t.Fatalf("%s contains the secret %q: %s", path, value, content)
		}
	}
	shown := textBytes(played(t, one(t, s)))
	if strings.Contains(shown, value) {
		t.Fatalf("the recording of %q shows the secret %q: %q", stream.String(), value, shown)
	}
	if !strings.Contains(shown, "***") && !strings.Contains(shown, "[redacted]") {
		t.Fatalf("the recording of %q shows %q, want marks in place of secrets", stream.String(), shown)
	}
}

// textBytes returns the text of a recording without sequences and line ends.
func textBytes(shown string) string {
	var s textOnly
	_, _ = newTextMask(nil, &s).Write([]byte(shown))
	return s.String()
}

type textOnly struct{ bytes.Buffer }

func (s *textOnly) text(p []byte)  { s.Write(p) }
func (s *textOnly) control([]byte) {}

func TestRedaction(t *testing.T) {
	for seed := range uint64(80) {
		checkRedaction(t, theSecret, "text $ ", seed)
		checkRedaction(t, "sk-ant-0123456789", "sk-ant-", seed)
	}
}

func FuzzRedaction(f *testing.F) {
	f.Add("hunter2-hunter2", "prompt $ \x1b[1m", uint64(1))
	f.Add("ababababab", "abab", uint64(7))
	f.Add("secret with spaces", "\r\n", uint64(3))
	f.Fuzz(func(t *testing.T, value, around string, seed uint64) {
		if len(value) < 8 || len(value) > 200 || len(around) > 200 || strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r > '~' || r == '*' }) {
			t.Skip()
		}
		checkRedaction(t, value, around, seed)
	})
}

// TestMaskKeepsSequences checks that sequences within held text keep their places and are bounded.
func TestMaskKeepsSequences(t *testing.T) {
	var out sequenceLog
	m := newTextMask(secret.NewRedactor(secret.NewValue(theSecret)), &out)
	for _, p := range []string{"hun", "\x1b[1m", "ter", "\x1b[m", "\n", "x"} {
		_, _ = m.Write([]byte(p))
	}
	if want := "hun<\x1b[1m>ter<\x1b[m><\n>x"; out.String() != want {
		t.Errorf("output = %q, want %q", out.String(), want)
	}
	out.Reset()
	_, _ = m.Write([]byte("hunter2-hun"))
	for range maxPending {
		_, _ = m.Write([]byte("\x1b[1m"))
	}
	if m.size > maxPending || out.Len() == 0 {
		t.Errorf("%d bytes of sequences are held back, want at most %d", m.size, maxPending)
	}
}

type sequenceLog struct{ strings.Builder }

func (s *sequenceLog) text(p []byte)    { s.Write(p) }
func (s *sequenceLog) control(p []byte) { s.WriteString("<" + string(p) + ">") }
