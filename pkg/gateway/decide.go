package gateway

import (
	"net/netip"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

type (
	question = policy.Question
	decision = policy.Decision
)

// decide asks the policy in force. All of the gateway's decisions go through it.
func (g *Gateway) decide(q question) decision { return g.policy.Load().Decide(q) }

// allowsUnchecked reports whether names are allowed without inspecting the traffic to them.
func (g *Gateway) allowsUnchecked() bool {
	p := g.policy.Load()
	return p != nil && p.Mode == policy.Open
}

// services returns the opted-in services of the host and its network.
func (g *Gateway) services() []netip.AddrPort {
	if p := g.policy.Load(); p != nil {
		return p.HostServices
	}
	return nil
}
