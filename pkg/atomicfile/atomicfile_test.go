package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestWrite(t *testing.T) {
	for name, write := range map[string]func(string, []byte, os.FileMode) error{"flushed": Write, "not flushed": WriteUnflushed} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			for _, text := range []string{"a longer text", "short"} {
				if err := write(path, []byte(text), 0o640); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(path)
				if err != nil || string(got) != text {
					t.Errorf("ReadFile after write = %q, %v, want %q", got, err, text)
				}
			}
			if st, err := os.Stat(path); err != nil {
				t.Error(err)
			} else if got := st.Mode().Perm(); got != 0o640 {
				t.Errorf("mode of the file = %v, want %v", got, os.FileMode(0o640))
			}
			// A path that cannot be replaced stays as it was, and no temporary file is left
			// beside it.
			if err := os.MkdirAll(filepath.Join(dir, "full", "x"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := write(filepath.Join(dir, "full"), nil, 0o600); err == nil {
				t.Error("write to the path of a directory succeeded, want an error")
			}
			if err := write(filepath.Join(dir, "missing", "file"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("write to a missing directory: error %v, want %v", err, fs.ErrNotExist)
			}
			if diff := cmp.Diff([]string{"file", "full"}, namesIn(t, dir)); diff != "" {
				t.Errorf("names in the directory mismatch (-want +got):\n%s", diff)
			}
		})
	}
}

// TestFullDisk checks that a full disk leaves the old content and no part of the new.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := Write(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	limitFiles(t, 4096)
	for name, write := range map[string]func(string, []byte, os.FileMode) error{"flushed": Write, "not flushed": WriteUnflushed} {
		if err := write(path, []byte(strings.Repeat("x", 5000)), 0o600); !errors.Is(err, syscall.EFBIG) {
			t.Errorf("%s: write to a full disk: error %v, want %v", name, err, syscall.EFBIG)
		}
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("ReadFile after failed writes = %q, %v, want %q", got, err, "old")
	}
	if diff := cmp.Diff([]string{"file"}, namesIn(t, dir)); diff != "" {
		t.Errorf("names in the directory mismatch (-want +got):\n%s", diff)
	}
}

// TestFlush checks the order: the content is flushed before the file gets its name, and the
// directory is flushed before Write returns.
func TestFlush(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	errDisk := errors.New("the disk is gone")
	var temp string
	var steps failing
	create := func(path string) (file, error) {
		f, err := createTemp(path)
		temp = filepath.Base(f.Name())
		return &spy{f, &steps}, err
	}
	err := replace(path, []byte("new"), 0o600, create, func(synced string) error {
		if got, err := os.ReadFile(path); err != nil || string(got) != "new" || synced != dir {
			t.Errorf("when %s is flushed, the file has %q, %v, want %q when %s is flushed", synced, got, err, "new", dir)
		}
		steps.steps = append(steps.steps, "sync directory")
		return errDisk
	})
	if !errors.Is(err, errDisk) {
		t.Errorf("replace: error %v, want that of the directory, %v", err, errDisk)
	}
	if err := replace(path, []byte("new"), 0o600, create, nil); err != nil {
		t.Errorf("replace without a flush: %v", err)
	}
	if diff := cmp.Diff([]string{"sync", "sync directory"}, steps.steps); diff != "" {
		t.Errorf("flushes of one flushed and one unflushed file mismatch (-want +got):\n%s", diff)
	}
	if ok, err := filepath.Match(".file.*.tmp", temp); err != nil || !ok {
		t.Errorf("name of the temporary file = %q, want one that matches %q", temp, ".file.*.tmp")
	}
	if err := syncDir(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("syncDir of a missing directory: error %v, want %v", err, fs.ErrNotExist)
	}
}

// spy is a file that records its flushes.
type spy struct {
	file
	steps *failing
}

func (s *spy) Sync() error { return errors.Join(s.steps.step("sync"), s.file.Sync()) }

// failing is a file whose disk fails at one step.
type failing struct {
	at    string
	steps []string
}

var errStep = errors.New("input/output error")

func (f *failing) step(name string) error {
	f.steps = append(f.steps, name)
	if name == f.at {
		return errStep
	}
	return nil
}

func (f *failing) Name() string                { return "file" }
func (f *failing) Write(p []byte) (int, error) { return len(p), f.step("write " + string(p)) }
func (f *failing) Chmod(m fs.FileMode) error   { return f.step("chmod " + m.String()) }
func (f *failing) Sync() error                 { return f.step("sync") }
func (f *failing) Close() error                { return f.step("close") }

// TestFailedSteps checks that, whichever step fails, the file is closed and the error is
// returned.
func TestFailedSteps(t *testing.T) {
	all := []string{"write text", "chmod -rw-r-----", "sync", "close"}
	for _, flush := range []bool{true, false} {
		want := slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s == "sync" && !flush })
		for _, at := range append([]string{""}, all...) {
			f := &failing{at: at}
			err := writeAndClose(f, []byte("text"), 0o640, flush)
			if diff := cmp.Diff(want, f.steps); diff != "" {
				t.Errorf("flush %t, failing at %q: steps mismatch (-want +got):\n%s", flush, at, diff)
			}
			if want := slices.Contains(want, at); errors.Is(err, errStep) != want {
				t.Errorf("flush %t, failing at %q: error %v, want %q: %t", flush, at, err, errStep, want)
			}
		}
	}
}

func namesIn(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// limitFiles limits the file size of this process until the test ends, which has the effect
// of a full disk.
func limitFiles(t *testing.T, size uint64) {
	t.Helper()
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	set := func(l syscall.Rlimit) {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &l); err != nil {
			t.Fatal(err)
		}
	}
	set(syscall.Rlimit{Cur: size, Max: was.Max})
	t.Cleanup(func() { set(was) })
}

func TestCreate(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := Create(path, []byte("first"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Create(path, []byte("second"), 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Create of an existing file = %v, want fs.ErrExist", err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := Create(filepath.Join(dir, "link"), []byte("third"), 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Create at a dangling link = %v, want fs.ErrExist", err)
	}
	text, err := os.ReadFile(path)
	st, statErr := os.Stat(path)
	if err := errors.Join(err, statErr); err != nil {
		t.Fatal(err)
	}
	if string(text) != "first" || st.Mode() != 0o600 {
		t.Errorf("the file has %q and mode %v, want \"first\" and 0600", text, st.Mode())
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("the directory has %v (%v), want the file and the link", entries, err)
	}
}
