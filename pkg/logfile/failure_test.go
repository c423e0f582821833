package logfile

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// failing is a file whose disk fails in one kind of call.
type failing struct {
	*os.File
	at string
}

var errDisk = errors.New("input/output error")

func (f failing) Stat() (fs.FileInfo, error) {
	if f.at == "stat" {
		return nil, errDisk
	}
	return f.File.Stat()
}

func (f failing) ReadAt(p []byte, off int64) (int, error) {
	if f.at == "read" {
		return 0, errDisk
	}
	return f.File.ReadAt(p, off)
}

func (f failing) Truncate(size int64) error {
	if strings.HasPrefix(f.at, "truncate") {
		return errDisk
	}
	return f.File.Truncate(size)
}

func (f failing) Write(p []byte) (int, error) {
	if f.at == "write" || f.at == "truncate what was written" {
		n, _ := f.File.Write(p[:len(p)/2])
		return n, syscall.ENOSPC
	}
	return f.File.Write(p)
}

func (f failing) Sync() error {
	if f.at == "sync" {
		return errDisk
	}
	return f.File.Sync()
}

// TestFailedCommit checks that Commit reports any failure and leaves no partial record.
func TestFailedCommit(t *testing.T) {
	for _, c := range []struct {
		at, before, want string
		err              error
	}{
		{"", "one\n", "one\ntwo\n", nil},
		{"", "one\nhal", "one\ntwo\n", nil},
		{"", "x", "two\n", nil},
		{"", "\n", "\ntwo\n", nil},
		{"stat", "one\n", "one\n", errDisk},
		{"read", "one\n", "one\n", errDisk},
		{"truncate", "one\nhal", "one\nhal", errDisk},
		{"write", "one\n", "one\n", syscall.ENOSPC},
		{"write", "", "", syscall.ENOSPC},
		{"truncate what was written", "one\n", "one\ntw", errDisk},
		{"sync", "one\n", "one\ntwo\n", errDisk},
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte(c.before), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		again, err := commit(failing{f, c.at}, path, Limits{}, []byte("two\n"))
		if !errors.Is(err, c.err) || again {
			t.Errorf("commit when %q fails after %q = %v, again %t, want %v, false", c.at, c.before, err, again, c.err)
		}
		f.Close()
		if got := content(t, path); got != c.want {
			t.Errorf("log when %q fails after %q = %q, want %q", c.at, c.before, got, c.want)
		}
	}
}

// TestFullDisk checks that a full disk costs only the record that did not fit, which
// Commit reports. Earlier records stay, and when there is space again, the next record
// follows them.
func TestFullDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	first := record("p", 0, 3000)
	if err := Commit(t.Context(), path, Limits{}, []byte(first)); err != nil {
		t.Fatal(err)
	}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	set := func(l syscall.Rlimit) {
		t.Helper()
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &l); err != nil {
			t.Fatal(err)
		}
	}
	set(syscall.Rlimit{Cur: 4096, Max: was.Max})
	t.Cleanup(func() { set(was) })
	second := record("p", 1, 3000)
	if err := Commit(t.Context(), path, Limits{}, []byte(second)); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("Commit on a full disk = %v, want %v", err, syscall.EFBIG)
	}
	if got := content(t, path); got != first {
		t.Errorf("log = %d bytes, want the first record's %d", len(got), len(first))
	}
	f := &File{Path: path}
	defer f.Close()
	if _, err := f.Write([]byte(second)); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("Write of a log line on a full disk = %v, want %v", err, syscall.EFBIG)
	}
	set(was)
	if err := Commit(t.Context(), path, Limits{}, []byte(second)); err != nil {
		t.Fatal(err)
	}
	if got := content(t, path); got != first+second {
		t.Errorf("log = %d bytes, want the %d of both records", len(got), len(first+second))
	}
}

