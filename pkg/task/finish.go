package task

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// killWait is how long a process group may take to die from SIGKILL.
const killWait = 30 * time.Second

// collectLimit stops a guest that never stops sending. Receiving gigabytes from an
// emulated guest takes an hour.
const collectLimit = 3 * time.Hour

// advanceEnding takes the next step towards the last phase of a task whose outcome is decided.
func (w *Worker) advanceEnding(ctx context.Context, t Task) (Task, error) {
	switch {
	case t.Phase == Running:
		err := w.advance(ctx, &t, Completing, PhaseChange{Outcome: t.Status.Outcome}, func(_ *store.Task, status *Status) {
			status.Ended = time.Now().UTC()
		})
		return t, err
	case t.Phase == Completing && !t.Status.Collected:
		return t, w.collect(ctx, &t)
	}
	return t, w.finish(ctx, &t)
}

// last returns the phase that an outcome leads to.
func (t Task) last() Phase {
	o := t.Status.Outcome
	switch {
	case o.Result == CancelledByUser:
		return Cancelled
	case o.Result == Success:
		return Completed
	case t.InSession() || t.Desired == Destroyed || t.SessionID == "" || !Phase.canGo(t.Phase, FailedPreserved):
		return Failed
	case o.Preserve || t.Manifest.Lifecycle.FailureAction == "preserve":
		return FailedPreserved
	}
	return Failed
}

// collect fetches what the agent did: its logs to the end, the artifacts, and its
// commits. If some of it cannot be collected, it stays in the VM, which is then kept.
func (w *Worker) collect(ctx context.Context, t *Task) error {
	err := w.step(ctx, *t, "collect results", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeoutCause(ctx, collectLimit, fail.New(fail.Timeout, "collecting took longer than %v", collectLimit))
		defer cancel()
		for again := false; ; again = true {
			if err := w.restartVM(ctx, *t); err != nil {
				return err
			}
			err := w.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
				if err := w.kill(ctx, *t, s, g); err != nil {
					return err
				}
				return w.gather(ctx, t, s, g)
			})
			if !isVMGone(err) || again {
				return err
			}
			// What the agent did is on the disk of the VM that went away.
			if herr := w.stopVM(ctx, *t); herr != nil {
				return errors.Join(err, herr)
			}
		}
	})
	var trouble *storeTrouble
	if isDiskFull(err) { // the VM with its content still exists
		err = w.retryLater(ctx, t, err, capacityTries, capacityDelays()...)
		if err == nil {
			return nil
		}
	}
	if errors.As(err, &trouble) {
		return err
	}
	return w.update(ctx, t, func(row *store.Task, status *Status) []store.Event {
		status.Collected = true
		if err == nil {
			return []store.Event{event(EventArtifacts, gathered(*status))}
		}
		reason := w.text(fmt.Sprintf("the agent's results could not be collected: %v", err))
		status.Outcome.Preserve = true
		if status.Outcome.Result == Success {
			status.Outcome.Result, status.Outcome.Code = Failure, fail.CodeOf(err).String()
			status.Outcome.Reason, status.Outcome.Hint = reason, w.text(fail.HintOf(err))
			row.SetError(status.Outcome.Code, reason, status.Outcome.Hint)
		}
		return []store.Event{event(EventWarning, session.Warning{Message: reason, Hint: w.text(fail.HintOf(err))})}
	})
}

func gathered(f Status) Gathered {
	g := Gathered{Files: len(f.Artifacts), Skipped: len(f.Skipped)}
	for _, a := range f.Artifacts {
		g.Bytes += a.Size
	}
	return g
}

// restartVM starts a VM that went away again: what the agent did is on its disk.
func (w *Worker) restartVM(ctx context.Context, t Task) error {
	s, err := w.Sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase == session.Ready {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(t.Manifest.Lifecycle.ProvisionTimeout))
	defer cancel()
	if s.Phase == session.Gone || s.Desired == session.Gone {
		return notReady(s)
	}
	if _, err := w.Sessions.SetDesired(ctx, s, session.Ready); err != nil {
		return err
	}
	return w.await(ctx, s.ID, session.Ready)
}

// kill ends a running agent and the processes it started: first with SIGTERM, then
// with SIGKILL.
func (w *Worker) kill(ctx context.Context, t Task, s session.Session, g guestclient.Guest) error {
	at := g.Task(t.ID, t.Status.Attempt)
	for _, try := range []struct {
		signal guestclient.Signal
		wait   time.Duration
	}{{guestclient.Terminate, time.Duration(t.Manifest.Lifecycle.CancelGrace)}, {guestclient.Kill, killWait}} {
		st, err := at.Signal(ctx, try.signal)
		if err != nil || st.State != guestproto.TaskRunning {
			return err
		}
		err = waitAgentEnd(ctx, at, try.wait)
		if !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
	}
	return fail.New(fail.Failure, "the agent survived SIGKILL").WithHint("agent-sessionizer exec %s -- ps -ef", s.Name)
}

