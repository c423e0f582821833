package guestagent_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

// The program installs, saves and restores files. It does not save files that came
// from the provision scripts or the user's dotfiles.
func TestHome(t *testing.T) {
	g := newFakeGuest(t)
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	host := t.TempDir()
	for name, text := range map[string]string{".zshrc": "mine", ".keep/brought": "mine", ".keep/changed": "mine"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(host, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(host, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(host)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var dotfiles bytes.Buffer
	if _, err := homearchive.Dotfiles(&dotfiles, root, ""); err != nil {
		t.Fatal(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	get := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "(none)"
		}
		return string(b)
	}
	g.write("/var/lib/agent-sessionizer/dotfiles/.keep/shipped", "by the image")
	put(".zshrc", "by the image")
	g.ok(dotfiles.String(), "home", "bring", "--first=true")
	if got := get(".zshrc"); got != "mine" {
		t.Errorf(".zshrc after home bring = %q, want %q", got, "mine")
	}
	put(".keep/shipped", "by the image")
	put(".keep/changed", "by the agent")
	put(".keep/new", "by the agent")
	put(".keep/.netrc", "machine x")
	args := []string{"--not=project", "--max=1000000", "--", ".keep"}
	saved, notes, code := g.run("", append([]string{"home", "save"}, args...)...)
	if code != 0 || !strings.Contains(notes, ".keep/.netrc: contains a login") {
		t.Fatalf("home save: exit %d, notes %q, want exit 0 and a note with %q", code, notes, ".keep/.netrc: contains a login")
	}
	dir = t.TempDir()
	t.Setenv("HOME", dir)
	g.ok(saved, append([]string{"home", "restore", "--first=true"}, args...)...)
	for name, want := range map[string]string{
		".keep/changed": "by the agent", ".keep/new": "by the agent", ".keep/brought": "(none)", ".keep/shipped": "(none)", ".keep/.netrc": "(none)", ".zshrc": "(none)",
	} {
		if got := get(name); got != want {
			t.Errorf("%s after home restore = %q, want %q", name, got, want)
		}
	}
	for _, args := range [][]string{{"home"}, {"home", "steal"}, {"home", "save", "--no"}} {
		if _, errs, code := g.run("", args...); code != 2 {
			t.Errorf("agent-guest %q: exit %d, %q, want exit 2", args, code, errs)
		}
	}
	if _, errs, code := g.run(saved[:len(saved)-1], append([]string{"home", "restore"}, args...)...); code == 0 || !strings.Contains(errs, "cut off") {
		t.Errorf("home restore of a truncated archive: exit %d, %q, want an error with %q", code, errs, "cut off")
	}
}
