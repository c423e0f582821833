package task

import (
	"encoding/json"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Rerun says whether a task of a cluster may run again after its host was lost.
type Rerun string

// The policies.
const (
	RerunNever        Rerun = "never"
	RerunIfNotStarted Rerun = "if-not-started" // its agent certainly did not run
	RerunAlways       Rerun = "always"
)

// Decode reads a row.
func Decode(row store.Task) (Task, error) { return read(row, nil) }

// Started reports whether the agent may have run.
func (t Task) Started() bool { return t.Status.Attempt > 0 }

// Lost returns the row of a task whose host was lost, as it is from then on, and the event of
// the change; no event if the task had ended. It waits in the queue again if that is allowed, and
// has failed otherwise.
func Lost(row store.Task, host string, now time.Time) (store.Task, []store.Event, error) {
	t, err := read(row, nil)
	if err != nil || t.Phase.Over() && t.Phase != FailedPreserved {
		return row, nil, err
	}
	rerun := Rerun(t.Manifest.Lifecycle.Rerun)
	again := rerun == RerunAlways || rerun == RerunIfNotStarted && !t.Started()
	if t.InSession() || t.Parent != "" {
		again = false // what it needs was on that host
	}
	reason := "host " + host + " was lost"
	change := PhaseChange{From: t.Phase, Desired: t.Desired, Reason: reason}
	status := t.Status
	switch {
	case status.Outcome == nil && t.Desired != Run:
		status.Outcome = &Outcome{Result: CancelledByUser, At: now}
		change.To = Cancelled
	case status.Outcome == nil && again:
		status = Status{RetryOf: status.RetryOf, Actor: status.Actor, Trace: status.Trace, Restricted: status.Restricted}
		change.To = Pending
		row.SessionID = ""
	default:
		if status.Outcome == nil {
			status.Outcome = &Outcome{Result: Failure, Code: fail.Host.String(), Reason: reason, At: now}
		}
		change.To = Failed
		if !status.Collected {
			reason += " before the results were collected"
		}
		row.SetError(fail.Host.String(), reason, "agent-sessionizer task retry "+row.ID)
	}
	change.Outcome = status.Outcome
	if row.Status, err = json.Marshal(status); err != nil {
		return row, nil, err
	}
	row.Phase, row.StateChangedAt = string(change.To), now
	return row, []store.Event{store.NewEvent(EventPhase, change)}, nil
}

// CancelWaiting returns the row of a task that waits in a queue, once a user wants it to end, and the
// event of the change.
func CancelWaiting(row store.Task, desired DesiredPhase, now time.Time) (store.Task, store.Event, error) {
	t, err := read(row, nil)
	if err != nil {
		return row, store.Event{}, err
	}
	t.Status.Outcome = &Outcome{Result: CancelledByUser, At: now}
	row.Phase, row.Desired, row.StateChangedAt = string(Cancelled), string(desired), now
	row.Status, err = json.Marshal(t.Status)
	return row, store.NewEvent(EventPhase, PhaseChange{From: t.Phase, To: Cancelled, Desired: desired, Outcome: t.Status.Outcome}), err
}
