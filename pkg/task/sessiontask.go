package task

import (
	"cmp"
	"context"
	"errors"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
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
func findSession(ctx context.Context, m *session.Manager, asked *manifest.Task) (s session.Session, field string, err error) {
	s, err = namedSession(ctx, m, asked)
	if err != nil {
		return s, "vm.session", err
	}
	return s, "repository.url", ofSession(s, asked)
}

// namedSession finds the session that the manifest names, if tasks may run in it.
func namedSession(ctx context.Context, m *session.Manager, asked *manifest.Task) (session.Session, error) {
	const list = "agent-sessionizer list"
	what := asked.VM.Session
	s, err := m.FindExact(ctx, what)
	if fail.CodeOf(err) == fail.NotFound {
		if over, oerr := m.Ended(ctx, what); oerr == nil && over {
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
	rows, err := m.store().Tasks(ctx, store.TaskFilter{Phases: Unended(), Here: true, OldestFirst: true})
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		if row.SessionID != session {
			continue
		}
		t, err := read(row, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, nil
}

// Needing describes the tasks that have not ended and that run in a session, wait for it or were
// submitted from inside it. It returns "" for none.
func (m *Manager) Needing(ctx context.Context, session string) (string, error) {
	rows, err := m.store().Tasks(ctx, store.TaskFilter{Phases: Unended(), Here: true, OldestFirst: true})
	for _, row := range rows {
		if row.SessionID == session || row.Parent == session || row.Root == session {
			return "task " + row.ID + " has not ended", nil
		}
	}
	return "", err
}

// errGone means that a session is gone or about to be.
var errGone = errors.New("it was destroyed")

func sessionGone(s session.Session) error {
	if s.Phase != session.Gone && s.Phase != session.Destroying && s.Desired != session.Gone {
		return nil
	}
	return fail.New(fail.NotFound, "session %s of the task is gone: %w", s.Name, errGone).WithHint("agent-sessionizer list")
}
