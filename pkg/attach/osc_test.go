package attach

import (
	"bytes"
	"encoding/base64"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
)

func TestFilter(t *testing.T) {
	hello := base64.StdEncoding.EncodeToString([]byte("hello"))
	write := "]52;c;" + hello
	for _, c := range []struct{ name, in, out, copied string }{
		{"text", "plain ünï ☃ 日本 “quotes” \r\n\t", "plain ünï ☃ 日本 “quotes” \r\n\t", ""},
		{"colours and keys", "\x1b[31mred\x1b[0m\x1bOA\x1b7\x1b8\x1b(B", "\x1b[31mred\x1b[0m\x1bOA\x1b7\x1b8\x1b(B", ""},
		{"title", "\x1b]0;title\x07a\x1b]2;t\x1b\\b", "\x1b]0;title\x07a\x1b]2;t\x1b\\b", ""},
		{"colour question", "\x1b]11;?\x07", "\x1b]11;?\x07", ""},
		{"hyperlink", "\x1b]8;;http://x\x1b\\x\x1b]8;;\x1b\\", "\x1b]8;;http://x\x1b\\x\x1b]8;;\x1b\\", ""},
		{"write, BEL", "a\x1b" + write + "\x07b", "ab", "hello"},
		{"write, ST", "a\x1b" + write + "\x1b\\b", "ab", "hello"},
		{"write, no padding", "a\x1b" + strings.TrimRight(write, "=") + "\x07b", "ab", "hello"},
		{"write, primary", "\x1b]52;p0;" + hello + "\x07", "", "hello"},
		{"write, empty selection", "\x1b]52;;" + hello + "\x07", "", "hello"},
		{"read", "a\x1b]52;c;?\x07b", "ab", ""},
		{"read, ST", "a\x1b]52;c;?\x1b\\b", "ab", ""},
		{"clear", "a\x1b]52;c;!\x07b", "ab", ""},
		{"no text", "a\x1b]52\x07b\x1b]52;\x07c\x1b]52;c\x07d", "abcd", ""},
		{"leading zeros", "a\x1b]00052;c;?\x07b", "ab", ""},
		{"zeros without end", "a\x1b]" + strings.Repeat("0", 100) + "52;c;?\x07b", "ab", ""},
		{"number that wraps around", "a\x1b]4294967348;c;?\x07b", "ab", ""},
		{"controls inside", "a\x1b\x00]\x015\x002\x7f;c;?\x07b", "a\x00b", ""},
		{"inside another string", "a\x1b]0;x\x1b]52;c;?\x07b", "a\x1b]0;xb", ""},
		{"aborted", "a\x1b]52;c;" + hello + "\x18b", "a\x18b", ""},
		{"ended by another sequence", "a\x1b]52;c;" + hello + "\x1b[1mb", "a\x1b[1mb", "hello"},
		{"tmux passthrough", "a\x1bPtmux;\x1b\x1b" + write + "\x07\x1b\\b", "a\x1bPtmux;\x1b\\b", "hello"},
		{"tmux passthrough, ST", "a\x1bPtmux;\x1b\x1b]52;c;?\x1b\x1b\\\x1b\\b", "a\x1bPtmux;\x1b\\b", ""},
		{"twice wrapped", "\x1bPtmux;\x1b\x1bPtmux;\x1b\x1b\x1b\x1b]52;c;?\x07\x1b\x1b\\\x1b\\", "", ""},
		{"C1 OSC", "a\u009d52;c;?\x07b", "a52;c;?\x07b", ""},
		{"raw C1 OSC", "a\x9d52;c;?\x07b", "a52;c;?\x07b", ""},
		{"C1 between", "a\x1b\u0080]5\x852;c;?\x07b", "ab", ""},
		{"C1 ST", "\x1b]52;c;?\u009c still in it\x07b", "b", ""},
		{"kitty's clipboard", "a\x1b]5522;type=read;x\x1b\\b", "ab", ""},
		{"iTerm's clipboard", "a\x1b]1337;Copy=:aGk=\x07b", "ab", ""},
		{"lone escape", "a\x1b\x1b\x1b[1mb", "a\x1b\x1b\x1b[1mb", ""},
		{"pieces around one that is swallowed", "\x1b]5\x1b]52;c;x\x072;c;?\x07", "2;c;?\x07", ""},
		{"escapes before one that is swallowed", "\x1b\x1b\x1b\x1b]52;c;?\a]52;c;?\a", "]52;c;?\a", ""},
		{"number only", "a\x1b]104\x1b\\b\x1b]104\x07c", "a\x1b]104\x1b\\b\x1b]104\x07c", ""},
		{"too long", "a\x1b]52;c;" + strings.Repeat("QUFB", maxCopy/4) + "\x07b", "ab", ""},
	} {
		for _, chunk := range []int{len(c.in), 1, 3} {
			var out, copied bytes.Buffer
			f := &filter{w: &out, onCopy: func(b []byte) { copied.Write(b) }}
			for in := []byte(c.in); len(in) > 0; {
				n := min(chunk, len(in))
				if _, err := f.Write(in[:n]); err != nil {
					t.Fatal(err)
				}
				in = in[n:]
			}
			if c.name == "twice wrapped" { // what is left is the wrapping, which is harmless
				if strings.Contains(out.String(), "52") {
					t.Errorf("%s: %q", c.name, out.String())
				}
				continue
			}
			if out.String() != c.out || copied.String() != c.copied {
				t.Errorf("%s in pieces of %d: %q and copied %q, want %q and %q", c.name, chunk, out.String(), copied.String(), c.out, c.copied)
			}
		}
	}
}

