// Package fleet runs tasks on the hosts of a cluster.
//
// The log of the cluster has the truth about a task that waits, and about who runs it. While a host
// runs it, that host's store has the truth, and the host sends each event to the log. What a
// reader is shown comes from the log alone, so it never changes again, whatever happens to hosts.
package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// EventHost is the kind of the event that a host took a task. Its data is a Taken.
const EventHost = "host"

// Taken names the host that runs a task from then on.
type Taken struct {
	Host string `json:"host"`
}

// State is a task as the latest entry of its log has it.
type State struct {
	Row         store.Task   `json:"row"`
	Host        string       `json:"host,omitempty"` // that runs it; "" while it waits
	Incarnation string       `json:"incarnation,omitempty"`
	Fence       uint64       `json:"fence,omitempty"` // of the host's claim
	Newest      int64        `json:"newest"`          // sequence of the latest event
	Need        cluster.Need `json:"need,omitzero"`
	Band        cluster.Band `json:"band,omitempty"`
	Rerun       task.Rerun   `json:"rerun,omitempty"`

	Seq uint64 `json:"-"` // of the entry
}

// change is the data of an entry: the state from then on, and what led to it.
type change struct {
	State
	Events []store.Event `json:"events,omitempty"`
	Text   []byte        `json:"text,omitempty"` // of the first entry: the manifest as it was submitted
}

// Tasks are the tasks of a cluster, as one host sees and runs them.
type Tasks struct {
	Name        string // of this host
	Incarnation func() string
	Tasks       *cluster.TaskLog
	Queue       *cluster.Queue
	Store       *store.Store
	Log         *slog.Logger

	// Want records in this host's store what users want of a task.
	Want  func(ctx context.Context, task string, desired task.DesiredPhase) error
	Nudge func(host, task string) // tells a host that the log of its task has a request; may be lost
}

// Get returns a task's state.
func (f *Tasks) Get(ctx context.Context, id string) (State, error) {
	e, err := f.Tasks.Last(ctx, id)
	if errors.Is(err, cluster.ErrNone) {
		return State{}, fail.New(fail.NotFound, "no task %q in the cluster", id).WithHint("agent-sessionizer task list --all")
	}
	if err != nil {
		return State{}, err
	}
	c, err := decode(e)
	return c.State, err
}

