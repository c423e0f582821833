package fleet

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
)

// An entry may name large parts that are not found: a core that has just lost touch with the others does
// not know the latest, and a hostile host may name some that never existed. Nothing waits for them. A
// follower of the log reads on, and holds back only the entries of that task, until the parts are found
// or the entry counts as damaged.

// errIncomplete is returned, wrapped, by reads of an entry whose large parts are not found for now.
var errIncomplete = errors.New("large parts of it are missing")

const (
	// incompleteFor is how long an entry may be incomplete before it counts as damaged. A core that lost
	// touch with the others notices it sooner.
	incompleteFor   = 30 * time.Second
	incompletePause = 5 * time.Second // between two tries to read them
	maxIncomplete   = 1000            // more of them count as damaged at once
	forgetAfter     = time.Hour
)

// incomplete are the entries that are or were incomplete.
type incomplete struct {
	mu    sync.Mutex
	since map[uint64]time.Time // by Seq
	held  map[string]span      // by task
}

// span are the entries of a task that a follower holds back.
type span struct{ first, last uint64 }

// overdue reports whether an entry that is incomplete counts as damaged.
func (i *incomplete) overdue(seq uint64, now time.Time) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	maps.DeleteFunc(i.since, func(_ uint64, since time.Time) bool { return now.Sub(since) > forgetAfter })
	since, known := i.since[seq]
	switch {
	case known:
		return now.Sub(since) >= incompleteFor
	case len(i.since) >= maxIncomplete:
		return true
	case i.since == nil:
		i.since = map[uint64]time.Time{}
	}
	i.since[seq] = now
	return false
}

// hold holds back an entry, and those of its task that follow.
func (i *incomplete) hold(e cluster.Entry) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.held == nil {
		i.held = map[string]span{}
	}
	if _, is := i.held[e.Task]; !is {
		i.held[e.Task] = span{e.Seq, e.Seq}
	}
}

// holds reports whether an entry is held back because an earlier one of its task is.
func (i *incomplete) holds(e cluster.Entry) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	s, is := i.held[e.Task]
	if is {
		i.held[e.Task] = span{s.first, max(s.last, e.Seq)}
	}
	return is
}

// letGo holds back a task no longer if its entries were stored up to one. It returns false if a later one
// is held back.
func (i *incomplete) letGo(id string, stored uint64) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.held[id].last > stored {
		return false
	}
	delete(i.held, id)
	return true
}

func (i *incomplete) tasks() []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Collect(maps.Keys(i.held))
}

// before returns the position up to which nothing is held back, and at most position: after a crash, the
// follower reads from there.
func (i *incomplete) before(position uint64) uint64 {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, s := range i.held {
		position = min(position, s.first-1)
	}
	return position
}

// storeHeld stores the entries that were held back, as soon as they can be read, until ctx ends.
func (f *Tasks) storeHeld(ctx context.Context) {
	for pause(ctx, incompletePause); ctx.Err() == nil; pause(ctx, incompletePause) {
		for _, id := range f.incomplete.tasks() {
			if err := f.storeHeldOf(ctx, id); err != nil && !errors.Is(err, errIncomplete) && ctx.Err() == nil {
				f.Log.WarnContext(ctx, "failed to store entries of the cluster's log; it is tried again", "task", id, "error", err)
			}
		}
	}
}

func (f *Tasks) storeHeldOf(ctx context.Context, id string) error {
	for stored := uint64(0); ; {
		c, _, err := f.Store.Claim(ctx, id)
		if err != nil {
			return err
		}
		for e, err := range f.Tasks.Entries(ctx, id, max(c.Revision, stored)) {
			if err == nil {
				err = f.store(ctx, []cluster.Entry{e}, 0, true)
			}
			if err != nil {
				return err
			}
			stored = e.Seq
		}
		if f.incomplete.letGo(id, max(c.Revision, stored)) {
			return nil
		}
	}
}
