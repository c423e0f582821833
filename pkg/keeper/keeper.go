// Package keeper runs one session or one task to rest. It is the detached process
// behind each session or task that is being made, runs, or is being removed.
//
// It takes its subject's lock, which shows other processes that it runs. It then works
// towards the desired phase in the store until nothing is left to do. It may be killed
// at any line; the next command starts another.
package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// poll is how often the row is read to detect a changed desired phase; that costs one
// read by primary key.
const poll = 100 * time.Millisecond

// A Subject is the session or task that a keeper works on.
type Subject interface {
	// Lock returns the path of the lock that its keeper holds.
	Lock() string
	// Look reads the current state.
	Look(ctx context.Context) (State, error)
	// Next does the work that brings the subject one phase nearer to the desired one. It
	// returns when ctx is cancelled because the desired phase changed. It may be called
	// again after any error.
	Next(ctx context.Context) error
	// Left is called when the keeper is done with the subject, whether it had the lock
	// or not.
	Left(ctx context.Context) error
}

// State is the part of a subject's state that a keeper needs.
type State struct {
	Phase, Desired string
	Rest           bool // nothing runs and nothing is left to do
	Served         bool // it has the desired phase, and keeps it while its keeper lives
	Quiet          bool // only watching is left to do
}

// Run works on c until it is at rest. If another keeper holds the lock, Run waits, in
// case that keeper dies before the desired phase is reached.
func Run(ctx context.Context, log *slog.Logger, c Subject) error {
	lock, err := takeLock(ctx, log, c)
	if err != nil {
		return err
	}
	if lock != nil {
		if merr := lock.Mark(); merr != nil { // such as a full disk; the mark serves only the audit log
			log.WarnContext(ctx, "failed to mark lock; a crash of this keeper would not be audited", "error", merr)
		}
		err = work(ctx, log, c)
		if uerr := lock.Remove(); uerr != nil {
			log.ErrorContext(ctx, "failed to unlock", "error", uerr)
		}
	}
	return errors.Join(err, c.Left(context.WithoutCancel(ctx)))
}

// work works towards the desired phase of c until c is at rest.
func work(ctx context.Context, log *slog.Logger, c Subject) error {
	pauses := &backoff.ExponentialBackOff{InitialInterval: time.Second, Multiplier: 2, MaxInterval: time.Hour}
	for {
		s, err := c.Look(ctx)
		if err != nil {
			return err
		}
		if s.Rest {
			return nil
		}
		log.InfoContext(ctx, "working", "phase", s.Phase, "desired", s.Desired)
		if s.Quiet {
			tuneGC()
		}
		err = waitDesiredChange(ctx, log, c, s.Desired)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil, errors.Is(err, store.ErrStale):
			pauses.Reset()
			continue
		}
		// This is not a failed step, which has its own phase. Something prevents the
		// step from being done or recorded: a full disk, or a VM that cannot be removed
		// now. The desired phase is in the row, so retry, each time after a longer
		// delay.
		retry := pauses.NextBackOff()
		if retry > time.Minute {
			return fmt.Errorf("giving up until the next command: %w", err)
		}
		log.ErrorContext(ctx, "retrying", "phase", s.Phase, "desired", s.Desired, "in", retry, "error", err)
		select {
		case <-time.After(retry):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tuneGC releases the memory that making a session took, which is many times what
// watching it takes. Each session has a keeper, which spends most of its life watching.
// From then on garbage is collected often, because there is little to collect.
func tuneGC() {
	debug.SetGCPercent(50)
	debug.FreeOSMemory()
}

// takeLock returns nil when c came to rest without this keeper.
func takeLock(ctx context.Context, log *slog.Logger, c Subject) (*lockfile.Lock, error) {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		lock, ok, err := lockfile.Try(c.Lock())
		if err != nil || ok {
			return lock, err
		}
		s, err := c.Look(ctx)
		if err != nil {
			return nil, err
		}
		// The subject is served and its keeper lives, because a ready session keeps its
		// keeper. Do not conclude this on the first try, as another command's
		// lockfile.Died may have held the lock for a moment.
		if s.Rest || tries > 0 && s.Served {
			return nil, nil
		}
		if tries == 0 {
			log.InfoContext(ctx, "waiting for the active keeper", "phase", s.Phase, "desired", s.Desired)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// waitDesiredChange calls Next with a context that ends when the desired phase is no
// longer the given one.
func waitDesiredChange(ctx context.Context, log *slog.Logger, c Subject, desired string) error {
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
					log.WarnContext(ctx, "failed to read desired phase", slog.Any("error", err))
				}
				continue
			}
			if s.Desired != desired {
				cancel()
				return
			}
		}
	}()
	defer func() { cancel(); <-done }()
	return c.Next(ctx)
}
