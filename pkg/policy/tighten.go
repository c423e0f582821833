package policy

import (
	"net/netip"
	"slices"
	"strings"
)

// Tighten returns user narrowed by what a repository's own file says. The
// result allows nothing that user does not allow. What repo leaves out (an
// empty mode, nil lists) does not narrow; a list that is there and empty
// narrows to nothing. A mode that is not one narrows to isolated.
func Tighten(user, repo *Policy) *Policy {
	if user == nil {
		return &Policy{Version: Version, Mode: Isolated, Names: []Rule{}, Ports: []uint16{}}
	}
	p := &Policy{
		Version:      user.Version,
		Mode:         user.Mode,
		Names:        slices.Clone(user.Names),
		Ports:        slices.Clone(user.Ports),
		HostServices: slices.Clone(user.HostServices),
	}
	if repo == nil {
		return p
	}
	p.Mode = narrower(user.Mode, repo.Mode)
	if repo.Names != nil {
		p.Names = common(user, repo)
	}
	// Names say nothing in open mode, so a repository's list makes it a list.
	if repo.Names != nil && p.Mode == Open {
		p.Mode = Allowlist
	}
	if user.Mode == Open && p.Mode == Allowlist {
		p.Names = slices.Clone(repo.Names)
	}
	if repo.Ports != nil {
		p.Ports = slices.DeleteFunc(p.Ports, func(port uint16) bool { return !slices.Contains(repo.Ports, port) })
	}
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

// common returns the patterns that both allow. Of two patterns one holds the
// other or they share no name, so it is those of each side that the other covers.
func common(a, b *Policy) []Rule {
	both := []Rule{}
	seen := map[string]bool{}
	take := func(rules []Rule, by *index) {
		for _, r := range rules {
			if !seen[r.Pattern] && by.covers(r.Pattern) {
				seen[r.Pattern] = true
				both = append(both, r)
			}
		}
	}
	take(a.Names, b.rules())
	take(b.Names, a.rules())
	return both
}

// covers reports whether every name of pattern is allowed.
func (x *index) covers(pattern string) bool {
	zone, wildcard := strings.CutPrefix(pattern, "*.")
	if !wildcard {
		_, ok := x.find(pattern)
		return ok
	}
	if _, ok := x.below[zone]; ok {
		return true
	}
	_, ok := x.findBelow(zone)
	return ok
}
