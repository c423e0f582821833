package attach

import (
	"os"
	"runtime"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// A window that is resized during a dial interrupts select(2), and keys still count.
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

// Other keys than those that give up are read and dropped.
func TestOtherKeysAreDropped(t *testing.T) {
	u := newUser(t)
	tty := u.raw(3)
	u.types("nothing of it")
	readable(t, tty)
	stop, err := watchKeys(tty, func() { t.Error("a key that means nothing was taken") })
	if err != nil {
		t.Fatal(err)
	}
	for n := -1; n != 0; runtime.Gosched() { // until it was read
		if n, err = unix.IoctlGetInt(int(tty.Fd()), unix.TIOCINQ); err != nil {
			t.Fatal(err)
		}
	}
	stop()
}
