package policy

import (
	"iter"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// Tighten returns user narrowed by a repository's own policy file. The result allows
// nothing that user does not allow. Parts that repo leaves out (an empty mode, nil
// lists) do not narrow; an empty list that is not nil narrows to nothing. An unknown
// mode narrows to isolated. Denials of both apply. Names have no effect in open mode,
// so a list of names in repo ends open mode.
func Tighten(user, repo *Policy) *Policy {
	if user == nil {
		return &Policy{Version: Version, Mode: Isolated, Names: []Rule{}, Ports: []uint16{}}
	}
	p := &Policy{
		Version:      user.Version,
		Mode:         user.Mode,
		Names:        slices.Clone(user.Names),
		Denied:       slices.Clone(user.Denied),
		Asked:        slices.Clone(user.Asked),
		Ports:        slices.Clone(user.Ports),
		HostServices: slices.Clone(user.HostServices),
		Enforced:     user.Enforced,
		Requests:     slices.Clone(user.Requests),
	}
	if repo == nil {
		return p
	}
	for _, layer := range repo.Requests { // a subtask has the layers of its parent again
		if !slices.ContainsFunc(p.Requests, func(has []RequestRules) bool { return reflect.DeepEqual(has, layer) }) {
			p.Requests = append(p.Requests, layer)
		}
	}
	p.Mode = narrower(user.Mode, repo.Mode)
	if repo.Names != nil && p.Mode == Open {
		p.Mode = Allowlist
	}
	if repo.Ports != nil {
		p.Ports = intersectPorts(p.Ports, repo.Ports)
	}
	switch {
	case repo.Names != nil:
		p.Names = commonRules(user, repo, p.Ports)
		p.Asked = commonRules(&Policy{Names: user.Asked, Ports: user.Ports, Mode: Allowlist}, repo, p.Ports)
	case repo.Ports != nil:
		p.Names = slices.AppendSeq([]Rule{}, withPorts(user.Names, repo.Ports))
		p.Asked = slices.AppendSeq([]Rule{}, withPorts(user.Asked, repo.Ports))
	}
	p.Denied = append(p.Denied, repo.Denied...)
	if repo.HostServices != nil {
		p.HostServices = slices.DeleteFunc(p.HostServices, func(s netip.AddrPort) bool { return !slices.Contains(repo.HostServices, s) })
	}
	return p
}

func narrower(user, repo Mode) Mode {
	switch {
	case repo == "":
		return user
	case user.width() < 0 || repo.width() < 0:
		return Isolated
	case repo.width() < user.width():
		return repo
	}
	return user
}

// withPorts yields the rules, restricted to those of their own ports that are in ports.
func withPorts(rules []Rule, ports []uint16) iter.Seq[Rule] {
	return func(yield func(Rule) bool) {
		for _, r := range rules {
			if r.Ports != nil {
				if r.Ports = intersectPorts(r.Ports, ports); len(r.Ports) == 0 {
					continue
				}
			}
			if !yield(r) {
				return
			}
		}
	}
}

// commonRules returns the rules for what both policies allow. Of two patterns, either one
// contains the other or they share no name. So it is enough to take each pattern of
// either side and to give it the ports that both sides open for all of its names. ports
// are those of the result, which a rule need not repeat.
func commonRules(user, repo *Policy, ports []uint16) []Rule {
	user.build()
	repo.build()
	ports = sorted(ports)
	list := []Rule{}
	seen := map[string]bool{}
	for _, r := range slices.Concat(user.Names, repo.Names) {
		if seen[r.Pattern] {
			continue
		}
		seen[r.Pattern] = true
		open, _ := user.portsOf(r.Pattern)
		if user.Mode == Open {
			open = append(open, user.Ports...)
		}
		if theirs, unsaid := repo.portsOf(r.Pattern); !unsaid {
			open = intersectPorts(open, theirs)
		}
		open = sorted(open)
		if len(open) > 0 && slices.Equal(open, ports) {
			list = append(list, Rule{Pattern: r.Pattern, Source: r.Source})
			continue
		}
		for some := range slices.Chunk(open, MaxPorts) {
			list = append(list, Rule{Pattern: r.Pattern, Ports: some, Source: r.Source})
		}
	}
	return list
}

// portsOf returns the ports that the rules of p open for every name of a pattern.
// unsaid means that a rule leaves its ports to p, and p defines none.
func (p *Policy) portsOf(pattern string) (ports []uint16, unsaid bool) {
	for key, ok := strings.TrimPrefix(pattern, "*"), true; ok; key, ok = parentPattern(key) {
		for _, h := range p.names[key] {
			if ports = append(ports, h.rule.Ports...); h.rule.Ports == nil {
				ports, unsaid = append(ports, p.Ports...), unsaid || p.Ports == nil
			}
		}
	}
	return ports, unsaid
}

func intersectPorts(a, b []uint16) []uint16 {
	return slices.DeleteFunc(slices.Clone(a), func(port uint16) bool { return !slices.Contains(b, port) })
}

func sorted(ports []uint16) []uint16 {
	ports = slices.Clone(ports)
	slices.Sort(ports)
	return slices.Compact(ports)
}
