package task

import (
	"context"
	"errors"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
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

// withPhaseLimit runs f, the work of a phase, within the phase's limit.
func (w *Worker) withPhaseLimit(ctx context.Context, t *Task, limit time.Duration, what string, f func(context.Context) error) error {
	whole := ctx
	now := time.Now()
	spent := w.currentSpent(t.Status, now)
	err := w.update(ctx, t, func(_ *store.Task, status *Status) []store.Event { status.Spent = spent; return nil })
	if err != nil {
		return err
	}
	w.noted = now
	ctx, cancel := w.withRemaining(ctx, *t, limit, what)
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

// stage prepares on the host what the task needs: its directory, and the repository's
// mirror.
func (w *Worker) stage(ctx context.Context, t *Task) error {
	d := w.Dir(t.ID)
	if err := w.prepareDir(ctx, *t); err != nil {
		return err
	}
	if err := d.writeBrief(*t); err != nil {
		return err
	}
	if t.InSession() { // its agent works on what is in the session
		return w.advance(ctx, t, Provisioning, PhaseChange{}, nil)
	}
	r, err := sessionRequest(t.Manifest, t.Status.Restricted)
	if err != nil {
		return err
	}
	err = w.withPhaseLimit(ctx, t, time.Duration(t.Manifest.Lifecycle.StageTimeout), "fetching the repository", func(ctx context.Context) error {
		for {
			err := w.refresh(ctx, *t, r.Repo)
			if err == nil || ctx.Err() != nil || !repo.Transient(err) {
				return err
			}
			if err := w.retryLater(ctx, t, err, t.Manifest.Lifecycle.Retries.Clone, cloneDelays()...); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	return w.advance(ctx, t, Provisioning, PhaseChange{}, nil)
}

func cloneDelays() []time.Duration {
	return []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute}
}

// refresh updates the mirror, and checks that it has what the manifest names.
func (w *Worker) refresh(ctx context.Context, t Task, ref repo.Ref) error {
	return w.step(ctx, t, "refresh the mirror", func(ctx context.Context) error {
		mirrors := *w.Mirrors
		mirrors.Retry.Times = -1 // stage retries, and records each retry
		m, err := mirrors.Ensure(ctx, ref, func(string) {})
		if err != nil {
			return err
		}
		if m.Warning != "" {
			w.warn(ctx, t, "", "%s", m.Warning)
		}
		sub := t.Manifest.Repository.Subpath
		if sub == "" {
			return nil
		}
		is, err := m.Source(false).MayHaveDir(ctx, sub)
		if err == nil && !is {
			err = w.located(ctx, t).Refuse(manifest.Fault{Field: "repository.subpath", Err: fail.New(fail.NotFound,
				"the commit to be checked out has no directory %q", sub).WithHint("git -C %s ls-tree -d -r --name-only HEAD", m.Dir)})
		}
		return err
	})
}

// located returns the task's manifest, with line numbers if the written text is
// available.
func (w *Worker) located(ctx context.Context, t Task) *manifest.Task {
	text, err := w.store().TaskText(ctx, t.ID)
	if err != nil || text == nil {
		return t.Manifest
	}
	if written, _, err := manifest.Parse("manifest.yaml", text, "/"); err == nil {
		return written
	}
	return t.Manifest
}

// provision has a session created for the task, or started again. The session may be
// the task's own or a user's.
func (w *Worker) provision(ctx context.Context, t *Task) error {
	life := t.Manifest.Lifecycle
	what := "creating the VM"
	if t.InSession() {
		what = "starting the session"
	}
	err := w.withPhaseLimit(ctx, t, time.Duration(life.ProvisionTimeout), what, func(ctx context.Context) error {
		for {
			err := w.session(ctx, t)
			if err == nil || ctx.Err() != nil {
				return err
			}
			var trouble *storeTrouble
			if errors.As(err, &trouble) || t.InSession() && errors.Is(err, errGone) {
				return err
			}
			if err := w.retryLater(ctx, t, err, life.Retries.Provision, 10*time.Second, 30*time.Second); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	return w.advance(ctx, t, Ready, PhaseChange{}, func(_ *store.Task, status *Status) { status.Attempt++ })
}

// session makes the task's session ready. A task never has two sessions.
func (w *Worker) session(ctx context.Context, t *Task) error {
	warned := false
	for {
		s, err := w.open(ctx, *t)
		if fail.CodeOf(err) == fail.Conflict { // the capacity was taken meanwhile
			if !warned {
				w.warn(ctx, *t, fail.HintOf(err), "waiting for capacity on the host: %v", err)
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
			if err := w.update(ctx, t, func(row *store.Task, _ *Status) []store.Event { row.SessionID = s.ID; return nil }); err != nil {
				return err
			}
		}
		return w.step(ctx, *t, "prepare the VM", func(ctx context.Context) error {
			return w.await(ctx, s.ID, session.Ready)
		})
	}
}

func (w *Worker) open(ctx context.Context, t Task) (session.Session, error) {
	if t.InSession() {
		s, err := w.Sessions.Get(ctx, t.SessionID)
		if err == nil {
			err = sessionGone(s)
		}
		if err != nil {
			return s, err
		}
		return w.Sessions.SetDesired(ctx, s, session.Ready)
	}
	r, err := sessionRequest(t.Manifest, t.Status.Restricted)
	if err != nil {
		return session.Session{}, err
	}
	r.Task = t.ID
	s, _, _, err := w.Sessions.Open(ctx, r) // the submitter has seen the notices
	return s, err
}

// await follows a session until it is in that phase, or cannot get there.
func (w *Worker) await(ctx context.Context, id string, phase session.Phase) error {
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	seen := time.Now()
	for {
		s, err := w.Sessions.Get(ctx, id)
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
		w.wakeSession(ctx, s, &seen)
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
func (w *Worker) wakeSession(ctx context.Context, s session.Session, seen *time.Time) {
	if store.Held(w.paths().SessionLock(s.ID)) {
		*seen = time.Now()
	}
	if time.Since(*seen) < keeperless {
		return
	}
	*seen = time.Now()
	if err := w.Sessions.Tend(ctx, s); err != nil {
		w.Log.Warn("failed to start session keeper", "error", err)
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

// launch starts the agent exactly once: a guest that already runs it reports that
// instead.
func (w *Worker) launch(ctx context.Context, t *Task) error {
	err := w.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
		return w.start(ctx, t, s, g)
	})
	if isVMGone(err) {
		return w.crashed(ctx, t, err)
	}
	if err != nil {
		return err
	}
	d := w.Dir(t.ID)
	// Start this attempt's output on its own line, not at the end of the previous
	// attempt's.
	if err := endLine(d.Stdout()); err != nil {
		return err
	}
	return w.advance(ctx, t, Running, PhaseChange{}, func(_ *store.Task, status *Status) {
		now := time.Now().UTC()
		if status.Started.IsZero() {
			status.Started = now
		}
		status.Quiet = 0
		// The previous attempt's output stays in the logs, before this attempt's.
		status.LogBase = Offsets{Stdout: size(d.Stdout()), Stderr: size(d.Stderr())}
	})
}

// withGuest calls f with the guest. While the guest does not respond, it tries again, for
// as long as the manifest says. It fails once the session is no longer ready.
func (w *Worker) withGuest(ctx context.Context, t Task, f func(context.Context, session.Session, guestclient.Guest) error) error {
	patience := time.Duration(t.Manifest.Lifecycle.Retries.Connect)
	heard, woken := time.Now(), time.Now()
	for {
		s, err := w.Sessions.Get(ctx, t.SessionID)
		if err != nil {
			return err
		}
		if s.Phase != session.Ready {
			return notReady(s)
		}
		w.wakeSession(ctx, s, &woken)
		conn, err := w.Sessions.Dial(ctx, s)
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
		w.Log.WarnContext(ctx, "guest connection failed", "error", err)
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

// stopVM stops a VM that cannot be reached any more: its agent must not still run when
// another one is started. The VM of a user's session is not stopped; lost handles its
// agent.
func (w *Worker) stopVM(ctx context.Context, t Task) error {
	if t.InSession() {
		return nil
	}
	s, err := w.Sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase != session.Ready {
		return err
	}
	return w.step(ctx, t, "stop the VM", func(ctx context.Context) error {
		if _, err := w.Sessions.SetDesired(ctx, s, session.Stopped); err != nil {
			return err
		}
		return w.await(ctx, s.ID, session.Stopped)
	})
}

func notReady(s session.Session) error {
	reason := s.ErrorMessage
	if reason == "" {
		reason = "it is " + string(s.Phase)
	}
	return fail.New(fail.Failure, "%w: %s: %s", errNotReady, s.Name, reason).WithHint("agent-sessionizer logs %s", s.Name)
}
