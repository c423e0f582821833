package guest

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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// taskSilence is when a stream about a task counts as dead. The guest program
// sends something every 20 seconds at least.
const taskSilence = 3 * time.Minute

// Task is one attempt at a task in a guest: an agent that runs detached, so that
// it outlives every process of the host, and what it leaves.
type Task struct {
	Guest   Guest
	ID      string // 12 hexadecimal digits
	Attempt int    // counted from 1
}

// Task is an attempt at a task.
func (g Guest) Task(id string, attempt int) Task { return Task{Guest: g, ID: id, Attempt: attempt} }

// What a guest may say instead of doing what it was asked. Each is found with
// errors.Is; to ask again does not help.
var (
	// ErrTruncated is output that became shorter than what has come of it.
	ErrTruncated = errors.New("the agent's output was cut in the guest")

	// ErrNoCollection is a collection that the guest does not have any more; it
	// can be made anew.
	ErrNoCollection = errors.New("the guest has no such collection of artifacts any more")
)

func (t Task) command(verb string, args ...string) string {
	return t.Guest.program(append(append([]string{"task", verb}, args...), wire.TaskName(t.ID, t.Attempt))...)
}

func (t Task) check() error {
	if err := wire.CheckTaskName(wire.TaskName(t.ID, t.Attempt)); err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	return nil
}

// Start has the agent run, unless this attempt began before, whether or not
// somebody heard of that: it may be called as often as one likes, and the agent
// runs once. What comes back is how it stands then.
func (t Task) Start(ctx context.Context, what wire.TaskStart) (wire.TaskStatus, error) {
	var text bytes.Buffer
	if err := what.Encode(&text); err != nil {
		return wire.TaskStatus{}, fail.New(fail.Usage, "%w", err)
	}
	return t.status(ctx, &text, t.command("start"))
}

// Remove takes away what the guest keeps of all attempts at the task, none of which
// may run.
func (t Task) Remove(ctx context.Context) error {
	if err := t.check(); err != nil {
		return err
	}
	// The second place is for what did not fit on a full disk.
	line := ssh.Quote("sh", "-c", `rm -rf -- "$1" "/dev/shm/agent-task-$2-"*`, "sh", t.Guest.Root+taskDir+"/"+t.ID, t.ID)
	if _, err := t.Guest.SSH.Output(ctx, line, nil, maxReply); err != nil {
		return fmt.Errorf("remove what the task left in the guest: %w", err)
	}
	return nil
}

// Status says how it stands.
func (t Task) Status(ctx context.Context) (wire.TaskStatus, error) {
	return t.status(ctx, nil, t.command("status"))
}

// Signal is what can be sent to an agent.
type Signal string

// The signals. After Kill nothing of the agent is left, also of one that began
// at the same time.
const (
	Terminate Signal = "TERM"
	Kill      Signal = "KILL"
)

// Signal sends one to the agent and all that it started. To one that has ended
// it does nothing; one that is not started yet will not run.
func (t Task) Signal(ctx context.Context, s Signal) (wire.TaskStatus, error) {
	return t.status(ctx, nil, t.command("signal")+" "+ssh.Quote(string(s)))
}

func (t Task) status(ctx context.Context, in io.Reader, cmd string) (wire.TaskStatus, error) {
	if err := t.check(); err != nil {
		return wire.TaskStatus{}, err
	}
	out, err := t.Guest.SSH.Output(ctx, cmd, in, maxReply)
	if err != nil {
		return wire.TaskStatus{}, fmt.Errorf("ask the guest about the agent: %w", err)
	}
	return wire.DecodeTaskStatus(bytes.NewReader(out))
}

// TaskOffsets say which of the agent's output is known already.
type TaskOffsets struct {
	Stdout, Stderr int64
	Max            int64 // bytes of each that are wanted in all; 0 for all there will be
}

// TaskFrame is a piece of what a guest says of an agent: either output, or how
// it stands.
type TaskFrame struct {
	Stderr bool   // which output
	Offset int64  // where Data stands in it
	Data   []byte // until the function returns
	Status *wire.TaskStatus
}

// Watch calls f with the agent's output, from offsets on, and with how it stands:
// at once, when it changes, and every 20 seconds. It returns nil after f had the
// status of an agent that does not run (any more), before which all its output
// came. Slow is f, and the guest waits. When the connection dies, Watch may be
// called again with the offsets that f came to.
func (t Task) Watch(ctx context.Context, from TaskOffsets, f func(TaskFrame) error) error {
	stdin, hold := io.Pipe()            // at its end the guest's side ends, too
	defer func() { _ = hold.Close() }() // never fails, says io
	over := false
	pace := time.NewTicker(glancePace) // a guest that says more waits for us
	defer pace.Stop()
	cmd := t.command("watch", fmt.Sprintf("--stdout=%d", from.Stdout), fmt.Sprintf("--stderr=%d", from.Stderr), fmt.Sprintf("--max=%d", from.Max))
	err := t.frames(ctx, cmd, stdin, func(frame wire.Frame) error {
		switch {
		case over:
			return errors.New("it goes on after the end")
		case frame.Kind == wire.FrameStatus:
			s, err := wire.DecodeTaskStatus(bytes.NewReader(frame.Data))
			if err != nil {
				return err
			}
			over = s.State != wire.TaskRunning
			if r := s.Result; r != nil && (from.short(from.Stdout, r.Stdout) || from.short(from.Stderr, r.Stderr)) {
				return ErrTruncated
			}
			err = f(TaskFrame{Status: &s})
			if err == nil && !over {
				<-pace.C
			}
			return err
		case len(frame.Data) > 0 && (frame.Kind == wire.FrameStdout || frame.Kind == wire.FrameStderr):
			at := &from.Stdout
			if frame.Kind == wire.FrameStderr {
				at = &from.Stderr
			}
			piece := TaskFrame{Stderr: frame.Kind == wire.FrameStderr, Offset: *at, Data: frame.Data}
			*at += int64(len(frame.Data))
			if from.Max > 0 && *at > from.Max {
				return fmt.Errorf("it sends more than the %d bytes that are wanted", from.Max)
			}
			return f(piece)
		}
		return unexpected(frame)
	})
	if err == nil && !over {
		err = errEnded
	}
	if err != nil {
		return fmt.Errorf("watch the agent: %w", err)
	}
	return nil
}

