package termtext

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestLine(t *testing.T) {
	for in, want := range map[string]string{
		"plain – ünïcode ✓":            "plain – ünïcode ✓",
		"a\x1b[31;1mred\x1b[0m":        "ared",
		"a\x1b]52;c;AAAA\x07b":         "ab",
		"a\x1b]0;title\x1b\\b":         "ab",
		"open \x1b]52;c;AAA":           "open",
		"a\x1bPq\x1b\\b":               "ab",
		"a\x1bP+q544e\x1b\\b":          "ab",
		"a\x1b(Bb":                     "ab",
		"a\u009b31mb":                  "a31mb",
		"a\x1b":                        "a",
		"a\x1b[":                       "a",
		"a\rb\n\tc":                    "a b c",
		"one\ntwo\tthree\r\nfour":      "one two three four",
		"10%\r20%":                     "10% 20%",
		"\x1b]0;swallow\nnext":         "next",
		"bad\xff\xfeutf8\x00\x07\x7f":  "badutf8",
		"gpj.\u202eexe\u2066\ufeff":    "gpj.exe",
		"  spaces   between  \u2028 x": "spaces between x",
		"tag\U000e0041":                "tag",
		"one\u00a0two":                 "one two",
	} {
		if got := Line(in); got != want {
			t.Errorf("Line(%q) = %q, want %q", in, got, want)
		}
	}
	if got, want := Lines("a\x1b[1m\n\tb  c\r\n\x1b]0;d\re"), "a\n\tb  c\n\ne"; got != want {
		t.Errorf("Lines: %q, want %q", got, want)
	}
}

func TestHead(t *testing.T) {
	for _, c := range []struct {
		in          string
		most        int
		head, brief string
	}{
		{"", 0, "", ""},
		{"abc", 3, "abc", "abc"},
		{"abc", 2, "ab", "ab…"},
		{"aü", 2, "a", "a…"},
		{"ü", 1, "", "…"},
		{"\x80\x80", 1, "", "…"},
	} {
		if head, brief := Head(c.in, c.most), Brief(c.in, c.most); head != c.head || brief != c.brief {
			t.Errorf("Head(%q, %d) = %q, Brief %q, want %q, %q", c.in, c.most, head, brief, c.head, c.brief)
		}
	}
}

func FuzzLines(f *testing.F) {
	f.Add("a\x1b]52;c;AAAA\x07b\u009b1m", 3)
	f.Add("a\x1b[31mb\u009bx\x1b", 0)
	f.Add("\x1b\x1b[3\x1b]\xc2\x9b1m\r\u200d", 5)
	f.Fuzz(func(t *testing.T, s string, most int) {
		lines := Lines(s)
		for _, r := range lines {
			if r < ' ' && r != '\n' && r != '\t' || r >= 0x7f && r < 0xa0 || r == 0x202e {
				t.Fatalf("Lines(%q) = %q, want no control characters", s, lines)
			}
		}
		if !utf8.ValidString(lines) || len(lines) > len(s) {
			t.Fatalf("Lines(%q) = %q, want valid UTF-8, not longer", s, lines)
		}
		if line := Line(s); strings.ContainsAny(line, "\n\t") || Line(line) != line {
			t.Fatalf("Line(%q) = %q, want one line that Line leaves unchanged", s, line)
		}
		if most = max(0, most); len(Head(lines, most)) > most || !utf8.ValidString(Head(lines, most)) || !strings.HasPrefix(lines, Head(lines, most)) {
			t.Fatalf("Head(%q, %d) = %q, want a valid beginning within the bound", lines, most, Head(lines, most))
		}
	})
}
