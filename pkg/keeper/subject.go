package keeper

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Session is a session as a Subject.
type Session struct {
	Worker *session.Worker
	ID     string

	announced session.Phase
}

// Lock returns the path of the session's lock.
func (c *Session) Lock() string { return c.Worker.Sessions.Config.Paths.SessionLock(c.ID) }

// Look reads the session's row.
func (c *Session) Look(ctx context.Context) (State, error) {
	s, err := c.Worker.Sessions.Get(ctx, c.ID)
	return State{
		Phase: string(s.Phase), Desired: string(s.Desired), Rest: session.AtRest(s.Phase, s.Desired),
		Served: s.Phase == s.Desired, Quiet: s.Phase == session.Ready,
	}, err
}

// Next does the work of the session's phase.
func (c *Session) Next(ctx context.Context) error {
	s, err := c.Worker.Sessions.Get(ctx, c.ID)
	if err != nil {
		return err
	}
	c.notifyAttention(ctx, s)
	s, err = c.Worker.Next(ctx, s)
	c.notifyAttention(context.WithoutCancel(ctx), s)
	return err
}

func (c *Session) notifyAttention(ctx context.Context, s session.Session) {
	if c.Worker.Phase != nil && s.Phase != c.announced {
		c.Worker.Phase(ctx, s)
		c.announced = s.Phase
	}
}

// Left removes the directory of a session that is gone. The process that started this
// keeper created the directory for the keeper's log, perhaps after an earlier keeper
// had removed it.
func (c *Session) Left(ctx context.Context) error {
	if s, err := c.Worker.Sessions.Get(ctx, c.ID); err == nil && s.Phase == session.Gone {
		return os.RemoveAll(c.Worker.Sessions.Config.Paths.SessionDir(c.ID))
	}
	return nil
}

// Task is a task as a Subject.
type Task struct {
	Worker *task.Worker
	ID     string
}

// Lock returns the path of the task's lock.
func (c *Task) Lock() string { return c.Worker.Tasks.LockPath(c.ID) }

// Look reads the task's row.
func (c *Task) Look(ctx context.Context) (State, error) {
	t, err := c.Worker.Tasks.Get(ctx, c.ID)
	return State{
		Phase: string(t.Phase), Desired: string(t.Desired), Rest: t.Host != "" || task.AtRest(t.Phase),
		Served: t.Desired == task.Run, Quiet: t.Phase == task.Running || t.Phase == task.FailedPreserved,
	}, err
}

// scheduleEvery is how often the keepers of tasks check whether another task can start.
// The host may have gained capacity since the last task ended.
const scheduleEvery = 15 * time.Second

// Next does the work of the task's phase, and schedules queued tasks meanwhile.
func (c *Task) Next(ctx context.Context) error {
	t, err := c.Worker.Tasks.Get(ctx, c.ID)
	if err != nil {
		return err
	}
	sctx, cancel := context.WithCancel(ctx)
	var scheduling sync.WaitGroup
	scheduling.Go(func() { c.schedule(sctx) })
	defer func() { cancel(); scheduling.Wait() }()
	_, err = c.Worker.Next(ctx, t)
	return err
}

func (c *Task) schedule(ctx context.Context) {
	tick := time.NewTicker(scheduleEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := c.Worker.Tasks.Schedule(ctx); err != nil && ctx.Err() == nil {
			c.Worker.Log.WarnContext(ctx, "failed to start waiting tasks", "error", err)
		}
	}
}

// Left gives the slot to the next queued task.
func (c *Task) Left(ctx context.Context) error { return c.Worker.Tasks.Schedule(ctx) }