func decode(e cluster.Entry) (c change, err error) {
	if err := json.Unmarshal(e.Data, &c); err != nil {
		return c, fmt.Errorf("read entry %d of the cluster's log: %w", e.Seq, err)
	}
	c.Seq = e.Seq
	if e.Kind == cluster.Claimed {
		c.Fence = e.Seq
	}
	return c, nil
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

func (f *Tasks) write(ctx context.Context, kind cluster.Kind, c change) (uint64, error) {
	data, err := json.Marshal(c)
	if err != nil {
		return 0, err
	}
	return f.Tasks.Append(ctx, c.Row.ID, cluster.Entry{Kind: kind, Fence: c.Fence, Data: data}, c.Seq)
}

// Submit adds a task that any host which meets its need may run. Once it returns without an error,
// the task cannot be lost.
func (f *Tasks) Submit(ctx context.Context, s State, text []byte, evs []store.Event) error {
	if err := f.Queue.Offer(ctx, s.Row.ID, 0, s.Need, s.Band); err != nil {
		return err
	}
	_, err := f.append(ctx, cluster.Submitted, change{State: s, Events: evs, Text: text})
	return err
}

// Take claims an offered task, and adds it to this host's store. It returns false if another host
// has it, or none is to run it.
func (f *Tasks) Take(ctx context.Context, o cluster.Offer) (bool, error) {
	s, err := f.Get(ctx, o.Task)
	if fail.CodeOf(err) == fail.NotFound || err == nil && s.Seq <= o.After {
		return false, o.Early(ctx)
	}
	if err != nil {
		return false, err
	}
	for s.Host == "" && task.Phase(s.Row.Phase) == task.Pending {
		c := change{State: s, Events: []store.Event{store.NewEvent(EventHost, Taken{f.Name})}}
		c.Host, c.Incarnation, c.Fence = f.Name, f.Incarnation(), 0
		seq, err := f.append(ctx, cluster.Claimed, c)
		if errors.Is(err, cluster.ErrConflict) { // another host was first, or a user cancelled it
			if s, err = f.Get(ctx, o.Task); err != nil {
				return false, err
			}
			continue
		}
		if err != nil {
			return false, err
		}
		if err := f.adopt(ctx, o.Task, seq); err != nil {
			return false, err
		}
		return true, o.Done(ctx)
	}
	if s.Host == f.Name && s.Incarnation == f.Incarnation() { // this host ended between the claim and here
		if err := f.adopt(ctx, o.Task, s.Fence); err != nil {
			return false, err
		}
	}
	return false, o.Done(ctx)
}

// adopt adds a task that this host has claimed to its store, as the log has it at the claim.
func (f *Tasks) adopt(ctx context.Context, id string, fence uint64) error {
	var evs []store.Event
	var text []byte
	for e, err := range f.Tasks.Entries(ctx, id, 0) {
		if err != nil {
			return err
		}
		c, err := decode(e)
		if err != nil {
			return err
		}
		evs = append(evs, c.Events...)
		if c.Text != nil {
			text = c.Text
		}
		if e.Seq == fence {
			return f.Store.ImportTask(ctx, c.Row, text, evs, store.Claim{Fence: fence, Revision: fence})
		}
	}
	return fmt.Errorf("claim task %s: the cluster's log lacks the claim %d", id, fence)
}

// chunk limits the events of one entry, in bytes.
const chunk = 256 << 10

// Ship sends the new events of a task of this host to the log. It returns whether there may be
// more. If the task is no longer this host's, Ship removes it from the store.
func (f *Tasks) Ship(ctx context.Context, id string) (more bool, err error) {
	c, row, evs, err := f.Store.Unshipped(ctx, id, chunk)
	if err != nil || len(evs) == 0 {
		return false, err
	}
	s, known, err := f.own(ctx, c, row)
	if err != nil || !known {
		return err == nil, err
	}
	s.Row, s.Newest = row, evs[len(evs)-1].Seq
	seq, err := f.write(ctx, cluster.Reported, change{State: s, Events: evs})
	if errors.Is(err, cluster.ErrConflict) {
		return true, nil // a request, or the end of the claim: the next call finds out
	}
	if err != nil {
		return false, err
	}
	if err := f.Store.Ship(ctx, c, seq, s.Newest); err != nil && !errors.Is(err, store.ErrStale) {
		return false, err
	}
	return true, nil
}

// errNotOurs is returned when a task is no longer this host's.
var errNotOurs = errors.New("another host has the task, or none")

// own returns the state of a task that this host has claimed, and whether this host knew it. If it
// did not, own records it: the answer to a write may have been lost, or a user wants the task
// to end.
func (f *Tasks) own(ctx context.Context, c store.Claim, row store.Task) (s State, known bool, err error) {
	if s, err = f.Get(ctx, c.Task); err != nil {
		return s, false, err
	}
	switch {
	case s.Seq < c.Revision:
		return s, false, fmt.Errorf("read task %s: the server of the cluster is outdated", c.Task)
	case s.Host != f.Name || s.Fence != c.Fence:
		f.Log.WarnContext(ctx, "the task runs on another host now", "task", c.Task, "host", s.Host)
		return s, false, errors.Join(errNotOurs, f.Store.DisownTask(ctx, c))
	case s.Seq == c.Revision:
		return s, true, nil
	}
	if s.Row.Desired != row.Desired { // before the revision, which says that it is done
		if err := f.Want(ctx, c.Task, task.DesiredPhase(s.Row.Desired)); err != nil {
			return s, false, err
		}
	}
	err = f.Store.Ship(ctx, c, s.Seq, max(c.Shipped, s.Newest))
	if errors.Is(err, store.ErrStale) { // another call did it
		err = nil
	}
	return s, false, err
}

// Look reads what users want of a task of this host from its log, and records it.
func (f *Tasks) Look(ctx context.Context, id string) error {
	c, row, _, err := f.Store.Unshipped(ctx, id, 0)
	if err != nil {
		return err
	}
	_, _, err = f.own(ctx, c, row)
	return err
}

// Request asks the host of a task to end it. A task without a host ends at once.
func (f *Tasks) Request(ctx context.Context, id string, desired task.DesiredPhase) (State, error) {
	for {
		s, err := f.Get(ctx, id)
		if err != nil {
			return s, err
		}
		c := change{State: s}
		kind := cluster.Requested
		switch {
		case task.Phase(s.Row.Phase).Over() && (desired == task.Cancel || task.Phase(s.Row.Phase) != task.FailedPreserved),
			s.Row.Desired == string(desired), s.Row.Desired == string(task.Destroyed):
			return s, nil
		case s.Host == "":
			var ev store.Event
			if c.Row, ev, err = task.CancelWaiting(s.Row, desired, time.Now().UTC()); err != nil {
				return s, err
			}
			c.Events = []store.Event{ev}
		default:
			c.Row.Desired = string(desired)
		}
		seq, err := f.append(ctx, kind, c)
		if errors.Is(err, cluster.ErrConflict) {
			continue
		}
		if err != nil {
			return s, err
		}
		if f.Nudge != nil && s.Host != "" {
			f.Nudge(s.Host, id)
		}
		c.State.Seq = seq
		return c.State, nil
	}
}

// Of returns the ids of the tasks that a host has claimed in one incarnation and that have not
// ended.
func (f *Tasks) Of(ctx context.Context, host, incarnation string) (all []string, err error) {
	for e, err := range f.Tasks.Latest(ctx) {
		if err != nil {
			return nil, err
		}
		c, err := decode(e)
		if err != nil {
			return nil, err
		}
		if c.Host == host && c.Incarnation == incarnation && !ended(task.Phase(c.Row.Phase)) {
			all = append(all, c.Row.ID)
		}
	}
	return all, nil
}

// ended reports whether nothing of a task is left on its host but files.
func ended(p task.Phase) bool { return p.Over() && p != task.FailedPreserved }

// Release ends the claim of a host that was revoked in that incarnation. It may be repeated.
func (f *Tasks) Release(ctx context.Context, id, host, incarnation string) error {
	for {
		s, err := f.Get(ctx, id)
		if err != nil || s.Host != host || s.Incarnation != incarnation {
			return err
		}
		c := change{State: s}
		if c.Row, c.Events, err = task.Lost(s.Row, s.Rerun, host, time.Now().UTC()); err != nil {
			return err
		}
		if len(c.Events) == 0 {
			return nil
		}
		c.Host, c.Incarnation, c.Fence = "", "", 0
		if task.Phase(c.Row.Phase) == task.Pending {
			if err := f.Queue.Offer(ctx, id, s.Seq, s.Need, s.Band); err != nil {
				return err
			}
		}
		if _, err := f.append(ctx, cluster.Released, c); !errors.Is(err, cluster.ErrConflict) {
			return err
		}
	}
}
