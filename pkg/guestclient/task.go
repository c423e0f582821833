package guestclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// taskSilence is how long a stream about a task may be silent before it counts as dead.
// The guest program sends something at least every 20 seconds.
const taskSilence = 3 * time.Minute

// Task is one attempt at a task in a guest: an agent that runs detached, so that it
// outlives every process of the host, and its results.
type Task struct {
	Guest   Guest
	ID      string // 12 hexadecimal digits
	Attempt int    // counted from 1
}

// Task returns an attempt at a task.
func (g Guest) Task(id string, attempt int) Task { return Task{Guest: g, ID: id, Attempt: attempt} }

// Errors for requests that the guest refuses. They can be found with errors.Is;
// repeating the request does not help.
var (
	// ErrTruncated reports output that became shorter than what was already received.
	ErrTruncated = errors.New("the agent's output was truncated in the guest")

	// ErrNoCollection reports a collection that the guest no longer has. It can be made
	// again.
	ErrNoCollection = errors.New("the guest no longer has this collection of artifacts")
)

func (t Task) command(verb string, args ...string) string {
	return t.Guest.program(append(append([]string{"task", verb}, args...), guestproto.TaskName(t.ID, t.Attempt))...)
}

func (t Task) check() error {
	if err := guestproto.CheckTaskName(guestproto.TaskName(t.ID, t.Attempt)); err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	return nil
}

// Start starts the agent unless this attempt was already started, even if the host
// never learned of that. It may be called any number of times, and the agent runs once.
// Start returns the current status.
func (t Task) Start(ctx context.Context, what guestproto.TaskStart) (guestproto.TaskStatus, error) {
	var text bytes.Buffer
	if err := what.Encode(&text); err != nil {
		return guestproto.TaskStatus{}, fail.New(fail.Usage, "%w", err)
	}
	return t.status(ctx, &text, t.command("start"))
}

// Remove deletes everything that the guest keeps of all attempts at the task. None of
// them may be running.
func (t Task) Remove(ctx context.Context) error {
	if err := t.check(); err != nil {
		return err
	}
	// The second location holds what did not fit on a full disk.
	line := ssh.Quote("sh", "-c", `rm -rf -- "$1" "/dev/shm/agent-task-$2-"*`, "sh", t.Guest.Root+taskDir+"/"+t.ID, t.ID)
	if _, err := t.Guest.SSH.Output(ctx, line, nil, maxReply); err != nil {
		return fmt.Errorf("remove the task's files from the guest: %w", err)
	}
	return nil
}

// Status returns the attempt's current status.
func (t Task) Status(ctx context.Context) (guestproto.TaskStatus, error) {
	return t.status(ctx, nil, t.command("status"))
}

// Signal is a signal that can be sent to an agent.
type Signal string

// The signals. After Kill nothing of the agent is left, even if it started at the same
// time.
const (
	Terminate Signal = "TERM"
	Kill      Signal = "KILL"
)

// Signal sends a signal to the agent and all processes that it started. It has no
// effect on an agent that has ended; an agent that has not started yet will not run.
func (t Task) Signal(ctx context.Context, s Signal) (guestproto.TaskStatus, error) {
	return t.status(ctx, nil, t.command("signal")+" "+ssh.Quote(string(s)))
}

func (t Task) status(ctx context.Context, in io.Reader, cmd string) (guestproto.TaskStatus, error) {
	if err := t.check(); err != nil {
		return guestproto.TaskStatus{}, err
	}
	out, err := t.Guest.SSH.Output(ctx, cmd, in, maxReply)
	if err != nil {
		return guestproto.TaskStatus{}, fmt.Errorf("query the guest about the agent: %w", orUnreachable(err))
	}
	return guestproto.DecodeTaskStatus(bytes.NewReader(out))
}

