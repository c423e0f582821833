package session

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// The session of a cluster's task may run only while this host has the task. Its gateway stops what
// the guest sends at the end of the host's lease; a while later, its keeper stops the VM.

// leaseOf makes the network of a session depend on the lease of this host, if the session's task is
// one of a cluster.
func (net Net) leaseOf(ctx context.Context, s Session, g gateway.Process) error {
	_, is, err := net.Sessions.claim(ctx, s)
	if err != nil || !is {
		return err
	}
	l, err := net.Sessions.Store.Lease(ctx)
	if err != nil {
		return err
	}
	return g.SetLease(gateway.Lease{File: net.Sessions.Config.Paths.Term(), Incarnation: l.Incarnation})
}

// claim returns this host's claim of a session's task, if that is one of a cluster.
func (m *Manager) claim(ctx context.Context, s Session) (c store.Claim, is bool, err error) {
	if s.Task == "" {
		return c, false, nil
	}
	return m.Store.Claim(ctx, s.Task)
}

// lapsed returns why the VM of a session must stop: this host may no longer have its task.
func (m *Manager) lapsed(ctx context.Context, s Session) (cause, err error) {
	c, is, err := m.claim(ctx, s)
	if err != nil || !is {
		return nil, err
	}
	const hint = "agent-sessionizer cluster show"
	if c.Fence == 0 {
		return fail.New(fail.Conflict, "the cluster gave task %s to another host, or ended it", s.Task).WithHint(hint), nil
	}
	l, err := m.Store.Lease(ctx)
	if err != nil || l.Valid(store.StopAfter) {
		return nil, err
	}
	return fail.New(fail.Host, "this host has lost touch with its cluster, so it stopped the VM of task %s", s.Task).WithHint(hint), nil
}
