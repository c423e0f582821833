package session

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// The wall is the session's gateway, a process on the host in which the VM's
// only network card ends. It must stand before the VM starts, and outlives the
// keeper: a VM that loses it has no network until it is started again.

const (
	// wallEvery is how often a watching keeper asks the gateway how it is.
	wallEvery = 5 * time.Second
	// wallPatience is how long it may not answer before it counts as frozen.
	wallPatience = 20 * time.Second
)

// Gateway is the session's gateway as a process; only walled sessions have one.
func (m *Manager) Gateway(s Session) gateway.Process {
	return gateway.Process{Dir: m.gatewayDir(s.ID), Self: m.Self}
}

func (m *Manager) gatewayDir(id string) string {
	return filepath.Join(m.Config.Paths.SessionDir(id), "gateway")
}

// raise makes the wall stand before the VM starts. A VM that runs without a
// gateway that answers has lost its network card for good, and is shut down.
func (w *Worker) raise(ctx context.Context, s Session) error {
	if !s.Spec.Walled {
		w.warn(ctx, s.ID, "", "this session has no wall (network.wall was false when it was made): root in the guest decides what it reaches, this host included")
		return nil
	}
	return w.step(ctx, s.ID, "raise the wall", func(ctx context.Context, p vm.Progress) error {
		wire, err := w.Driver.Wire(s.VM())
		if err != nil {
			return err
		}
		pol, err := w.Policy(s)
		if err != nil {
			return err
		}
		g := w.Gateway(s)
		m, err := w.Driver.Inspect(ctx, s.VM())
		if err != nil && !errors.Is(err, vm.ErrNotFound) {
			return err
		}
		if m.State == vm.Running {
			st, err := g.Status(ctx)
			if err == nil && !st.Unplugged {
				return g.SetPolicy(ctx, pol)
			}
			p("the VM has lost its network, shutting it down first")
			_, poweroff := w.farewell(ctx, s)
			if err := w.Driver.Stop(ctx, s.VM(), poweroff, stopGrace); err != nil {
				return err
			}
		}
		// Whatever is left of a gateway served another run.
		if err := g.Stop(ctx); err != nil {
			return err
		}
		return g.Start(ctx, wire, pol)
	})
}

// wallWatch finds out that a gateway is gone or frozen.
type wallWatch struct {
	asked    time.Time
	answered time.Time
	told     string // the last complaint of the gateway that was passed on
}

// check returns why the wall has fallen, nil while it stands. Its process is
// looked at every time, it is asked now and then.
func (c *wallWatch) check(ctx context.Context, w *Worker, s Session) error {
	if !s.Spec.Walled {
		return nil
	}
	now := time.Now()
	if c.answered.IsZero() {
		c.answered = now
	}
	g := w.Gateway(s)
	fallen := func(what string) error {
		return fail.New(fail.Failure, "%s: nothing gets in or out of the VM", what).WithHint("agent-sessionizer start %s", s.Name)
	}
	if !g.Running() {
		// It ends with its VM, of which the driver knows the cause.
		if m, err := w.Driver.Inspect(ctx, s.VM()); err != nil || m.State != vm.Running {
			return nil //nolint:nilerr // the watcher inspects it too
		}
		return fallen("the session's gateway has ended")
	}
	if now.Sub(c.asked) < wallEvery {
		return nil
	}
	c.asked = now
	st, err := g.Status(ctx)
	switch {
	case err == nil:
		c.answered = now
	case ctx.Err() != nil:
		return nil //nolint:nilerr // called off
	case now.Sub(c.answered) > wallPatience:
		return fallen("the session's gateway does not answer")
	}
	complaint := st.PolicyError
	if complaint == "" {
		complaint = st.JournalErr
	}
	if complaint != "" && complaint != c.told {
		w.warn(ctx, s.ID, "agent-sessionizer net reload "+s.Name, "the session's gateway: %s", complaint)
	}
	c.told = complaint
	return nil
}
