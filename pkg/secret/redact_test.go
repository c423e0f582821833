package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRedactorForms(t *testing.T) {
	secrets := []string{
		"ghp_16C7e42F292c6912E7710c838347Ae178B4a", "p@ss w'ord\"<&>/\\$x%", "snöwman☃-secret", "line one of it\r\nline two of it\nx",
		strings.Repeat("longvalue+/", 200), "abcdef",
	}
	for _, s := range secrets {
		r := NewRedactor(NewValue(s))
		js, _ := json.Marshal(s)
		quoted, err := exec.Command("bash", "-c", `printf %q "$1"`, "-", s).Output()
		if err != nil {
			t.Fatalf("bash is needed: %v", err)
		}
		shown := map[string]string{
			"plain": s, "json": string(js), "query": url.QueryEscape(s), "path": url.PathEscape(s), "hex": hex.EncodeToString([]byte(s)),
			"HEX": strings.ToUpper(hex.EncodeToString([]byte(s))), "quote": "'" + strings.ReplaceAll(s, "'", `'\''`) + "'",
			"terminal": strings.ReplaceAll(s, "\n", "\r\n"),
		}
		if !strings.Contains(s, "\n") && isASCII(s) {
			shown["%q"] = string(quoted)
		}
		for how, text := range shown {
			if got := r.Redact("<" + text + ">"); leaks(got, text) {
				t.Errorf("Redact(%q as %s) = %q, want nothing of it", s, how, got)
			}
		}
		for _, prefix := range []string{"", "u", "u:", "us:"} {
			text := base64.StdEncoding.EncodeToString([]byte(prefix + s + "!"))
			if got := r.Redact(text); len(s) > 6 && leaks(got, text) {
				t.Errorf("Redact(%q in base64 after %q) = %q, want nothing of it", s, prefix, got)
			}
		}
	}
}

func isASCII(s string) bool { return !strings.ContainsFunc(s, func(c rune) bool { return c > 0x7e }) }

// leaks reports whether redacted text still contains ten consecutive characters of
// the original secret.
func leaks(got, original string) bool {
	for i := 0; i+10 <= len(original); i++ {
		if strings.Contains(got, original[i:i+10]) {
			return true
		}
	}
	return !strings.Contains(got, redacted)
}

func TestRedactorText(t *testing.T) {
	r := NewRedactor(NewValue("abcdef"), NewValue("defghi"), NewValue("short"), NewValue(""), NewValue("abcdefXYZ"))
	for in, want := range map[string]string{
		"":                       "",
		"plain":                  "plain",
		"short":                  "short", // five bytes: not redacted
		"abcdef":                 "[redacted]",
		"abcdefghi.":             "[redacted].", // overlapping secrets leave no rest
		"abcdefXY":               "[redacted]XY",
		"abcdefXYZ":              "[redacted]",
		"-abcdefabcdef-":         "-[redacted]-",
		"abcde abcdef":           "abcde [redacted]",
		"abcabcdef":              "abc[redacted]",
		"abcdefabcdabcdef":       "[redacted]abcd[redacted]", // text between two secrets may begin like one
		"abcdef abcdef\ndefghi":  "[redacted] [redacted]\n[redacted]",
		"[redacted] is harmless": "[redacted] is harmless",
	} {
		if got := r.Redact(in); got != want {
			t.Errorf("String(%q) = %q, want %q", in, got, want)
		}
	}
	var none *Redactor
	if none.Redact("abcdef") != "abcdef" {
		t.Errorf("Redact of a nil Redactor = %q, want \"abcdef\"", none.Redact("abcdef"))
	}
}

func TestRedactorWriter(t *testing.T) {
	r := NewRedactor(NewValue("secret-one"))
	var out bytes.Buffer
	w := r.Writer(&out)
	for _, s := range []string{"a sec", "ret-", "one b secret-", "two c secret-tw", "o sec"} {
		if n, err := w.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatalf("Write(%q) = %d, %v, want %d, nil", s, n, err, len(s))
		}
	}
	if got := out.String(); got != "a [redacted] b secret-two c secret-two " {
		t.Errorf("output before Close = %q, want the last word held back", got)
	}
	r.Add(NewValue("secret-two"))
	if _, err := w.Write([]byte("ret-two")); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); got != "a [redacted] b secret-two c secret-two [redacted]" {
		t.Errorf("output after Close = %q, want the last word redacted", got)
	}
}

