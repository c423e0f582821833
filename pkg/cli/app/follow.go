package app

import (
	"context"
	"encoding/json"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Follow shows the events of s until it is in the desired phase, or broken. Interrupting it
// stops the display, not the work.
func Follow(ctx context.Context, a *App, h ops.Host, s session.View, desired session.Phase) (session.View, error) {
	now, err := ops.GetProgress.On(ctx, h, ops.SessionPath{ID: s.ID})
	if err != nil {
		return s, err
	}
	view := a.Con.Steps()
	defer view.Close()
	if s.State == desired && now.Session.State == desired { // otherwise it got there meanwhile, perhaps with warnings
		return now.Session, nil
	}
	watched, stop := watchKeeper(ctx, h, s)
	defer stop()
	for ev, err := range h.Events(watched, ops.Session(s.ID), now.After, true) {
		if err != nil {
			if ctx.Err() == nil {
				if cause := context.Cause(watched); cause != nil {
					err = cause
				}
				return s, err
			}
			return s, DetachedError(s)
		}
		switch ev.Kind {
		case session.EventStep:
			var st lifecycle.Step
			if err := json.Unmarshal(ev.Data, &st); err == nil {
				view.Update(console.Step{Name: st.Name, State: st.State, Detail: st.Detail, Elapsed: st.Elapsed()})
			}
		case session.EventWarning:
			var w lifecycle.Warning
			if err := json.Unmarshal(ev.Data, &w); err == nil {
				view.Say("warning: %s", w.Message)
				if w.Hint != "" {
					view.Say("hint: %s", w.Hint)
				}
			}
		case session.EventPhase:
			var p session.PhaseChange
			if err := json.Unmarshal(ev.Data, &p); err != nil {
				return s, err
			}
			cur, err := ops.GetSession.On(ctx, h, ops.SessionPath{ID: s.ID})
			if err != nil {
				return s, err
			}
			switch {
			case cur.State == desired && p.To != desired: // the steps to it follow
			case cur.State == desired:
				return cur, nil
			case cur.State == session.Broken && cur.Desired != session.Gone:
				return cur, Broken(cur)
			case cur.Desired != desired:
				return cur, fail.New(fail.Conflict, "another command changed the desired phase of %s to %s", cur.Name, cur.Desired).WithHint("agent-sessionizer list")
			}
		}
	}
	return s, nil
}

// DetachedError returns the error for a user who leaves work that continues without them.
func DetachedError(s session.View) error {
	return fail.New(fail.Interrupted, "%s continues in the background", s.Name).
		WithHint("agent-sessionizer open %s, or to cancel it: agent-sessionizer destroy %s", s.Name, s.Name)
}

// Broken returns the error that a session's row records. A session that was never ready may
// have been requested with the wrong options, so the hint also suggests to replace it.
func Broken(s session.View) error {
	e := fail.New(fail.Failure, "%s is broken", s.Name)
	if s.Error != nil {
		e = fail.New(fail.ParseCode(s.Error.Code), "%s: %s", s.Name, s.Error.Message)
		e.Hint = s.Error.Hint
	}
	if !s.WasReady {
		e.Hint += ", or to start over: agent-sessionizer destroy " + s.Name
	}
	return e
}

// Keeperless is how long a session that is not at rest may lack a keeper. It is much longer
// than a keeper takes to start.
const Keeperless = 3 * time.Second

// watchKeeper returns a context that ends if s has no keeper and a new one does not help,
// because the awaited events would never come. The reason is the context's cause. stop ends
// the watching and waits until it has ended.
func watchKeeper(ctx context.Context, h ops.Host, s session.View) (watched context.Context, stop func()) {
	watched, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(Keeperless / 6)
		defer tick.Stop()
		seen, woken := time.Now(), false
		for {
			select {
			case <-watched.Done():
				return
			case <-tick.C:
			}
			now, err := ops.GetProgress.On(watched, h, ops.SessionPath{ID: s.ID})
			// The follower reports a row that cannot be read.
			if err != nil || session.AtRest(now.Session.State, now.Session.Desired) || now.Kept {
				seen = time.Now()
				continue
			}
			if time.Since(seen) < Keeperless {
				continue
			}
			if woken {
				cancel(abandoned(now.Session))
				return
			}
			if _, err := ops.TendSession.On(watched, h, ops.SessionPath{ID: s.ID}); err != nil {
				cancel(err)
				return
			}
			seen, woken = time.Now(), true
		}
	}()
	return watched, func() { cancel(nil); <-done }
}

// abandoned returns the error of a session whose keepers give up.
func abandoned(s session.View) error {
	why := lifecycle.ViewError{Message: "its keeper ended without recording an error"}
	if s.Error != nil && s.Error.Message != "" {
		why = *s.Error
	}
	e := fail.New(fail.ParseCode(why.Code), "%s is %s instead of %s, and no keeper works on it: %s", s.Name, s.State, s.Desired, why.Message)
	if e.Hint = why.Hint; e.Hint == "" {
		e.Hint = "agent-sessionizer logs --of keeper " + s.Name
	}
	return e
}
