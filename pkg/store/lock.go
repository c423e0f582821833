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

// Lock is a held flock(2). The kernel drops it when the process dies, however it
// dies; that is why a lock, and not a pid file, shows which process is alive. Only
// the holder may unlink a lock file: TryLock never returns a lock on a file that was
// unlinked.
type Lock struct {
	f      *os.File
	marked bool
}

// TryLock takes the lock on path if it is free; ok is false when it is held.
func TryLock(path string) (l *Lock, ok bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, fmt.Errorf("create lock directory: %w", err)
	}
	for {
		f, err := openLocked(path)
		if err != nil || f == nil {
			return nil, false, err
		}
		own, err := f.Stat()
		if err != nil {
			_ = f.Close() // this also unlocks
			return nil, false, fmt.Errorf("inspect lock: %w", err)
		}
		if is, err := os.Stat(path); err == nil && os.SameFile(own, is) {
			return &Lock{f: f}, true, nil
		}
		_ = f.Close() // its last holder has unlinked it
	}
}

// openLocked opens the file at path and locks it. It returns nil when another process
// has the lock.
func openLocked(path string) (*os.File, error) {
	// O_CLOEXEC, Go's default, keeps child processes from inheriting the lock.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
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

// Held reports whether any process holds the lock on path.
func Held(path string) bool {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	// A shared lock for an instant: two processes that check at once do not see each
	// other.
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// Mark writes this process's pid into the lock file until Unlock. If the pid is found
// while no process holds the lock, this process has died.
func (l *Lock) Mark() error {
	l.marked = true
	if err := l.f.Truncate(0); err != nil {
		return fmt.Errorf("mark lock: %w", err)
	}
	if _, err := l.f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return fmt.Errorf("mark lock: %w", err)
	}
	return nil
}

// Died reports whether the process that last marked the lock on path died while
// holding it. It returns true only once per death: that caller handles what was left
// behind.
func Died(path string) (bool, error) {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() == 0 {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("inspect lock: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return false, fmt.Errorf("open lock: %w", err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return false, nil //nolint:nilerr // the lock is held, so its holder is alive
	}
	// Another process may have cleared the mark between Stat and Flock.
	if st, err = f.Stat(); err != nil || st.Size() == 0 {
		return false, err
	}
	return true, f.Truncate(0)
}

// Remove releases the lock for good. It unlinks the file first, so that no other
// process can meanwhile lock another file of the same name.
func (l *Lock) Remove() error {
	err := os.Remove(l.f.Name())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, l.Unlock())
}

// Unlock releases the lock.
func (l *Lock) Unlock() error {
	var err error
	if l.marked { // while the lock is ours; later the mark may be another process's
		err = l.f.Truncate(0)
	}
	return errors.Join(err, l.f.Close())
}
