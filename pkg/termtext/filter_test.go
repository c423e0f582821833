package termtext

import (
	"bytes"
	"encoding/base64"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/termtexttest"
)

func TestScreenFilter(t *testing.T) {
	hello := base64.StdEncoding.EncodeToString([]byte("hello"))
	write := "]52;c;" + hello
	same := func(names ...string) (all []struct{ name, in, out, copied string }) {
		for _, s := range names {
			all = append(all, struct{ name, in, out, copied string }{"unchanged", s, s, ""})
		}
		return all
	}
	dropped := func(names ...string) (all []struct{ name, in, out, copied string }) {
		for _, s := range names {
			all = append(all, struct{ name, in, out, copied string }{"dropped", "a" + s + "b", "ab", ""})
		}
		return all
	}
	cases := []struct{ name, in, out, copied string }{
		{"write, BEL", "a\x1b" + write + "\x07b", "ab", "hello"},
		{"write, ST", "a\x1b" + write + "\x1b\\b", "ab", "hello"},
		{"write, C1", "a\u009d52;c;" + hello + "\u009cb", "ab", "hello"},
		{"write, no padding", "a\x1b" + strings.TrimRight(write, "=") + "\x07b", "ab", "hello"},
		{"write, primary", "\x1b]52;p0;" + hello + "\x07", "", "hello"},
		{"write, empty selection", "\x1b]52;;" + hello + "\x07", "", "hello"},
		{"write, leading zeros", "\x1b]0052;c;" + hello + "\x07", "", "hello"},
		{"write inside another string", "a\x1b]0;x\x1b" + write + "\x07b", "a\x1b]0;x\x1b\\b", "hello"},
		{"write, ended by another sequence", "a\x1b" + write + "\x1b[1mb", "a\x1b[1mb", "hello"},
		{"write in tmux's passthrough", "a\x1bPtmux;\x1b\x1b" + write + "\x07\x1b\\b", "ab", "hello"},
		{"title by BEL in C1", "\u009d2;t\x07", "\x1b]2;t\x07", ""},
		{"colours in C1", "\u009b31mred", "\x1b[31mred", ""},
		{"colours of an 8-bit terminal", "\x9b31mred", "\x1b[31mred", ""},
		{"a control character inside a sequence", "\x1b[\r31\am", "\r\a\x1b[31m", ""},
		{"a character that no sequence has", "\x1b[3ä", "ä", ""},
		{"escape after escape", "a\x1b\x1b\x1b[1mb", "a\x1b[1mb", ""},
		{"cut off by a new sequence", "a\x1b[12\x1b[1mb", "a\x1b[1mb", ""},
		{"some modes", "\x1b[?1000;1001;2;2004h", "\x1b[?1000;2004h", ""},
		{"invalid UTF-8", "a\xffb\xe2\x9cc\xe0\x80\xa0", "a\ufffdb\ufffdc\ufffd\ufffd", ""},
		{"an overlong escape", "a\xe0\x80\x9b]0;x\x07", "a\ufffd0;x\a", ""},
		{"next line in C1", "a\u0085b", "a\x1bEb", ""},
	}
	cases = append(cases, same(
		"plain ünï ☃ 日本 “quotes” \r\n\t", "\x1b[31mred\x1b[0m\x1b7\x1b8\x1b(B\x1b(0\x0e\x0f", "\x1b[38;2;1;2;3m\x1b[4:3m\x1b[58:5:1m",
		"\x1b]0;title\x07a\x1b]2;t\x1b\\b", "\x1b]11;?\x07", "\x1b]10;?;?\x1b\\", "\x1b]4;1;?;2;?\x07", "\x1b]8;;http://x\x1b\\x\x1b]8;;\x1b\\",
		// Output of tmux for xterm-256color, tmux-256color, screen, linux and
		// rxvt-unicode.
		"\x1b[?1049h\x1b[22;0;0t\x1b[?1h\x1b=\x1b[H\x1b[2J\x1b[?12l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?1005l",
		"\x1b[c\x1b[>c\x1b[>q\x1b[?2004h\x1b[?1004h\x1b[>4;2m\x1b[>4m\x1b[18t\x1b[14t\x1b[?996n\x1b[?2031h", "\x1b[?2026h\x1b[1;24r\x1b[?69h\x1b[?7727h\x1b[1;40s\x1b[2 q",
		"\x1b[32;1;1;2;2$x\x1b[3S\x1b[2T\x1b[5X\x1b[2L\x1b[2M\x1b[4P\x1b[3@\x1b[7b\x1b[10G\x1b[3d\x1bM\x1bg", "\x1b[23;0;0t\x1b[?1l\x1b>\x1b[?25l\x1b[?1c",
		"\x1b[>1u\x1b[?u\x1b[=1;2u\x1b[<u\x1b[6n\x1b[?2026$p\x1b[!p\x1b[4h\x1b[4l\x1b[34h",
	)...)
	cases = append(cases, dropped(
		// Strings in both forms, with every terminator.
		"\x1bPq#0~\x1b\\", "\x1b_Gf=100;AAAA\x1b\\", "\x1b^message\x1b\\", "\x1bXstring\x1b\\", "\x1bkname\x1b\\", "\u0090$qm\u009c", "\x90$qm\x9c",
		"\u009fG\x07x\u009c", "\u009ex\u009c", "\u0098x\u009c", "\x1bP+q544e\x18", "\x1b_x\x1a", "\x1bP@kitty-cmd{\"cmd\":\"ls\"}\x1b\\", "\x1bP\x1b]50;?\x07\x1b\\",
		// Commands that are not on the allowlist, or are malformed.
		"\x1b]52;c;?\x07", "\x1b]52;c;?\x1b\\", "\x1b]52;c;!\x07", "\x1b]52\x07", "\x1b]52;\x07", "\x1b]52;c\x07", "\x1b]52;c;"+hello+"\x18",
		"\x1b]"+strings.Repeat("0", 100)+"52;c;?\x07", "\x1b]4294967348;c;?\x07", "\x1b\x00]\x015\x002\x7f;c;?\x07", "\x1b]1337;Copy=:aGk=\x07", "\x1b]5522;type=read;x\x1b\\",
		"\x1b]50;?\x07", "\x1b]3;P=x\x07", "\x1b]46;/tmp/log\x07", "\x1b]777;notify;a;b\x07", "\x1b]9;hello\x07", "\x1b]83;exec sh\x07", "\x1b]7;file:///x\x07",
		"\x1b]4;1;red\x07", "\x1b]4;1;?;2;red\x07", "\x1b]11;red\x07", "\x1b]11;?;red\x07", "\x1b]104\x1b\\", "\x1b]111\x07", "\x1b]8;;file:///etc/passwd\x07", "\x1b]8;;vscode:x\x07",
		"\x1b]l\x1b\\", "\x1b]P7ffffff\x07", "\x1b]0;"+strings.Repeat("t", 2000)+"\x07", "\x1b]8;;http://"+strings.Repeat("t", maxOSC)+"\x07",
		"\x1b]52;c;"+strings.Repeat("QUFB", MaxCopy/4+1)+"\x07", "\x1b]1;x\x18", "\x1b]2\x07",
		// Sequences that make a terminal answer, print, move its window or interpret
		// input differently.
		"\x1b[21t", "\x1b[20t", "\x1b[3;1;1t", "\x1b[8;9;9t", "\x1b[11t", "\x1b[5i", "\x1b[?5i", "\x1b[4i", "\x1b[1;1;1;1;1;1*y", "\x1b[x", "\x1b[&u", "\x1b[1$w",
		"\x1b[?15n", "\x1b[?26n", "\x1b[=c", "\x1b[1c", "\x1b[?2l", "\x1b[?38h", "\x1b[?1001h", "\x1b[2h", "\x1b[?1001s", "\x1b[?1000r", "\x1b[1;2;3;4;5T", "\x1b[3J",
		"\x1b[>2t", "\x1b[?1S", "\x1b[>1p", "\x1b[\"p", "\x1b[+p", "\x1b[1\x201\x20q", "\x1b[1<2m", "\x1b["+strings.Repeat("1;", 100)+"m", "\x1b[99999999999999999999A", "\x1b[1 A", "\x1b[5n", "\x1b[?1007h", "\x1b[20h",
		"\x1bZ", "\x1bc", "\x1bn", "\x1b%@", "\x1b%G", "\x1b F", "\x1b#8", "\x1b(5", "\x1bN", "\x1b\\", "\x05", "\x00", "\x7f", "\x11\x13", "\x1b[0;3J",
	)...)
	for _, c := range cases {
		for _, chunk := range []int{len(c.in), 1, 3} {
			var out, copied bytes.Buffer
			f := NewScreenFilter(&out, func(b []byte) { copied.Write(b) })
			for in := []byte(c.in); len(in) > 0; {
				n := min(chunk, len(in))
				if _, err := f.Write(in[:n]); err != nil {
					t.Fatal(err)
				}
				in = in[n:]
			}
			if out.String() != c.out || copied.String() != c.copied {
				t.Errorf("%s: output of %.100q in pieces of %d = %.100q, copied %q, want %q, %q", c.name, c.in, chunk, out.String(), copied.String(), c.out, c.copied)
			}
			if got := termtexttest.ScreenEffects(out.String()); len(got) > 0 {
				t.Errorf("%s: effects of %q = %q, want none", c.name, c.in, got)
			}
		}
	}
}

