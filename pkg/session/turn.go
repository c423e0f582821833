package session

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Where VMs are emulated, forks that wake at once compete for the host's cores, and three of
// them take longer than three in a row. So they wake in turn.

const (
	turnLimit  = 20 * time.Second // after which a fork wakes without its turn
	turnSilent = time.Second      // after which the user sees that a fork waits
)

var errTurnLimit = errors.New("the turn to wake did not come")

// turn is a fork's turn to wake, of which a host has one at a time. It is a lock on a file, so it
// ends with the process at the latest.
type turn struct {
	path string
	log  *slog.Logger
	lock *lockfile.Lock // nil: not this fork's turn
}

// needsTurn reports whether the next start of the session's VM resumes a saved VM or a checkpoint
// for the first time, on a host that emulates VMs.
func (s Session) needsTurn(accel vm.Accel) bool {
	resumes := s.Status.From == golden.FromWarm || s.forkOf() != nil && s.Status.Resumes != ""
	return accel.Name == "tcg" && resumes && !s.Status.WasReady
}

// wait waits for the turn, at most turnLimit. Without the turn, the fork may wake too: only ctx is
// a reason to fail.
func (t *turn) wait(ctx context.Context, p vm.Progress) error {
	if t.lock != nil { // the fork wakes again
		return nil
	}
	take := func(limit time.Duration) (err error) {
		limited, cancel := context.WithTimeoutCause(ctx, limit, errTurnLimit)
		defer cancel()
		t.lock, err = lockfile.Wait(limited, t.path, nil)
		return err
	}
	err := take(turnSilent)
	if errors.Is(err, errTurnLimit) {
		p("waiting until another VM is ready, at most " + turnLimit.String())
		err = take(turnLimit - turnSilent)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		t.log.WarnContext(ctx, "failed to wait for the turn to wake", "error", err)
	}
	return nil
}

// end lets the next fork wake. It does nothing if it is not this fork's turn.
func (t *turn) end() {
	if t.lock != nil {
		t.lock.Unlock()
		t.lock = nil
	}
}