// TestNoFile checks that the error says why a file cannot be created.
func TestNoFile(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing", "log")
	if err := Commit(t.Context(), missing, Limits{}, []byte("x\n")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Commit to a missing directory = %v, want %v", err, fs.ErrNotExist)
	}
	f := &File{Path: missing}
	if n, err := f.Write([]byte("x\n")); n != 0 || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Write to a missing directory = %d, %v, want 0, %v", n, err, fs.ErrNotExist)
	}
	if err := f.Close(); err != nil {
		t.Errorf("Close of a file that was never opened = %v, want nil", err)
	}
	if err := turn(missing, Limits{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("turn below a missing directory = %v, want %v", err, fs.ErrNotExist)
	}
	if err := turn(filepath.Join(t.TempDir(), "log"), Limits{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("turn of a missing file = %v, want %v", err, fs.ErrNotExist)
	}
	if files, err := Open(missing); err != nil || len(files) != 0 {
		t.Errorf("Open of a missing log = %v, %v, want none, nil", files, err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if files, err := Open(filepath.Join(file, "log")); err == nil || files != nil {
		t.Errorf("Open below a file = %v, %v, want nil, an error", files, err)
	}
}

// TestOpenFindsItsOwn checks that Open finds each of a log's files once, in order, and
// no other file.
func TestOpenFindsItsOwn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	for name, text := range map[string]string{
		"log":                        "4\n",
		"log.20260101T000000.000Z":   "2\n",
		"log.20250101T000000.000Z":   "1\n",
		"log.20260102T000000.000Z":   "3\n",
		"20270101T000000.000Z":       "of no log\n",
		"log.2027":                   "no time\n",
		"other.20270101T000000.000Z": "of another\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// The file was renamed after it was opened, and an old file was removed meanwhile.
	if err := os.Link(path, path+".20260103T000000.000Z"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("gone", path+".20260104T000000.000Z"); err != nil {
		t.Fatal(err)
	}
	files, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, f := range files {
		b, err := os.ReadFile(f.Name())
		if err != nil {
			t.Error(err)
		}
		got += string(b)
		f.Close()
	}
	if got != "1\n2\n3\n4\n" {
		t.Errorf("records = %q, want \"1\\n2\\n3\\n4\\n\"", got)
	}
	if err := os.Symlink(filepath.Base(path)+".20260105T000000.000Z", path+".20260105T000000.000Z"); err != nil {
		t.Fatal(err)
	}
	if files, err := Open(path); !errors.Is(err, syscall.ELOOP) || files != nil {
		t.Errorf("Open with an old file that cannot be opened = %v, %v, want nil, %v", files, err, syscall.ELOOP)
	}
}

// TestDue checks that a file ends with its period, or when the next record would make
// it too large.
func TestDue(t *testing.T) {
	dir := t.TempDir()
	noon := time.Date(2026, 3, 4, 12, 30, 0, 0, time.UTC)
	for _, c := range []struct {
		size   int
		n      int
		limits Limits
		age    time.Duration
		want   bool
	}{
		{0, 100, Limits{Max: 10}, 0, false},
		{10, 100, Limits{}, 1000 * time.Hour, false},
		{10, 5, Limits{Max: 15}, 0, false},
		{10, 6, Limits{Max: 15}, 0, true},
		{10, 0, Limits{Every: Hourly}, 29 * time.Minute, false},
		{10, 0, Limits{Every: Hourly}, 31 * time.Minute, true},
		{10, 0, Limits{Every: Daily}, 12 * time.Hour, false},
		{10, 0, Limits{Every: Daily}, 13 * time.Hour, true},
		{10, 0, Limits{Every: Never}, 1000 * time.Hour, false},
	} {
		path := filepath.Join(dir, "log")
		if err := os.WriteFile(path, make([]byte, c.size), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, noon, noon.Add(-c.age)); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.limits.due(st, c.n, noon); got != c.want {
			t.Errorf("due of %d bytes and %d more, %s old, %+v = %t, want %t", c.size, c.n, c.age, c.limits, got, c.want)
		}
	}
}

// TestOldFilesAreBounded checks the limits on the number and the age of old files.
func TestOldFilesAreBounded(t *testing.T) {
	const at = "20060102T150405.000Z"
	now := time.Now().UTC()
	for limits, want := range map[Limits]int{
		{}:                             6,
		{Keep: 2}:                      2,
		{Keep: 6}:                      6,
		{For: 90 * time.Minute}:        2,
		{Keep: 1, For: 24 * time.Hour}: 1,
	} {
		path := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(path, []byte("x\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		for hours := 1; hours <= 5; hours++ {
			if err := os.WriteFile(path+"."+now.Add(-time.Duration(hours)*time.Hour).Format(at), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := turn(path, limits); err != nil {
			t.Fatal(err)
		}
		files := old(t, path)
		if len(files) != want {
			t.Fatalf("old files with %+v = %d, want %d", limits, len(files), want)
		}
		if newest := content(t, files[len(files)-1].path); newest != "x\n" {
			t.Errorf("newest old file with %+v = %q, want \"x\\n\"", limits, newest)
		}
	}
}

// TestWriteBehindAPart checks that a record after a partial one is on its own line, and
// that its writer does not notice.
func TestWriteBehindAPart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("par"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &File{Path: path}
	defer f.Close()
	for range 2 {
		if n, err := f.Write([]byte("x\n")); n != 2 || err != nil {
			t.Errorf("Write = %d, %v, want 2, nil", n, err)
		}
	}
	if got := content(t, path); got != "par\nx\nx\n" {
		t.Errorf("log = %q, want \"par\\nx\\nx\\n\"", got)
	}
}

// TestNoFileStaysOpen checks that a long-running process leaks no open files.
func TestNoFileStaysOpen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	count := func() int {
		t.Helper()
		open, err := os.ReadDir("/dev/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(open)
	}
	before := count()
	for range 10 {
		if err := Commit(t.Context(), path, Limits{}, []byte("x\n")); err != nil { // into a new file
			t.Fatal(err)
		}
		if err := os.Link(path, path+".20260103T000000.000Z"); err != nil {
			t.Fatal(err)
		}
		files, err := Open(path)
		if err != nil || len(files) != 1 {
			t.Fatalf("Open = %v, %v, want 1 file", files, err)
		}
		if err := unix.Flock(int(files[0].Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*lockPoll)
		if err := Commit(ctx, path, Limits{}, []byte("x\n")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Commit while another process holds the lock = %v, want %v", err, context.DeadlineExceeded)
		}
		cancel()
		files[0].Close()
		f := &File{Path: path}
		if _, err := f.Write([]byte("x\n")); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Close(), os.Remove(path), os.Remove(path+".20260103T000000.000Z")); err != nil {
			t.Fatal(err)
		}
	}
	if after := count(); after != before {
		t.Errorf("open files = %d, want %d as before", after, before)
	}
}
