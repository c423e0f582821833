package picker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestRooms checks that a picker removes the directory of one that was killed, and no
// directory of a running picker.
func TestRooms(t *testing.T) {
	parent := testenv.ShortDir(t)
	t.Setenv("TMPDIR", parent)
	living, err := newPickerDir()
	if err != nil {
		t.Fatal(err)
	}
	killed, err := newPickerDir()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(killed.rows(), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := killed.lock.Unlock(); err != nil { // as the kernel does
		t.Fatal(err)
	}
	past := time.Now().Add(-time.Hour)
	for _, r := range []*workDir{living, killed} {
		if err := os.Chtimes(r.dir, past, past); err != nil {
			t.Fatal(err)
		}
	}
	next, err := newPickerDir()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(killed.dir); err == nil {
		t.Error("directory of a killed picker exists, want it removed")
	}
	for _, r := range []*workDir{living, next} {
		fi, err := os.Stat(r.dir)
		if err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("%s = %v, %v, want mode 0700", r.dir, fi, err)
		}
		if len(r.socket()) > maxSocket {
			t.Errorf("socket = %s (%d bytes), want at most %d", r.socket(), len(r.socket()), maxSocket)
		}
		if err := r.remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(r.dir); err == nil {
			t.Error("directory of an ended picker exists, want it removed")
		}
	}

	long := filepath.Join(parent, strings.Repeat("x", 90))
	if err := os.Mkdir(long, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", long)
	r, err := newPickerDir()
	if err != nil {
		t.Fatal(err)
	}
	if len(r.socket()) > maxSocket {
		t.Errorf("socket = %s (%d bytes), want at most %d", r.socket(), len(r.socket()), maxSocket)
	}
	if err := r.remove(); err != nil {
		t.Error(err)
	}
}