func TestFilterWithoutTaker(t *testing.T) {
	var out bytes.Buffer
	f := &filter{w: &out}
	_, _ = f.Write([]byte("a\x1b]052;p;aGVsbG8\x1b\\b\x1b]52;c;?\x07"))
	if got := out.String(); got != "a\x1b]52;c;aGVsbG8=\x07b" {
		t.Errorf("%q, want the write in its plain form and no read", got)
	}
}

var clipboardRE = regexp.MustCompile(`\x1b[\x00-\x17\x19\x1c-\x1f\x7f]*\][\x00-\x06\x08-\x17\x19\x1c-\x1f\x7f0]*5[\x00-\x06\x08-\x17\x19\x1c-\x1f\x7f]*2[\x00-\x06\x08-\x17\x19\x1c-\x1f\x7f]*[^0-9\x18\x1a]`)

// FuzzFilter: no clipboard sequence as a terminal understands it comes out, in
// whatever pieces the input came.
func FuzzFilter(f *testing.F) {
	f.Add("a\x1b]52;c;?\x07b", uint64(1))
	f.Add("\x1bPtmux;\x1b\x1b]52;c;?\x07\x1b\\", uint64(2))
	f.Add("\x1b\xc2\x9d]5\x9d2;\xe2\x80\x9d\x18\x1a\x7f", uint64(3))
	f.Fuzz(func(t *testing.T, in string, seed uint64) {
		var whole, pieces bytes.Buffer
		drop := func([]byte) {}
		_, _ = (&filter{w: &whole, onCopy: drop}).Write([]byte(in))
		fl, rnd := &filter{w: &pieces, onCopy: drop}, rand.New(rand.NewPCG(seed, 0))
		for rest := []byte(in); len(rest) > 0; {
			n := 1 + rnd.IntN(min(len(rest), 5))
			_, _ = fl.Write(rest[:n])
			rest = rest[n:]
		}
		if whole.String() != pieces.String() {
			t.Fatalf("whole %q, in pieces %q", whole.String(), pieces.String())
		}
		if m := clipboardRE.Find(whole.Bytes()); m != nil {
			t.Fatalf("%q let %q through", in, m)
		}
	})
}
