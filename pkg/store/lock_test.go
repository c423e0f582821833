package store_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func mustLock(t *testing.T, path string) *store.Lock {
	t.Helper()
	l, ok, err := store.TryLock(path)
	if err != nil || !ok {
		t.Fatalf("TryLock(%s) = %t, %v, want true, nil", path, ok, err)
	}
	return l
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks", "session-1")
	if store.Held(path) {
		t.Fatal("Held before the lock exists = true, want false")
	}
	l := mustLock(t, path)
	if _, ok, err := store.TryLock(path); ok || err != nil {
		t.Fatalf("second TryLock = %t, %v, want false, nil", ok, err)
	}
	if !store.Held(path) {
		t.Fatal("Held of a held lock = false, want true")
	}
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	if store.Held(path) {
		t.Fatal("Held after Unlock = true, want false")
	}
	// The file stays: if it were unlinked, two processes could hold locks on two
	// inodes.
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	if _, _, err := store.TryLock(filepath.Join(path, "below", "a-file")); err == nil {
		t.Fatal("TryLock below a file = nil, want an error")
	}
}

func TestLockOfAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	for _, end := range []struct {
		name string
		f    func(*process) error
	}{
		{"kill -9", func(p *process) error { return p.Process.Kill() }},
		{"unlock", func(p *process) error { return p.in.Close() }},
	} {
		t.Run(end.name, func(t *testing.T) {
			p := spawn(t, "lock", path)
			if !store.Held(path) {
				t.Fatal("Held by another process = false, want true")
			}
			if _, ok, err := store.TryLock(path); ok || err != nil {
				t.Fatalf("TryLock of another process's lock = %t, %v, want false, nil", ok, err)
			}
			if err := end.f(p); err != nil {
				t.Fatal(err)
			}
			for { // the kernel drops the lock when it has finished with the process
				l, ok, err := store.TryLock(path)
				if err != nil {
					t.Fatal(err)
				}
				if ok {
					if err := l.Unlock(); err != nil {
						t.Fatal(err)
					}
					break
				}
				runtime.Gosched()
			}
		})
	}
}

func TestRemovedLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l := mustLock(t, path)
	waiting, err := os.OpenFile(path, os.O_RDWR, 0) // opened by another process, before the file is removed
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	if err := l.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) || store.Held(path) {
		t.Fatalf("after Remove: Stat = %v, Held = %t, want a missing file, false", err, store.Held(path))
	}
	if died, err := store.Died(path); died || err != nil {
		t.Fatalf("Died of a removed lock = %t, %v, want false, nil", died, err)
	}
	again := mustLock(t, path)
	if !store.Held(path) {
		t.Fatal("Held of the new lock = false, want true")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := again.Remove(); err != nil {
		t.Fatalf("second Remove = %v, want nil", err)
	}
}

// Processes that a keeper starts (a host agent, a shell) outlive it; the lock must
// not.
func TestLockIsNotInherited(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	l := mustLock(t, path)
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	if store.Held(path) {
		t.Fatal("Held after the parent unlocked = true, want false: the child holds the lock")
	}
}
