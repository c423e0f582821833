// Package keeper runs one session to rest: the detached process behind every
// session that is being made, runs, or is being removed.
//
// It takes the session's lock, which is what tells everyone that it lives, and
// then does what the row in the store wants, until nothing is left to do. It
// may be killed at any line; any next command starts another.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// poll is how often the row is read for a changed want: one read by primary key.
const poll = 100 * time.Millisecond

// Run keeps session id until it is at rest. If another keeper holds the lock,
// Run stands by, in case that one dies before the intent is served.
func Run(ctx context.Context, w *session.Worker, id string) error {
	lock, err := takeLock(ctx, w, id)
	if err != nil {
		return err
	}
	if lock != nil {
		defer func() {
			if err := lock.Unlock(); err != nil {
				w.Log.Error("unlock", "error", err)
			}
		}()
		err = work(ctx, w, id)
	}
	if s, gerr := w.Get(context.WithoutCancel(ctx), id); gerr == nil && s.Phase == session.Gone {
		// Whoever started us made the directory for our log, perhaps after the
		// keeper before us had removed it.
		err = errors.Join(err, os.RemoveAll(w.Config.Paths.SessionDir(id)))
	}
	return err
}

// work does what the row wants until it is at rest.
func work(ctx context.Context, w *session.Worker, id string) error {
	retry := time.Second
	var told session.Phase
	for {
		s, err := w.Get(ctx, id)
		if err != nil {
			return err
		}
		if w.Phase != nil && s.Phase != told {
			w.Phase(ctx, s)
			told = s.Phase
		}
		if session.AtRest(s.Phase, s.Want) {
			return nil
		}
		w.Log.Info("working", "phase", s.Phase, "want", s.Want)
		if s.Phase == session.Ready {
			settle()
		}
		_, err = untilWantChanges(ctx, w, s)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil, errors.Is(err, store.ErrStale):
			retry = time.Second
			continue
		}
		// Not a failed step (that is a phase of its own) but something that
		// keeps it from being done or recorded: a full disk, a VM that cannot be
		// removed just now. The row says what is wanted; try again, ever more slowly.
		w.Log.Error("will try again", "phase", s.Phase, "want", s.Want, "in", retry, "error", err)
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return ctx.Err()
		}
		if retry *= 2; retry > time.Minute {
			return fmt.Errorf("give up for now, the next command tries again: %w", err)
		}
	}
}

// settle gives back what making a session took, which is many times what
// watching it takes: there is a keeper for every session, and most of its life
// it watches. From then on it collects often: there is little to collect.
func settle() {
	debug.SetGCPercent(50)
	debug.FreeOSMemory()
}

// takeLock returns nil when the session came to rest without us.
func takeLock(ctx context.Context, w *session.Worker, id string) (*store.Lock, error) {
	path := w.Config.Paths.SessionLock(id)
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		lock, ok, err := store.TryLock(path)
		if err != nil || ok {
			return lock, err
		}
		s, err := w.Get(ctx, id)
		if err != nil {
			return nil, err
		}
		// Served, and its keeper lives: a ready session keeps its keeper. Not at
		// the first try, which store.Held of some command may have disturbed.
		if session.AtRest(s.Phase, s.Want) || tries > 0 && s.Phase == s.Want {
			return nil, nil
		}
		if tries == 0 {
			w.Log.Info("standing by", "phase", s.Phase, "want", s.Want)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// untilWantChanges calls Next with a context that ends when the row wants
// something else than s did.
func untilWantChanges(ctx context.Context, w *session.Worker, s session.Session) (session.Session, error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(poll)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			row, err := w.Store.Session(ctx, s.ID)
			if err != nil {
				if ctx.Err() == nil {
					w.Log.Warn("read the session", slog.Any("error", err))
				}
				continue
			}
			if row.Want != string(s.Want) {
				cancel()
				return
			}
		}
	}()
	defer func() { cancel(); <-done }()
	return w.Next(ctx, s)
}
