package picker

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestFindClones checks that clones are found below the roots: not too deep, not
// through links, not inside clones, and not in directories that are skipped.
func TestFindClones(t *testing.T) {
	p := newPicker(t)
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
	home := os.Getenv("HOME")
	clone := func(path, origin string) string {
		dir := filepath.Join(home, path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		git(t, dir, "init", "-q")
		if origin != "" {
			git(t, dir, "remote", "add", "origin", origin)
		}
		return dir
	}
	link := func(to, at string) {
		if err := os.Symlink(to, filepath.Join(home, at)); err != nil {
			t.Fatal(err)
		}
	}
	remote := clone("src/app", "git@github.com:Owner/App.git")
	local := clone("src/group/sub/lib", "")
	deepest := clone("src/1/2/3/4", "")
	root := clone("single", "")
	for _, hidden := range []string{"src/1/2/3/4x/5", "src/.cache/x", "src/app/vendored", "src/web/node_modules/dep", "elsewhere/x"} {
		clone(hidden, "")
	}
	link(filepath.Join(home, "elsewhere"), "src/linked")
	link(filepath.Join(home, "src"), "src/loop")
	link(filepath.Join(home, "src"), "work") // the root itself may be a link
	if err := os.WriteFile(filepath.Join(home, "src/broken"), nil, 0o600); err != nil {
		t.Fatal(err)
	}

	cfg := p.Manager.Config
	cfg.Roots = []string{filepath.Join(home, "work"), root, filepath.Join(home, "nowhere")}
	p.clones.roots = cfg.Roots
	if got := p.clones.read(); got != nil {
		t.Errorf("clones before the first search = %v, want nil", got)
	}
	if err := FindClones(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range p.clones.read() {
		got = append(got, c.Path+" "+c.Key)
	}
	want := []string{
		remote + " github.com/owner/app", local + " local:" + local, deepest + " local:" + deepest, root + " local:" + root,
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("clones mismatch (-want +got):\n%s", diff)
	}

	// A clone whose remote changes counts as a different clone; git is not asked again
	// about the others.
	before := p.clones.read()
	git(t, remote, "remote", "set-url", "origin", "https://git.example.org/t/p.git")
	if err := FindClones(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(p.clones.read(), func(c Clone) bool { return c.Key == "git.example.org/t/p" })
	if i < 0 || len(p.clones.read()) != len(before) {
		t.Errorf("clones after a change = %+v, want git.example.org/t/p among %d", p.clones.read(), len(before))
	}

	// Clones found below other roots do not count.
	p.clones = cloneCacheReader{file: p.clones.file, roots: []string{"/elsewhere"}}
	if got := p.clones.read(); got != nil {
		t.Errorf("clones of other roots = %v, want nil", got)
	}
}

// TestOneLooksForClones checks that no second search starts while one hangs, and that
// earlier results stay.
func TestOneLooksForClones(t *testing.T) {
	p := newPicker(t)
	cfg := p.Manager.Config
	cfg.Roots = []string{filepath.Join(os.Getenv("HOME"), "src")}
	mark := filepath.Join(os.Getenv("HOME"), "started")
	p.Manager.Self = filepath.Join(os.Getenv("HOME"), "self")
	if err := os.WriteFile(p.Manager.Self, []byte("#!/bin/sh\necho \"$1\" >>'"+mark+"'\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	lock, free, err := lockfile.Try(cloneLock(cfg.Paths))
	if err != nil || !free {
		t.Fatalf("Try = %t, %v, want true, nil", free, err)
	}
	if err := p.find(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := FindClones(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cloneCache(cfg.Paths)); err == nil {
		t.Error("second search at the same time wrote its result, want none")
	}
	_ = lock.Unlock()
	if err := p.find(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the process that looks", func() bool { b, _ := os.ReadFile(mark); return string(b) == FindCommand+"\n" })
	if err := FindClones(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if err := p.find(t.Context()); err != nil { // the last search was a moment ago
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * findAgain)
	if err := os.Chtimes(cloneCache(cfg.Paths), old, old); err != nil {
		t.Fatal(err)
	}
	if err := p.find(t.Context()); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the next look", func() bool { b, _ := os.ReadFile(mark); return string(b) == strings.Repeat(FindCommand+"\n", 2) })
}
