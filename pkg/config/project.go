package config

import (
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// wish is what a project asks for; what it leaves out stays unset and narrows nothing.
func (c *Config) wish(pr *Project) (*policy.Policy, error) {
	p := &policy.Policy{Version: policy.Version, Mode: policy.Mode(pr.Network.Mode)}
	if pr.Network.Ports != nil {
		p.Ports = []uint16{}
		for _, port := range pr.Network.Ports {
			p.Ports = append(p.Ports, uint16(port))
		}
	}
	var err error
	if pr.Network.Allow != nil {
		if p.Names, err = c.expand(pr.Network.Allow, ProjectFile); err != nil {
			return nil, err
		}
	}
	p.Denied, err = c.expand(pr.Network.Deny, ProjectFile)
	return p, err
}

// lift takes out of a repository's denials what the user allows on the session:
// the same names or, under a wildcard, fewer. What stays denied of one are the
// other ports that user opens for anything.
func lift(denied, allowed []policy.Rule, user *policy.Policy) []policy.Rule {
	left := []policy.Rule{}
	for _, d := range denied {
		ports, touched := d.Ports, false
		if ports == nil {
			ports = user.PortsOut()
		}
		for _, a := range allowed {
			zone, wildcard := strings.CutPrefix(a.Pattern, "*")
			if a.Pattern != d.Pattern && (!wildcard || !strings.HasSuffix(d.Pattern, zone)) {
				continue
			}
			opened := a.Ports
			if opened == nil {
				opened = user.Ports
			}
			touched = true
			ports = slices.DeleteFunc(slices.Clone(ports), func(port uint16) bool { return slices.Contains(opened, port) })
		}
		if !touched {
			left = append(left, d)
			continue
		}
		for some := range slices.Chunk(ports, policy.MaxPorts) {
			left = append(left, policy.Rule{Pattern: d.Pattern, Ports: some, Source: d.Source})
		}
	}
	return left
}
