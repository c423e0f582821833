package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// File is a file of a task that the cluster stores: an artifact, or one of its agent's outputs.
type File struct {
	Artifact string         `json:"artifact,omitempty"` // name; "" for an output
	Stream   string         `json:"stream,omitempty"`   // stdout or stderr
	Parts    []cluster.Part `json:"parts"`
}

// maxIndex limits the list of a task's files, in bytes.
const maxIndex = 16 << 20

// Keep stores the files of a task of this host that has ended, so that all hosts have them, and then
// settles the task. It may be repeated.
func (f *Tasks) Keep(ctx context.Context, id string) error {
	c, row, evs, err := f.Store.Unshipped(ctx, id, chunk)
	if err != nil || c.Fence == 0 || c.Settled || len(evs) > 0 || !ended(task.Phase(row.Phase)) {
		return err
	}
	s, known, err := f.own(ctx, c, row)
	if errors.Is(err, errNotOurs) {
		return nil
	}
	if err != nil || !known {
		return err
	}
	if len(s.Files) == 0 {
		s.Files, err = f.keep(ctx, id)
		if errors.Is(err, cluster.ErrFull) {
			f.Log.WarnContext(ctx, "the logs and artifacts of a task stay on this host only", "task", id, "error", err)
			return ignoreStale(f.Store.Settle(ctx, c))
		}
		if err != nil {
			return err
		}
	}
	if len(s.Files) > 0 {
		seq, err := f.write(ctx, cluster.Stored, change{State: s})
		if errors.Is(err, cluster.ErrConflict) {
			return nil // a request: the next call continues after it
		}
		if err != nil {
			return err
		}
		if err := f.Store.Ship(ctx, c, seq, c.Shipped); err != nil {
			return ignoreStale(err)
		}
		c.Revision = seq
	}
	return ignoreStale(f.Store.Settle(ctx, c))
}

// keep stores the files of a task, and returns the parts of their list.
func (f *Tasks) keep(ctx context.Context, id string) ([]cluster.Part, error) {
	outputs, err := f.Outputs(ctx, id)
	if err != nil || len(outputs) == 0 {
		return nil, err
	}
	var list []File
	for _, o := range outputs {
		is := File{Artifact: o.Artifact, Stream: o.Stream}
		r, err := o.Open()
		if errors.Is(err, fs.ErrNotExist) { // it was removed meanwhile
			continue
		}
		if err == nil {
			is.Parts, err = f.Files.Put(ctx, id, r)
			err = errors.Join(err, r.Close())
		}
		if err != nil {
			return nil, err
		}
		list = append(list, is)
	}
	text, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	if len(text) > maxIndex {
		return nil, fmt.Errorf("the list of files has %d bytes: %w", len(text), cluster.ErrFull)
	}
	return f.Files.Put(ctx, id, bytes.NewReader(text))
}

// keepers is how many tasks' files are sent at once.
const keepers = 2

// keep stores the files of the tasks of this host that have ended.
func (h *Host) keep(ctx context.Context) error {
	w := h.Tasks.Store.Watch()
	defer w.Close()
	for ctx.Err() == nil {
		changed := w.Changed()
		claims, err := h.Tasks.Store.Unsettled(ctx)
		if err != nil {
			return err
		}
		var all errgroup.Group
		all.SetLimit(keepers)
		errs := make([]error, len(claims)) // of all, because one must not hold up the others
		for i, c := range claims {
			all.Go(func() error { errs[i] = h.Tasks.Keep(ctx, c.Task); return nil })
		}
		_ = all.Wait() // errs has them
		if err := errors.Join(errs...); err != nil {
			return err
		}
		pause(ctx, retry)
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return nil
}

// Open opens a file of a task of another host, which the cluster stores after the task's end. ctx
// limits all reading.
func (p *Part) Open(ctx context.Context, t task.Task, artifact, stream string) (*io.SectionReader, error) {
	if !p.State.Role.Allows(cluster.Member) {
		return nil, fail.New(fail.Policy, "this host is a %s, which may not read the files of other hosts' tasks", p.State.Role).WithHint("agent-sessionizer cluster show")
	}
	text, err := p.sessions().Store.TaskFiles(ctx, t.ID)
	if err != nil {
		return nil, err
	}
	var index []cluster.Part
	if text != "" {
		if err := json.Unmarshal([]byte(text), &index); err != nil {
			return nil, fmt.Errorf("read the list of files of task %s: %w", t.ID, err)
		}
	}
	if len(index) == 0 {
		return nil, fail.New(fail.Conflict, "the logs and artifacts of task %s are on host %s; the cluster stores them after the task's end", t.ID, t.Host).
			WithHint("agent-sessionizer --host %s task show %s", t.Host, t.ID)
	}
	n, err := p.Node(ctx)
	if err != nil {
		return nil, err
	}
	r, err := n.Files.Open(ctx, t.ID, index)
	if err != nil || r.Size() > maxIndex {
		return nil, errors.Join(fail.New(fail.Failure, "the list of files of task %s is damaged", t.ID), err)
	}
	list, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	var files []File
	if err := json.Unmarshal(list, &files); err != nil {
		return nil, fmt.Errorf("read the list of files of task %s: %w", t.ID, err)
	}
	for _, is := range files {
		if is.Artifact == artifact && is.Stream == stream {
			return n.Files.Open(ctx, t.ID, is.Parts)
		}
	}
	if artifact == "" { // there was no output
		return io.NewSectionReader(bytes.NewReader(nil), 0, 0), nil
	}
	return nil, fail.New(fail.NotFound, "task %s has no artifact %q", t.ID, artifact).WithHint("agent-sessionizer task artifacts %s", t.ID)
}

// filesOf returns the list of a task's files as a store has it.
func filesOf(parts []cluster.Part) string {
	if len(parts) == 0 {
		return ""
	}
	text, _ := json.Marshal(parts) // strings and numbers only
	return string(text)
}

// outputs returns the files of a task of this host.
func (p *Part) outputs(ctx context.Context, id string) ([]task.Output, error) {
	t, err := p.Tasks.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	return p.Tasks.Outputs(t)
}