// waitAgentEnd waits until the agent no longer runs.
func waitAgentEnd(ctx context.Context, at guestclient.Task, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		st, err := at.Status(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil || st.State != guestproto.TaskRunning:
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// gather receives the rest of the logs, the artifacts and the commits.
func (w *Worker) gather(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	if err := w.drain(ctx, t, g); err != nil {
		return err
	}
	if t.base(s) == nil {
		return nil // the task never had a checkout
	}
	list, lost, err := w.receive(ctx, *t, s, g.Task(t.ID, t.Status.Attempt))
	if err != nil {
		return err
	}
	res, err := w.Sessions.Fetch(ctx, s, g.SSH, "", repo.FetchOptions{})
	if err != nil {
		// The patch has the commits, too. If the agent broke the repository, the
		// patch is all that can be collected.
		w.warn(ctx, *t, fail.HintOf(err), "the agent's commits were not fetched: %v", err)
	} else if res.Commits > 0 {
		w.Log.InfoContext(ctx, "commits fetched", "commits", res.Commits, "refs", len(res.Refs))
	}
	err = w.update(ctx, t, func(_ *store.Task, status *Status) []store.Event {
		status.Artifacts, status.Skipped = nil, nil
		for _, a := range list {
			if a.Skipped != "" {
				status.Skipped = append(status.Skipped, Skipped{Name: a.Name, Reason: w.text(a.Skipped)})
			} else {
				status.Artifacts = append(status.Artifacts, Artifact{Name: a.Name, Size: a.Size, SHA256: a.SHA256})
			}
		}
		return nil
	})
	if err == nil && len(lost) > 0 {
		err = fail.New(fail.Failure, "%d files could not be received unchanged, such as %q: %s", len(lost), lost[0].Name, lost[0].Skipped).
			WithHint("agent-sessionizer task artifacts %s", t.ID)
	}
	return err
}

// collectTries limits how often files are collected again that change during the
// transfer.
const collectTries = 3

// receive has the guest collect what the agent did, and receives it. It returns as
// lost the files that were collected and did not arrive, even after collecting them
// again.
func (w *Worker) receive(ctx context.Context, t Task, s session.Session, at guestclient.Task) (list, lost []guestproto.Artifact, err error) {
	dir := w.Dir(t.ID).artifacts()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fail.New(fail.Host, "create artifacts directory: %w", err)
	}
	into, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, fail.New(fail.Host, "open artifacts directory: %w", err)
	}
	defer into.Close()
	life := t.Manifest.Lifecycle
	for try := 1; ; try++ {
		made, err := at.Collect(ctx, guestproto.TaskCollect{
			Dir: s.Status.Dir, Base: t.base(s).Commit, Patterns: life.ArtifactPatterns,
			MaxFiles: guestproto.MaxArtifacts, MaxBytes: int64(life.MaxArtifactBytes),
		})
		if err != nil {
			return nil, nil, err
		}
		list, err = at.Receive(ctx, into, made)
		lost = nil
		for i, a := range list {
			if a.Skipped != "" && made.Artifacts[i].Skipped == "" {
				lost = append(lost, a)
			}
		}
		if again := errors.Is(err, guestclient.ErrNoCollection) || len(lost) > 0; !again || try == collectTries {
			return list, lost, err
		}
	}
}

// drain reads the logs to their end: the agent may have printed until it was ended.
func (w *Worker) drain(ctx context.Context, t *Task, g guestclient.Guest) error {
	if t.Status.Attempt == 0 || t.Status.Started.IsZero() {
		return nil
	}
	r, err := w.newCollector(ctx, t)
	if err != nil {
		return err
	}
	err = r.collectUntilExit(ctx, g)
	if errors.Is(err, errAgentLost) {
		err = nil
	}
	err = errors.Join(err, r.close(ctx))
	*t = r.task
	return err
}

// finish writes the final files of a task that has ended, removes its VM unless the
// VM is to be kept, and enters the last phase.
func (w *Worker) finish(ctx context.Context, t *Task) error {
	last := t.last()
	d := w.Dir(t.ID)
	base := ""
	if t.SessionID != "" {
		s, err := w.Sessions.Get(ctx, t.SessionID)
		if err != nil {
			return err
		}
		if b := t.base(s); b != nil {
			base = b.Commit
		}
	}
	if err := w.writeFiles(ctx, *t); err != nil {
		return err
	}
	if err := d.sweep(); err != nil {
		return err
	}
	if err := d.writeMetadata(*t, base); err != nil {
		return err
	}
	if err := d.writeBundle(); err != nil {
		return err
	}
	if last != FailedPreserved {
		if err := w.discard(ctx, t); err != nil {
			return err
		}
	}
	return w.advance(ctx, t, last, PhaseChange{Outcome: t.Status.Outcome}, func(_ *store.Task, status *Status) {
		if last == FailedPreserved {
			status.Until = time.Now().UTC().Add(time.Duration(t.Manifest.Lifecycle.PreserveFor))
		}
	})
}

// discard destroys the task's own session, if it has one, and waits until the session
// is gone. A session that existed before the task stays.
func (w *Worker) discard(ctx context.Context, t *Task) error {
	if t.InSession() {
		return w.cleanupInSession(ctx, *t)
	}
	if t.SessionID == "" {
		return nil
	}
	s, err := w.Sessions.Get(ctx, t.SessionID)
	if err != nil || s.Phase == session.Gone {
		return err
	}
	return w.step(ctx, *t, "remove the VM", func(ctx context.Context) error {
		if _, err := w.Sessions.SetDesired(ctx, s, session.Gone); err != nil {
			return err
		}
		return w.await(ctx, s.ID, session.Gone)
	})
}

// preserve keeps the VM of a failed task until its time is over, or until a user
// destroys it.
func (w *Worker) preserve(ctx context.Context, t Task) (Task, error) {
	if t.Desired != Destroyed {
		if err := sleep(ctx, time.Until(t.Status.Until)); err != nil {
			return t, nil //nolint:nilerr // the desired state says what is next
		}
	}
	keep := context.WithoutCancel(ctx)
	if err := w.discard(keep, &t); err != nil {
		return t, err
	}
	reason := "the preserved VM was removed: its retention time ended"
	if t.Desired == Destroyed {
		reason = "the preserved VM was removed: a user requested it"
	}
	return t, w.advance(keep, &t, Failed, PhaseChange{Reason: reason}, nil)
}
