package fleet

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Host is this host's part in running the tasks of its cluster: it renews its lease, takes tasks
// while it has room, sends their events to the cluster's log, and learns what users want of
// them. On a core, it also ends the claims of hosts that are lost.
type Host struct {
	Tasks *Tasks
	Hosts *cluster.Hosts
	Core  bool
	Log   *slog.Logger

	// Describe says what the host is and has free.
	Describe func(context.Context) (cluster.Host, error)
	// Wake starts the keepers of tasks that need one.
	Wake func(context.Context) error
	// Restart begins another incarnation of a host that was revoked, after everything that it
	// ran for the cluster has been stopped.
	Restart func(context.Context) error
	// Clock is the time since the host booted; nil means bootclock.Now.
	Clock func() time.Duration

	lease *cluster.Lease
}

// These are the pauses between two rounds of the loops.
const (
	takeWait = 5 * time.Second        // for an offer
	shipWait = 500 * time.Millisecond // without news of the store
	lookWait = 10 * time.Second       // between two looks at the log of a task
	retry    = time.Second
)

// Serve does the host's part until ctx ends.
func (h *Host) Serve(ctx context.Context) {
	clock := h.Clock
	if clock == nil {
		clock = bootclock.Now
	}
	h.lease = cluster.NewLease(h.Hosts, clock)
	var all sync.WaitGroup
	for what, f := range map[string]func(context.Context) error{
		"renew the lease": h.renew, "take tasks": h.take, "send events": h.ship, "read requests": h.look,
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

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// renew sends heartbeats. On a core, each one that is acknowledged is followed by a look at those of
// the other hosts.
func (h *Host) renew(ctx context.Context) error {
	silence := cluster.Silence{}
	for ctx.Err() == nil {
		is, err := h.Describe(ctx)
		if err != nil {
			return err
		}
		try, cancel := context.WithTimeout(ctx, cluster.HeartbeatEvery)
		until, err := h.lease.Renew(try, is)
		cancel()
		if errors.Is(err, cluster.ErrRevoked) {
			h.Log.ErrorContext(ctx, "this host was revoked: other hosts may run its tasks", "error", err)
			if err := h.abandon(ctx); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := h.Tasks.Store.SetLease(ctx, until); err != nil {
			return err
		}
		if h.Core {
			if err := h.supervise(ctx, &silence, is.Name); err != nil {
				h.Log.WarnContext(ctx, "failed to look at the other hosts", "error", err)
			}
		}
		pause(ctx, cluster.HeartbeatEvery)
	}
	return nil
}

// abandon gives up all tasks that have not ended, and begins another incarnation.
func (h *Host) abandon(ctx context.Context) error {
	if err := h.Restart(ctx); err != nil {
		return err
	}
	claims, err := h.Tasks.Store.Claims(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range claims {
		_, err := h.Tasks.Ship(ctx, c.Task) // removes those that are no longer ours
		if !errors.Is(err, errNotOurs) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
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
	took, err := h.Tasks.Take(ctx, o)
	if err != nil || !took {
		return err
	}
	h.Log.InfoContext(ctx, "took a task", "task", o.Task)
	return h.Wake(ctx)
}

// ship sends the new events of all tasks of this host.
func (h *Host) ship(ctx context.Context) error {
	w := h.Tasks.Store.Watch()
	defer w.Close()
	for ctx.Err() == nil {
		changed := w.Changed()
		err := h.each(ctx, func(c store.Claim) error {
			for {
				if more, err := h.Tasks.Ship(ctx, c.Task); err != nil || !more {
					return err
				}
			}
		})
		if err != nil {
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

// look reads the logs of all tasks of this host.
func (h *Host) look(ctx context.Context) error {
	err := h.each(ctx, func(c store.Claim) error { return h.Tasks.Look(ctx, c.Task) })
	pause(ctx, lookWait)
	return err
}

// each calls f for all claims. Tasks that are no longer this host's are no error.
func (h *Host) each(ctx context.Context, f func(store.Claim) error) error {
	claims, err := h.Tasks.Store.Claims(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range claims {
		if err := f(c); err != nil && !errors.Is(err, errNotOurs) && fail.CodeOf(err) != fail.NotFound {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// supervise revokes hosts that have been silent too long, and releases the tasks of all that are
// revoked.
func (h *Host) supervise(ctx context.Context, silence *cluster.Silence, own string) error {
	seqs, all, err := h.Hosts.All(ctx)
	if err != nil {
		return err
	}
	clock := h.Clock
	if clock == nil {
		clock = bootclock.Now
	}
	lost := map[string]bool{}
	for _, name := range silence.Look(clock(), seqs) {
		lost[name] = true
	}
	for _, is := range all {
		switch {
		case is.Name == own:
			continue
		case is.Revoked == "" && lost[is.Name]:
			err := h.Hosts.Revoke(ctx, is, seqs[is.Name], own)
			if errors.Is(err, cluster.ErrConflict) {
				continue // it lives, or another core was first
			}
			if err != nil {
				return err
			}
			h.Log.WarnContext(ctx, "revoked a host that sent no heartbeat", "host", is.Name, "after", cluster.RevokeAfter)
		case is.Revoked == "":
			continue
		}
		if err := h.release(ctx, is); err != nil {
			return err
		}
	}
	return nil
}

// release ends the claims of a revoked host.
func (h *Host) release(ctx context.Context, is cluster.Host) error {
	tasks, err := h.Tasks.Of(ctx, is.Name, is.Incarnation)
	if err != nil {
		return err
	}
	for _, id := range tasks {
		if err := h.Tasks.Release(ctx, id, is.Name, is.Incarnation); err != nil {
			return err
		}
		h.Log.WarnContext(ctx, "released a task of a lost host", "task", id, "host", is.Name)
	}
	return nil
}
