package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// latest decodes the latest entry of a task. If that is damaged, the last one that is not counts: the next
// entry then follows the damaged one, so that a hostile host cannot stop a task with it.
func (f *Tasks) latest(ctx context.Context, last cluster.Entry) (c change, err error) {
	if c, err = f.decode(ctx, last); err == nil || !errors.Is(err, cluster.ErrDamaged) {
		return c, err
	}
	f.Log.ErrorContext(ctx, "ignored an entry of the cluster's log", "error", err)
	for e, rerr := range f.Tasks.Entries(ctx, last.Task, 0) {
		if rerr != nil {
			return c, rerr
		}
		if e.Seq > last.Seq {
			break
		}
		switch good, derr := f.decode(ctx, e); {
		case derr == nil:
			c, err = good, nil
		case !errors.Is(derr, cluster.ErrDamaged):
			return c, derr
		}
	}
	c.Seq = last.Seq
	return c, err
}

// decode reads the change in an entry. The error is ErrDamaged, wrapped, if it never can be read, and
// errIncomplete alone if that is not certain yet.
func (f *Tasks) decode(ctx context.Context, e cluster.Entry) (c change, err error) {
	if err = e.Err; err == nil {
		c, err = f.parse(ctx, e.Task, e.Data)
	}
	if errors.Is(err, errIncomplete) && f.incomplete.overdue(e.Seq, time.Now()) {
		err = fmt.Errorf("%w: %w", cluster.ErrDamaged, err)
	}
	if err == nil && c.Row.ID != e.Task {
		err = fmt.Errorf("it is about task %q: %w", c.Row.ID, cluster.ErrDamaged)
	}
	if err == nil && e.Kind == cluster.Claimed && task.Phase(c.Row.Phase) != task.Pending {
		err = fmt.Errorf("it claims a task that is %s: %w", c.Row.Phase, cluster.ErrDamaged)
	}
	if err == nil { // each host of the cluster can write here
		if cerr := task.CheckShared(c.Row); cerr != nil {
			err = fmt.Errorf("%w: %w", cluster.ErrDamaged, cerr)
		}
	}
	if err != nil {
		return c, fmt.Errorf("read entry %d of task %s in the cluster's log, by host %s: %w", e.Seq, e.Task, e.Host, err)
	}
	c.Seq = e.Seq
	if e.Kind == cluster.Claimed {
		c.Fence = e.Seq
	}
	return c, nil
}

// parse reads a change, and what it has among the large entries.
func (f *Tasks) parse(ctx context.Context, task string, text []byte) (c change, err error) {
	for deep := 0; ; deep++ {
		c = change{}
		if err := json.Unmarshal(text, &c); err != nil {
			return c, fmt.Errorf("%w: %w", cluster.ErrDamaged, err)
		}
		if c.Large == nil || deep > 0 {
			break
		}
		if text, err = f.read(ctx, task, c.Large); err != nil {
			return c, err
		}
	}
	if c.Manifest == nil {
		return c, nil
	}
	if c.Row.Manifest, err = f.readManifest(ctx, task, c.Manifest); err != nil {
		return c, err
	}
	c.Manifest = nil
	return c, nil
}

// readManifest reads a large manifest, unless it is the one that was read last.
func (f *Tasks) readManifest(ctx context.Context, task string, parts []cluster.Part) ([]byte, error) {
	f.large.mu.Lock()
	was, text := f.large.parts, f.large.text
	f.large.mu.Unlock()
	if slices.Equal(parts, was) {
		return slices.Clone(text), nil
	}
	text, err := f.read(ctx, task, parts)
	if err != nil {
		return nil, err
	}
	f.large.mu.Lock()
	defer f.large.mu.Unlock()
	f.large.parts, f.large.text = parts, text
	return slices.Clone(text), nil
}

// maxLarge limits a large entry, in bytes. A manifest has at most 1 MiB, and several times that as JSON.
const maxLarge = 8 << 20

// read reads a large entry. The error is errIncomplete, wrapped, if parts of it are not found.
func (f *Tasks) read(ctx context.Context, task string, parts []cluster.Part) ([]byte, error) {
	r, err := f.Entries.Open(ctx, task, parts)
	if err != nil || r.Size() > maxLarge {
		return nil, errors.Join(fmt.Errorf("a large entry: %w", cluster.ErrDamaged), err)
	}
	text, err := io.ReadAll(r)
	if fail.CodeOf(err) == fail.NotFound {
		err = fmt.Errorf("%w: %w", errIncomplete, err)
	}
	return text, err
}

// append writes a change after the entry that c continues.
func (f *Tasks) append(ctx context.Context, kind cluster.Kind, c change) (uint64, error) {
	for i := range c.Events {
		c.Newest++
		ev := &c.Events[i]
		ev.Subject, ev.Seq = c.Row.ID, c.Newest
		if ev.At.IsZero() {
			ev.At = time.Now().UTC().Truncate(time.Millisecond)
		}
		if len(ev.Data) == 0 {
			ev.Data = json.RawMessage("{}")
		}
	}
	return f.write(ctx, kind, c)
}

// write writes a change. What is too large for an entry is stored before.
func (f *Tasks) write(ctx context.Context, kind cluster.Kind, c change) (uint64, error) {
	var err error
	if len(c.Row.Manifest) >= largeManifest {
		if c.Manifest, err = f.Entries.Put(ctx, c.Row.ID, bytes.NewReader(c.Row.Manifest)); err != nil {
			return 0, err
		}
		c.Row.Manifest = nil
	}
	data, err := json.Marshal(c)
	if err != nil {
		return 0, err
	}
	if len(data) >= largeChange {
		parts, err := f.Entries.Put(ctx, c.Row.ID, bytes.NewReader(data))
		if err != nil {
			return 0, err
		}
		if data, err = json.Marshal(change{Large: parts}); err != nil {
			return 0, err
		}
	}
	return f.Tasks.Append(ctx, c.Row.ID, cluster.Entry{Kind: kind, Fence: c.Fence, Data: data}, c.Seq)
}
