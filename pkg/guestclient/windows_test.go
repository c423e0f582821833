package guestclient

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
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

// A terminal waits for ready-tmux only if tmux does not run.
func TestAttachTmux(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		filepath.Join(dir, "bin", "tmux"):     "[ $1 != has-session ] || exec test -e " + dir + "/runs\necho \"$*\" >>" + dir + "/log; : >" + dir + "/go\n",
		filepath.Join(dir, "root", ReadyTmux): "[ ! -e " + dir + "/runs ] || until [ -e " + dir + "/go ]; do sleep 0.01; done\necho ready \"$*\" >>" + dir + "/log\n",
	} {
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte("#!/bin/sh\n"+text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	attach, ready := "-u attach-session -t =agent\n", "ready -d /it's/dir\n"
	for _, want := range []string{ready + attach, attach + ready} { // the second time, tmux runs
		cmd := exec.Command("sh", "-c", Guest{Root: filepath.Join(dir, "root")}.AttachTmux("/it's/dir"))
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, out)
		}
		var log []byte
		testenv.WaitFor(t, "both commands", func() bool {
			log, _ = os.ReadFile(filepath.Join(dir, "log"))
			return len(log) >= len(want)
		})
		if string(log) != want {
			t.Errorf("commands = %q, want %q", log, want)
		}
		for name, do := range map[string]func(string) error{"log": os.Remove, "go": os.Remove, "runs": func(name string) error { return os.WriteFile(name, nil, 0o600) }} {
			if err := do(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
}
