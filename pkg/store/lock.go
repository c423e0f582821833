package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Lock is a held flock(2). The kernel drops it when the process dies, however
// it dies, which is why it and not a pid file says who is alive. Lock files are
// never unlinked: two processes could otherwise hold "the" lock on two inodes.
type Lock struct {
	f *os.File
}

// TryLock takes the lock on path if it is free; ok is false when it is held.
func TryLock(path string) (l *Lock, ok bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, fmt.Errorf("make the lock directory: %w", err)
	}
	// O_CLOEXEC (Go's default) keeps the lock out of what we start.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, false, fmt.Errorf("open the lock: %w", err)
	}
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err == nil {
		return &Lock{f}, true, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, false, nil
	}
	return nil, false, fmt.Errorf("lock %s: %w", path, err)
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

// Unlock lets the lock go.
func (l *Lock) Unlock() error { return l.f.Close() }
