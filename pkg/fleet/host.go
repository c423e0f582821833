package fleet

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Host is this host's part in running the tasks of its cluster: it renews its lease, takes tasks
// while it has room, sends their events to the cluster's log, and stores what the log has. On a
// core, it also ends the claims of hosts that are lost.
type Host struct {
	Tasks *Tasks
	Hosts *cluster.Hosts
	Core  bool
	Log   *slog.Logger

	// Describe says what the host is and has free. Its incarnation is set here.
	Describe func(context.Context) (cluster.Host, error)
	// Wake starts the keepers of tasks that need one.
	Wake func(context.Context) error
	// Abandon stops what still runs of tasks that the host has lost.
	Abandon func(ctx context.Context, tasks []string) error
	// Leased is called after each heartbeat that was acknowledged.
	Leased func(store.Lease) error
	// Clock is the time since the host booted; nil means bootclock.Now.
	Clock func() time.Duration

	lease    *cluster.Lease
	released string // incarnation of which no claims of an earlier one are left
}

// These are the pauses between two rounds of the loops.
const (
	takeWait = 2 * time.Second // for an offer of a need that is known
	shipWait = 5 * time.Second // without news of the store, which wake it
	retry    = time.Second
	restart  = 10 * time.Second // after this host's part could not start
)

// shippers is how many tasks are sent at once: each waits for the disks of the cores.
const shippers = 8

// Serve does the host's part until ctx ends.
func (h *Host) Serve(ctx context.Context) {
	h.lease = cluster.NewLease(h.Hosts, h.now)
	var all sync.WaitGroup
	for what, f := range map[string]func(context.Context) error{
		"renew the lease": h.renew, "take tasks": h.take, "send events": h.ship, "store files": h.keep, "read the cluster's log": h.Tasks.Follow,
	} {
		all.Go(func() {
			for ctx.Err() == nil {
				err := f(ctx)
				if err != nil && ctx.Err() == nil {
					h.Log.WarnContext(ctx, "failed to "+what, "error", err)
					pause(ctx, retry)
				}
			}
		})
	}
	all.Wait()
}

