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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// killWait is how long a process group may take to die from SIGKILL.
const killWait = 30 * time.Second

// collectLimit stops a guest that never stops sending. Receiving gigabytes from an
// emulated guest takes an hour.
const collectLimit = 3 * time.Hour

// results collects what an agent did.
type results struct {
	rec *recorder
	vm  *machine
}

// collect fetches what the agent did: its logs to the end, the artifacts, and its
// commits. If some of it cannot be collected, it stays in the VM, which is then kept.
func (c *results) collect(ctx context.Context, t *Task) error {
	err := c.rec.Step(ctx, t.ID, "collect results", func(ctx context.Context, _ vm.Progress) error {
		ctx, cancel := context.WithTimeoutCause(ctx, collectLimit, fail.New(fail.Timeout, "collecting took longer than %v", collectLimit))
		defer cancel()
		for again := false; ; again = true {
			if err := c.vm.restartVM(ctx, *t); err != nil {
				return err
			}
			err := c.vm.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
				if err := killAgent(ctx, *t, s, g); err != nil {
					return err
				}
				return c.gather(ctx, t, s, g)
			})
			if !isVMGone(err) || again {
				return err
			}
			// What the agent did is on the disk of the VM that went away.
			if herr := c.vm.stopVM(ctx, *t); herr != nil {
				return errors.Join(err, herr)
			}
		}
	})
	var trouble *storeTrouble
	if isDiskFull(err) { // the VM with its content still exists
		err = c.rec.retryLater(ctx, t, err, capacityTries, capacityDelays()...)
		if err == nil {
			return nil
		}
	}
	if errors.As(err, &trouble) {
		return err
	}
	return c.rec.update(ctx, t, func(row *store.Task, status *Status) []store.Event {
		status.Collected = true
		if err == nil {
			return []store.Event{store.NewEvent(EventArtifacts, gathered(*status))}
		}
		reason := c.rec.Text(fmt.Sprintf("the agent's results could not be collected: %v", err))
		status.Outcome.Preserve = true
		if status.Outcome.Result == Success || status.Outcome.Result == CancelledByUser {
			status.Outcome.Result, status.Outcome.Code = Failure, fail.CodeOf(err).String()
			status.Outcome.Reason, status.Outcome.Hint = reason, c.rec.Text(fail.HintOf(err))
			row.SetError(status.Outcome.Code, reason, status.Outcome.Hint)
		}
		return []store.Event{store.NewEvent(EventWarning, lifecycle.Warning{Message: reason, Hint: c.rec.Text(fail.HintOf(err))})}
	})
}

func gathered(f Status) Gathered {
	g := Gathered{Files: len(f.Artifacts), Skipped: len(f.Skipped)}
	for _, a := range f.Artifacts {
		g.Bytes += a.Size
	}
	return g
}

// killAgent ends a running agent and the processes it started: first with SIGTERM, then
// with SIGKILL.
func killAgent(ctx context.Context, t Task, s session.Session, g guestclient.Guest) error {
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
func (c *results) gather(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	drained := c.rec.drain(ctx, t, g)
	if drained != nil && !errors.Is(drained, guestclient.ErrTruncated) || t.base(s) == nil { // or the task never had a checkout
		return drained
	}
	list, lost, err := receive(ctx, c.rec.tasks.Dir(t.ID), *t, s, g.Task(t.ID, t.Status.Attempt))
	if err != nil {
		return err
	}
	res, err := session.Work{Sessions: c.vm.sessions}.Fetch(ctx, s, g.SSH, "", repo.FetchOptions{})
	if err != nil {
		// The patch has the commits, too. If the agent broke the repository, the
		// patch is all that can be collected.
		c.rec.Warn(ctx, t.ID, fail.HintOf(err), "the agent's commits were not fetched: %v", err)
	} else if res.Commits > 0 {
		c.rec.Log.InfoContext(ctx, "commits fetched", "commits", res.Commits, "refs", len(res.Refs))
	}
	err = c.rec.update(ctx, t, func(_ *store.Task, status *Status) []store.Event {
		status.Artifacts, status.Skipped = nil, nil
		for _, a := range list {
			if a.Skipped != "" {
				status.Skipped = append(status.Skipped, Skipped{Name: a.Name, Reason: c.rec.Text(a.Skipped)})
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
	return errors.Join(err, drained)
}

// collectTries limits how often files are collected again that change during the
// transfer.
const collectTries = 3

// receive has the guest collect what the agent did, and receives it. It returns as
// lost the files that were collected and did not arrive, even after collecting them
// again.
func receive(ctx context.Context, d Dir, t Task, s session.Session, at guestclient.Task) (list, lost []guestproto.Artifact, err error) {
	dir := d.artifacts()
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
func (rec *recorder) drain(ctx context.Context, t *Task, g guestclient.Guest) error {
	if t.Status.Attempt == 0 || t.Status.Started.IsZero() {
		return nil
	}
	r, err := rec.newCollector(ctx, t)
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
