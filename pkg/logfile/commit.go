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

// lockPoll is how often a file that another process writes to is looked at again.
const lockPoll = 5 * time.Millisecond

// Commit appends a record to the file at path; it is on the disk when Commit
// returns. Processes take turns, until ctx ends. A process that is killed, or a
// power cut, in the middle leaves a part of a record at most, which the next
// Commit takes away: nobody was told that it is there.
func Commit(ctx context.Context, path string, l Limits, record []byte) error {
	for {
		f, err := lockFile(ctx, path)
		if err != nil {
			return err
		}
		again, err := commit(f, path, l, record)
		if err = errors.Join(err, f.Close()); err != nil || !again { // which unlocks
			return err
		}
	}
}

// file is what commit needs of an *os.File. The disk may fail at each of these.
type file interface {
	io.ReaderAt
	io.Writer
	Stat() (fs.FileInfo, error)
	Truncate(size int64) error
	Sync() error
}

// commit returns again when the file was full, and there is another now.
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
			return false, fmt.Errorf("take away a part of a record: %w", err)
		}
	}
	if end > 0 && l.due(is, len(record), time.Now()) && turn(path, l) == nil {
		return true, nil // else it gets larger: better than to lose a record
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
	// The file is new, or its first record is.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return false, err
	}
	defer dir.Close()
	return false, dir.Sync()
}

// lockFile opens the file at path and waits until it is ours alone.
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
			// While we waited it may have become an old one.
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
			return nil, fmt.Errorf("wait for whoever writes to %s: %w", path, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// wholeLines is where the last whole line of f ends.
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
