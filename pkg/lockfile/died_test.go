package lockfile

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// A lock reports once that its last holder died, and never a holder that released it.
func TestDied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l", "lock")
	is := func(want bool, when string) {
		t.Helper()
		if died, err := Died(path); err != nil || died != want {
			t.Errorf("Died %s = %t, %v, want %t, nil", when, died, err, want)
		}
	}
	is(false, "before there is a lock")
	take := func(mark bool) *Lock {
		t.Helper()
		l, ok, err := Try(path)
		if err != nil || !ok {
			t.Fatalf("Try = %t, %v, want true, nil", ok, err)
		}
		if mark {
			if err := l.Mark(); err != nil {
				t.Fatal(err)
			}
		}
		return l
	}
	let := func(l *Lock) {
		t.Helper()
		if err := l.Unlock(); err != nil {
			t.Fatal(err)
		}
	}
	die := func(l *Lock) { _ = l.f.Close() } // as the kernel does for a killed process
	l := take(true)
	is(false, "while it is held")
	let(l)
	is(false, "after it was let go")
	die(take(true))
	is(true, "after its holder died")
	is(false, "the second time")
	die(take(false))
	is(false, "after one died who had not marked it")
	// If another process marks the lock again before any check, that process is alive
	// and releases it.
	die(take(true))
	let(take(true))
	is(false, "after the next one let it go")
}

// A mark replaces the previous one, and file errors are returned.
func TestMark(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	if err := os.WriteFile(path, []byte("1234567890\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, ok, err := Try(path)
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	if err := l.Mark(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != strconv.Itoa(os.Getpid())+"\n" {
		t.Errorf("mark in the lock file = %q, %v, want the process id %d", got, err, os.Getpid())
	}
	if err := l.f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Mark(); err == nil {
		t.Error("Mark of a closed file = nil, want an error")
	}
	if err := l.Unlock(); err == nil {
		t.Error("Unlock of a closed file = nil, want an error")
	}
}
