package recording

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

func textOf(in string) string {
	var got []string
	l := newLines(func(line string) { got = append(got, line) })
	f := termtext.NewReplayFilter(newTextMask(nil, l))
	_, _ = f.Write([]byte(in))
	l.end()
	return strings.Join(got, "|")
}

func TestLines(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"a\r\nb", "a|b"},
		{"\x1b[31mred\x1b[m and \x1b[1mbold", "red and bold"},
		{"l\bls\b\blsx\b \b", "ls"},
		{"10%\r20%\r100%", "100%"},
		{"long line\rshort\x1b[K", "short"},
		{"abc\x1b[2Dx\x1b[Cy", "axcy"},
		{"abcdef\x1b[3G\x1b[2Px", "abxf"},
		{"ad\b\x1b[2@bc", "abcd"},
		{"abcd\x1b[1G\x1b[2X", "cd"},
		{"one\x1b[5;1Htwo\x1b[?25l three", "one|two three"},
		{"same\r\nsame\r\nother\r\nsame", "same|other"},
		{"shell\x1b[?1049hvim\x1b[?1049lshell again", "shell|vim|shell again"},
		{"tab\tx\x07", "tab x"},
		{"\x1b[400Cfar", "far"},
		{"f\u00fc\u4e2d", "f\u00fc\u4e2d"},
		{"\x1b]0;title\x07text", "text"},
	} {
		if got := textOf(c.in); got != c.want {
			t.Errorf("text of %q = %q, want %q", c.in, got, c.want)
		}
	}
	if got := textOf(strings.Repeat("x", 3*maxLine)); len(got) > maxLine+1 {
		t.Errorf("text of a long line has %d bytes, want it split and repeated once", len(got))
	}
}

func FuzzLines(f *testing.F) {
	f.Add("a\x1b[3@b\x1b[P\x1b[X\x1b[400C\x1b[D")
	f.Fuzz(func(t *testing.T, in string) {
		for line := range strings.SplitSeq(textOf(in), "|") {
			if strings.ContainsAny(line, "\n\x1b\r") || len([]rune(line)) > maxLine+maxForward {
				t.Errorf("line %q of %q", line, in)
			}
		}
	})
}
