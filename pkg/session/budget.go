package session

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Budget returns what the session may use of models. Unlike in the settings, no field is inherited.
func (net Net) Budget(s Session) (config.Budget, error) {
	set, err := net.settings(s)
	b, own := set.Budget.Within(s.Spec.Budget), s.Status.Budget
	b.Session, b.Tokens = max(cmp.Or(own.Session, b.Session), 0), max(cmp.Or(own.Tokens, b.Tokens), 0)
	b.Day = max(b.Day, 0)
	return b, err
}

// SetBudget replaces limits of one session. It takes effect immediately, if the session runs and
// for those of its subtasks, which share it.
// Zero fields stay as they are; config.Unlimited removes a limit.
func (net Net) SetBudget(ctx context.Context, s Session, b config.Budget) (Session, error) {
	if !s.Spec.Enforced {
		return s, fail.New(fail.Usage, "the network of session %s does not end in a gateway, which a budget needs", s.Name)
	}
	s, err := net.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Budget = b.Over(f.Budget) })
	if err != nil {
		return s, err
	}
	all, err := net.Sessions.List(ctx)
	for _, below := range all { // they share it
		if w := below.Spec.Within; below.Phase == Ready && (below.ID == s.ID || w != nil && slices.Contains(w.Sessions, s.ID)) {
			err = errors.Join(err, net.ApplyPolicy(ctx, below))
		}
	}
	return s, err
}

// gateway returns the session's gateway, after writing what the gateway counts. SetPolicy and Start
// apply that.
func (net Net) gateway(ctx context.Context, s Session) (gateway.Process, error) {
	g := net.Sessions.Gateway(s)
	b, err := net.Budget(s)
	if err != nil {
		return g, err
	}
	var shared []gateway.Shared
	if above := s.Spec.Within; above != nil {
		for _, id := range above.Sessions {
			p, err := net.Sessions.Get(ctx, id)
			if err != nil {
				return g, err
			}
			b, err := net.Budget(p)
			if err != nil {
				return g, err
			}
			if b.Session > 0 || b.Tokens > 0 {
				shared = append(shared, gateway.Shared{Tree: p.Tree(), Budget: gateway.Budget{Session: int64(b.Session), Tokens: int64(b.Tokens)}})
			}
		}
	}
	if err := net.leaseOf(ctx, s, g); err != nil {
		return g, err
	}
	c := net.Sessions.Config
	return g, g.WriteMetering(gateway.Metering{
		Store: c.Paths.Store(), Session: s.ID, RepoKey: s.RepoKey, Task: s.Task, Tree: s.Tree(), Shared: shared, Prices: c.Prices,
		Budget: gateway.Budget{Session: int64(b.Session), Day: int64(b.Day), Tokens: int64(b.Tokens)},
	})
}
