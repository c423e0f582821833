// Package keeper runs one session or one task to rest: the detached process behind
// each that is being made, runs, or is being removed.
//
// It takes its charge's lock, which is what tells everyone that it lives, and
// then does what the row in the store wants, until nothing is left to do. It
// may be killed at any line; any next command starts another.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// poll is how often the row is read for a changed want: one read by primary key.
const poll = 100 * time.Millisecond

// A Charge is what a keeper keeps: a session or a task.
type Charge interface {
	// Lock is the path of its lock, which its keeper holds.
	Lock() string
	// Look reads how it is.
	Look(ctx context.Context) (State, error)
	// Next does what brings it one phase nearer to what is wanted. It returns when
	// ctx is cancelled because that changed, and may be called again after any error.
	Next(ctx context.Context) error
	// Left is called when the keeper is done with it, with the lock or without.
	Left(ctx context.Context) error
}

// State is how a Charge is, as far as a keeper must know.
type State struct {
	Phase, Want string
	Rest        bool // nothing runs and nothing is to be done
	Served      bool // it is as wanted, and stays so while its keeper lives
	Quiet       bool // all that is left is to watch
}

// Run keeps c until it is at rest. If another keeper holds the lock, Run stands
// by, in case that one dies before the intent is served.
func Run(ctx context.Context, log *slog.Logger, c Charge) error {
	lock, err := takeLock(ctx, log, c)
	if err != nil {
		return err
	}
	if lock != nil {
		if merr := lock.Mark(); merr != nil { // as on a full disk; it is for the audit log only
			log.WarnContext(ctx, "should the keeper die, nobody is told", "error", merr)
		}
		err = work(ctx, log, c)
		if uerr := lock.Remove(); uerr != nil {
			log.ErrorContext(ctx, "unlock", "error", uerr)
		}
	}
	return errors.Join(err, c.Left(context.WithoutCancel(ctx)))
}

// work does what is wanted of c until it is at rest.
func work(ctx context.Context, log *slog.Logger, c Charge) error {
	retry := time.Second
	for {
		s, err := c.Look(ctx)
		if err != nil {
			return err
		}
		if s.Rest {
			return nil
		}
		log.InfoContext(ctx, "working", "phase", s.Phase, "want", s.Want)
		if s.Quiet {
			settle()
		}
		err = untilWantChanges(ctx, log, c, s.Want)
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
		log.ErrorContext(ctx, "will try again", "phase", s.Phase, "want", s.Want, "in", retry, "error", err)
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

// takeLock returns nil when c came to rest without us.
func takeLock(ctx context.Context, log *slog.Logger, c Charge) (*store.Lock, error) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		lock, ok, err := store.TryLock(c.Lock())
		if err != nil || ok {
			return lock, err
		}
		s, err := c.Look(ctx)
		if err != nil {
			return nil, err
		}
		// Served, and its keeper lives: a ready session keeps its keeper. Not at
		// the first try, which store.Held of some command may have disturbed.
		if s.Rest || tries > 0 && s.Served {
			return nil, nil
		}
		if tries == 0 {
			log.InfoContext(ctx, "standing by", "phase", s.Phase, "want", s.Want)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// untilWantChanges calls Next with a context that ends when something else than
// want is wanted.
func untilWantChanges(ctx context.Context, log *slog.Logger, c Charge, want string) error {
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
			s, err := c.Look(ctx)
			if err != nil {
				if ctx.Err() == nil {
					log.WarnContext(ctx, "read what is wanted", slog.Any("error", err))
				}
				continue
			}
			if s.Want != want {
				cancel()
				return
			}
		}
	}()
	defer func() { cancel(); <-done }()
	return c.Next(ctx)
}
