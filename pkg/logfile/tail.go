package logfile

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"time"
)

const (
	tailPoll  = 200 * time.Millisecond
	tailChunk = 32 << 10
)

// Tail reads a growing file from offset on. Once over is closed the file is
// complete, and Tail returns at its end.
func Tail(ctx context.Context, path string, offset int64, over <-chan struct{}, f func(offset int64, data []byte) error) error {
	var file *os.File
	defer func() {
		if file != nil {
			_ = file.Close() // opened for reading only
		}
	}()
	buf := make([]byte, tailChunk)
	tick := time.NewTicker(tailPoll)
	defer tick.Stop()
	for {
		last := false
		select {
		case <-over: // checked before the read, which then sees everything written earlier
			last = true
		default:
		}
		if file == nil {
			var err error
			if file, err = os.Open(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if err != nil {
				file = nil
			}
		}
		n := 0
		if file != nil {
			var err error
			if n, err = file.ReadAt(buf, offset); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
		}
		if n > 0 {
			if err := f(offset, bytes.Clone(buf[:n])); err != nil {
				return err
			}
			offset += int64(n)
			continue
		}
		if last {
			return nil
		}
		select {
		case <-tick.C:
		case <-over:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
