package task

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// Worker does the work of a task's phases. One keeper uses one Worker, and holds the
// task's lock meanwhile.
type Worker struct {
	*Manager
	Mirrors *repo.Mirrors
	Log     *slog.Logger

	// Redact removes secrets from the task's row, its events, its logs and Log. The
	// secrets that the guest says it was given are added to it.
	Redact *secret.Redactor

	noted time.Time // when we last recorded Spent, with a monotonic reading
}

// Next takes the step that brings the task one phase closer to its end, and returns
// the task as it is afterwards. When ctx is cancelled because the desired state
// changed, Next returns with the phase unchanged; the keeper then calls it again.
func (w *Worker) Next(ctx context.Context, t Task) (Task, error) {
	ctx = traceid.With(ctx, t.Status.Trace)
	w.Sessions.Actor = t.Status.Actor  // changes to the session are attributed to the task's submitter
	keep := context.WithoutCancel(ctx) // for writes that must happen even when the work is cancelled
	if t.Status.Outcome == nil && t.Desired != Run {
		return w.decide(keep, t, Outcome{Result: CancelledByUser})
	}
	if t.Status.Outcome != nil && !t.Phase.Over() {
		return w.advanceEnding(keep, t)
	}
	var err error
	switch t.Phase {
	case Staging:
		err = w.stage(ctx, &t)
	case Provisioning:
		err = w.provision(ctx, &t)
	case Ready:
		err = w.launch(ctx, &t)
	case Running:
		err = w.run(ctx, &t)
	case FailedPreserved:
		return w.preserve(ctx, t)
	default:
		return t, fmt.Errorf("task %s is %s: nothing to do", t.ID, t.Phase)
	}
	switch {
	case err == nil, errors.Is(err, store.ErrStale):
		return t, err
	case ctx.Err() != nil:
		return t, nil //nolint:nilerr // cancelled; the desired state says what is next
	}
	var trouble *storeTrouble
	if errors.As(err, &trouble) { // not the task's fault: the keeper tries again
		return t, err
	}
	if isDiskFull(err) {
		err = w.retryLater(ctx, &t, err, capacityTries, capacityDelays()...)
		switch {
		case err == nil:
			return t, nil
		case ctx.Err() != nil:
			return t, nil //nolint:nilerr // cancelled; the desired state says what is next
		case errors.As(err, &trouble):
			return t, err
		}
	}
	return w.decide(keep, t, failure(err))
}

// capacityTries is how often a step is retried while the host's disk is full: for a
// quarter of an hour.
const capacityTries = 20

func capacityDelays() []time.Duration {
	return []time.Duration{time.Second, 2 * time.Second, 5 * time.Second, 15 * time.Second, 30 * time.Second, time.Minute}
}

// isDiskFull reports whether err means a full disk, on which space may become available.
func isDiskFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || store.Full(err)
}

// failure returns the outcome of a step that failed for good.
func failure(err error) Outcome {
	o := Outcome{Result: Failure, Code: fail.CodeOf(err).String(), Reason: err.Error(), Hint: fail.HintOf(err)}
	if fail.CodeOf(err) == fail.Timeout {
		o.Result = TimedOut
	}
	return o
}

// storeTrouble marks errors of the store, which decide nothing about a task.
type storeTrouble struct{ error }

func (e *storeTrouble) Unwrap() error { return e.error }

