package cli

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// follow shows the events of s until it is in the desired phase, or broken. Interrupting it
// stops the display, not the work.
func (a *app) follow(ctx context.Context, m *session.Manager, s session.Session, desired session.Phase) (session.Session, error) {
	seq, err := m.LastPhaseSeq(ctx, s.ID)
	if err != nil {
		return s, err
	}
	view := a.con.Steps()
	defer view.Close()
	if cur, err := m.Get(ctx, s.ID); err != nil || cur.Phase == desired {
		return cur, err
	}
	watched, stop := a.watchKeeper(ctx, m, s)
	defer stop()
	for ev, err := range m.Store.Follow(watched, s.ID, seq) {
		if err != nil {
			if ctx.Err() == nil {
				if cause := context.Cause(watched); cause != nil {
					err = cause
				}
				return s, err
			}
			return s, detachedError(s)
		}
		switch ev.Kind {
		case session.EventStep:
			var st session.Step
			if err := json.Unmarshal(ev.Data, &st); err == nil {
				view.Update(console.Step{Name: st.Name, State: st.State, Detail: st.Detail, Elapsed: st.Elapsed()})
			}
		case session.EventWarning:
			var w session.Warning
			if err := json.Unmarshal(ev.Data, &w); err == nil {
				view.Say("warning: %s", w.Message)
				if w.Hint != "" {
					view.Say("hint: %s", w.Hint)
				}
			}
		case session.EventPhase:
			cur, err := m.Get(ctx, s.ID)
			if err != nil {
				return s, err
			}
			switch {
			case cur.Phase == desired:
				return cur, nil
			case cur.Phase == session.Broken && cur.Desired != session.Gone:
				return cur, broken(cur)
			case cur.Desired != desired:
				return cur, fail.New(fail.Conflict, "another command changed the desired phase of %s to %s", cur.Name, cur.Desired).WithHint("agent-sessionizer list")
			}
		}
	}
	return s, nil
}

// detachedError returns the error for a user who leaves work that continues without them.
func detachedError(s session.Session) error {
	return fail.New(fail.Interrupted, "%s continues in the background", s.Name).
		WithHint("agent-sessionizer open %s, or to cancel it: agent-sessionizer destroy %s", s.Name, s.Name)
}

// broken returns the error that a session's row records. A session that was never ready may
// have been requested with the wrong options, so the hint also suggests to replace it.
func broken(s session.Session) error {
	e := fail.New(fail.ParseCode(s.ErrorCode), "%s: %s", s.Name, s.ErrorMessage)
	e.Hint = s.ErrorHint
	if !s.Status.WasReady {
		e.Hint += ", or to start over: agent-sessionizer destroy " + s.Name
	}
	return e
}

// keeperless is how long a session that is not at rest may lack a keeper. It is much longer
// than a keeper takes to start.
const keeperless = 3 * time.Second

// watchKeeper returns a context that ends if s has no keeper and a new one does not help,
// because the awaited events would never come. The reason is the context's cause. stop ends
// the watching and waits until it has ended.
func (a *app) watchKeeper(ctx context.Context, m *session.Manager, s session.Session) (watched context.Context, stop func()) {
	watched, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(keeperless / 6)
		defer tick.Stop()
		seen, woken := time.Now(), false
		for {
			select {
			case <-watched.Done():
				return
			case <-tick.C:
			}
			cur, err := m.Get(watched, s.ID)
			// The follower reports a row that cannot be read.
			if err != nil || session.AtRest(cur.Phase, cur.Desired) || store.Held(m.Config.Paths.SessionLock(s.ID)) {
				seen = time.Now()
				continue
			}
			if time.Since(seen) < keeperless {
				continue
			}
			if woken {
				cancel(abandoned(cur))
				return
			}
			if err := m.Reconcile(watched); err != nil {
				cancel(err)
				return
			}
			seen, woken = time.Now(), true
		}
	}()
	return watched, func() { cancel(nil); <-done }
}

// abandoned returns the error of a session whose keepers give up.
func abandoned(s session.Session) error {
	why := errors.New("its keeper ended without recording an error")
	if s.ErrorMessage != "" {
		why = errors.New(s.ErrorMessage)
	}
	e := fail.New(fail.ParseCode(s.ErrorCode), "%s is %s instead of %s, and no keeper works on it: %w", s.Name, s.Phase, s.Desired, why)
	if e.Hint = s.ErrorHint; e.Hint == "" {
		e.Hint = "agent-sessionizer logs --of keeper " + s.Name
	}
	return e
}
