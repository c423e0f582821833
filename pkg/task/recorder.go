package task

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// storeTrouble marks errors of the store, which decide nothing about a task.
type storeTrouble struct{ error }

func (e *storeTrouble) Unwrap() error { return e.error }

// A recorder writes what becomes of a task: its row, its events, and the files that mirror
// them. It measures how long a phase takes.
type recorder struct {
	lifecycle.Reporter
	tasks *Manager
	noted time.Time // when we last recorded Spent, with a monotonic reading
}

// update changes the task's row, and t. f may return no events.
func (rec *recorder) update(ctx context.Context, t *Task, f func(row *store.Task, status *Status) []store.Event) error {
	row, err := rec.tasks.store().UpdateTask(ctx, t.ID, func(row *store.Task) ([]store.Event, error) {
		if Phase(row.Phase) != t.Phase {
			return nil, fmt.Errorf("task %s is %s, not %s: %w", row.ID, row.Phase, t.Phase, store.ErrStale)
		}
		cur, err := read(*row, nil)
		if err != nil {
			return nil, err
		}
		evs := f(row, &cur.Status)
		row.Status, err = json.Marshal(cur.Status)
		return evs, err
	})
	if err != nil {
		return &storeTrouble{err}
	}
	*t, err = read(row, nil)
	return err
}

// advance moves t to another phase, as the transition table allows, and resets what
// belonged to the previous phase.
func (rec *recorder) advance(ctx context.Context, t *Task, to Phase, change PhaseChange, f func(*store.Task, *Status)) error {
	if !next.Allow(t.Phase, to) {
		return fmt.Errorf("task %s: no transition from %s to %s", t.ID, t.Phase, to)
	}
	from := t.Phase
	if to.Over() && !from.Over() {
		// Otherwise another host of a cluster could take the end of the task for that of its host.
		if err := rec.tasks.store().WaitShipped(ctx, t.ID); err != nil {
			return &storeTrouble{err}
		}
	}
	change.From, change.To = from, to
	if what := ends[to]; what != "" && !from.Over() {
		rec.tasks.audit(ctx, what, *t) // before the transition: after a crash it may be recorded twice, but is never missing
	}
	err := rec.update(ctx, t, func(row *store.Task, status *Status) []store.Event {
		row.Phase = string(to)
		if from == Running {
			status.Ran += rec.phaseTime(*status)
		}
		status.Tries, status.NextTry, status.Spent = 0, time.Time{}, Spent{}
		if f != nil {
			f(row, status)
		}
		change.Session, change.Desired = row.SessionID, DesiredPhase(row.Desired)
		return []store.Event{store.NewEvent(EventPhase, change)}
	})
	if err != nil {
		return err
	}
	rec.Log.InfoContext(ctx, "task state transition", "from", from, "to", to)
	return rec.writeFiles(ctx, *t)
}

// writeFiles updates the files that mirror the store.
func (rec *recorder) writeFiles(ctx context.Context, t Task) error {
	err := rec.tasks.Dir(t.ID).appendEvents(func(seq int64, limit int) ([]store.Event, error) {
		return rec.tasks.store().Events(ctx, t.ID, seq, limit)
	})
	return errors.Join(err, rec.tasks.Dir(t.ID).writeState(t))
}

// decide writes how the task ends. The first outcome stays.
func (rec *recorder) decide(ctx context.Context, t *Task, o Outcome) error {
	o.At = time.Now().UTC()
	o.Reason, o.Hint = rec.Text(o.Reason), rec.Text(o.Hint)
	return rec.update(ctx, t, func(row *store.Task, status *Status) []store.Event {
		if status.Outcome != nil {
			return nil
		}
		status.Outcome = &o
		if o.Result != Success && o.Result != CancelledByUser {
			row.SetError(cmp.Or(o.Code, fail.Failure.String()), o.Reason, o.Hint)
		}
		return []store.Event{store.NewEvent(EventOutcome, o)}
	})
}

// retryLater counts a failed try of a phase's work and waits for the next one; it returns
// cause after too many. The count and the delay are stored in the row, so a new
// keeper neither restarts the count nor shortens the wait.
func (rec *recorder) retryLater(ctx context.Context, t *Task, cause error, most int, delays ...time.Duration) error {
	if t.Status.Tries >= most {
		return cause
	}
	delay := delays[min(t.Status.Tries, len(delays)-1)]
	delay = time.Duration(float64(delay) * (1 + jitter*(2*rand.Float64()-1)))
	err := rec.update(context.WithoutCancel(ctx), t, func(_ *store.Task, status *Status) []store.Event {
		status.Tries++
		status.NextTry = time.Now().Add(delay)
		return []store.Event{store.NewEvent(EventRetry, Retrying{
			Phase: t.Phase, Try: status.Tries + 1, Most: most + 1, DelayMS: delay.Milliseconds(),
			Error: rec.Text(cause.Error()), Hint: rec.Text(fail.HintOf(cause)),
		})}
	})
	if err != nil {
		return err
	}
	return sleep(ctx, delay)
}

// jitter is the fraction by which a delay is randomly lengthened or shortened.
const jitter = 0.15

// waitRetryDelay waits for the rest of a delay that a previous keeper started.
func (t *Task) waitRetryDelay(ctx context.Context) error {
	left := time.Until(t.Status.NextTry)
	if left <= 0 || left > time.Minute { // a clock that was set back must not delay us
		return nil
	}
	return sleep(ctx, left)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// withPhaseLimit runs f, the work of a phase, within the phase's limit.
func (rec *recorder) withPhaseLimit(ctx context.Context, t *Task, limit time.Duration, what string, f func(context.Context) error) error {
	whole := ctx
	now := time.Now()
	spent := rec.currentSpent(t.Status, now)
	err := rec.update(ctx, t, func(_ *store.Task, status *Status) []store.Event { status.Spent = spent; return nil })
	if err != nil {
		return err
	}
	rec.noted = now
	ctx, cancel := rec.withRemaining(ctx, *t, limit, what)
	defer cancel()
	if err := t.waitRetryDelay(ctx); err != nil {
		return err
	}
	err = f(ctx)
	if err != nil && ctx.Err() != nil && whole.Err() == nil {
		return context.Cause(ctx) // the limit, and not an error that it caused
	}
	return err
}

// withRemaining returns ctx with the limit of a phase, minus the time that previous keepers
// used.
func (rec *recorder) withRemaining(ctx context.Context, t Task, limit time.Duration, what string) (context.Context, context.CancelFunc) {
	left := max(limit-rec.phaseTime(t.Status), time.Millisecond)
	return context.WithTimeoutCause(ctx, left, fail.New(fail.Timeout, "%s took longer than %v", what, limit).
		WithHint("agent-sessionizer task logs %s", t.ID))
}

// phaseTime returns how long the phase has taken so far.
func (rec *recorder) phaseTime(f Status) time.Duration {
	s := f.Spent
	switch {
	case s.At.IsZero():
		return s.For
	case s.At.Equal(rec.noted):
		return s.For + time.Since(rec.noted)
	}
	return s.For + max(0, time.Since(s.At))
}

// currentSpent returns the current value of Spent. The caller stores it in the row, and then
// sets noted.
func (rec *recorder) currentSpent(f Status, now time.Time) Spent {
	return Spent{For: rec.phaseTime(f), At: now.UTC()}
}