// orUnreachable returns an ssh.ErrUnreachable if a signal killed the guest's side of a query, and otherwise
// err. The guest shuts down, or has no memory left: the same query may have an answer later.
func orUnreachable(err error) error {
	if exit, ran := errors.AsType[*ssh.ExitError](err); ran && exit.Code > 128 {
		return fmt.Errorf("%w: %w", ssh.ErrUnreachable, err)
	}
	return err
}

// TaskOffsets defines which part of the agent's output is already known.
type TaskOffsets struct {
	Stdout, Stderr int64
	Max            int64 // total bytes of each stream to transfer; 0 for all
}

// TaskFrame is a message from a guest about an agent: either output or a status.
type TaskFrame struct {
	Stderr bool   // which stream
	Offset int64  // position of Data in the stream
	Data   []byte // valid until the function returns
	Status *guestproto.TaskStatus
}

// Watch calls f with the agent's output, starting at the offsets in from, and with its
// status: at once, when it changes, and every 20 seconds. It returns nil after f has
// received the status of an agent that no longer runs, or does not run yet; all output
// comes before that. While f runs, the guest waits. After the connection has died,
// Watch may be called again with the offsets that f reached.
func (t Task) Watch(ctx context.Context, from TaskOffsets, f func(TaskFrame) error) error {
	stdin, hold := io.Pipe()            // when it ends, the guest's side ends, too
	defer func() { _ = hold.Close() }() // never fails, according to io
	over := false
	pace := time.NewTicker(observationPace) // a guest that sends more has to wait
	defer pace.Stop()
	cmd := t.command("watch", fmt.Sprintf("--stdout=%d", from.Stdout), fmt.Sprintf("--stderr=%d", from.Stderr), fmt.Sprintf("--max=%d", from.Max))
	err := t.frames(ctx, cmd, stdin, func(frame guestproto.Frame) error {
		switch {
		case over:
			return errors.New("the guest sent data after the end")
		case frame.Kind == guestproto.FrameStatus:
			s, err := guestproto.DecodeTaskStatus(bytes.NewReader(frame.Data))
			if err != nil {
				return err
			}
			over = s.State != guestproto.TaskRunning
			if r := s.Result; r != nil && (from.isShort(from.Stdout, r.Stdout) || from.isShort(from.Stderr, r.Stderr)) {
				return ErrTruncated
			}
			err = f(TaskFrame{Status: &s})
			if err == nil && !over {
				<-pace.C
			}
			return err
		case len(frame.Data) > 0 && (frame.Kind == guestproto.FrameStdout || frame.Kind == guestproto.FrameStderr):
			at := &from.Stdout
			if frame.Kind == guestproto.FrameStderr {
				at = &from.Stderr
			}
			piece := TaskFrame{Stderr: frame.Kind == guestproto.FrameStderr, Offset: *at, Data: frame.Data}
			*at += int64(len(frame.Data))
			if from.Max > 0 && *at > from.Max {
				return fmt.Errorf("the guest sent more than the requested %d bytes", from.Max)
			}
			return f(piece)
		}
		return unexpected(frame)
	})
	if err == nil && !over {
		err = errEnded
	}
	if err != nil {
		return fmt.Errorf("watch the agent: %w", orUnreachable(err))
	}
	return nil
}

// isShort reports whether less output has arrived than exists, within the limit.
func (o TaskOffsets) isShort(have, all int64) bool {
	if o.Max > 0 {
		all = min(all, o.Max)
	}
	return have < all
}

// unexpected returns the error for a frame that was not requested.
func unexpected(frame guestproto.Frame) error {
	if frame.Kind != guestproto.FrameFailure {
		return fmt.Errorf("unexpected frame of kind %q", rune(frame.Kind))
	}
	failure, err := guestproto.DecodeFailure(frame.Data)
	if err != nil {
		return err
	}
	switch failure.Kind {
	case guestproto.FailureTruncated:
		return ErrTruncated
	case guestproto.FailureNoCollection:
		return ErrNoCollection
	}
	return errors.New(failure.Text)
}

