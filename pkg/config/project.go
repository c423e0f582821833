package config

import (
	"net/netip"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func addrPort(h HostService) netip.AddrPort { return netip.AddrPort(h) }

// policy is the project's wish; what it leaves out stays unset and narrows nothing.
func (pr *Project) policy() *policy.Policy {
	p := &policy.Policy{Version: policy.Version, Mode: policy.Mode(pr.Network.Mode)}
	if pr.Network.Ports != nil {
		p.Ports = []uint16{}
		for _, port := range pr.Network.Ports {
			p.Ports = append(p.Ports, uint16(port))
		}
	}
	if pr.Network.Allow != nil {
		p.Names = []policy.Rule{}
		for _, name := range pr.Network.Allow {
			p.Names = append(p.Names, policy.Rule{Pattern: string(name), Source: ProjectFile})
		}
	}
	return p
}
