// Package fleet runs tasks on the hosts of a cluster.
//
// The log of the cluster has the truth about a task that waits, and about who runs it. While a host
// runs it, that host's store has the truth, and the host sends each event to the log. What a
// reader is shown comes from the log alone, so it never changes again, whatever happens to hosts.
package fleet

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"slices"
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

// hostLabel is the label that each host has with its own name.
const hostLabel = "host"

// line returns where a task waits in the queue: by what it requires of its host, and by its priority.
func line(row store.Task) (cluster.Line, error) {
	t, err := task.Decode(row)
	if err != nil {
		return cluster.Line{}, err
	}
	p := t.Manifest.Placement
	labels := maps.Clone(p.Labels)
	if p.Host != "" {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[hostLabel] = p.Host
	}
	return cluster.NewLine(cluster.Need{
		Arch: p.Arch, Labels: labels, Memory: int64(t.Manifest.VM.Memory) / 2, // as a host alone admits VMs
	}, cluster.BandOf(row.Priority)), nil
}

// offer puts a task into the queue, for a host that finds an entry of its log after a sequence number.
func (f *Tasks) offer(ctx context.Context, row store.Task, after uint64) error {
	l, err := line(row)
	if err != nil {
		return err
	}
	return f.Queue.Offer(ctx, row.ID, after, l)
}

// waitingAtOnce is how many waiting tasks are read at once.
const waitingAtOnce = 500

// waiting yields the tasks that no host has, as this host's replicas have them, the oldest first. An
// error is the last item.
func (f *Tasks) waiting(ctx context.Context) iter.Seq2[store.Task, error] {
	return func(yield func(store.Task, error) bool) {
		filter := store.TaskFilter{Phases: []string{string(task.Pending)}, OldestFirst: true, Limit: waitingAtOnce}
		for {
			rows, err := f.Store.Tasks(ctx, filter)
			if err != nil {
				yield(store.Task{}, err)
			}
			if err != nil || len(rows) == 0 {
				return
			}
			for _, row := range rows {
				if row.Host == store.Waiting && !yield(row, nil) {
					return
				}
			}
			filter.After = rows[len(rows)-1].ID
		}
	}
}

// missing returns how many offers each line of the queue lacks, by its subject: more tasks wait there than it
// has offers, as far as this host knows.
func (f *Tasks) missing(ctx context.Context) (map[string]int, error) {
	missing := map[string]int{}
	for row, err := range f.waiting(ctx) {
		if err != nil {
			return nil, err
		}
		l, err := line(row)
		if err != nil {
			return nil, err
		}
		missing[l.Subject()]++
	}
	if len(missing) == 0 {
		return nil, nil
	}
	offers, err := f.Queue.Offers(ctx)
	maps.DeleteFunc(missing, func(subject string, waiting int) bool {
		missing[subject] = waiting - int(offers[subject])
		return missing[subject] <= 0
	})
	return missing, err
}

