package session

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// setAsideIn runs the script on a directory that a hostile session left, as root does in the guest.
func setAsideIn(t *testing.T, work string) (string, error) {
	t.Helper()
	argv := append([]string{"-c", setAsideScript, "bash", work, ".set-aside-0123", "repo"}, settingsNames...)
	out, err := exec.CommandContext(t.Context(), "bash", argv...).CombinedOutput()
	return string(out), err
}

func shell(t *testing.T, dir, line string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-ec", line)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}

func TestSetAside(t *testing.T) {
	dir := t.TempDir()
	work, outside := filepath.Join(dir, "work"), filepath.Join(dir, "outside")
	shell(t, dir, `mkdir -p outside/.git work/repo/.git work/repo/sub/.claude && cd work
		echo evil >repo/.git/config && echo evil >repo/sub/.claude/settings.json && echo evil >repo/.envrc && echo kept >repo/file
		mkdir -p .GIT nested/.git $'a\nb/.git' -- -x/.git deep && ln -s ../outside linked && ln -s ../../outside/.git nested/.claude
		ln -s ../outside .set-aside-0 && mkdir data && echo kept >data/git
		(cd deep && for i in $(seq 30); do d=$(printf 'd%.0s' {1..200}); mkdir $d && cd $d; done && echo evil >.envrc)`)
	said, err := setAsideIn(t, work)
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	left := shell(t, work, `find . -path ./.set-aside-0123 -prune -o \( -iname .git -o -name .claude -o -name .envrc \) -print; cat repo/file data/git; ls -A ../outside; cat .set-aside-0123/git/config; ls -A .set-aside-0123 | wc -l`)
	if want := "kept\nkept\n.git\nevil\n9\n"; left != want { // the checkout's .git, and eight others
		t.Errorf("left = %q, want %q", left, want)
	}
	for _, path := range []string{"repo/.git\n", "./repo/sub/.claude\n", "./.GIT\n", "./-x/.git\n"} {
		if !strings.Contains(said, path) {
			t.Errorf("output = %q, want %q in it", said, path)
		}
	}
	if _, err := os.Stat(filepath.Join(outside, ".git")); err != nil {
		t.Errorf("directory behind a link: %v, want it to stay", err)
	}

	// The keeper died after it had put a new clone there, whose settings stay.
	shell(t, work, "mkdir -p repo/.git repo/.claude && echo new >repo/.git/config && echo evil >data/.envrc")
	if said, err := setAsideIn(t, work); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	if got := shell(t, work, "cat repo/.git/config; ls -d repo/.claude; ls -A data"); got != "new\nrepo/.claude\ngit\n" {
		t.Errorf("after a second run = %q, want the new clone", got)
	}
}

// What cannot be moved is an error, because it would run.
func TestSetAsideFails(t *testing.T) {
	work := filepath.Join(t.TempDir(), "work")
	shell(t, filepath.Dir(work), "mkdir -p work/repo work/bin && echo evil >work/.envrc && printf '#!/bin/sh\nexit 1\n' >work/bin/mktemp && chmod 755 work/bin/mktemp")
	t.Setenv("PATH", filepath.Join(work, "bin")+":"+os.Getenv("PATH"))
	if said, err := setAsideIn(t, work); err == nil {
		t.Errorf("set aside without a directory for it = success, want an error\n%s", said)
	}
	if _, err := os.Stat(filepath.Join(work, ".set-aside-0123", ".failed")); err == nil {
		t.Error(".failed stays, so that a retry fails, too")
	}
}

// The checkout is a link to another directory, or a file.
func TestSetAsideACheckoutThatIsNone(t *testing.T) {
	for _, left := range []string{"ln -s ../outside work/repo", "echo x >work/repo", "mkfifo work/repo"} {
		dir := t.TempDir()
		shell(t, dir, "mkdir -p work outside/.git && "+left)
		if said, err := setAsideIn(t, filepath.Join(dir, "work")); err != nil {
			t.Fatalf("%s: %v\n%s", left, err, said)
		}
		if got := shell(t, dir, "ls -A work outside"); got != "outside:\n.git\n\nwork:\n.set-aside-0123\n" {
			t.Errorf("%s: left = %q, want no checkout", left, got)
		}
	}
}
