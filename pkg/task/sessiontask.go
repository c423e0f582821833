package task

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A task may run in a session that a user opened. The session is started if it is
// stopped, and stays otherwise unchanged. Nothing here stops or destroys such a
// session.

// InSession reports whether the task's session existed before the task, and stays after
// it.
func (t Task) InSession() bool { return t.Manifest.VM.Session != "" }

// repository returns what the task works on, for display.
func (t Task) repository() string {
	return cmp.Or(t.Manifest.Repository.URL, t.Status.Repository)
}

// base returns what the agent started from, or nil when it never had a checkout.
func (t Task) base(s session.Session) *repo.Base {
	if t.InSession() {
		return t.Status.Base
	}
	return s.Status.Base
}

// findSession finds the session in which a task is to run. On an error, field names the
// faulty field of the manifest.
func (m *Manager) findSession(ctx context.Context, asked *manifest.Task) (s session.Session, field string, err error) {
	s, err = m.isInSession(ctx, asked)
	if err != nil {
		return s, "vm.session", err
	}
	return s, "repository.url", ofSession(s, asked)
}

// isInSession finds the session that the manifest names, if tasks may run in it.
func (m *Manager) isInSession(ctx context.Context, asked *manifest.Task) (session.Session, error) {
	const list = "agent-sessionizer list"
	what := asked.VM.Session
	s, err := m.Sessions.Find(ctx, what)
	if fail.CodeOf(err) == fail.NotFound {
		if over, oerr := m.Sessions.Ended(ctx, what); oerr == nil && over {
			return s, fail.New(fail.NotFound, "session %s is gone", what).WithHint(list)
		}
	}
	switch {
	case err != nil:
		return s, err
	case s.Task != "":
		return s, fail.New(fail.Conflict, "session %s belongs to task %s and is removed with it", s.Name, s.Task).WithHint(list)
	case sessionGone(s) != nil:
		return s, fail.New(fail.Conflict, "session %s is being destroyed", s.Name).WithHint(list)
	}
	return s, nil
}

// ofSession refuses a repository that is not the session's.
func ofSession(s session.Session, asked *manifest.Task) error {
	if asked.Repository.URL == "" {
		return nil
	}
	ref, err := repo.Parse(asked.Repository.URL, "/")
	switch {
	case err != nil:
		return err
	case ref.Key != s.RepoKey:
		return fail.New(fail.Usage, "session %s is for %s, but the manifest's repository is %s", s.Name, s.RepoKey, ref.Key).
			WithHint("leave repository.url out, or: agent-sessionizer list")
	case ref.Branch != "":
		return fail.New(fail.Usage, "the manifest names branch %s, but in session %s the agent works on what is checked out there", ref.Branch, s.Name).
			WithHint("leave repository.url out")
	}
	return nil
}

// In returns the tasks that run in a session or wait for it.
func (m *Manager) In(ctx context.Context, session string) (all []Task, err error) {
	var phases []string
	for _, p := range Phases() {
		if !p.Over() {
			phases = append(phases, string(p))
		}
	}
	rows, err := m.store().Tasks(ctx, store.TaskFilter{Phases: phases, OldestFirst: true})
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		if row.SessionID != session {
			continue
		}
		t, err := read(row)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

// errGone means that a session is gone or about to be.
var errGone = errors.New("it was destroyed")

func sessionGone(s session.Session) error {
	if s.Phase != session.Gone && s.Phase != session.Destroying && s.Desired != session.Gone {
		return nil
	}
	return fail.New(fail.NotFound, "session %s of the task is gone: %w", s.Name, errGone).WithHint("agent-sessionizer list")
}

// outcomeIfLost returns how a task ends whose session went away, or nil when the session may
// come back. A user's session is never rebuilt. One that does not respond is not
// stopped, because the agent may still be running in it.
func (w *Worker) outcomeIfLost(ctx context.Context, t Task, what crashAction, cause error) (*Outcome, error) {
	s, err := w.Sessions.Get(ctx, t.SessionID)
	if err != nil {
		return nil, err
	}
	if err := sessionGone(s); err != nil {
		o := failure(err)
		return &o, nil
	}
	if errors.Is(cause, errSilent) {
		o := failure(cause)
		return &o, nil
	}
	if what == actionRestart {
		return nil, nil
	}
	return &Outcome{
		Result: CrashLoop, Code: fail.Failure.String(), Hint: fail.HintOf(cause),
		Reason: fmt.Sprintf("the VM of session %s crashed %d times: %v", s.Name, len(t.Status.Restarts)+1, cause),
	}, nil
}

// noteBase records what is checked out before an agent starts for the first time.
func (w *Worker) noteBase(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	if !t.InSession() || t.Status.Base != nil {
		return nil
	}
	base, err := repo.Head(ctx, g.SSH, s.Status.Dir)
	if err != nil {
		return err
	}
	return w.update(ctx, t, func(_ *store.Task, status *Status) []store.Event { status.Base = &base; return nil })
}

// leaveLimit is for a guest that no longer responds after everything was collected.
const leaveLimit = 2 * time.Minute

// cleanupInSession ends the task's processes in a session that stays, and removes the task's
// files there, except what could not be collected.
func (w *Worker) cleanupInSession(ctx context.Context, t Task) error {
	if t.Status.Attempt == 0 || t.Status.Outcome.Preserve {
		return nil
	}
	s, err := w.Sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase != session.Ready {
		return err // nothing runs in it
	}
	err = w.step(ctx, t, "clean up in the session", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, leaveLimit+time.Duration(t.Manifest.Lifecycle.CancelGrace)+killWait)
		defer cancel()
		return w.withGuest(ctx, t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
			if err := w.kill(ctx, t, s, g); err != nil { // some paths here bypass collect
				return err
			}
			return g.Task(t.ID, t.Status.Attempt).Remove(ctx)
		})
	})
	if err != nil && !errors.Is(err, errNotReady) {
		w.warn(ctx, t, "agent-sessionizer exec "+s.Name+" -- ps -ef", "parts of the task may be left in session %s: %v", s.Name, err)
	}
	return nil
}
