package task

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Worker does the work of a task's phases. One keeper uses one Worker, and holds the
// task's lock meanwhile.
type Worker struct {
	Tasks   *Manager
	Mirrors *repo.Mirrors
	Log     *slog.Logger

	rec     *recorder
	vm      *machine
	agent   *agentRun
	results *results
}

// NewWorker returns a worker for the tasks of m. redact removes secrets from a task's row,
// its events, its logs and log. The secrets that the guest says it was given are added to it.
func NewWorker(m *Manager, mirrors *repo.Mirrors, log *slog.Logger, redact *secret.Redactor) *Worker {
	rec := &recorder{Reporter: lifecycle.Reporter{Store: m.store(), Log: log, Redact: redact}, tasks: m}
	vm := &machine{rec: rec, sessions: m.Sessions}
	return &Worker{Tasks: m, Mirrors: mirrors, Log: log, rec: rec, vm: vm, agent: &agentRun{rec, vm}, results: &results{rec, vm}}
}

// Next takes the step that brings the task one phase closer to its end, and returns
// the task as it is afterwards. When ctx is cancelled because the desired state
// changed, Next returns with the phase unchanged; the keeper then calls it again.
func (w *Worker) Next(ctx context.Context, t Task) (Task, error) {
	ctx = traceid.With(ctx, t.Status.Trace)
	w.Tasks.Sessions.Actor = t.Status.Actor // changes to the session are attributed to the task's submitter
	keep := context.WithoutCancel(ctx)      // for writes that must happen even when the work is cancelled
	if t.Status.Outcome == nil && t.Desired != Run {
		err := w.rec.decide(keep, &t, Outcome{Result: CancelledByUser})
		return t, err
	}
	if t.Status.Outcome != nil && !t.Phase.Over() {
		return w.advanceEnding(keep, t)
	}
	var err error
	switch t.Phase {
	case Staging, Provisioning, Ready: // otherwise a VM is started only to be stopped at once
		if err := w.Tasks.store().CheckFence(ctx, t.ID); err != nil {
			return t, &storeTrouble{err}
		}
	}
	switch t.Phase {
	case Staging:
		err = w.stage(ctx, &t)
	case Provisioning:
		err = w.provision(ctx, &t)
	case Ready:
		err = w.agent.launch(ctx, &t)
	case Running:
		err = w.agent.run(ctx, &t)
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
		err = w.rec.retryLater(ctx, &t, err, capacityTries, capacityDelays()...)
		switch {
		case err == nil:
			return t, nil
		case ctx.Err() != nil:
			return t, nil //nolint:nilerr // cancelled; the desired state says what is next
		case errors.As(err, &trouble):
			return t, err
		}
	}
	err = w.rec.decide(keep, &t, failure(err))
	return t, err
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

// stage prepares on the host what the task needs: its directory, and the repository's
// mirror.
func (w *Worker) stage(ctx context.Context, t *Task) error {
	d := w.Tasks.Dir(t.ID)
	if err := w.Tasks.prepareDir(ctx, *t); err != nil {
		return err
	}
	if err := d.writeBrief(*t, w.Tasks.maySubmit(*t)); err != nil {
		return err
	}
	if t.InSession() { // its agent works on what is in the session
		return w.rec.advance(ctx, t, Provisioning, PhaseChange{}, nil)
	}
	r, err := t.sessionRequest()
	if err != nil {
		return err
	}
	err = w.rec.withPhaseLimit(ctx, t, time.Duration(t.Manifest.Lifecycle.StageTimeout), "fetching the repository", func(ctx context.Context) error {
		for {
			err := w.refresh(ctx, *t, r.Repo)
			if err == nil || ctx.Err() != nil || !repo.Transient(err) {
				return err
			}
			if err := w.rec.retryLater(ctx, t, err, t.Manifest.Lifecycle.Retries.Clone, cloneDelays()...); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	return w.rec.advance(ctx, t, Provisioning, PhaseChange{}, nil)
}

func cloneDelays() []time.Duration {
	return []time.Duration{5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, time.Minute}
}

// refresh updates the mirror, and checks that it has what the manifest names.
func (w *Worker) refresh(ctx context.Context, t Task, ref repo.Ref) error {
	return w.rec.Step(ctx, t.ID, "refresh the mirror", func(ctx context.Context, _ vm.Progress) error {
		mirrors := *w.Mirrors
		mirrors.Pauses = func() backoff.BackOff { return &backoff.StopBackOff{} } // stage retries, and records each retry
		m, err := mirrors.Ensure(ctx, ref, func(string) {})
		if err != nil {
			return err
		}
		if m.Warning != "" {
			w.rec.Warn(ctx, t.ID, "", "%s", m.Warning)
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
	text, err := w.Tasks.store().TaskText(ctx, t.ID)
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
	err := w.rec.withPhaseLimit(ctx, t, time.Duration(life.ProvisionTimeout), what, func(ctx context.Context) error {
		for {
			err := w.vm.session(ctx, t)
			if err == nil || ctx.Err() != nil {
				return err
			}
			var trouble *storeTrouble
			if errors.As(err, &trouble) || t.InSession() && errors.Is(err, errGone) {
				return err
			}
			if err := w.rec.retryLater(ctx, t, err, life.Retries.Provision, 10*time.Second, 30*time.Second); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	return w.rec.advance(ctx, t, Ready, PhaseChange{}, func(_ *store.Task, status *Status) { status.Attempt++ })
}

// advanceEnding takes the next step towards the last phase of a task whose outcome is decided.
func (w *Worker) advanceEnding(ctx context.Context, t Task) (Task, error) {
	switch {
	case t.Phase == Running:
		err := w.rec.advance(ctx, &t, Completing, PhaseChange{Outcome: t.Status.Outcome}, func(_ *store.Task, status *Status) {
			status.Ended = time.Now().UTC()
		})
		return t, err
	case t.Phase == Completing && !t.Status.Collected:
		return t, w.results.collect(ctx, &t)
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
	case t.InSession() || t.Desired == Destroyed || t.SessionID == "" || !next.Allow(t.Phase, FailedPreserved):
		return Failed
	case o.Preserve || t.Manifest.Lifecycle.FailureAction == "preserve":
		return FailedPreserved
	}
	return Failed
}

// finish writes the final files of a task that has ended, removes its VM unless the
// VM is to be kept, and enters the last phase.
func (w *Worker) finish(ctx context.Context, t *Task) error {
	last := t.last()
	d := w.Tasks.Dir(t.ID)
	base := ""
	if t.SessionID != "" {
		s, err := w.Tasks.Sessions.Get(ctx, t.SessionID)
		if err != nil {
			return err
		}
		if b := t.base(s); b != nil {
			base = b.Commit
		}
	}
	if err := w.rec.writeFiles(ctx, *t); err != nil {
		return err
	}
	if err := d.sweep(); err != nil {
		return err
	}
	used, err := w.Tasks.Usage(ctx, t.ID)
	if err != nil {
		return err
	}
	if err := d.writeMetadata(*t, base, used); err != nil {
		return err
	}
	if err := d.writeBundle(); err != nil {
		return err
	}
	if last != FailedPreserved {
		if err := w.vm.discard(ctx, t); err != nil {
			return err
		}
	}
	return w.rec.advance(ctx, t, last, PhaseChange{Outcome: t.Status.Outcome}, func(_ *store.Task, status *Status) {
		if last == FailedPreserved {
			status.Until = time.Now().UTC().Add(time.Duration(t.Manifest.Lifecycle.PreserveFor))
		}
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
	if err := w.vm.discard(keep, &t); err != nil {
		return t, err
	}
	reason := "the preserved VM was removed: its retention time ended"
	if t.Desired == Destroyed {
		reason = "the preserved VM was removed: a user requested it"
	}
	return t, w.rec.advance(keep, &t, Failed, PhaseChange{Reason: reason}, nil)
}