func TestScreenFilterWithoutTaker(t *testing.T) {
	var out bytes.Buffer
	f := NewScreenFilter(&out, nil)
	_, _ = f.Write([]byte("a\x1b]052;p;aGVsbG8\x1b\\b\x1b]52;c;?\x07"))
	if got := out.String(); got != "a\x1b]52;c;aGVsbG8=\x07b" {
		t.Errorf("output = %q, want the write in its plain form and no read", got)
	}
}

func TestReplayFilter(t *testing.T) {
	for _, c := range []struct{ in, out string }{
		{"a\x1b[31mred\x1b[2J\x1b[3;4H\x1b[?1049h\x1b[?25l\x1b(0q\x1b(B\x1b7\x1b8", "a\x1b[31mred\x1b[2J\x1b[3;4H\x1b[?1049h\x1b[?25l\x1b(0q\x1b(B\x1b7\x1b8"},
		{"a\x1b]0;title\x07\x1b]8;;http://x\x07\x1b]52;c;aGVsbG8=\x07\x1b]11;?\x07b", "ab"},
		{"a\x1b[c\x1b[>c\x1b[6n\x1b[?6n\x1b[18t\x1b[22;0;0t\x1b[4$p\x1b[?4m\x1b[?ub", "ab"},
		{"a\x1b[?1h\x1b[?1000;1006h\x1b[?2004h\x1b[?1004h\x1b=\x1b>\x1b[>1u\x1b[<u\x1b[=1;2u\x1b[>4;2mb", "ab"},
		{"\x1b[?1000;25l", "\x1b[?25l"},
	} {
		var out bytes.Buffer
		f := NewReplayFilter(&out)
		_, _ = f.Write([]byte(c.in))
		if out.String() != c.out || f.Asked() {
			t.Errorf("output of %q = %q, asked %t, want %q", c.in, out.String(), f.Asked(), c.out)
		}
	}
}