// FuzzRedactor checks that the split of a text into writes does not matter, and
// that no secret remains.
func FuzzRedactor(f *testing.F) {
	f.Add("abcdef", "defghi", "xx abcdefghi abcdeabcdef", uint64(1))
	f.Add("aaaaaa", "aaaaaaaab", "aaaaaaaaaaaaaaaab", uint64(2))
	f.Add("two words\nand lines", "123456", `"two words\nand lines"`, uint64(3))
	f.Fuzz(func(t *testing.T, a, b, text string, seed uint64) {
		if len(a)+len(b)+len(text) > 1<<12 {
			return
		}
		r := NewRedactor(NewValue(a), NewValue(b))
		text += a + text + b + a
		whole := r.Redact(text)
		rnd := rand.New(rand.NewPCG(seed, 0))
		var out bytes.Buffer
		w := r.Writer(&out)
		for rest := []byte(text); len(rest) > 0; {
			n := 1 + rnd.IntN(min(len(rest), 9))
			if _, err := w.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if out.String() != whole {
			t.Fatalf("output in pieces = %q, want %q", out.String(), whole)
		}
		for _, s := range []string{a, b} {
			if s = strings.TrimRight(s, "\r\n"); len(s) < minRedact || strings.Contains(redacted, s) || strings.Contains(s, redacted) {
				continue
			}
			for _, part := range strings.Split(whole, redacted) {
				if strings.Contains(part, s) {
					t.Fatalf("redacted text = %q, want no %q", whole, s)
				}
			}
		}
	})
}

func TestRedactorRandomChunks(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	for range 300 {
		secrets := make([]Value, 1+rnd.IntN(4))
		for i := range secrets {
			secrets[i] = NewValue(randomText(rnd, 6+rnd.IntN(8)))
		}
		r := NewRedactor(secrets...)
		var text strings.Builder
		for range 20 {
			text.WriteString(randomText(rnd, rnd.IntN(12)))
			text.WriteString(secrets[rnd.IntN(len(secrets))].Reveal())
		}
		var out bytes.Buffer
		w := r.Writer(&out)
		for rest := text.String(); rest != ""; {
			n := 1 + rnd.IntN(min(len(rest), 7))
			_, _ = w.Write([]byte(rest[:n]))
			rest = rest[n:]
		}
		_ = w.Close()
		if whole := r.Redact(text.String()); out.String() != whole {
			t.Fatalf("output in pieces = %q, want %q", out.String(), whole)
		}
	}
}

// Mask never changes the length, and hides what Writer hides.
func TestMask(t *testing.T) {
	r := NewRedactor(NewValue("abcdef"), NewValue("defghi"), NewValue("two\nlines of it"))
	for in, want := range map[string]string{
		"": "", "plain": "plain", "abcdef": "******", "abcdefghi.": "*********.", "-abcdefabcdef-": "-************-",
		"abcabcdef": "abc******", "a two\nlines of it": "a " + strings.Repeat("*", 15),
		`"two\nlines of it"`: `"` + strings.Repeat("*", 16) + `"`,
		"abcde":              "abcde", "YWJjZGVm": "********",
	} {
		for size := 1; size <= len(in)+1; size++ {
			var out bytes.Buffer
			w := r.Mask(&out)
			for rest := in; rest != ""; {
				n := min(size, len(rest))
				if _, err := w.Write([]byte(rest[:n])); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if out.String() != want {
				t.Errorf("mask of %q by %d bytes = %q, want %q", in, size, out.String(), want)
			}
		}
	}
	var none *Redactor
	var out bytes.Buffer
	if w := none.Mask(&out); w != nil {
		_, err := w.Write([]byte("abcdef"))
		if err := errors.Join(err, w.Close()); err != nil || out.String() != "abcdef" {
			t.Errorf("mask without secrets = %q, %v, want \"abcdef\"", out.String(), err)
		}
	}
}

// randomText uses only two letters, so that secrets overlap each other.
func randomText(rnd *rand.Rand, n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "ab"[rnd.IntN(2)]
	}
	return string(b)
}

func TestRedactorHandler(t *testing.T) {
	r := NewRedactor(NewValue("tok-12345"))
	var out bytes.Buffer
	inner := "tok-12345"
	log := slog.New(r.Handler(slog.NewJSONHandler(&out, nil))).With("with", "x tok-12345").WithGroup("g")
	log.Info("message tok-12345", "s", "tok-12345", "err", errors.New("bad tok-12345"), "n", 5, "bytes", []byte("tok-12345"),
		slog.Group("in", "deep", "tok-12345"), "struct", struct{ P *string }{&inner}, "fine", []int{1, 2})
	s := out.String()
	if strings.Contains(s, "tok-12345") || strings.Contains(s, base64.StdEncoding.EncodeToString([]byte("tok-12345"))) {
		t.Errorf("log = %q, want no secret", s)
	}
	for _, want := range []string{`"n":5`, `"fine":[1,2]`, `message [redacted]`, `bad [redacted]`} {
		if !strings.Contains(s, want) {
			t.Errorf("log = %s, want %s in it", s, want)
		}
	}
}

// A line is short and printable, wherever it was cut.
func TestRedactorLine(t *testing.T) {
	r := NewRedactor(NewValue("secret-one"))
	for _, c := range []struct {
		in, want string
		most     int
	}{
		{"a secret-one b\nnext", "a [redacted] b next", 40},
		{"a sec\x1b[0mret-one b", "a [redacted] b", 40},
		{"a \x00secret-one", "a [redacted]", 40},
		{"twelve bytes", "twelve bytes", 12},
		{"", "", 10},
	} {
		if got := r.Line(c.in, c.most); got != c.want {
			t.Errorf("Line(%q, %d) = %q, want %q", c.in, c.most, got, c.want)
		}
	}
	if got := r.Line(strings.Repeat("x", 1000), 12); len(got) > 16 || !strings.HasPrefix(got, "xxxxxxxx") {
		t.Errorf("Line of a long line = %q, want at most 16 bytes of it", got)
	}
}

// Lines of a value are matched separately if they are long enough to be
// distinguished from ordinary text.
func TestRedactorLines(t *testing.T) {
	r := NewRedactor(NewValue("first line here\n  eight-by  \nseven-b\n"))
	for in, want := range map[string]string{
		"[first line here]": "[[redacted]]", "[eight-by]": "[[redacted]]", "[seven-b]": "[seven-b]",
	} {
		if got := r.Redact(in); got != want {
			t.Errorf("Redact(%q) = %q, want %q", in, got, want)
		}
	}
	// Base64 of a short secret would hide ordinary text: pieces under 8 characters
	// are not redacted.
	if got := NewRedactor(NewValue("abcdef")).Redact("YWJjZGVm HFiY2RlZg BhYmNkZW"); got != "[redacted] HFiY2RlZg BhYmNkZW" {
		t.Errorf("Redact of short base64 pieces = %q, want the first alone redacted", got)
	}
	if got := NewRedactor(NewValue("a/b?c d+e")).Redact("a%2fb%3fc+d%2be"); got != redacted {
		t.Errorf("Redact of a URL with lower-case digits = %q, want %q", got, redacted)
	}
	if got := NewRedactor(NewValue("a/b<c>de")).Redact(`a\/b<c>de a/b\u003cc\u003ede`); got != redacted+" "+redacted {
		t.Errorf("Redact of JSON escapes = %q, want %q", got, redacted+" "+redacted)
	}
}

// A failed write returns its error, and an empty write writes nothing.
func TestRedactorWriterFails(t *testing.T) {
	r := NewRedactor(NewValue("secret-one"))
	if n, err := r.Writer(brokenWriter{}).Write([]byte("text")); n != 0 || !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Write to a broken writer = %d, %v, want 0, %v", n, err, io.ErrClosedPipe)
	}
	w := r.Writer(brokenWriter{})
	if n, err := w.Write([]byte("secret-")); n != 7 || err != nil {
		t.Errorf("Write of a possible prefix = %d, %v, want 7, nil", n, err)
	}
	if err := w.Close(); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Close of a broken writer = %v, want %v", err, io.ErrClosedPipe)
	}
}

