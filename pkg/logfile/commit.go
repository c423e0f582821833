package logfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lockPoll is how often a file that another process writes to is checked again.
const lockPoll = 5 * time.Millisecond

// Commit appends a record to the file at path. The record is on the disk when Commit
// returns. Concurrent processes wait for each other, until ctx ends. If a process is
// killed or the power fails in the middle, at most a partial record remains. The next
// Commit removes it, because its Commit never reported success.
func Commit(ctx context.Context, path string, l Limits, record []byte) error {
	for {
		f, err := lockFile(ctx, path)
		if err != nil {
			return err
		}
		again, err := commit(f, path, l, record)
		if err = errors.Join(err, f.Close()); err != nil || !again { // Close also unlocks
			return err
		}
	}
}

// file is the part of *os.File that commit needs. The disk may fail in each of these
// calls.
type file interface {
	io.ReaderAt
	io.Writer
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Sync() error
}

// commit appends a record to f. It returns again if the file was full and a new one has
// taken its place.
func commit(f file, path string, l Limits, record []byte) (again bool, err error) {
	is, err := f.Stat()
	if err != nil {
		return false, err
	}
	end, err := wholeLines(f, is.Size())
	if err != nil {
		return false, err
	}
	if end < is.Size() {
		if err := f.Truncate(end); err != nil {
			return false, fmt.Errorf("remove an incomplete record: %w", err)
		}
	}
	if end > 0 && l.due(is, len(record), time.Now()) && turn(path, l) == nil {
		return true, nil // if renaming fails, the file grows: better than losing a record
	}
	if _, err := f.Write(record); err != nil {
		return false, errors.Join(err, f.Truncate(end)) // a full disk
	}
	if err := f.Sync(); err != nil {
		return false, err
	}
	if end > 0 {
		return false, nil
	}
	// The file or its first record is new, so the directory must be flushed, too.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return false, err
	}
	defer dir.Close()
	return false, dir.Sync()
}

// lockFile opens the file at path and waits for an exclusive lock on it.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// The file may have been renamed while we waited.
			if is, err := os.Stat(path); err == nil {
				if own, err := f.Stat(); err == nil && os.SameFile(own, is) {
					return f, nil
				}
			}
		}
		_ = f.Close() // nothing was written to it
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the lock on %s: %w", path, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// wholeLines returns the offset where the last complete line of f ends.
func wholeLines(f io.ReaderAt, size int64) (int64, error) {
	buf := make([]byte, 4096)
	for end := size; end > 0; {
		part := buf[:min(int64(len(buf)), end)]
		if _, err := f.ReadAt(part, end-int64(len(part))); err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(part, '\n'); i >= 0 {
			return end - int64(len(part)) + int64(i) + 1, nil
		}
		end -= int64(len(part))
	}
	return 0, nil
}
