package lockfile_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gofrs/flock"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain lets this test binary act as a process that holds a lock.
func TestMain(m *testing.M) {
	testenv.Main(m, testenv.Commands{"hold": func(_ context.Context, args []string) error {
		l, ok, err := lockfile.Try(args[0])
		if err != nil || !ok {
			return fmt.Errorf("Try = %t, %w", ok, err)
		}
		fmt.Println("locked")
		_, _ = io.Copy(io.Discard, os.Stdin)
		return l.Unlock()
	}})
}

// hold starts a process that holds the lock until its standard input ends.
func hold(t *testing.T, path string) (*exec.Cmd, io.Closer) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "hold", path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = in.Close(), cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("line of the child = %q, %v, want \"locked\"", line, err)
	}
	return cmd, in
}

// A check of whether a lock is held takes it for an instant, which does not keep
// another process from it.
func TestTryDuringHeld(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	check := flock.New(path)
	if ok, err := check.TryRLock(); err != nil || !ok {
		t.Fatalf("TryRLock = %t, %v, want true, nil", ok, err)
	}
	go func() {
		time.Sleep(20 * time.Millisecond)
		_ = check.Close()
	}()
	if err := mustLock(t, path).Unlock(); err != nil {
		t.Fatal(err)
	}
}

func mustLock(t *testing.T, path string) *lockfile.Lock {
	t.Helper()
	l, ok, err := lockfile.Try(path)
	if err != nil || !ok {
		t.Fatalf("Try(%s) = %t, %v, want true, nil", path, ok, err)
	}
	return l
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks", "session-1")
	if lockfile.Held(path) {
		t.Fatal("Held before the lock exists = true, want false")
	}
	l := mustLock(t, path)
	if _, ok, err := lockfile.Try(path); ok || err != nil {
		t.Fatalf("second Try = %t, %v, want false, nil", ok, err)
	}
	if !lockfile.Held(path) {
		t.Fatal("Held of a held lock = false, want true")
	}
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	if lockfile.Held(path) {
		t.Fatal("Held after Unlock = true, want false")
	}
	// The file stays: if it were unlinked, two processes could hold locks on two
	// inodes.
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	if _, _, err := lockfile.Try(filepath.Join(path, "below", "a-file")); err == nil {
		t.Fatal("Try below a file = nil, want an error")
	}
}

func TestLockOfAnotherProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	for _, end := range []struct {
		name string
		f    func(*exec.Cmd, io.Closer) error
	}{
		{"kill -9", func(p *exec.Cmd, _ io.Closer) error { return p.Process.Kill() }},
		{"unlock", func(_ *exec.Cmd, in io.Closer) error { return in.Close() }},
	} {
		t.Run(end.name, func(t *testing.T) {
			p, in := hold(t, path)
			if !lockfile.Held(path) {
				t.Fatal("Held by another process = false, want true")
			}
			if _, ok, err := lockfile.Try(path); ok || err != nil {
				t.Fatalf("Try of another process's lock = %t, %v, want false, nil", ok, err)
			}
			if err := end.f(p, in); err != nil {
				t.Fatal(err)
			}
			for { // the kernel drops the lock when it has finished with the process
				l, ok, err := lockfile.Try(path)
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
	if _, err := os.Stat(path); !os.IsNotExist(err) || lockfile.Held(path) {
		t.Fatalf("after Remove: Stat = %v, Held = %t, want a missing file, false", err, lockfile.Held(path))
	}
	if died, err := lockfile.Died(path); died || err != nil {
		t.Fatalf("Died of a removed lock = %t, %v, want false, nil", died, err)
	}
	again := mustLock(t, path)
	if !lockfile.Held(path) {
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
	if lockfile.Held(path) {
		t.Fatal("Held after the parent unlocked = true, want false: the child holds the lock")
	}
}

// A lock that cannot be taken is neither held nor acquired.
func TestLockErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	l := mustLock(t, file)
	defer l.Unlock()
	for _, path := range []string{filepath.Join(file, "below"), filepath.Join(file, "below", "it"), t.TempDir()} {
		l, ok, err := lockfile.Try(path)
		if l != nil || ok || err == nil {
			t.Errorf("Try(%s) = %v, %t, %v, want nil, false, an error", path, l, ok, err)
		}
		if lockfile.Held(path) {
			t.Errorf("Held(%s) = true, want false", path)
		}
	}
	if died, err := lockfile.Died(filepath.Join(file, "below")); died || err == nil {
		t.Errorf("Died(path below a file) = %t, %v, want false, an error", died, err)
	}
}

// An unlinked lock file protects nothing: its holder keeps a lock that no other
// process can find, and the next process locks the new file.
func TestUnlinkedLock(t *testing.T) {
	path := t.TempDir() + "/lock"
	var wait sync.WaitGroup
	var held, most atomic.Int32
	for range 4 {
		wait.Go(func() {
			for taken := 0; taken < 200; {
				l, ok, err := lockfile.Try(path)
				if err != nil {
					t.Error(err)
					return
				}
				if !ok {
					continue
				}
				taken++
				if n := held.Add(1); n > most.Load() {
					most.Store(n)
				}
				held.Add(-1)
				if err := os.Remove(path); err != nil { // the holder's last action
					t.Error(err)
				}
				if err := l.Unlock(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if most.Load() != 1 {
		t.Errorf("processes holding the lock at once = %d, want 1", most.Load())
	}
}
