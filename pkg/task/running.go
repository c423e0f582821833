package task

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// An agentRun starts a task's agent in its guest and watches it until it ends.
type agentRun struct {
	rec *recorder
	vm  *machine
}

// launch starts the agent exactly once: a guest that already runs it reports that
// instead.
func (a *agentRun) launch(ctx context.Context, t *Task) error {
	// From here on the agent may have run: all hosts of a cluster know that before it does.
	if err := a.rec.tasks.store().WaitShipped(ctx, t.ID); err != nil {
		return &storeTrouble{err}
	}
	err := a.vm.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
		return a.start(ctx, t, s, g)
	})
	if isVMGone(err) {
		return a.crashed(ctx, t, err)
	}
	if err != nil {
		return err
	}
	d := a.rec.tasks.Dir(t.ID)
	// Start this attempt's output on its own line, not at the end of the previous
	// attempt's.
	if err := endLine(d.Stdout()); err != nil {
		return err
	}
	return a.rec.advance(ctx, t, Running, PhaseChange{}, func(_ *store.Task, status *Status) {
		now := time.Now().UTC()
		if status.Started.IsZero() {
			status.Started = now
		}
		status.Quiet = 0
		// The previous attempt's output stays in the logs, before this attempt's.
		status.LogBase = Offsets{Stdout: size(d.Stdout()), Stderr: size(d.Stderr())}
	})
}

// start asks the guest to run the agent. When repeated, the guest does not run it
// again.
func (a *agentRun) start(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	if err := a.noteBase(ctx, t, s, g); err != nil {
		return err
	}
	if err := endLast(ctx, *t, s, g); err != nil {
		return err
	}
	cwd := s.Status.Dir
	if sub := t.Manifest.Repository.Subpath; sub != "" {
		cwd += "/" + sub
	}
	env := map[string]string{"AGENT_TASK_ID": t.ID, "AGENT_TRACE_ID": t.Status.Trace}
	maps.Copy(env, t.Manifest.Agent.Env)
	_, err := g.Task(t.ID, t.Status.Attempt).Start(ctx, guestproto.TaskStart{
		Argv: agent.Command(t.Manifest.Agent), Env: env, Dir: cwd, Brief: Brief(*t, a.rec.tasks.maySubmit(*t)),
	})
	return err
}

// noteBase records what is checked out before an agent starts for the first time.
func (a *agentRun) noteBase(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	if !t.InSession() || t.Status.Base != nil {
		return nil
	}
	base, err := repo.Head(ctx, g.SSH, s.Status.Dir)
	if err != nil {
		return err
	}
	return a.rec.update(ctx, t, func(_ *store.Task, status *Status) []store.Event { status.Base = &base; return nil })
}

// endLast ends the previous attempt if it still runs: a session that was broken, or
// that others stopped and started, need not have had its VM down.
func endLast(ctx context.Context, t Task, s session.Session, g guestclient.Guest) error {
	if t.Status.Attempt--; t.Status.Attempt < 1 {
		return nil
	}
	st, err := g.Task(t.ID, t.Status.Attempt).Status(ctx)
	if err != nil || st.State != guestproto.TaskRunning {
		return err
	}
	return killAgent(ctx, t, s, g)
}

// run watches the agent until it ends or has to be ended.
func (a *agentRun) run(ctx context.Context, t *Task) error {
	r, err := a.rec.newCollector(ctx, t)
	if err != nil {
		return err
	}
	limit := time.Duration(t.Manifest.Lifecycle.Timeout) - t.Status.Ran
	err = a.rec.withPhaseLimit(ctx, t, limit, "the agent", func(ctx context.Context) error {
		ctx, cancel := context.WithCancelCause(ctx)
		var watching sync.WaitGroup
		life := t.Manifest.Lifecycle
		watching.Go(func() { r.watchLiveness(ctx, cancel, life) })
		defer func() { cancel(nil); watching.Wait() }()
		err := a.vm.withGuest(ctx, *t, func(ctx context.Context, _ session.Session, g guestclient.Guest) error {
			return r.collectUntilExit(ctx, g)
		})
		if cause := context.Cause(ctx); errors.Is(cause, errHung) {
			return cause
		}
		return err
	})
	if cerr := r.close(context.WithoutCancel(ctx)); cerr != nil {
		return cerr
	}
	*t = r.task
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err == nil:
		return a.recordExit(ctx, t, r.result)
	case errors.Is(err, errHung):
		return a.hung(ctx, t, err)
	case isVMGone(err):
		return a.crashed(ctx, t, err)
	}
	return err
}

