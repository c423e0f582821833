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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// start asks the guest to run the agent. When repeated, the guest does not run it
// again.
func (w *Worker) start(ctx context.Context, t *Task, s session.Session, g guestclient.Guest) error {
	if err := w.noteBase(ctx, t, s, g); err != nil {
		return err
	}
	if err := w.endLast(ctx, *t, s, g); err != nil {
		return err
	}
	cwd := s.Status.Dir
	if sub := t.Manifest.Repository.Subpath; sub != "" {
		cwd += "/" + sub
	}
	env := map[string]string{"AGENT_TASK_ID": t.ID, "AGENT_TRACE_ID": t.Status.Trace}
	maps.Copy(env, t.Manifest.Agent.Env)
	_, err := g.Task(t.ID, t.Status.Attempt).Start(ctx, guestproto.TaskStart{
		Argv: agent.Command(t.Manifest.Agent), Env: env, Dir: cwd, Brief: Brief(*t),
	})
	return err
}

// endLast ends the previous attempt if it still runs: a session that was broken, or
// that others stopped and started, need not have had its VM down.
func (w *Worker) endLast(ctx context.Context, t Task, s session.Session, g guestclient.Guest) error {
	if t.Status.Attempt--; t.Status.Attempt < 1 {
		return nil
	}
	st, err := g.Task(t.ID, t.Status.Attempt).Status(ctx)
	if err != nil || st.State != guestproto.TaskRunning {
		return err
	}
	return w.kill(ctx, t, s, g)
}

// run watches the agent until it ends or has to be ended.
func (w *Worker) run(ctx context.Context, t *Task) error {
	r, err := w.newCollector(ctx, t)
	if err != nil {
		return err
	}
	limit := time.Duration(t.Manifest.Lifecycle.Timeout) - t.Status.Ran
	err = w.withPhaseLimit(ctx, t, limit, "the agent", func(ctx context.Context) error {
		ctx, cancel := context.WithCancelCause(ctx)
		var watching sync.WaitGroup
		life := t.Manifest.Lifecycle
		watching.Go(func() { r.watchLiveness(ctx, cancel, life) })
		defer func() { cancel(nil); watching.Wait() }()
		err := w.withGuest(ctx, *t, func(ctx context.Context, _ session.Session, g guestclient.Guest) error {
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
		return w.recordExit(ctx, t, r.result)
	case errors.Is(err, errHung):
		return w.hung(ctx, t, err)
	case isVMGone(err):
		return w.crashed(ctx, t, err)
	}
	return err
}

// These are the reasons to stop waiting for an agent.
var (
	errHung      = errors.New("the agent printed nothing")
	errAgentLost = errors.New("the agent ended without a result: its VM was restarted, or the agent was killed")
)

// recordExit decides the outcome by how the agent ended.
func (w *Worker) recordExit(ctx context.Context, t *Task, r guestproto.TaskResult) error {
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
	next, err := w.decide(ctx, *t, o)
	*t = next
	return err
}

// hung reacts to a stuck agent as the manifest says.
func (w *Worker) hung(ctx context.Context, t *Task, cause error) error {
	o := Outcome{Result: Hung, Code: fail.Timeout.String(), Reason: cause.Error(), Hint: "agent-sessionizer task logs " + t.ID}
	switch t.Manifest.Lifecycle.HangAction {
	case "restart":
		what, restarts := afterCrash(t.Manifest.Lifecycle.CrashLoop, t.Status.Restarts, t.Status.Rebuilds, 0, time.Now())
		if what != actionRestart {
			break
		}
		// End this agent first: two agents in one checkout would be worse.
		if err := w.withGuest(ctx, *t, func(ctx context.Context, s session.Session, g guestclient.Guest) error {
			return errors.Join(w.kill(ctx, *t, s, g), w.drain(ctx, t, g))
		}); err != nil {
			return err
		}
		return w.advance(ctx, t, Ready, PhaseChange{Reason: cause.Error()}, func(_ *store.Task, status *Status) {
			status.Restarts = restarts
			status.Attempt++
		})
	case "preserve":
		o.Preserve = true
	}
	next, err := w.decide(ctx, *t, o)
	*t = next
	return err
}

// crashed reacts to a VM that went away as the manifest says.
func (w *Worker) crashed(ctx context.Context, t *Task, cause error) error {
	uptime := time.Duration(0)
	if t.Phase == Running {
		uptime = w.phaseTime(t.Status)
	}
	what, restarts := afterCrash(t.Manifest.Lifecycle.CrashLoop, t.Status.Restarts, t.Status.Rebuilds, uptime, time.Now())
	if t.InSession() {
		o, err := w.outcomeIfLost(ctx, *t, what, cause)
		if err != nil {
			return err
		}
		if o != nil {
			next, err := w.decide(ctx, *t, *o)
			*t = next
			return err
		}
	}
	tell := Restart{What: "vm", Attempt: t.Status.Attempt + 1, Reason: w.text(cause.Error())}
	switch what {
	case actionGiveUp:
		next, err := w.decide(ctx, *t, Outcome{
			Result: CrashLoop, Code: fail.Failure.String(), Hint: fail.HintOf(cause),
			Reason: fmt.Sprintf("the VM crashed %d times and was rebuilt %d times: %v", len(t.Status.Restarts)+1, t.Status.Rebuilds, cause),
		})
		*t = next
		return err
	case actionRebuild:
		tell.What = "rebuild"
		if err := w.discard(ctx, t); err != nil {
			return err
		}
	case actionRestart:
		if err := w.stopVM(ctx, *t); err != nil {
			return err
		}
	}
	w.appendEvent(ctx, *t, EventRestart, tell)
	return w.advance(ctx, t, Provisioning, PhaseChange{Reason: tell.Reason}, func(row *store.Task, status *Status) {
		status.Restarts = restarts
		if what == actionRebuild {
			status.Rebuilds++
			row.SessionID = ""
		}
	})
}