// Reoffer offers tasks again if more of them wait than the queue has offers, and returns how many.
// A host may end between its look at an offer and what it does with it, and a core may lose
// what its disk had not stored. The oldest tasks are offered, as those offers should have been taken
// first; an offer too many does no harm.
func (f *Tasks) Reoffer(ctx context.Context) (n int, err error) {
	missing, err := f.missing(ctx)
	if err != nil || len(missing) == 0 {
		return 0, err
	}
	opened := map[string]bool{}
	for row, err := range f.waiting(ctx) {
		if err != nil {
			return n, err
		}
		l, err := line(row)
		if err != nil {
			return n, err
		}
		if missing[l.Subject()] <= 0 {
			continue
		}
		if !opened[l.Subject()] { // the server may have forgotten it since this host opened it
			if err := f.Queue.Open(ctx, l); err != nil {
				return n, err
			}
			opened[l.Subject()] = true
		}
		if err := f.Queue.Offer(ctx, row.ID, 0, l); err != nil {
			return n, err
		}
		missing[l.Subject()]--
		n++
	}
	return n, nil
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

// catchUp stores what the log has of one task.
func (f *Tasks) catchUp(ctx context.Context, id string) error {
	c, _, err := f.Store.Claim(ctx, id)
	if err != nil {
		return err
	}
	var entries []cluster.Entry
	for e, err := range f.Tasks.Entries(ctx, id, c.Revision) {
		if err != nil {
			return err
		}
		entries = append(entries, e)
	}
	return f.apply(ctx, entries, 0)
}

// Follow stores what the log has of all tasks, and waits for more until ctx ends.
func (f *Tasks) Follow(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var storing sync.WaitGroup
	storing.Go(func() { f.storeHeld(ctx) })
	defer func() { stop(); storing.Wait() }()
	position, err := f.Store.Position(ctx)
	if err != nil {
		return err
	}
	for batch, err := range f.Tasks.Follow(ctx, position) {
		if err != nil {
			return err
		}
		if err := f.apply(ctx, batch, batch[len(batch)-1].Seq); err != nil {
			return err
		}
	}
	return nil
}

// apply stores entries of the log, up to a position. Those that are incomplete are stored later.
func (f *Tasks) apply(ctx context.Context, entries []cluster.Entry, position uint64) error {
	return f.store(ctx, entries, position, false)
}

// store stores entries of the log, up to a position. If they were held back before, the error is
// errIncomplete, wrapped, if one still is incomplete.
func (f *Tasks) store(ctx context.Context, entries []cluster.Entry, position uint64, again bool) error {
	incarnation, err := f.Store.Incarnation(ctx)
	if err != nil {
		return err
	}
	var all []store.Replica
	size := 0
	for _, e := range entries {
		if size >= storeMost { // each entry may name large parts
			if err := f.Store.Replicate(ctx, all, f.incomplete.before(min(position, e.Seq-1))); err != nil {
				return err
			}
			all, size = nil, 0
		}
		if !again && f.incomplete.holds(e) {
			continue
		}
		c, err := f.decode(ctx, e)
		switch {
		case errors.Is(err, cluster.ErrDamaged): // the next entry of the task has all that matters but the events
			f.Log.ErrorContext(ctx, "ignored an entry of the cluster's log", "error", err)
			continue
		case errors.Is(err, errIncomplete) && !again:
			f.Log.WarnContext(ctx, "an entry of the cluster's log is incomplete; it is read again", "error", err)
			f.incomplete.hold(e)
			continue
		case err != nil:
			return err
		}
		own, _, err := f.Store.Claim(ctx, e.Task)
		if err != nil {
			return err
		}
		is := c.replica()
		switch mine := c.Host == f.Name && c.Incarnation == incarnation; {
		case own.Fence != 0 && mine && c.Fence == own.Fence:
			switch {
			case e.Kind == cluster.Requested:
				err = f.look(ctx, own)
			case e.Kind == cluster.Reported && e.Seq > own.Revision: // Ship's answer was lost: if the task is given away now, its events must stay
				err = ignoreStale(f.Store.Ship(ctx, own, e.Seq, max(own.Shipped, c.Newest)))
			}
			if err != nil {
				return err
			}
			continue
		case own.Fence != 0 && e.Seq > own.Revision:
			f.Log.WarnContext(ctx, "the task was given to another host", "task", e.Task, "host", c.Host)
			if err := f.Store.Disown(ctx, own); err != nil {
				return err
			}
		case e.Kind == cluster.Claimed && mine:
			is.Fence = c.Fence
		}
		all = append(all, is)
		size += len(is.Task.Manifest) + len(is.Text)
		for _, ev := range is.Events {
			size += len(ev.Data)
		}
	}
	return f.Store.Replicate(ctx, all, f.incomplete.before(position))
}

// storeMost limits what is stored at once, in bytes, beyond one entry. Tests change it.
var storeMost = 16 << 20

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