func (h *Host) now() time.Duration {
	if h.Clock == nil {
		return bootclock.Now()
	}
	return h.Clock()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// renew sends heartbeats. On a core, each one that is acknowledged is followed by a look at those of
// the other hosts.
func (h *Host) renew(ctx context.Context) error {
	s := supervisor{Host: h, done: map[string]uint64{}}
	for ctx.Err() == nil {
		is, err := h.beat(ctx)
		if errors.Is(err, cluster.ErrRevoked) {
			h.Log.ErrorContext(ctx, "this host was revoked: other hosts may run its tasks", "error", err)
			lost, err := h.Tasks.Store.Reincarnate(ctx)
			if err != nil {
				return err
			}
			if err := h.Abandon(ctx, lost); err != nil {
				h.Log.ErrorContext(ctx, "failed to stop what this host has lost", "tasks", lost, "error", err)
			}
			continue
		}
		if err != nil {
			return err
		}
		// A core that revoked this host may have seen it again before it released its tasks. This reads the latest
		// entry of all tasks, so it is not done after each failure.
		if h.released != is.Incarnation {
			if _, err := h.Tasks.Lost(ctx, is.Name, is.Incarnation); err != nil {
				return err
			}
			h.released = is.Incarnation
		}
		if h.Core {
			if err := s.look(ctx, is.Name); err != nil {
				h.Log.WarnContext(ctx, "failed to look at the other hosts", "error", err)
			}
			if err := s.count(ctx); err != nil {
				h.Log.WarnContext(ctx, "failed to compare the waiting tasks with their offers", "error", err)
			}
		}
		if s.swept == 0 || s.now()-s.swept >= sweepEvery {
			if err := h.sweep(ctx, is, s.done); err != nil {
				h.Log.WarnContext(ctx, "failed to release what nothing works on", "error", err)
			}
			s.swept = s.now()
		}
		pause(ctx, cluster.HeartbeatEvery)
	}
	return nil
}

// beat sends one heartbeat.
func (h *Host) beat(ctx context.Context) (is cluster.Host, err error) {
	ctx, cancel := context.WithTimeout(ctx, cluster.HeartbeatEvery)
	defer cancel()
	if is, err = h.Describe(ctx); err != nil {
		return is, err
	}
	if is.Incarnation, err = h.Tasks.Store.Incarnation(ctx); err != nil {
		return is, err
	}
	until, err := h.lease.Renew(ctx, is)
	if err != nil {
		return is, err
	}
	if err := h.Tasks.Store.SetLease(ctx, is.Incarnation, until); err != nil {
		return is, err
	}
	if h.Leased == nil {
		return is, nil
	}
	l, err := h.Tasks.Store.Lease(ctx)
	if err != nil {
		return is, err
	}
	return is, h.Leased(l)
}

// take claims a task if the host has room for one.
func (h *Host) take(ctx context.Context) error {
	is, err := h.Describe(ctx)
	if err != nil {
		return err
	}
	if is.FreeSlots < 1 || is.Drained || !h.lease.Valid() {
		pause(ctx, retry)
		return nil
	}
	o, ok, err := h.Tasks.Queue.Take(ctx, is, takeWait)
	if err != nil || !ok {
		return err
	}
	if is, err = h.Describe(ctx); err != nil || is.FreeSlots < 1 || is.Drained || !h.lease.Valid() { // since the call of Take
		return errors.Join(err, o.Return())
	}
	took, err := h.claim(ctx, o)
	if err != nil || !took {
		return err
	}
	h.Log.InfoContext(ctx, "took a task", "task", o.Task)
	return h.Wake(ctx)
}

// claim claims an offered task, if that is possible before the lease ends.
func (h *Host) claim(ctx context.Context, o cluster.Offer) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, h.lease.Left())
	defer cancel()
	return h.Tasks.Take(ctx, o)
}

// sweepEvery is the time between two searches for claims that no host works on.
const sweepEvery = time.Minute

// sweep releases tasks whose claims no host works on: a claim may arrive in the log after its host was
// revoked, and after its other claims were released. These are claims of earlier incarnations of this host,
// and all claims of the hosts that were lost, which are given with their latest heartbeats.
func (h *Host) sweep(ctx context.Context, own cluster.Host, lost map[string]uint64) error {
	all, err := h.Tasks.Store.TasksElsewhere(ctx, append(task.Unended(), string(task.FailedPreserved)))
	if err != nil {
		return err
	}
	var errs []error
	for host, ids := range all {
		if seq, is := lost[host]; is || host == own.Name {
			for _, id := range ids {
				errs = append(errs, h.releaseOrphan(ctx, id, host, own, seq))
			}
		}
	}
	return errors.Join(errs...)
}

// releaseOrphan releases a task of this host's earlier incarnations, or of a host that was lost with that
// heartbeat.
func (h *Host) releaseOrphan(ctx context.Context, id, host string, own cluster.Host, heartbeat uint64) error {
	s, err := h.Tasks.Get(ctx, id)
	if err != nil || s.Host != host {
		return err
	}
	if host == own.Name {
		if s.Incarnation == own.Incarnation {
			return nil
		}
	} else if _, now, err := h.Hosts.Get(ctx, host); err != nil || now != heartbeat { // it is back, and may have claimed the task since
		return err
	}
	if err := h.Tasks.release(ctx, id, host, s.Incarnation); err != nil {
		return err
	}
	h.Log.WarnContext(ctx, "released a task that was claimed too late", "task", id, "host", host)
	return nil
}

// ship sends what is new of all tasks of this host, and what its users want of others'.
func (h *Host) ship(ctx context.Context) error {
	w := h.Tasks.Store.Watch()
	defer w.Close()
	for ctx.Err() == nil {
		changed := w.Changed()
		if err := errors.Join(h.shipAll(ctx), h.wishes(ctx)); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-time.After(shipWait):
		case <-ctx.Done():
		}
	}
	return nil
}

