package ssh_test

import (
	"os/exec"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// The test runs a shell to check Quote's output.
func TestQuote(t *testing.T) {
	for _, s := range []string{
		"", "plain", "two words", "it's", `"$(id)"`, "`id`", "a\nb", "-rf", "~", "*", "a=b", "\\", "!x", "#c", "'", "''", "é", "a;b&c|d", "\x1b",
	} {
		out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", ssh.Quote("printf", "%s|%s", s, "end")).Output()
		if err != nil || string(out) != s+"|end" {
			t.Errorf("shell output of Quote(%q) = %q, %v, want %q", s, out, err, s+"|end")
		}
	}
	if got := ssh.Quote("git", "-C", "/a/b", "two words"); got != "git -C /a/b 'two words'" {
		t.Errorf("Quote = %s, want git -C /a/b 'two words'", got)
	}
}