func TestFilterState(t *testing.T) {
	f := NewScreenFilter(&bytes.Buffer{}, nil)
	for _, c := range []struct {
		in         string
		alt, asked bool
	}{
		{"text\x1b[1m\x1b[?25h\x1b]2;t\x07", false, false},
		{"\x1b[?25;1049h", true, false},
		{"\x1b[?1049l", false, false},
		{"\x1b[?47h", true, false},
		{"\x1b[?1047l", false, false},
		{"\x1b[21t", false, false},
		{"\x1b]11;?\x07", false, true},
	} {
		_, _ = f.Write([]byte(c.in))
		if f.AltScreen() != c.alt || f.Asked() != c.asked {
			t.Errorf("after %q: AltScreen = %t, Asked = %t, want %t, %t", c.in, f.AltScreen(), f.Asked(), c.alt, c.asked)
		}
	}
	for _, question := range []string{"\x1b[c", "\x1b[>c", "\x1b[>q", "\x1b[6n", "\x1b[?6n", "\x1b[18t", "\x1b[4$p", "\x1b[?4$p", "\x1b[?u", "\x1b[?4m", "\x1b]4;1;?\x07"} {
		if f := NewScreenFilter(&bytes.Buffer{}, nil); true {
			if _, _ = f.Write([]byte(question)); !f.Asked() {
				t.Errorf("Asked after %q = false, want true", question)
			}
		}
	}
}