func (h *Host) shipAll(ctx context.Context) error {
	claims, err := h.Tasks.Store.Unsettled(ctx)
	if err != nil {
		return err
	}
	var all errgroup.Group
	all.SetLimit(shippers)
	errs := make([]error, len(claims)) // of all, because one must not hold up the others
	for i, c := range claims {
		all.Go(func() error {
			for more := true; more && errs[i] == nil; {
				more, errs[i] = h.Tasks.Ship(ctx, c.Task)
			}
			if errors.Is(errs[i], errNotOurs) {
				errs[i] = h.Abandon(ctx, []string{c.Task})
			}
			return nil
		})
	}
	_ = all.Wait() // errs has them
	return errors.Join(errs...)
}

func (h *Host) wishes(ctx context.Context) error {
	all, err := h.Tasks.Store.Wishes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, w := range all {
		_, err := h.Tasks.Request(ctx, w.Task, task.DesiredPhase(w.Desired))
		if fail.CodeOf(err) == fail.NotFound {
			var c store.Claim
			if c, _, err = h.Tasks.Store.Claim(ctx, w.Task); err == nil && c.Submitted && !c.Settled && c.Revision == 0 {
				continue // the log does not have the task yet
			}
		}
		if err == nil {
			err = h.Tasks.Store.Fulfil(ctx, w)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// supervisor ends the claims of hosts that are lost.
type supervisor struct {
	*Host
	silence cluster.Silence
	done    map[string]uint64 // by host: the heartbeat after which its claims were ended

	swept   time.Duration // when claims that no host works on were searched
	counted time.Duration // when the waiting tasks were compared with their offers
	short   bool          // there were too few
}

// countEvery is the time between two comparisons of the waiting tasks with their offers. Two in a row
// must show that offers are missing, because tasks are claimed meanwhile.
const countEvery = time.Minute

// count offers tasks again whose offers were lost.
func (s *supervisor) count(ctx context.Context) error {
	if s.counted != 0 && s.now()-s.counted < countEvery {
		return nil
	}
	s.counted = s.now()
	missing, err := s.Tasks.missing(ctx)
	if err != nil {
		return err
	}
	short := len(missing) > 0
	if short && s.short {
		n, err := s.Tasks.Reoffer(ctx)
		if n > 0 {
			s.Log.WarnContext(ctx, "offered tasks again whose offers were lost", "tasks", n)
		}
		if err != nil {
			return err
		}
	}
	s.short = short
	return nil
}

// look revokes hosts that have been silent too long, and releases the tasks of all that are revoked.
func (s *supervisor) look(ctx context.Context, own string) error {
	seqs, all, err := s.Hosts.All(ctx)
	if err != nil {
		return err
	}
	lost := s.silence.Look(s.now(), seqs)
	for _, is := range all {
		seq := seqs[is.Name]
		if is.Name == own || s.done[is.Name] == seq || (is.Revoked == "" || is.Removed) && !slices.Contains(lost, is.Name) {
			continue
		}
		if is.Revoked == "" {
			err := s.Hosts.Revoke(ctx, is, seq, own)
			if errors.Is(err, cluster.ErrConflict) {
				continue // it lives, or another core was first
			}
			if err != nil {
				return err
			}
			s.Log.WarnContext(ctx, "revoked a host that sent no heartbeat", "host", is.Name, "after", cluster.RevokeAfter)
			continue // the next look releases its tasks
		}
		released, err := s.Tasks.Lost(ctx, is.Name, "")
		for _, id := range released {
			s.Log.WarnContext(ctx, "released a task of a lost host", "task", id, "host", is.Name)
		}
		if err != nil {
			return err
		}
		s.done[is.Name] = seq
	}
	return nil
}
