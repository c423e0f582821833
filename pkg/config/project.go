package config

import (
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// projectPolicy returns the policy that a project asks for. Fields that it leaves out stay unset and
// narrow nothing.
func (c *Config) projectPolicy(pr *Project) (*policy.Policy, error) {
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
	if len(pr.Network.HTTP) > 0 {
		p.Requests = [][]policy.RequestRules{pr.Network.HTTP.compile("", ProjectFile)}
	}
	p.Denied, err = c.expand(pr.Network.Deny, ProjectFile)
	return p, err
}

// liftDenials removes from a repository's denials the names that the user allows for the session.
// An allowed name lifts a denial of the same name, and an allowed wildcard also lifts
// denials below it. A lifted denial still covers the other ports that user opens for any
// name.
func liftDenials(denied, allowed []policy.Rule, user *policy.Policy) []policy.Rule {
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
