//go:build !darwin || cgo

package lima

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// The host agent runs once per VM, however often it is started.
func TestClaim(t *testing.T) {
	dir := t.TempDir()
	first, err := claim(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := claim(dir); fail.CodeOf(err) != fail.Conflict {
		t.Fatalf("second claim = %v, want code %v", err, fail.Conflict)
	}
	first.Close()
	again, err := claim(dir)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	idle(t, "-pidfile", filepath.Join(dir, "qemu.pid"))
	if _, err := claim(dir); fail.CodeOf(err) != fail.Conflict {
		t.Fatalf("claim beside a QEMU = %v, want code %v", err, fail.Conflict)
	}
}

// A guest that prints without end must not fill the disk.
func TestLogsStayShort(t *testing.T) {
	dir := t.TempDir()
	for f, size := range map[string]int{"serial.log": maxLog, "serialv.log": 100} {
		if err := os.WriteFile(filepath.Join(dir, f), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// QEMU continues to write at its old offset.
	f, err := os.OpenFile(filepath.Join(dir, "serial.log"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := shorten(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("on"), maxLog); err != nil {
		t.Fatal(err)
	}
	if used := diskUsed(dir); used > 1<<20 {
		t.Errorf("disk used by logs = %d bytes, want at most %d", used, 1<<20)
	}
	if st, err := os.Stat(filepath.Join(dir, "serialv.log")); err != nil || st.Size() != 100 {
		t.Errorf("short log = %v, %v, want 100 bytes", st, err)
	}
}