// update changes the task's row, and t. f may return no events.
func (w *Worker) update(ctx context.Context, t *Task, f func(row *store.Task, status *Status) []store.Event) error {
	row, err := w.store().UpdateTask(ctx, t.ID, func(row *store.Task) ([]store.Event, error) {
		if Phase(row.Phase) != t.Phase {
			return nil, fmt.Errorf("task %s is %s, not %s: %w", row.ID, row.Phase, t.Phase, store.ErrStale)
		}
		cur, err := read(*row)
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
	*t, err = read(row)
	return err
}

// advance moves t to another phase, as the transition table allows, and resets what
// belonged to the previous phase.
func (w *Worker) advance(ctx context.Context, t *Task, to Phase, change PhaseChange, f func(*store.Task, *Status)) error {
	if !t.Phase.canGo(to) {
		return fmt.Errorf("task %s: no transition from %s to %s", t.ID, t.Phase, to)
	}
	from := t.Phase
	change.From, change.To = from, to
	if what := ends[to]; what != "" && !from.Over() {
		w.audit(ctx, what, *t) // before the transition: after a crash it may be recorded twice, but is never missing
	}
	err := w.update(ctx, t, func(row *store.Task, status *Status) []store.Event {
		row.Phase = string(to)
		if from == Running {
			status.Ran += w.phaseTime(*status)
		}
		status.Tries, status.NextTry, status.Spent = 0, time.Time{}, Spent{}
		if f != nil {
			f(row, status)
		}
		change.Session, change.Desired = row.SessionID, DesiredPhase(row.Desired)
		return []store.Event{event(EventPhase, change)}
	})
	if err != nil {
		return err
	}
	w.Log.InfoContext(ctx, "task state transition", "from", from, "to", to)
	return w.writeFiles(ctx, *t)
}

// writeFiles updates the files that mirror the store.
func (w *Worker) writeFiles(ctx context.Context, t Task) error {
	err := w.Dir(t.ID).appendEvents(func(seq int64, limit int) ([]store.Event, error) {
		return w.store().Events(ctx, t.ID, seq, limit)
	})
	return errors.Join(err, w.Dir(t.ID).writeState(t))
}

// decide writes how the task ends. The first outcome stays.
func (w *Worker) decide(ctx context.Context, t Task, o Outcome) (Task, error) {
	o.At = time.Now().UTC()
	o.Reason, o.Hint = w.text(o.Reason), w.text(o.Hint)
	err := w.update(ctx, &t, func(row *store.Task, status *Status) []store.Event {
		if status.Outcome != nil {
			return nil
		}
		status.Outcome = &o
		if o.Result != Success && o.Result != CancelledByUser {
			row.SetError(cmp.Or(o.Code, fail.Failure.String()), o.Reason, o.Hint)
		}
		return []store.Event{event(EventOutcome, o)}
	})
	return t, err
}

// text returns s as rows and events may hold it: without secrets, safe to print, and
// short.
func (w *Worker) text(s string) string { return w.Redact.Line(s, 2000) }

// appendEvent appends an event that changes nothing in the row.
func (w *Worker) appendEvent(ctx context.Context, t Task, kind string, data any) {
	// An event that cannot be written must not stop the work: the phase change that
	// follows uses the same store and will fail loudly.
	if err := w.store().Append(ctx, t.ID, event(kind, data)); err != nil {
		w.Log.Error("failed to append event", "kind", kind, "error", err)
	}
}

func (w *Worker) warn(ctx context.Context, t Task, hint, format string, args ...any) {
	w.appendEvent(ctx, t, EventWarning, session.Warning{Message: w.text(fmt.Sprintf(format, args...)), Hint: hint})
}

// step runs f as a named step and reports it in events.
func (w *Worker) step(ctx context.Context, t Task, name string, f func(context.Context) error) error {
	began := time.Now()
	keep := context.WithoutCancel(ctx)
	tell := func(state, detail string) {
		w.appendEvent(keep, t, EventStep, session.Step{Name: name, State: state, Detail: w.text(detail), ElapsedMS: time.Since(began).Milliseconds()})
	}
	tell("start", "")
	err := f(ctx)
	switch {
	case err == nil:
		tell("done", "")
		return nil
	case ctx.Err() == nil:
		tell("failed", err.Error())
	}
	return fmt.Errorf("%s: %w", name, err)
}

// retryLater counts a failed try of a phase's work and waits for the next one; it returns
// cause after too many. The count and the delay are stored in the row, so a new
// keeper neither restarts the count nor shortens the wait.
func (w *Worker) retryLater(ctx context.Context, t *Task, cause error, most int, delays ...time.Duration) error {
	if t.Status.Tries >= most {
		return cause
	}
	delay := delays[min(t.Status.Tries, len(delays)-1)]
	delay = time.Duration(float64(delay) * (1 + jitter*(2*rand.Float64()-1)))
	err := w.update(context.WithoutCancel(ctx), t, func(_ *store.Task, status *Status) []store.Event {
		status.Tries++
		status.NextTry = time.Now().Add(delay)
		return []store.Event{event(EventRetry, Retrying{
			Phase: t.Phase, Try: status.Tries + 1, Most: most + 1, DelayMS: delay.Milliseconds(),
			Error: w.text(cause.Error()), Hint: w.text(fail.HintOf(cause)),
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

// withRemaining returns ctx with the limit of a phase, minus the time that previous keepers
// used.
func (w *Worker) withRemaining(ctx context.Context, t Task, limit time.Duration, what string) (context.Context, context.CancelFunc) {
	left := max(limit-w.phaseTime(t.Status), time.Millisecond)
	return context.WithTimeoutCause(ctx, left, fail.New(fail.Timeout, "%s took longer than %v", what, limit).
		WithHint("agent-sessionizer task logs %s", t.ID))
}

// phaseTime returns how long the phase has taken so far.
func (w *Worker) phaseTime(f Status) time.Duration {
	s := f.Spent
	switch {
	case s.At.IsZero():
		return s.For
	case s.At.Equal(w.noted):
		return s.For + time.Since(w.noted)
	}
	return s.For + max(0, time.Since(s.At))
}

// currentSpent returns the current value of Spent. The caller stores it in the row, and then
// sets noted.
func (w *Worker) currentSpent(f Status, now time.Time) Spent {
	return Spent{For: w.phaseTime(f), At: now.UTC()}
}
