package gateway

import (
	"net/netip"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

type (
	question = policy.Question
	decision = policy.Decision
)

// decide asks the policy in force. No other place does.
func (g *Gateway) decide(q question) decision { return g.policy.Load().Decide(q) }

// lax says whether names are allowed without a look at what is said to them.
func (g *Gateway) lax() bool {
	p := g.policy.Load()
	return p != nil && p.Mode == policy.Open
}

// services are the opted-in services of the host and its network.
func (g *Gateway) services() []netip.AddrPort {
	if p := g.policy.Load(); p != nil {
		return p.HostServices
	}
	return nil
}
