package netguard

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const followEvery = 250 * time.Millisecond

// LogOptions selects entries of the query log: with since, the first entries after
// that number; without it, the last ones.
type LogOptions struct {
	Since  int64 // -1 if not set
	Limit  int   // 0 for all
	Follow bool
}

func PrintLog(ctx context.Context, g sys.Guest, out io.Writer, o LogOptions) error {
	w := bufio.NewWriter(out)
	var last int64
	var lines [][]byte
	older, newer := logFiles(g.Path(stateDir))
	for _, path := range []string{older, newer} {
		err := scanLog(path, func(q guestproto.Query, line []byte) bool {
			last = max(last, q.Seq)
			if q.Seq <= o.Since {
				return true
			}
			if o.Since >= 0 && o.Limit > 0 && len(lines) == o.Limit {
				return false
			}
			lines = append(lines, slices.Clone(line))
			if o.Limit > 0 && len(lines) > o.Limit {
				lines = lines[1:]
			}
			return true
		})
		if err != nil {
			return err
		}
	}
	for _, line := range lines {
		if _, err := w.Write(append(line, '\n')); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil || !o.Follow {
		return err
	}
	return follow(ctx, out, newer, max(last, o.Since))
}

// follow prints new entries until ctx ends. It reads the open file to its end
// before it opens the next one, so that a rotation loses no entries.
func follow(ctx context.Context, out io.Writer, path string, seen int64) error {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var file *os.File
	var offset int64
	defer func() {
		if file != nil {
			_ = file.Close() // opened for reading only
		}
	}()
	for {
		if file == nil {
			f, err := os.Open(path)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if err == nil {
				file, offset = f, 0
			}
		}
		if file != nil {
			turned := !sameFile(file, path)
			var err error
			if offset, err = printFrom(file, offset, out, &seen); err != nil {
				return err
			}
			if turned {
				if err := file.Close(); err != nil {
					return err
				}
				file = nil
				continue
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func sameFile(f *os.File, path string) bool {
	a, errA := f.Stat()
	b, errB := os.Stat(path)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

// printFrom prints the complete lines after offset and returns the offset of their
// end.
func printFrom(f *os.File, offset int64, out io.Writer, seen *int64) (int64, error) {
	r := bufio.NewReader(io.NewSectionReader(f, offset, logBytes*2))
	for {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return offset, nil
		}
		if err != nil {
			return offset, err
		}
		offset += int64(len(line))
		for q, err := range guestproto.Queries(bytes.NewReader(line)) {
			if err != nil || q.Seq <= *seen {
				break
			}
			*seen = q.Seq
			if _, err := out.Write(line); err != nil {
				return offset, err
			}
		}
	}
}
