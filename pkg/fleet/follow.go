package fleet

import (
	"context"
	"errors"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

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
