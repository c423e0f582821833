package ops

import (
	"context"
	"iter"
	"log/slog"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Engine performs operations on this host, for one caller.
type Engine struct {
	Tasks  *task.Manager
	Images *image.Store
	Execs  Execs // nil unless this process serves the API
	Log    *slog.Logger
	Redact *secret.Redactor // applied to what this process prints and logs
	Caller Caller
	Disk   *DiskCache // nil measures each time

	// Costly bounds how many operations that read much, or work in a guest, run at once for
	// clients: its capacity. nil means no bound.
	Costly chan struct{}
	// Scheduled is called after a change that may let a waiting task run; nil schedules the
	// queue at once.
	Scheduled func()
	// DashboardLink makes a link that logs a browser in as the caller; nil unless this process
	// serves the API.
	DashboardLink func(context.Context, Caller) (DashboardLink, error)
	// Fetch fetches the commits of the guest that submits a subtask, before that is accepted; nil
	// if the host has them.
	Fetch func(context.Context) error
	// Preflight reports why this host cannot run VMs of an architecture, before one is created.
	Preflight func(ctx context.Context, arch string) error
	// Cluster is this host's part in its cluster; nil unless this process serves the API of a
	// host that belongs to one.
	Cluster *fleet.Part
	// Driver returns the VM manager's driver.
	Driver func() (vm.Driver, error)
}

// As returns the engine for another caller.
func (e Engine) As(c Caller) Engine {
	e.Caller = c
	return e
}

// Perform performs an operation if the caller may ask for it.
func (e Engine) Perform(ctx context.Context, c Call) error {
	if err := e.Caller.Check(c.Spec); err != nil {
		return err
	}
	return c.do(ctx, &e)
}

// Events implements Host.
func (e Engine) Events(ctx context.Context, of Subject, after int64, follow bool) iter.Seq2[store.Event, error] {
	if err := e.Caller.Check(Spec{ID: "events", Tag: "sessions"}); err != nil {
		return func(yield func(store.Event, error) bool) { yield(store.Event{}, err) }
	}
	if follow {
		return e.sessions().Store.Follow(ctx, of.ID, after)
	}
	return func(yield func(store.Event, error) bool) {
		for {
			evs, err := e.sessions().Store.Events(ctx, of.ID, after, 1000)
			if err != nil {
				yield(store.Event{}, err)
			}
			if err != nil || len(evs) == 0 {
				return
			}
			for _, ev := range evs {
				if after = ev.Seq; !yield(ev, nil) {
					return
				}
			}
		}
	}
}

// Dial implements Host.
func (e Engine) Dial(ctx context.Context, id string, shared bool) (*ssh.Client, error) {
	if err := e.Caller.Check(Tunnel); err != nil {
		return nil, err
	}
	s, err := e.Reachable(ctx, id)
	if err != nil {
		return nil, err
	}
	if shared {
		return session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
	}
	return session.Connections{Paths: e.sessions().Config.Paths}.DialOwn(ctx, s)
}

// Reachable returns a session to whose guest a user may connect.
func (e Engine) Reachable(ctx context.Context, id string) (session.Session, error) {
	s, err := e.Session(ctx, id)
	if err != nil {
		return s, err
	}
	if s.Phase == session.Stopping || s.Phase == session.Destroying { // its agents have ended, and must not start again
		return s, fail.New(fail.Conflict, "session %s is %s", s.Name, s.Phase).WithHint("agent-sessionizer open %s", s.Name)
	}
	return s, nil
}

// costly reserves the right to run a costly operation. The caller must call done.
func (e *Engine) costly() (done func(), err error) {
	if e.Costly == nil {
		return func() {}, nil
	}
	select {
	case e.Costly <- struct{}{}:
		return func() { <-e.Costly }, nil
	default:
		return nil, marked{fail.New(fail.Conflict, "too many operations run at once").WithHint("try again later"), ErrBusy}
	}
}

// schedule starts waiting tasks if there are free slots.
func (e *Engine) schedule(ctx context.Context) error {
	if e.Scheduled == nil {
		return e.Tasks.Schedule(ctx)
	}
	e.Scheduled()
	return nil
}

func (e *Engine) audit(ctx context.Context, r audit.Record) {
	if write := e.sessions().Audit; write != nil {
		write(ctx, r)
	}
}

// sessions returns the sessions, for changes that are recorded under the caller's name.
func (e *Engine) sessions() *session.Manager {
	m := *e.Tasks.Sessions
	m.Actor = e.Caller.Name
	return &m
}
