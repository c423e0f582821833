package ssh_test

import (
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"plain – ünïcode ✓":            "plain – ünïcode ✓",
		"a\x1b[31;1mred\x1b[0m":        "ared",
		"a\x1b]52;c;AAAA\x07b":         "ab",
		"a\x1b]0;title\x1b\\b":         "ab",
		"a\u009b31mb":                  "ab",
		"a\u009d0;t\u009cb":            "ab",
		"a\x1bP+q544e\x1b\\b":          "ab",
		"a\x1b(Bb\x1bcc":               "abc",
		"a\x1b":                        "a",
		"a\x1b[":                       "a",
		"one\ntwo\tthree\r\nfour":      "one two three four",
		"10%\r20%":                     "10% 20%",
		"\x1b]0;swallow\nnext":         "next",
		"bad\xff\xfeutf8\x00\x07\x7f":  "badutf8",
		"gpj.\u202eexe\u2066\ufeff":    "gpj.exe",
		"  spaces   between  \u2028 x": "spaces between x",
		"tag\U000e0041":                "tag",
	} {
		if got := ssh.Clean(in); got != want {
			t.Errorf("Clean(%q) = %q, want %q", in, got, want)
		}
	}
	if got := ssh.CleanText("a\x1b[1m\n\tb\r\nc"); got != "a\n\tb\nc" {
		t.Errorf("CleanText: %q", got)
	}
}

func FuzzClean(f *testing.F) {
	f.Add("a\x1b]52;c;AAAA\x07b\u009b1m")
	f.Fuzz(func(t *testing.T, s string) {
		got := ssh.CleanText(s)
		if !utf8.ValidString(got) || strings.ContainsAny(got, "\x1b\x07\x00\r\u009b\u202e") || len(got) > len(s) {
			t.Fatalf("%q → %q", s, got)
		}
		if strings.ContainsAny(ssh.Clean(s), "\n\t") {
			t.Fatalf("%q is not one line", s)
		}
	})
}

// The shell is the judge of what Quote makes.
func TestQuote(t *testing.T) {
	for _, s := range []string{
		"", "plain", "two words", "it's", `"$(id)"`, "`id`", "a\nb", "-rf", "~", "*", "a=b", "\\", "!x", "#c", "'", "''", "é", "a;b&c|d", "\x1b",
	} {
		out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", ssh.Quote("printf", "%s|%s", s, "end")).Output()
		if err != nil || string(out) != s+"|end" {
			t.Errorf("%q: %q %v", s, out, err)
		}
	}
	if got := ssh.Quote("git", "-C", "/a/b", "two words"); got != "git -C /a/b 'two words'" {
		t.Error(got)
	}
}