// short reports whether less has come than there was, as far as it is wanted.
func (o TaskOffsets) short(have, all int64) bool {
	if o.Max > 0 {
		all = min(all, o.Max)
	}
	return have < all
}

// unexpected is what a frame means that was not asked for.
func unexpected(frame wire.Frame) error {
	if frame.Kind != wire.FrameFailure {
		return fmt.Errorf("a frame of kind %q, out of place", rune(frame.Kind))
	}
	failure, err := wire.DecodeFailure(frame.Data)
	if err != nil {
		return err
	}
	switch failure.Kind {
	case wire.FailureTruncated:
		return ErrTruncated
	case wire.FailureNoCollection:
		return ErrNoCollection
	}
	return errors.New(failure.Text)
}

// Collect has the guest make a collection of what the agent did to its checkout
// and says what is in it; Receive brings it home. The commit, the bounds and the
// patterns are in ask. Its names can be those of files, they are all different,
// and they are within the bounds; else all that is said is a guest's word.
func (t Task) Collect(ctx context.Context, ask wire.TaskCollect) (wire.Collection, error) {
	var text bytes.Buffer
	if err := ask.Encode(&text); err != nil {
		return wire.Collection{}, fail.New(fail.Usage, "%w", err)
	}
	var c wire.Collection
	seen := map[string]bool{}
	var size, described int64
	files := 0
	err := t.frames(ctx, t.command("artifacts"), &text, func(frame wire.Frame) error {
		if c.ID != "" {
			return errors.New("it goes on after the end")
		}
		switch frame.Kind {
		case wire.FrameBeat:
			return nil
		case wire.FrameEnd:
			var err error
			c.ID, c.More, err = decodeCollection(frame.Data)
			return err
		case wire.FrameArtifact:
		default:
			return unexpected(frame)
		}
		a, err := wire.DecodeArtifact(frame.Data, t.ID)
		if err != nil {
			return err
		}
		if described += int64(len(frame.Data)); described > wire.MaxTaskManifest {
			return errors.New("it describes more files than were asked for")
		}
		if a.Skipped != "" {
			if len(c.Artifacts)-files >= wire.MaxTaskSkipped {
				return errors.New("it tells of more files that it skips than were asked for")
			}
			c.Artifacts = append(c.Artifacts, a)
			return nil
		}
		if files++; files > ask.MaxFiles || a.Size > ask.MaxBytes-size {
			return errors.New("it has more files, or larger ones, than were asked for")
		}
		if seen[a.Name] {
			return fmt.Errorf("it has %q twice", wire.Clean(a.Name))
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
		return wire.Collection{}, fmt.Errorf("collect the artifacts: %w", err)
	}
	return c, nil
}

func decodeCollection(text []byte) (id string, more int, err error) {
	var c wire.Collection
	if err := json.Unmarshal(text, &c); err != nil {
		return "", 0, errors.New("the end is not understood")
	}
	const most = 1 << 40
	return c.ID, min(max(c.More, 0), most), wire.CheckCollectionID(c.ID)
}

// frames runs a command of the guest program and calls f with what it sends, one
// frame at a time. It ends with an error when f does, when nothing comes for a
// long time, or when what comes is nonsense.
func (t Task) frames(ctx context.Context, cmd string, in io.Reader, f func(wire.Frame) error) error {
	if err := t.check(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r, w := io.Pipe()
	said := &progress{report: func(string) {}}
	done := make(chan struct{})
	go func() {
		err := t.Guest.SSH.Run(ctx, cmd, ssh.IO{Stdin: in, Stdout: w, Stderr: said})
		if _, ran := errors.AsType[*ssh.ExitError](err); ran {
			said.end()
			err = fmt.Errorf("%w: %s", err, strings.Join(said.tail, "; "))
		}
		w.CloseWithError(err) // nil reads as the end
		close(done)
	}()
	// The goroutine is over when frames returns: closing the reader fails its
	// writes, cancelling ends its command.
	defer func() {
		_ = r.Close() // never fails, says io
		cancel(nil)
		<-done
	}()
	silence := time.AfterFunc(taskSilence, func() { cancel(errSilent) })
	defer silence.Stop()
	for frame, err := range wire.Frames(r) {
		if err != nil {
			return err
		}
		silence.Stop() // what takes long now is f
		if err := f(frame); err != nil {
			return err
		}
		silence.Reset(taskSilence)
	}
	return nil
}
