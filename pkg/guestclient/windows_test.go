package guestclient

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestWindowsOf(t *testing.T) {
	got := windowsOf("@0 0 0 zsh vim\n@3 1 1 claude my agent\n@3 7 0 claude my agent\n@4 2 0  \n\n@5 -1 0 sh x\n@6 x 0 sh x\n@7 0\n3 0 0 sh x\n@8;kill-server 0 0 sh x\n@9 3 0 sh\x1b]52;c;eA== \x1b[31mred\u202e\xff\n")
	want := []Window{
		{ID: "@0", Index: 0, Name: "vim", Command: "zsh"},
		{ID: "@3", Index: 1, Name: "my agent", Active: true, Command: "claude"},
		{ID: "@4", Index: 2},
		{ID: "@9", Index: 3, Name: "\ufffd[31mred\ufffd\ufffd", Command: "sh\ufffd]52;c;eA=="},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("windows differ (-want +got):\n%s", diff)
	}
	var many strings.Builder
	for i := range 2 * maxWindows {
		fmt.Fprintf(&many, "@%d %d 0 sh %s\n", i, i, strings.Repeat("ä", 10_000))
	}
	all := windowsOf(many.String())
	if len(all) != maxWindows || utf8.RuneCountInString(all[0].Name) > 1000 {
		t.Errorf("windows of a long list = %d with names of %d characters, want at most %d with short names", len(all), utf8.RuneCountInString(all[0].Name), maxWindows)
	}
}

func TestShareWindow(t *testing.T) {
	for _, bad := range []string{"0", "@", "@1 ", "@1;kill-server", "@$(id)", "@1\n", "%1", "@12345678901"} {
		if cmd, err := (Guest{}).ShareWindow(bad, "/"); err == nil {
			t.Errorf("ShareWindow(%q) = %q, want an error", bad, cmd)
		}
	}
}