// These are the reasons to stop waiting for an agent.
var (
	errHung      = errors.New("the agent printed nothing")
	errAgentLost = errors.New("the agent ended without a result: its VM was restarted, or the agent was killed")
)

// recordExit decides the outcome by how the agent ended.
func (a *agentRun) recordExit(ctx context.Context, t *Task, r guestproto.TaskResult) error {
	code := r.ExitCode
	o := Outcome{Result: Success, ExitCode: &code, Signal: r.Signal}
	if !slices.Contains(t.Manifest.Lifecycle.SuccessCodes, code) || r.Signal != "" {
		o.Result, o.Code = Failure, fail.Failure.String()
		o.Reason = fmt.Sprintf("the agent ended with exit code %d", code)
		switch {
		case r.Signal != "":
			o.ExitCode, o.Reason = nil, "the agent was killed by signal "+r.Signal
		case r.Error != "":
			o.Reason += ": " + r.Error
		}
		o.Hint = "agent-sessionizer task logs " + t.ID
	}
	return a.rec.decide(ctx, t, o)
}

// hung reacts to a stuck agent as the manifest says.
func (a *agentRun) hung(ctx context.Context, t *Task, cause error) error {
	o := Outcome{Result: Hung, Code: fail.Timeout.String(), Reason: cause.Error(), Hint: "agent-sessionizer task logs " + t.ID}
	switch t.Manifest.Lifecycle.HangAction {
	case "restart":
		what, restarts := afterCrash(t.Manifest.Lifecycle.CrashLoop, t.Status.Restarts, t.Status.Rebuilds, 0, time.Now())
		if what != actionRestart {
			break
		}
		// End this agent first: two agents in one checkout would be worse.
		if err := a.vm.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
			return errors.Join(killAgent(ctx, *t, s, g), a.rec.drain(ctx, t, g))
		}); err != nil {
			return err
		}
		return a.rec.advance(ctx, t, Ready, PhaseChange{Reason: cause.Error()}, func(_ *store.Task, status *Status) {
			status.Restarts = restarts
			status.Attempt++
		})
	case "preserve":
		o.Preserve = true
	}
	return a.rec.decide(ctx, t, o)
}

// crashed reacts to a VM that went away as the manifest says.
func (a *agentRun) crashed(ctx context.Context, t *Task, cause error) error {
	uptime := time.Duration(0)
	if t.Phase == Running {
		uptime = a.rec.phaseTime(t.Status)
	}
	what, restarts := afterCrash(t.Manifest.Lifecycle.CrashLoop, t.Status.Restarts, t.Status.Rebuilds, uptime, time.Now())
	if t.InSession() {
		o, err := a.outcomeIfLost(ctx, *t, what, cause)
		if err != nil {
			return err
		}
		if o != nil {
			return a.rec.decide(ctx, t, *o)
		}
	}
	tell := Restart{What: "vm", Attempt: t.Status.Attempt + 1, Reason: a.rec.Text(cause.Error())}
	switch what {
	case actionGiveUp:
		return a.rec.decide(ctx, t, Outcome{
			Result: CrashLoop, Code: fail.Failure.String(), Hint: fail.HintOf(cause),
			Reason: fmt.Sprintf("the VM crashed %d times and was rebuilt %d times: %v", len(t.Status.Restarts)+1, t.Status.Rebuilds, cause),
		})
	case actionRebuild:
		tell.What = "rebuild"
		if err := a.vm.discard(ctx, t); err != nil {
			return err
		}
	case actionRestart:
		if err := a.vm.stopVM(ctx, *t); err != nil {
			return err
		}
	}
	a.rec.Append(ctx, t.ID, EventRestart, tell)
	return a.rec.advance(ctx, t, Provisioning, PhaseChange{Reason: tell.Reason}, func(row *store.Task, status *Status) {
		status.Restarts = restarts
		if what == actionRebuild {
			status.Rebuilds++
			row.SessionID = ""
		}
	})
}

// outcomeIfLost returns how a task ends whose session went away, or nil when the session may
// come back. A user's session is never rebuilt. One that does not respond is not
// stopped, because the agent may still be running in it.
func (a *agentRun) outcomeIfLost(ctx context.Context, t Task, what crashAction, cause error) (*Outcome, error) {
	s, err := a.vm.sessions.Get(ctx, t.SessionID)
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
