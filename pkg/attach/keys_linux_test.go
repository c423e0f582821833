package attach

import (
	"os"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSignalsDoNotEndTheWatching checks that keys still work after signals have interrupted
// select(2), as when the window is resized during a dial.
func TestSignalsDoNotEndTheWatching(t *testing.T) {
	u := newUser(t)
	tty := u.raw(3)
	pressed := make(chan struct{})
	stop, err := watchKeys(tty, func() { close(pressed) })
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		for _, thread := range threads {
			id, err := strconv.Atoi(thread.Name())
			if err != nil {
				t.Fatal(err)
			}
			_ = unix.Tgkill(os.Getpid(), id, unix.SIGWINCH) // a thread may have ended
		}
	}
	u.types("q")
	<-pressed
	stop()
}

// TestOtherKeysAreDropped checks that keys other than those that give up are read and
// discarded.
func TestOtherKeysAreDropped(t *testing.T) {
	u := newUser(t)
	tty := u.raw(3)
	u.types("nothing of it")
	readable(t, tty)
	stop, err := watchKeys(tty, func() { t.Error("watchKeys reported a key that does not give up, want only q and Ctrl-C") })
	if err != nil {
		t.Fatal(err)
	}
	for n := -1; n != 0; runtime.Gosched() { // until the input was read
		if n, err = unix.IoctlGetInt(int(tty.Fd()), unix.TIOCINQ); err != nil {
			t.Fatal(err)
		}
	}
	stop()
}
