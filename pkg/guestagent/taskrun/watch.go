package taskrun

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

const (
	taskPace = 50 * time.Millisecond // pause that combines several changes into one frame
	taskSure = 5 * time.Second       // check even without a notice
	taskBeat = 20 * time.Second      // send a status even without a change
	burst    = 4                     // frames of one file before the other file's turn
)

// Offsets is the range of output to send.
type Offsets struct {
	Stdout, Stderr, Most int64
}

// Watch sends the agent's output, from the given offsets on, and the attempt's
// status at each change and at intervals. It ends when the agent has ended, or when
// in ends, because then the reader is gone.
func (t Attempt) Watch(ctx context.Context, from Offsets, in io.Reader, out io.Writer) error {
	if from.Stdout < 0 || from.Stderr < 0 || from.Most < 0 {
		return fail.New(fail.Usage, "task watch: offsets must not be negative")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// This goroutine is not awaited: its read ends only when the sender closes in.
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	stirred, stop, err := t.notice()
	if err != nil {
		return err
	}
	defer stop()
	files := []*tail{
		{kind: guestproto.FrameStdout, path: t.path(taskStdout), at: from.Stdout, most: from.Most},
		{kind: guestproto.FrameStderr, path: t.path(taskStderr), at: from.Stderr, most: from.Most},
	}
	var sent guestproto.TaskState
	var sentAt time.Time
	for {
		// Read the state before the files, so that the files of an ended agent are
		// complete.
		state, _ := t.state()
		more := false
		for _, f := range files {
			again, err := f.send(out)
			if errors.Is(err, errTruncated) {
				return sendFailure(out, guestproto.FailureTruncated, err)
			}
			if err != nil {
				return err
			}
			more = more || again
		}
		over := state != guestproto.TaskRunning && !more
		if over || state != sent && state == guestproto.TaskRunning || time.Since(sentAt) >= taskBeat {
			s := t.Status()
			if s.State != state { // the state has changed since, and so have the files: send them before the end
				continue
			}
			if err := sendJSON(out, guestproto.FrameStatus, s.Encode); err != nil || over {
				return err
			}
			sent, sentAt = s.State, time.Now()
		}
		if more {
			if ctx.Err() != nil {
				return nil
			}
			continue
		}
		select {
		case <-stirred:
			select { // collect more output first
			case <-time.After(taskPace):
			case <-ctx.Done():
				return nil
			}
		case <-time.After(taskSure):
		case <-ctx.Done():
			return nil
		}
	}
}

// errTruncated reports that a file is shorter than the part already sent.
var errTruncated = errors.New("the agent's output was truncated")

// tail is a growing file.
type tail struct {
	kind guestproto.FrameKind
	path string
	at   int64 // bytes sent so far
	most int64 // bytes to send, 0 for all
	buf  []byte
}

// send sends some of the new content and reports whether there is more.
func (f *tail) send(out io.Writer) (more bool, err error) {
	file, err := os.OpenFile(f.path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) && f.at == 0 {
		return false, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		return false, errTruncated
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, errors.New("the agent's output is no longer in a regular file")
	}
	end := info.Size()
	if end < f.at {
		return false, errTruncated
	}
	if f.most > 0 {
		end = min(end, f.most)
	}
	if f.buf == nil {
		f.buf = make([]byte, guestproto.MaxFrame)
	}
	for range burst {
		if f.at >= end {
			return false, nil
		}
		n, err := file.ReadAt(f.buf[:min(int64(len(f.buf)), end-f.at)], f.at)
		if n == 0 && errors.Is(err, io.EOF) {
			return false, errTruncated
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return false, err
		}
		if err := guestproto.WriteFrame(out, f.kind, f.buf[:n]); err != nil {
			return false, err
		}
		f.at += int64(n)
	}
	return f.at < end, nil
}

// sendJSON sends the output of a message's Encode as a frame.
func sendJSON(out io.Writer, kind guestproto.FrameKind, encode func(io.Writer) error) error {
	var text bytes.Buffer
	if err := encode(&text); err != nil {
		return err
	}
	return guestproto.WriteFrame(out, kind, text.Bytes())
}

func sendFailure(out io.Writer, kind string, why error) error {
	return sendJSON(out, guestproto.FrameFailure, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(guestproto.Failure{Kind: kind, Text: fmt.Sprintf("%.1000s", sys.OneLine(why))})
	})
}
