package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Lock is a held flock(2). The kernel drops it when the process dies, however
// it dies, which is why it and not a pid file says who is alive. A lock file may be
// unlinked by its holder only: TryLock never returns the lock of a file that has
// lost its name.
type Lock struct {
	f      *os.File
	marked bool
}

// TryLock takes the lock on path if it is free; ok is false when it is held.
func TryLock(path string) (l *Lock, ok bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, fmt.Errorf("make the lock directory: %w", err)
	}
	for {
		f, err := openLocked(path)
		if err != nil || f == nil {
			return nil, false, err
		}
		own, err := f.Stat()
		if err != nil {
			_ = f.Close() // which unlocks
			return nil, false, fmt.Errorf("look at the lock: %w", err)
		}
		if is, err := os.Stat(path); err == nil && os.SameFile(own, is) {
			return &Lock{f: f}, true, nil
		}
		_ = f.Close() // its last holder has unlinked it
	}
}

// openLocked opens the file at path and locks it; nil when another has the lock.
func openLocked(path string) (*os.File, error) {
	// O_CLOEXEC (Go's default) keeps the lock out of what we start.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock: %w", err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// Held reports whether some process holds the lock on path.
func Held(path string) bool {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	// A shared lock for an instant: two askers do not see each other.
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// Mark writes our pid into the lock's file until Unlock. If it is there though
// nobody holds the lock, we have died.
func (l *Lock) Mark() error {
	l.marked = true
	if err := l.f.Truncate(0); err != nil {
		return fmt.Errorf("mark the lock: %w", err)
	}
	if _, err := l.f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return fmt.Errorf("mark the lock: %w", err)
	}
	return nil
}

// Died reports whether the last one who marked the lock on path died with it. It
// says so once: whoever is told sees to what was left.
func Died(path string) (bool, error) {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() == 0 {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the lock: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false, fmt.Errorf("open the lock: %w", err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return false, nil //nolint:nilerr // somebody lives
	}
	// While we waited for nothing somebody else may have been told.
	if st, err = f.Stat(); err != nil || st.Size() == 0 {
		return false, err
	}
	return true, f.Truncate(0)
}

// Remove lets the lock go for good, and unlinks its file first, so that no other
// process holds the lock of another file of that name meanwhile.
func (l *Lock) Remove() error {
	err := os.Remove(l.f.Name())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.Unlock())
}

// Unlock lets the lock go.
func (l *Lock) Unlock() error {
	var err error
	if l.marked { // while it is ours; later it may be another's mark
		err = l.f.Truncate(0)
	}
	return errors.Join(err, l.f.Close())
}
