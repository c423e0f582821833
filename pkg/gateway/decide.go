package gateway

import (
	"net/netip"
	"sync/atomic"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

type (
	question = policy.Question
	decision = policy.Decision
)

// currentPolicy is the policy in force.
type currentPolicy struct{ atomic.Pointer[policy.Policy] }

// decide asks the policy. All of the gateway's decisions go through it.
func (c *currentPolicy) decide(q question) decision { return c.Load().Decide(q) }

// decideRequest asks the policy about an HTTP request.
func (c *currentPolicy) decideRequest(q policy.Request) decision { return c.Load().DecideRequest(q) }

// graphQL returns the rules for the GraphQL operations in a request.
func (c *currentPolicy) graphQL(q policy.Request) []policy.GraphQLRules { return c.Load().GraphQL(q) }

// requestHosts returns the hosts and zones with request rules.
func (c *currentPolicy) requestHosts() []string {
	if p := c.Load(); p != nil {
		return p.RequestHosts()
	}
	return nil
}

// allowsUnchecked reports whether names are allowed without inspecting the traffic to them.
func (c *currentPolicy) allowsUnchecked() bool {
	p := c.Load()
	return p != nil && p.Mode == policy.Open
}

// services returns the opted-in services of the host and its network.
func (c *currentPolicy) services() []netip.AddrPort {
	if p := c.Load(); p != nil {
		return p.HostServices
	}
	return nil
}
