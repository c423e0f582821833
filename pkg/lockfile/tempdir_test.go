package lockfile

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// TestTempDir checks that the directories of processes that died are removed, and no others: one in
// use, one that has no lock yet, a link, and another kind of directory.
func TestTempDir(t *testing.T) {
	parent := t.TempDir()
	t.Setenv("TMPDIR", parent)
	old := time.Now().Add(-time.Hour)
	dir := func() (string, *Lock) {
		t.Helper()
		dir, l, err := TempDir("", "a-", os.RemoveAll)
		if err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 || filepath.Dir(dir) != parent {
			t.Fatalf("TempDir = %s, %v, %v, want a directory of mode 0700 below %s", dir, info, err, parent)
		}
		return dir, l
	}
	used, l := dir()
	defer func() { _ = l.Unlock() }()
	dead, l := dir()
	if err := l.f.Close(); err != nil { // as the kernel does
		t.Fatal(err)
	}
	keep := []string{used, filepath.Join(parent, "a-new"), filepath.Join(parent, "a-link"), filepath.Join(parent, "b-old")}
	for _, dir := range []string{keep[1], keep[3]} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(keep[3], keep[2]); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{used, dead, keep[3]} {
		if err := os.Chtimes(dir, old, old); err != nil {
			t.Fatal(err)
		}
	}
	next, l := dir()
	defer func() { _ = l.Unlock() }()
	left, err := filepath.Glob(filepath.Join(parent, "*"))
	want := slices.Sorted(slices.Values(append(keep, next)))
	if err != nil || !slices.Equal(left, want) {
		t.Errorf("directories = %q, %v, want %q", left, err, want)
	}
	if _, err := os.Stat(filepath.Join(keep[3], aliveFile)); err == nil {
		t.Errorf("lock in another kind of directory, which a link leads to")
	}
}
