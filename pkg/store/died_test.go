package store

import (
	"path/filepath"
	"testing"
)

// A lock tells once that its last holder died with it, and not of one who let it go.
func TestDied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "l", "lock")
	is := func(want bool, when string) {
		t.Helper()
		if died, err := Died(path); err != nil || died != want {
			t.Errorf("%s: %v, %v", when, died, err)
		}
	}
	is(false, "before there is a lock")
	l, ok, err := TryLock(path)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	is(false, "while it is held")
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	is(false, "after it was let go")
	if l, ok, err = TryLock(path); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if err := l.f.Close(); err != nil { // as the kernel does for one that was killed
		t.Fatal(err)
	}
	is(true, "after its holder died")
	is(false, "the second time")
	// Somebody takes it before anyone asks: whoever has it now lives.
	if l, ok, err = TryLock(path); err != nil || !ok {
		t.Fatal(ok, err)
	}
	_ = l.f.Close()
	if l, ok, err = TryLock(path); err != nil || !ok {
		t.Fatal(ok, err)
	}
	if err := l.Unlock(); err != nil {
		t.Fatal(err)
	}
	is(false, "after the next one let it go")
}
