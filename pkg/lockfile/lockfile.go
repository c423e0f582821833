// Package lockfile locks files with flock(2), by github.com/gofrs/flock. The kernel
// drops a lock when its process dies, however it dies; that is why a lock, and not a
// pid file, shows which process is alive.
package lockfile

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gofrs/flock"
)

const (
	poll     = 100 * time.Millisecond // between tries of Wait
	patience = time.Second            // of Try, with processes that call Held
)

// Lock is a held lock. Only its holder may unlink the file: no lock is returned on a
// file that was unlinked.
type Lock struct {
	f      *flock.Flock
	marked bool
}

// Try takes the lock on path if it is free; ok is false when it is held.
func Try(path string) (l *Lock, ok bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, false, fmt.Errorf("create lock directory: %w", err)
	}
	for until := time.Now().Add(patience); ; {
		f := flock.New(path) // the process's children do not inherit it
		ok, err := f.TryLock()
		if err != nil {
			return nil, false, fmt.Errorf("lock %s: %w", path, err)
		}
		if ok {
			own, err := f.Stat()
			if err != nil {
				return nil, false, errors.Join(fmt.Errorf("inspect lock: %w", err), f.Close())
			}
			if is, err := os.Stat(path); err == nil && os.SameFile(own, is) {
				return &Lock{f: f}, true, nil
			}
			_ = f.Close() // its last holder has unlinked it
			continue
		}
		// A process in Held has a shared lock for an instant.
		if Held(path) || time.Now().After(until) {
			return nil, false, nil
		}
		time.Sleep(time.Millisecond)
	}
}

// Wait takes the lock on path. If another process holds it, Wait calls waiting, unless
// that is nil, and waits until the lock is free or ctx ends.
func Wait(ctx context.Context, path string, waiting func()) (*Lock, error) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		l, ok, err := Try(path)
		if err != nil || ok {
			return l, err
		}
		if waiting != nil {
			waiting()
			waiting = nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// Held reports whether any process holds the lock on path.
func Held(path string) bool {
	// Two processes that check at once do not see each other's shared locks.
	f := flock.New(path, flock.SetFlag(os.O_RDONLY))
	free, err := f.TryRLock()
	return errors.Join(err, f.Close()) == nil && !free
}

// Mark writes this process's pid into the lock file until Unlock. If the pid is found
// while no process holds the lock, this process has died.
func (l *Lock) Mark() error {
	l.marked = true
	return l.write(strconv.Itoa(os.Getpid()) + "\n")
}

func (l *Lock) write(mark string) error {
	if !l.f.Locked() { // the mark may be another process's
		return fmt.Errorf("mark lock %s: it is not held", l.f.Path())
	}
	f, err := os.OpenFile(l.f.Path(), os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = f.WriteString(mark)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("mark lock: %w", err)
	}
	return nil
}

// Died reports whether the process that last marked the lock on path died while
// holding it. It returns true only once per death: that caller handles what was left
// behind.
func Died(path string) (bool, error) {
	marked := func() (bool, error) {
		st, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("inspect lock: %w", err)
		}
		return st.Size() > 0, nil
	}
	if is, err := marked(); !is {
		return false, err
	}
	l, ok, err := Try(path)
	if err != nil || !ok { // while the lock is held, its holder is alive
		return false, err
	}
	l.marked, err = marked() // another process may have cleared the mark meanwhile
	return l.marked, errors.Join(err, l.Unlock())
}

// Remove releases the lock for good. It unlinks the file first, so that no other
// process can meanwhile lock another file of the same name.
func (l *Lock) Remove() error {
	err := os.Remove(l.f.Path())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	l.marked = false
	return errors.Join(err, l.Unlock())
}

// Unlock releases the lock.
func (l *Lock) Unlock() error {
	var err error
	if l.marked {
		err = l.write("")
	}
	return errors.Join(err, l.f.Close())
}
