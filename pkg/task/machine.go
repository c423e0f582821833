package task

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	// followEvery is how often a task's keeper reads its session's row.
	followEvery = 200 * time.Millisecond

	// connectEvery is how often the keeper tries to connect to a guest that does not
	// respond.
	connectEvery = 2 * time.Second

	// capacityPollEvery is how often the keeper checks again whether the host has capacity
	// for the VM.
	capacityPollEvery = 10 * time.Second
)

// A machine is the VM of a task. It is reached through the task's session, whose own keeper
// does all work on it.
type machine struct {
	rec      *recorder
	sessions *session.Manager
}

// session makes the task's session ready. A task never has two sessions.
func (m *machine) session(ctx context.Context, t *Task) error {
	warned := false
	for {
		s, err := m.open(ctx, *t)
		if fail.CodeOf(err) == fail.Conflict { // the capacity was taken meanwhile
			if !warned {
				m.rec.Warn(ctx, t.ID, fail.HintOf(err), "waiting for capacity on the host: %v", err)
				warned = true
			}
			if err := sleep(ctx, capacityPollEvery); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if t.SessionID != s.ID {
			if err := m.rec.update(ctx, t, func(row *store.Task, _ *Status) []store.Event { row.SessionID = s.ID; return nil }); err != nil {
				return err
			}
		}
		return m.rec.Step(ctx, t.ID, "prepare the VM", func(ctx context.Context, _ vm.Progress) error {
			return m.await(ctx, s.ID, session.Ready)
		})
	}
}

func (m *machine) open(ctx context.Context, t Task) (session.Session, error) {
	if t.InSession() {
		s, err := m.sessions.Get(ctx, t.SessionID)
		if err == nil {
			err = sessionGone(s)
		}
		if err != nil {
			return s, err
		}
		return m.sessions.SetDesired(ctx, s, session.Ready)
	}
	r, err := t.sessionRequest()
	if err != nil {
		return session.Session{}, err
	}
	r.Task = t.ID
	if err := m.rec.tasks.leaveToSubmitter(ctx, t.ID, &r); err != nil {
		return session.Session{}, err
	}
	s, _, _, err := m.sessions.Open(ctx, r) // the submitter has seen the notices
	return s, err
}

// await follows a session until it is in that phase, or cannot get there.
func (m *machine) await(ctx context.Context, id string, phase session.Phase) error {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	seen := time.Now()
	for {
		s, err := m.sessions.Get(ctx, id)
		if err != nil {
			return err
		}
		switch {
		case s.Phase == phase:
			return nil
		case s.Phase == session.Broken && phase != session.Gone:
			return broken(s)
		case s.Phase == session.Gone:
			return sessionGone(s)
		case s.Phase == session.Stopped && s.Desired != session.Ready && phase == session.Ready:
			return fail.New(fail.Conflict, "session %s of the task was stopped", s.Name)
		}
		m.wakeSession(ctx, s, &seen)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// keeperless is how long a session may lack a keeper before wakeSession starts one: far
// longer than a keeper takes to start.
const keeperless = 3 * time.Second

// wakeSession starts a keeper for a session whose keeper has died, since no other process
// may do so. seen is when the session last had one.
func (m *machine) wakeSession(ctx context.Context, s session.Session, seen *time.Time) {
	if lockfile.Held(m.rec.tasks.paths().SessionLock(s.ID)) {
		*seen = time.Now()
	}
	if time.Since(*seen) < keeperless {
		return
	}
	*seen = time.Now()
	if err := m.sessions.Tend(ctx, s.Session); err != nil {
		m.rec.Log.Warn("failed to start session keeper", "error", err)
	}
}

// broken returns the error in a session's row.
func broken(s session.Session) error {
	e := fail.New(fail.ParseCode(s.ErrorCode), "session %s: %s", s.Name, s.ErrorMessage)
	if s.ErrorHint != "" {
		return e.WithHint("%s", s.ErrorHint)
	}
	return e
}

// withGuest calls f with the guest. While the guest does not respond, it tries again, for
// as long as the manifest says. It fails once the session is no longer ready.
func (m *machine) withGuest(ctx context.Context, t Task, f func(context.Context, session.Session, guestclient.Guest) error) error {
	patience := time.Duration(t.Manifest.Lifecycle.Retries.Connect)
	heard, woken := time.Now(), time.Now()
	for {
		s, err := m.sessions.Get(ctx, t.SessionID)
		if err != nil {
			return err
		}
		if s.Phase != session.Ready {
			return notReady(s)
		}
		m.wakeSession(ctx, s, &woken)
		conn, err := session.Connections{Paths: m.sessions.Config.Paths}.Dial(ctx, s)
		if err == nil {
			err = f(ctx, s, s.Guest(conn))
			// Decide by the connection, too: when it is lost, f may return any error.
			again := err != nil && (errors.Is(err, ssh.ErrUnreachable) || isClosed(conn.Done()))
			_ = conn.Close() // it ends with the process at the latest
			if !again {
				return err
			}
			heard = time.Now()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Since(heard) > patience {
			return fail.New(fail.Host, "%w for %v: %w", errSilent, patience, err).
				WithHint("agent-sessionizer logs --of serial %s", s.Name)
		}
		m.rec.Log.WarnContext(ctx, "guest connection failed", "error", err)
		if err := sleep(ctx, connectEvery); err != nil {
			return err
		}
	}
}

// isClosed reports whether a channel is closed.
func isClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// These are the reasons why a guest that was ready cannot be reached. They are
// returned wrapped.
var (
	errNotReady = errors.New("its session is no longer ready")
	errSilent   = errors.New("the guest did not answer")
)

// isVMGone reports whether the VM of a task went away.
func isVMGone(err error) bool {
	return errors.Is(err, errNotReady) || errors.Is(err, errSilent) || errors.Is(err, errAgentLost)
}

// restartVM starts a VM that went away again: what the agent did is on its disk.
func (m *machine) restartVM(ctx context.Context, t Task) error {
	s, err := m.sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase == session.Ready {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.Manifest.Lifecycle.ProvisionTimeout))
	defer cancel()
	if s.Phase == session.Gone || s.Desired == session.Gone {
		return notReady(s)
	}
	if _, err := m.sessions.SetDesired(ctx, s, session.Ready); err != nil {
		return err
	}
	return m.await(ctx, s.ID, session.Ready)
}

// stopVM stops a VM that cannot be reached any more: its agent must not still run when
// another one is started. The VM of a user's session is not stopped; lost handles its
// agent.
func (m *machine) stopVM(ctx context.Context, t Task) error {
	if t.InSession() {
		return nil
	}
	s, err := m.sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase != session.Ready {
		return err
	}
	return m.rec.Step(ctx, t.ID, "stop the VM", func(ctx context.Context, _ vm.Progress) error {
		if _, err := m.sessions.SetDesired(ctx, s, session.Stopped); err != nil {
			return err
		}
		return m.await(ctx, s.ID, session.Stopped)
	})
}

func notReady(s session.Session) error {
	reason := s.ErrorMessage
	if reason == "" {
		reason = "it is " + string(s.Phase)
	}
	return fail.New(fail.Failure, "%w: %s: %s", errNotReady, s.Name, reason).WithHint("agent-sessionizer logs %s", s.Name)
}

// discard destroys the task's own session, if it has one, and waits until the session
// is gone. A session that existed before the task stays.
func (m *machine) discard(ctx context.Context, t *Task) error {
	if t.InSession() {
		return m.cleanupInSession(ctx, *t)
	}
	if t.SessionID == "" {
		if err := m.recordLost(ctx, t); err != nil || t.SessionID == "" {
			return err
		}
	}
	s, err := m.sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase == session.Gone {
		return err
	}
	return m.rec.Step(ctx, t.ID, "remove the VM", func(ctx context.Context, _ vm.Progress) error {
		if _, err := m.sessions.SetDesired(ctx, s, session.Gone); err != nil {
			return err
		}
		return m.await(ctx, s.ID, session.Gone)
	})
}

// recordLost records the task's session if its keeper died, or the task was cancelled, after it had created
// the session and before it recorded it.
func (m *machine) recordLost(ctx context.Context, t *Task) error {
	all, err := m.sessions.List(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(all, func(s session.Session) bool { return s.Task == t.ID })
	if i < 0 {
		return nil
	}
	return m.rec.update(ctx, t, func(row *store.Task, _ *Status) []store.Event { row.SessionID = all[i].ID; return nil })
}

// leaveLimit is for a guest that no longer responds after everything was collected.
const leaveLimit = 2 * time.Minute

// cleanupInSession ends the task's processes in a session that stays, and removes the task's
// files there, except what could not be collected.
func (m *machine) cleanupInSession(ctx context.Context, t Task) error {
	if t.Status.Attempt == 0 || t.Status.Outcome.Preserve {
		return nil
	}
	s, err := m.sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase != session.Ready {
		return err // nothing runs in it
	}
	err = m.rec.Step(ctx, t.ID, "clean up in the session", func(ctx context.Context, _ vm.Progress) error {
		ctx, cancel := context.WithTimeout(ctx, leaveLimit+time.Duration(t.Manifest.Lifecycle.CancelGrace)+killWait)
		defer cancel()
		return m.withGuest(ctx, t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
			if err := killAgent(ctx, t, s, g); err != nil { // some paths here bypass collect
				return err
			}
			return g.Task(t.ID, t.Status.Attempt).Remove(ctx)
		})
	})
	if err != nil && !errors.Is(err, errNotReady) {
		m.rec.Warn(ctx, t.ID, "agent-sessionizer exec "+s.Name+" -- ps -ef", "parts of the task may be left in session %s: %v", s.Name, err)
	}
	return nil
}