func BenchmarkRedactor(b *testing.B) {
	r := NewRedactor(NewValue("ghp_16C7e42F292c6912E7710c838347Ae178B4a"), NewValue("sk-ant-api03-abcdefghijklmnopqrstuvwxyz"))
	text := bytes.Repeat([]byte("the quick brown fox jumps over ghp_the lazy dog 0123456789\n"), 1000)
	var out bytes.Buffer
	w := r.Writer(&out)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		out.Reset()
		_, _ = w.Write(text)
	}
}

// The values that a guest reports replace those it reported before.
func TestRedactorReplacesWhatAGuestSays(t *testing.T) {
	r := NewRedactor(NewValue("own-secret"))
	size := 0
	for i := range 100 {
		r.SetGuest(NewValue(fmt.Sprintf("guest-secret-%03d", i)))
		if size == 0 {
			size = len(r.patterns().sorted)
		}
		if n := len(r.patterns().sorted); n != size {
			t.Fatalf("patterns after %d answers = %d, want %d as after the first", i+1, n, size)
		}
	}
	r.Add(NewValue("late-secret"))
	want := "[redacted] [redacted] guest-secret-098 [redacted]"
	if got := r.Redact("own-secret guest-secret-099 guest-secret-098 late-secret"); got != want {
		t.Errorf("Redact with two answers of the guest = %q, want %q", got, want)
	}
	r.SetGuest()
	if got := r.Redact("own-secret guest-secret-099 late-secret"); got != "[redacted] guest-secret-099 [redacted]" {
		t.Errorf("Redact after the guest's last secret = %q, want its old ones shown", got)
	}
}

