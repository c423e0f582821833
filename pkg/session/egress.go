package session

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// The egress gateway is a process on the host in which the VM's only network card
// ends. It must run before the VM starts, and it outlives the keeper. A VM that loses
// its gateway has no network until it is started again.

const (
	// gatewayCheckEvery is how often a watching keeper asks the gateway for its status.
	gatewayCheckEvery = 5 * time.Second
	// gatewayPatience is how long the gateway may stay silent before it counts as
	// frozen.
	gatewayPatience = 20 * time.Second
)

// Gateway returns the session's gateway process; only sessions with Spec.Enforced
// have one.
func (m *Manager) Gateway(s Session) gateway.Process {
	return gateway.Process{Dir: m.Config.Paths.Gateway(s.ID), Self: m.Self}
}

// startGateway starts the gateway before the VM starts. A running VM whose gateway does not
// answer has lost its network card for good; startGateway shuts it down.
func (w *Worker) startGateway(ctx context.Context, s Session) error {
	if !s.Spec.Enforced {
		w.warn(ctx, s.ID, "", "this session's network is not enforced (network.enforce was false when it was created): root in the guest decides what it reaches, including this host")
		return nil
	}
	return w.step(ctx, s.ID, "start the gateway", func(ctx context.Context, p vm.Progress) error {
		sockets, err := w.Driver.NetSockets(s.VM())
		if err != nil {
			return err
		}
		pol, err := Net{Sessions: w.Sessions}.Policy(ctx, s)
		if err != nil {
			return err
		}
		g, err := Net{Sessions: w.Sessions}.gateway(ctx, s)
		if err != nil {
			return err
		}
		m, err := w.Driver.Inspect(ctx, s.VM())
		if err != nil && !errors.Is(err, vm.ErrNotFound) {
			return err
		}
		if m.State == vm.Running {
			st, err := g.Status(ctx)
			if err == nil && !st.Detached {
				return g.SetPolicy(ctx, pol)
			}
			p("the VM has lost its network, shutting it down first")
			_, _, poweroff := w.prepareShutdown(ctx, s)
			if err := w.Driver.Stop(ctx, s.VM(), poweroff, stopGrace); err != nil {
				return err
			}
		}
		// Whatever is left of a gateway served another run.
		if err := g.Stop(ctx); err != nil {
			return err
		}
		return g.Start(ctx, sockets, pol)
	})
}

// gatewayMonitor detects that a gateway has ended or is frozen.
type gatewayMonitor struct {
	asked    time.Time
	answered time.Time
	reported string // the gateway's last complaint that was reported
	noted    uint64 // the gateway's notes about the budget that were reported
	started  time.Time
}

// check returns why the gateway is down, or nil while it is running. It checks the
// gateway's process every time, and asks for its status only now and then.
func (c *gatewayMonitor) check(ctx context.Context, w *Worker, s Session) error {
	if !s.Spec.Enforced {
		return nil
	}
	now := time.Now()
	if c.answered.IsZero() {
		c.answered = now
	}
	g := w.Sessions.Gateway(s)
	down := func(what string) error {
		return fail.New(fail.Failure, "%s: the VM has no network", what).WithHint("agent-sessionizer start %s", s.Name)
	}
	if !g.Running() {
		// The gateway ends with its VM, and the driver knows why the VM ended.
		if m, err := w.Driver.Inspect(ctx, s.VM()); err != nil || m.State != vm.Running {
			return nil //nolint:nilerr // watch inspects the VM too
		}
		return down("the session's gateway has stopped")
	}
	if now.Sub(c.asked) < gatewayCheckEvery {
		return nil
	}
	c.asked = now
	st, err := g.Status(ctx)
	switch {
	case err == nil:
		c.answered = now
		if n := st.Budget; n != nil && n.Seq > c.noted && st.Started.Equal(c.started) && w.Budget != nil {
			w.Budget(ctx, s, *n)
		}
		// A gateway that was there before this keeper has been reported.
		if c.noted, c.started = 0, st.Started; st.Budget != nil {
			c.noted = st.Budget.Seq
		}
	case ctx.Err() != nil:
		return nil //nolint:nilerr // cancelled
	case now.Sub(c.answered) > gatewayPatience:
		return down("the session's gateway does not answer")
	}
	complaint := cmp.Or(st.PolicyError, st.LogErr, st.UsageErr)
	if complaint != "" && complaint != c.reported {
		w.warn(ctx, s.ID, "agent-sessionizer net reload "+s.Name, "gateway: %s", complaint)
	}
	c.reported = complaint
	return nil
}
