// Package fleet runs tasks on the hosts of a cluster.
//
// The log of the cluster has the truth about a task that waits, and about who runs it. While a host
// runs it, that host's store has the truth, and the host sends each event to the log. What a
// reader is shown comes from the log alone, so it never changes again, whatever happens to hosts.
package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
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
	Row         store.Task `json:"row"`
	Host        string     `json:"host,omitempty"` // that runs it, or ran it last; "" while it waits
	Incarnation string     `json:"incarnation,omitempty"`
	Fence       uint64     `json:"fence,omitempty"` // of the host's claim
	Newest      int64      `json:"newest"`          // sequence of the latest event

	Files []cluster.Part `json:"files,omitempty"` // the list of the task's files, among the cluster's

	Seq uint64 `json:"-"` // of the entry
}

// change is the data of an entry: the state from then on, and what led to it.
type change struct {
	State
	Events []store.Event `json:"events,omitempty"`
	Text   []byte        `json:"text,omitempty"` // of the first entry: the manifest as it was submitted

	Manifest []cluster.Part `json:"manifest,omitempty"` // a large one, which the row then lacks
	Large    []cluster.Part `json:"large,omitempty"`    // all of a change that is too large for an entry
}

// Sizes in bytes from which a manifest, or a change, is not in the entry itself, but among the cluster's
// large entries.
const (
	largeManifest = 16 << 10
	largeChange   = 300 << 10
)

// Tasks are the tasks of a cluster, as one host sees and runs them.
type Tasks struct {
	Name    string // of this host
	Tasks   *cluster.TaskLog
	Entries *cluster.Files // what is too large for Tasks
	Files   *cluster.Files // artifacts and logs; nil stores none
	Queue   *cluster.Queue
	Store   *store.Store
	Log     *slog.Logger

	// Want records in this host's store what users want of a task of this host.
	Want func(ctx context.Context, task string, desired task.DesiredPhase) error
	// Busy reports whether something of a task is left on this host, from an earlier claim; nil
	// means never.
	Busy func(ctx context.Context, task string) (bool, error)
	// Outputs returns the files of a task of this host that has ended.
	Outputs func(ctx context.Context, task string) ([]task.Output, error)

	large      large
	incomplete incomplete
}

// large is the large manifest that was read last: each entry of its task names it.
type large struct {
	mu    sync.Mutex
	parts []cluster.Part
	text  []byte
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
	c, err := f.latest(ctx, e)
	return c.State, err
}

// submit sends a task that this host has accepted to the cluster, so that any host which meets its
// need may run it.
func (f *Tasks) submit(ctx context.Context, c store.Claim, row store.Task, evs []store.Event) error {
	text, err := f.Store.TaskText(ctx, c.Task)
	if err != nil {
		return err
	}
	if err := f.offer(ctx, row, 0); err != nil {
		return err
	}
	is := change{State: State{Row: row, Newest: evs[len(evs)-1].Seq}, Events: evs, Text: text}
	seq, err := f.write(ctx, cluster.Submitted, is)
	if errors.Is(err, cluster.ErrConflict) {
		return nil // it was added by a try whose answer was lost: follow stores it
	}
	if err != nil {
		return err
	}
	is.Seq = seq
	return f.Store.Replicate(ctx, []store.Replica{is.replica()}, 0)
}

// replica returns what a host stores of an entry.
func (c change) replica() store.Replica {
	c.Row.Host = cmp.Or(c.Host, store.Waiting)
	return store.Replica{Task: c.Row, Text: c.Text, Events: c.Events, Newest: c.Newest, Revision: c.Seq, Files: filesOf(c.Files)}
}

// Take claims an offered task. It returns false if another host has it, or none is to run it.
func (f *Tasks) Take(ctx context.Context, o cluster.Offer) (bool, error) {
	if !ids.Valid(o.Task) { // a host put it there by other means
		return false, o.Done(ctx)
	}
	s, err := f.Get(ctx, o.Task)
	if fail.CodeOf(err) == fail.NotFound || err == nil && s.Seq <= o.After {
		return false, o.Early(ctx)
	}
	if errors.Is(err, errIncomplete) || errors.Is(err, cluster.ErrDamaged) { // perhaps another host can read it
		f.Log.WarnContext(ctx, "returned an offer of a task that cannot be read", "task", o.Task, "error", err)
		return false, o.Later()
	}
	if err != nil {
		return false, err
	}
	if f.Busy != nil && s.Host == "" {
		if busy, err := f.Busy(ctx, o.Task); err != nil || busy {
			return false, errors.Join(err, o.Later())
		}
	}
	took := false
	for s.Host == "" && task.Phase(s.Row.Phase) == task.Pending {
		incarnation, err := f.Store.Incarnation(ctx)
		if err != nil {
			return false, err
		}
		c := change{State: s, Events: []store.Event{store.NewEvent(EventHost, Taken{f.Name})}}
		c.Host, c.Incarnation, c.Fence = f.Name, incarnation, 0
		_, err = f.append(ctx, cluster.Claimed, c)
		if errors.Is(err, cluster.ErrConflict) { // another host was first, or a user cancelled it
			if s, err = f.Get(ctx, o.Task); err != nil {
				return false, err
			}
			continue
		}
		if err != nil {
			return false, err // perhaps it is claimed: follow finds out
		}
		took = true
		break
	}
	if err := f.catchUp(ctx, o.Task); err != nil {
		return took, err
	}
	return took, o.Done(ctx)
}

