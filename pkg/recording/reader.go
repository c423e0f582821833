package recording

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	maxHeader    = 4 << 10
	maxEventLine = 8 * maxEvent // bytes; each byte of output takes up to six
)

// header reads the part's first line.
func (p part) header() (h header, err error) {
	f, err := os.Open(p.cast())
	if err != nil {
		return h, err
	}
	defer f.Close()
	return readHeader(bufio.NewReaderSize(f, maxHeader))
}

func readHeader(r *bufio.Reader) (h header, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return h, err
	}
	if err := json.Unmarshal(line, &h); err != nil {
		return h, err
	}
	if h.Version != 2 || h.Width < 1 || h.Width > maxScreen || h.Height < 1 || h.Height > maxScreen {
		return h, errors.New("not a recording")
	}
	h.Title = termtext.Line(h.Title)
	return h, nil
}

// Events yields what happened on the terminal, in order. Parts that are removed meanwhile are left out.
func (r Recording) Events(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		width, height, last := 0, 0, time.Duration(0)
		for _, p := range r.parts {
			h, events, closeFile, err := p.open()
			if err != nil {
				continue
			}
			base := time.Unix(h.Timestamp, 0).Sub(r.Began)
			more := true
			if width != 0 && (width != h.Width || height != h.Height) {
				more = yield(Event{max(base, last), Resize, fmt.Sprintf("%dx%d", h.Width, h.Height)}, nil)
			}
			width, height = h.Width, h.Height
			for more && events.Scan() {
				e, ok := parseEvent(events.Bytes())
				if !ok { // a killed process did not complete it
					continue
				}
				if err := ctx.Err(); err != nil {
					yield(e, context.Cause(ctx))
					more = false
					break
				}
				if e.Kind == Resize {
					_, _ = fmt.Sscanf(e.Data, "%dx%d", &width, &height)
				}
				e.At = max(e.At+base, last) // a clock may have been set back
				last = e.At
				more = yield(e, nil)
			}
			closeFile()
			if !more {
				return
			}
		}
	}
}

// open opens a part at its first event.
func (p part) open() (h header, events *bufio.Scanner, closeFile func(), err error) {
	f, err := os.Open(p.cast())
	if err != nil {
		return h, nil, nil, err
	}
	r := bufio.NewReaderSize(f, 64<<10)
	if h, err = readHeader(r); err != nil {
		return h, nil, nil, errors.Join(err, f.Close())
	}
	events = bufio.NewScanner(r)
	events.Buffer(make([]byte, 64<<10), maxEventLine)
	return h, events, func() { _ = f.Close() }, nil
}

// WriteCast writes the whole recording as one asciicast v2 file.
func (r Recording) WriteCast(ctx context.Context, w io.Writer) error {
	if len(r.parts) == 0 {
		return nil
	}
	h, err := r.parts[0].header()
	if errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.Conflict, "the start of the recording was removed meanwhile").WithHint("agent-sessionizer recordings list")
	}
	if err != nil {
		return fail.New(fail.Host, "read recording: %w", err)
	}
	h.Title = r.Title
	line, err := json.Marshal(h)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(w, 64<<10)
	if _, err := out.Write(append(line, '\n')); err != nil {
		return err
	}
	for e, err := range r.Events(ctx) {
		if err != nil {
			return err
		}
		if _, err := out.Write(appendEvent(line[:0], e)); err != nil {
			return err
		}
	}
	return out.Flush()
}

// WriteText writes the text of the recording.
func (r Recording) WriteText(ctx context.Context, w io.Writer) error {
	out := bufio.NewWriterSize(w, 64<<10)
	for _, p := range r.parts {
		if err := p.copyText(ctx, out); err != nil {
			return err
		}
	}
	return out.Flush()
}

func (p part) copyText(ctx context.Context, out *bufio.Writer) error {
	f, err := os.Open(p.text())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fail.New(fail.Host, "read recording: %w", err)
	}
	defer f.Close()
	all := bufio.NewScanner(f)
	all.Buffer(make([]byte, 64<<10), maxTextLine)
	for all.Scan() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		_, text, ok := parseTextLine(all.Bytes())
		if !ok {
			continue
		}
		if _, err := out.Write(append(text, '\n')); err != nil {
			return err
		}
	}
	return nil
}

// ReadCast yields the events of an asciicast v2 file, such as WriteCast writes.
func ReadCast(r io.Reader) (width, height int, events iter.Seq2[Event, error], err error) {
	in := bufio.NewReaderSize(r, 64<<10)
	h, err := readHeader(in)
	if err != nil {
		return 0, 0, nil, fail.New(fail.Failure, "read recording: %w", err)
	}
	return h.Width, h.Height, func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(in)
		lines.Buffer(make([]byte, 64<<10), maxEventLine)
		for lines.Scan() {
			if e, ok := parseEvent(lines.Bytes()); ok && !yield(e, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Event{}, fail.New(fail.Failure, "read recording: %w", err))
		}
	}, nil
}