func TestLineFilter(t *testing.T) {
	for _, c := range []struct{ in, out string }{
		{"plain ünï\t\b\r\n\a", "plain ünï\t\b\r\n\a"},
		{"\x1b[31mred\x1b[m\x1b[K", "\x1b[31mred\x1b[m\x1b[K"},
		{"\x1b[31mleft red", "\x1b[31mleft red\x1b[0m"},
		{"\x1b[31mred\x1b[00m", "\x1b[31mred\x1b[00m"},
		{"a\x1b[2J\x1b[H\x1b[5A\x1b[c\x1b[?1049h\x1b[?1000h\x1b[4h\x1b7\x1b(0\x0e\x1b]0;title\x07\x1b]8;;http://x\x07b", "ab"},
		{"a\x1b]52;c;aGVsbG8=\x07b\x1b]11;?\x07", "ab"},
		{"+ hidden \x1bP\n+ shown", "+ hidden \n+ shown"},
		{"+ hidden \x1b]0;\n+ shown\x07\x1b[\n3m", "+ hidden \n+ shown\a\n3m"},
		{"if a \u202e} // \u2066x", "if a } // x"},
		{"cut off \x1b[3", "cut off "},
		{"cut off \x1b]0;t", "cut off "},
		{"half \xe2\x9c", "half "},
	} {
		var out bytes.Buffer
		f := NewLineFilter(&out)
		for i := range len(c.in) {
			_, _ = f.Write([]byte(c.in[i : i+1]))
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if out.String() != c.out {
			t.Errorf("output of %q = %q, want %q", c.in, out.String(), c.out)
		}
		if got := termtexttest.Effects(out.String()); len(got) > 0 {
			t.Errorf("effects of %q = %q, want none", c.in, got)
		}
	}
}

func TestFilterTellsWriteErrors(t *testing.T) {
	f := NewLineFilter(failing{})
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("Write to a broken terminal = nil, want an error")
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, bytes.ErrTooLarge }

// FuzzFilter checks that, whatever the input and however it is split, the output makes
// no terminal do more than allowed, leaves the terminal ready for the next text, and
// does not depend on the split.
func FuzzFilter(f *testing.F) {
	for i, seed := range []string{
		"a\x1b]52;c;?\x07b", "\x1bPtmux;\x1b\x1b]52;c;?\x07\x1b\\", "\x1b\xc2\x9d]5\x9d2;\xe2\x80\x9d\x18\x1a\x7f", "\x1b\x1b\x1b\x1b]52;c;?\a]52;c;?\a",
		"\x1bP\x1b\\\x1bP$qm\x1b\\", "\x1b_G\x1b]0;\x1b\\", "\x1b[21t\x1b[5i\x1b[?2l\x1b%@\x05", "\x1b]P7\x1b[[A\x1bkx\x1b!y", "\x1b]8;;file:///x\x07\x1b]0;t\x1b[c", "\u009b21t\u009dl\u009c",
		"\x1b[?1049;2;1001h\x1b]4;1;?;2;red\x07\x1b[ q\x1b[1;2;3T",
	} {
		f.Add(seed, uint64(i))
	}
	f.Fuzz(func(t *testing.T, in string, seed uint64) {
		checkFilter(t, in, seed)
	})
}

// TestFilterRandom runs FuzzFilter's check on sequences that random bytes would never
// form.
func TestFilterRandom(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	parts := []string{
		"\x1b", "\x1b[", "\x1b]", "\x1bP", "\x1b_", "\x1b^", "\x1bX", "\x1bk", "\x1b\\", "\x07", "\x18", "\x1a", "\u009b", "\u009d", "\u0090", "\u009c", "\x9b", "\x90", "\x9c", "\xe2", "\xc2",
		"?", ">", "=", "<", "0", "1", "2", "5", "11", "21", "52", "1049", ";", ":", "$", "*", " ", "!", "\"", "%", "(", "h", "l", "t", "i", "n", "c", "q", "y", "x", "p", "u", "m", "J", "@",
		"c;?", "tmux;", "file:///", "text", "é", "\n", "\x00", "\x05", "\x7f",
	}
	for range 20_000 {
		var in strings.Builder
		for range 1 + rnd.IntN(12) {
			in.WriteString(parts[rnd.IntN(len(parts))])
		}
		checkFilter(t, in.String(), rnd.Uint64())
	}
}

func checkFilter(t *testing.T, in string, seed uint64) {
	t.Helper()
	for _, kind := range []struct {
		filter  func(w *bytes.Buffer) *Filter
		effects func(string) []string
	}{
		{func(w *bytes.Buffer) *Filter { return NewScreenFilter(w, func([]byte) {}) }, termtexttest.ScreenEffects},
		{func(w *bytes.Buffer) *Filter { return NewScreenFilter(w, nil) }, termtexttest.ScreenEffects},
		{func(w *bytes.Buffer) *Filter { return NewReplayFilter(w) }, termtexttest.ScreenEffects},
		{func(w *bytes.Buffer) *Filter { return NewLineFilter(w) }, termtexttest.Effects},
	} {
		var whole, pieces bytes.Buffer
		_, _ = kind.filter(&whole).Write([]byte(in))
		fl, rnd := kind.filter(&pieces), rand.New(rand.NewPCG(seed, 0))
		for rest := []byte(in); len(rest) > 0; {
			n := 1 + rnd.IntN(min(len(rest), 5))
			_, _ = fl.Write(rest[:n])
			if got := kind.effects(pieces.String()); len(got) > 0 { // at every moment
				t.Fatalf("effects of %q up to %q = %q, want none", in, pieces.String(), got)
			}
			rest = rest[n:]
		}
		if whole.String() != pieces.String() {
			t.Fatalf("output for %q in pieces = %q, want %q as in one", in, pieces.String(), whole.String())
		}
	}
}