// chunk limits the events of one entry, in bytes.
const chunk = 256 << 10

// Ship sends to the log what is new of a task: of one that this host has, the new events, and one that
// this host has accepted, as a whole. It returns whether there may be more. If the task is no
// longer this host's, it becomes a replica.
func (f *Tasks) Ship(ctx context.Context, id string) (more bool, err error) {
	c, row, evs, err := f.Store.Unshipped(ctx, id, chunk)
	if err != nil {
		return false, err
	}
	if c.Fence == 0 {
		if c.Settled || len(evs) == 0 {
			return false, nil
		}
		return false, f.submit(ctx, c, row, evs)
	}
	if len(evs) == 0 {
		if f.Files == nil && !c.Settled && ended(task.Phase(row.Phase)) { // otherwise, Keep settles it
			return false, ignoreStale(f.Store.Settle(ctx, c))
		}
		return false, nil
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
	return true, ignoreStale(f.Store.Ship(ctx, c, seq, s.Newest))
}

// ignoreStale ignores that another call has done the same.
func ignoreStale(err error) error {
	if errors.Is(err, store.ErrStale) {
		return nil
	}
	return err
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
		return s, false, errors.Join(errNotOurs, f.Store.Disown(ctx, c), f.catchUp(ctx, c.Task))
	case s.Seq == c.Revision:
		return s, true, nil
	}
	if s.Row.Desired != row.Desired { // before the revision, which says that it is done
		if err := f.Want(ctx, c.Task, task.DesiredPhase(s.Row.Desired)); err != nil {
			return s, false, err
		}
	}
	return s, false, ignoreStale(f.Store.Ship(ctx, c, s.Seq, max(c.Shipped, s.Newest)))
}

// look reads what users want of a task of this host from its log, and records it.
func (f *Tasks) look(ctx context.Context, c store.Claim) error {
	c, row, _, err := f.Store.Unshipped(ctx, c.Task, 0)
	if err != nil {
		return err
	}
	_, _, err = f.own(ctx, c, row)
	if errors.Is(err, errNotOurs) {
		return nil
	}
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
		seq, err := f.append(ctx, cluster.Requested, c)
		if errors.Is(err, cluster.ErrConflict) {
			continue
		}
		c.State.Seq = seq
		return c.State, err
	}
}

// ended reports whether nothing of a task is left on its host but files.
func ended(p task.Phase) bool { return p.Over() && p != task.FailedPreserved }

// Lost ends the claims of a host except for those of one incarnation: none if keep is "". It returns the
// tasks that were released, and may be repeated.
func (f *Tasks) Lost(ctx context.Context, host, keep string) (released []string, err error) {
	for e, err := range f.Tasks.Latest(ctx) {
		if err != nil {
			return released, err
		}
		c, err := f.latest(ctx, e)
		if errors.Is(err, cluster.ErrDamaged) || errors.Is(err, errIncomplete) { // one must not hold up the others
			continue
		}
		if err != nil {
			return released, err
		}
		if c.Host != host || c.Incarnation == keep || ended(task.Phase(c.Row.Phase)) {
			continue
		}
		if err := f.release(ctx, c.Row.ID, host, c.Incarnation); err != nil {
			return released, err
		}
		released = append(released, c.Row.ID)
	}
	return released, nil
}

// release ends the claim of a host in an incarnation. It may be repeated.
func (f *Tasks) release(ctx context.Context, id, host, incarnation string) error {
	for {
		s, err := f.Get(ctx, id)
		if err != nil || s.Host != host || s.Incarnation != incarnation {
			return err
		}
		c := change{State: s}
		if c.Row, c.Events, err = task.Lost(s.Row, host, time.Now().UTC()); err != nil {
			return err
		}
		if len(c.Events) == 0 {
			return nil
		}
		c.Host, c.Incarnation, c.Fence = "", "", 0
		if task.Phase(c.Row.Phase) == task.Pending {
			if err := f.offer(ctx, c.Row, s.Seq); err != nil {
				return err
			}
		}
		if _, err := f.append(ctx, cluster.Released, c); !errors.Is(err, cluster.ErrConflict) {
			return err
		}
	}
}
