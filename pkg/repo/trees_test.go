package repo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Temporary repositories of processes that were killed are removed, and no others.
func TestSweepTrees(t *testing.T) {
	home := isolate(t)
	t.Setenv("TMPDIR", t.TempDir())
	host(t, home, "git init -q clone")
	open := func() *Trees {
		t.Helper()
		trees, err := OpenTrees(t.Context(), filepath.Join(home, "clone"))
		if err != nil {
			t.Fatal(err)
		}
		return trees
	}
	used := open()
	dead := filepath.Join(os.TempDir(), treesPrefix+"dead")
	write(t, filepath.Join(dead, "objects", "x"), "x")
	past := time.Now().Add(-time.Hour)
	for _, dir := range []string{dead, used.dir} {
		if err := os.Chtimes(dir, past, past); err != nil {
			t.Fatal(err)
		}
	}
	if err := open().Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dead); err == nil {
		t.Error("temporary repository of a dead process: it exists, want it removed")
	}
	if _, err := used.Tree(t.Context(), ""); err != nil {
		t.Errorf("repository in use: %v, want it to work", err)
	}
	if err := used.Close(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(os.TempDir()); len(left) > 0 || err != nil {
		t.Errorf("temporary files at the end: %v, %v, want none", left, err)
	}
}

// A path in git's output can hold anything but a NUL.
func TestParseRaw(t *testing.T) {
	id, none := strings.Repeat("a", 40), strings.Repeat("0", 40)
	got, err := parseRaw(":100644 100644 " + id + " " + id + " R090\x00a\nb\x00c\td\x00:000000 120000 " + none + " " + id + " A\x00:x\x00")
	if err != nil {
		t.Fatal(err)
	}
	want := []TreeChange{
		{Status: 'R', Path: "c\td", OldPath: "a\nb", Old: Entry{ModeFile, id}, New: Entry{ModeFile, id}},
		{Status: 'A', Path: ":x", New: Entry{ModeLink, id}},
	}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("changes = %+v, want %+v", got, want)
	}
	for _, bad := range []string{"x", ":100644 100644 a b\x00p\x00", ":100644 100644 " + id + " " + id + " R\x00only\x00"} {
		if _, err := parseRaw(bad); err == nil {
			t.Errorf("changes of %q: no error, want one", bad)
		}
	}
}

func TestPlainName(t *testing.T) {
	for name, want := range map[string]string{
		"a/main.go": "main.go", ".gitattributes": "gitattributes", "-rf": "rf", "$(touch x).go": "touch_x_.go",
		"a\nb": "a_b", "…": "file", "x/" + strings.Repeat("y", 300) + ".go": strings.Repeat("y", 97) + ".go",
	} {
		if got := plainName(name); got != want {
			t.Errorf("plainName(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestCopyRefs(t *testing.T) {
	home := isolate(t)
	host(t, home, "git init -q mirror && cd mirror && git commit -q --allow-empty -m x && git update-ref refs/agents/s/HEAD HEAD && git update-ref refs/agents/s/landed HEAD && git update-ref refs/agents/t/HEAD HEAD")
	host(t, home, "git init -q clone && cd clone && git config fetch.prune true && git commit -q --allow-empty -m y && git update-ref refs/agents/s/replaced/y HEAD")
	trees, err := OpenTrees(t.Context(), filepath.Join(home, "clone"))
	if err != nil {
		t.Fatal(err)
	}
	defer trees.Close()
	if err := trees.CopyRefs(t.Context(), filepath.Join(home, "mirror"), "s"); err != nil {
		t.Fatal(err)
	}
	equal(t, "references", host(t, home, "git -C clone for-each-ref refs/agents --format='%(refname)'"), "refs/agents/s/HEAD\nrefs/agents/s/replaced/y")
	// The agent renamed a branch to a name below itself.
	host(t, home, "git -C clone update-ref refs/agents/s/heads/a HEAD && git -C mirror update-ref refs/agents/s/heads/a/b HEAD")
	if err := trees.CopyRefs(t.Context(), filepath.Join(home, "mirror"), "s"); err != nil {
		t.Error(err)
	}
	old := host(t, home, "git -C clone rev-parse HEAD")
	equal(t, "references", host(t, home, "git -C clone for-each-ref refs/agents --format='%(refname)'"), "refs/agents/s/HEAD\nrefs/agents/s/heads/a/b\nrefs/agents/s/replaced/"+old+"\nrefs/agents/s/replaced/y")
	if err := trees.CopyRefs(t.Context(), filepath.Join(home, "mirror"), "../s"); err == nil {
		t.Error("copy with an invalid name: no error, want one")
	}
}