// Collect makes the guest collect the results of the agent's work in its checkout, and
// returns the list of them. Receive transfers the files. ask holds the commit, the
// bounds and the patterns.
//
// The names in the list are valid file names and all different, and the sizes are
// within the bounds. Everything else in the list is the guest's claim.
func (t Task) Collect(ctx context.Context, ask guestproto.TaskCollect) (guestproto.Collection, error) {
	var text bytes.Buffer
	if err := ask.Encode(&text); err != nil {
		return guestproto.Collection{}, fail.New(fail.Usage, "%w", err)
	}
	var c guestproto.Collection
	seen := map[string]bool{}
	var size, described int64
	files := 0
	err := t.frames(ctx, t.command("artifacts"), &text, func(frame guestproto.Frame) error {
		if c.ID != "" {
			return errors.New("the guest sent data after the end")
		}
		switch frame.Kind {
		case guestproto.FrameBeat:
			return nil
		case guestproto.FrameEnd:
			var err error
			c.ID, c.More, err = decodeCollection(frame.Data)
			return err
		case guestproto.FrameArtifact:
		default:
			return unexpected(frame)
		}
		a, err := guestproto.DecodeArtifact(frame.Data, t.ID)
		if err != nil {
			return err
		}
		if described += int64(len(frame.Data)); described > guestproto.MaxTaskManifest {
			return errors.New("the guest listed more files than were requested")
		}
		if a.Skipped != "" {
			if len(c.Artifacts)-files >= guestproto.MaxTaskSkipped {
				return errors.New("the guest listed more skipped files than were requested")
			}
			c.Artifacts = append(c.Artifacts, a)
			return nil
		}
		if files++; files > ask.MaxFiles || a.Size > ask.MaxBytes-size {
			return errors.New("the guest has more or larger files than were requested")
		}
		if seen[a.Name] {
			return fmt.Errorf("the guest listed %q twice", guestproto.Clean(a.Name))
		}
		seen[a.Name] = true
		size += a.Size
		c.Artifacts = append(c.Artifacts, a)
		return nil
	})
	if err == nil && c.ID == "" {
		err = errEnded
	}
	if err != nil {
		return guestproto.Collection{}, fmt.Errorf("collect the artifacts: %w", err)
	}
	return c, nil
}

func decodeCollection(text []byte) (id string, more int, err error) {
	var c guestproto.Collection
	if err := json.Unmarshal(text, &c); err != nil {
		return "", 0, errors.New("the last frame is malformed")
	}
	const most = 1 << 40
	return c.ID, min(max(c.More, 0), most), guestproto.CheckCollectionID(c.ID)
}

// frames runs a command of the guest program and calls f with each frame that it sends.
// It returns an error if f does, if nothing arrives within taskSilence, or if a frame
// is invalid.
func (t Task) frames(ctx context.Context, cmd string, in io.Reader, f func(guestproto.Frame) error) error {
	if err := t.check(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r, w := io.Pipe()
	stderr := &progress{report: func(string) {}}
	done := make(chan struct{})
	go func() {
		err := t.Guest.SSH.Run(ctx, cmd, ssh.IO{Stdin: in, Stdout: w, Stderr: stderr})
		if _, ran := errors.AsType[*ssh.ExitError](err); ran {
			stderr.end()
			err = fmt.Errorf("%w: %s", err, strings.Join(stderr.tail, "; "))
		}
		w.CloseWithError(err) // nil reads as the end
		close(done)
	}()
	// The goroutine ends before frames returns: closing the reader fails its writes,
	// and cancelling ends its command.
	defer func() {
		_ = r.Close() // never fails, according to io
		cancel(nil)
		<-done
	}()
	silence := time.AfterFunc(taskSilence, func() { cancel(errSilent) })
	defer silence.Stop()
	for frame, err := range guestproto.Frames(r) {
		if err != nil {
			return err
		}
		silence.Stop() // f's own time does not count
		if err := f(frame); err != nil {
			return err
		}
		silence.Reset(taskSilence)
	}
	return nil
}
