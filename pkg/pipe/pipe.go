// Package pipe moves bytes between streams: at most a given number, or in both directions.
package pipe

import (
	"bytes"
	"errors"
	"io"
	"sync"
)

// ErrFull is the error of a write beyond a Writer's limit.
var ErrFull = errors.New("more output than expected")

// Writer passes on a bounded number of bytes. A write that exceeds the rest fails, and
// nothing of it passes. With Cut its beginning passes, and it succeeds, so that the process
// that writes can continue.
type Writer struct {
	W    io.Writer
	Left int64 // bytes that may still pass
	Cut  bool
	Full func() // called for each write that exceeds the rest; may be nil

	Passed int64 // bytes
	Over   bool  // a write has exceeded the rest
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	keep := p
	if int64(len(p)) > w.Left {
		w.Over = true
		if w.Full != nil {
			w.Full()
		}
		if !w.Cut {
			return 0, ErrFull
		}
		keep = p[:w.Left]
	}
	n, err := w.W.Write(keep)
	w.Passed += int64(n)
	w.Left -= int64(n)
	if err != nil {
		return n, err
	}
	return len(p), nil
}

// Buffer keeps the first Limit bytes that are written to it. It may be read while something
// still writes.
type Buffer struct {
	Limit int
	Full  func() // called for each write that exceeds the limit; may be nil

	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer. It never fails.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	keep := min(len(p), b.Limit-b.buf.Len())
	b.buf.Write(p[:keep])
	if keep < len(p) && b.Full != nil {
		b.Full()
	}
	return len(p), nil
}

// Bytes returns a copy of what was kept.
func (b *Buffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.buf.Bytes())
}

// String returns what was kept.
func (b *Buffer) String() string { return string(b.Bytes()) }

// Copy copies from one stream to the other until it ends or fails, and passes its end on if
// the other can be closed for writing alone.
func Copy(to io.Writer, from io.Reader) error {
	_, err := io.Copy(to, from)
	return errors.Join(err, CloseWrite(to))
}

// CloseWrite closes w for writing, if it can be closed for that alone.
func CloseWrite(w io.Writer) error {
	if h, ok := w.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return nil
}
