package guestagent_test

import (
	"strings"
	"testing"
)

// TestUsage checks what the program prints when it is called for help, or wrongly.
func TestUsage(t *testing.T) {
	g := newFakeGuest(t)
	const other = "restart" // no command's name or help has it
	for _, c := range []struct {
		args       string
		code       int
		has, hasNo string
	}{
		{"task", 0, "task submit", "task signal"},
		{"task --help", 0, "--agent claude|codex", "ask [--choice"},
		{"help", 0, "task signal", other},
		{"", 2, "no command", "task signal"},
		{"nonsense", 2, "ask [--choice", "task signal"},
		{"task nonsense", 2, "task submit", "ask [--choice"},
		{"ask", 2, "ask: arguments after its flags: got 0, want 1", "task submit"},
		{"ask Which? --choice a", 2, "got 3, want 1", "task submit"},
		{"ask --help", 0, "ask [--choice", "task submit"},
		{"task submit --help", 0, "--agent claude|codex", "ask [--choice"},
		{"task submit -f x --prompt y", 2, "with -f, the manifest says everything", other},
		{"task submit -f x -- make", 2, "with -f, the manifest says everything", other},
	} {
		out, errs, code := g.run("", strings.Fields(c.args)...)
		text := out + errs
		if code != c.code || !strings.Contains(text, c.has) || strings.Contains(text, c.hasNo) || (code == 0) != (errs == "") {
			t.Errorf("agent-guest %s: exit %d, stdout %q, stderr %q, want exit %d, %q, and not %q", c.args, code, out, errs, c.code, c.has, c.hasNo)
		}
	}
}