// Only a last piece that is too short to match alone overlaps the one before it.
func TestChunks(t *testing.T) {
	whole := strings.Repeat("a", pieceLen)
	for rest, want := range map[string]string{
		"":                             "",
		"bbbbb":                        strings.Repeat("a", minRedact) + "bbbbb",
		strings.Repeat("b", minRedact): strings.Repeat("b", minRedact),
		strings.Repeat("b", pieceLen):  strings.Repeat("b", pieceLen),
	} {
		pieces := []string{whole}
		if want != "" {
			pieces = append(pieces, want)
		}
		if diff := cmp.Diff(pieces, chunks(whole+rest)); diff != "" {
			t.Errorf("pieces of %d bytes mismatch (-want +got):\n%s", pieceLen+len(rest), diff)
		}
	}
}

// A long secret is hidden to its last byte, in every form and at every length at
// which its last piece is short.
func TestLongSecretsAreHiddenToTheEnd(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 12))
	for _, length := range []int{pieceLen - 1, pieceLen, pieceLen + 1, pieceLen + minRedact - 1, pieceLen + minRedact, 2*pieceLen + 1, 3*pieceLen + 5, 3*pieceLen + 300} {
		b := make([]byte, length)
		for i := range b {
			b[i] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"[rnd.IntN(62)]
		}
		value := string(b)
		for name, v := range map[string]string{"one line": value, "among lines": "first line\n" + value + "\nlast line"} {
			r := NewRedactor(NewValue(v))
			if got := r.Redact("<" + value + ">"); got != "<[redacted]>" {
				t.Errorf("Redact(%s of %d bytes) = %q, want \"<[redacted]>\"", name, length, got[:min(len(got), 80)])
			}
			for _, size := range []int{1, 7, pieceLen, pieceLen + 1, 4096} {
				var out bytes.Buffer
				w := r.Mask(&out)
				for rest := []byte("<" + value + ">"); len(rest) > 0; {
					n := min(size, len(rest))
					if _, err := w.Write(rest[:n]); err != nil {
						t.Fatal(err)
					}
					rest = rest[n:]
				}
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				if want := "<" + strings.Repeat("*", length) + ">"; out.String() != want {
					t.Errorf("mask of %s of %d bytes in writes of %d left %d bytes, want 0", name, length, size, length-strings.Count(out.String(), "*"))
				}
			}
		}
	}
}
