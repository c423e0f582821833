package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Decision is the answer to one question, with what to tell the user.
type Decision struct {
	Allowed bool
	Rule    string // the pattern, host service or mode that allowed it
	Reason  string // why not; or where the rule stands
}

// index finds the rule of a name in as many look-ups as the name has labels.
// Values are positions in Names.
type index struct {
	exact map[string]int
	below map[string]int // zone of a wildcard
}

func (p *Policy) rules() *index {
	p.once.Do(func() {
		p.index = index{exact: make(map[string]int, len(p.Names)), below: map[string]int{}}
		for i, r := range p.Names {
			// A rule that would not parse allows nothing.
			pattern, err := ParsePattern(r.Pattern)
			if err != nil {
				continue
			}
			into, key := p.index.exact, pattern
			if zone, ok := strings.CutPrefix(pattern, "*."); ok {
				into, key = p.index.below, zone
			}
			if _, ok := into[key]; !ok {
				into[key] = i
			}
		}
	})
	return &p.index
}

// Name decides whether a name may be resolved and connected to.
func (p *Policy) Name(name string) Decision {
	if p == nil {
		return Decision{Reason: "no policy"}
	}
	canonical, err := Canonical(name)
	if err != nil {
		return Decision{Reason: err.Error()}
	}
	if d, done := p.mode(); done {
		return d
	}
	if p.Mode == Open {
		return Decision{Allowed: true, Rule: "mode open"}
	}
	if i, ok := p.rules().find(canonical); ok {
		return Decision{Allowed: true, Rule: p.Names[i].Pattern, Reason: p.Names[i].Source}
	}
	return Decision{Reason: "not on the allowlist"}
}

// find returns the rule for a name: itself, or the nearest wildcard above it.
func (x *index) find(name string) (int, bool) {
	if i, ok := x.exact[name]; ok {
		return i, true
	}
	return x.findBelow(name)
}

// findBelow returns the nearest wildcard that name is strictly below.
func (x *index) findBelow(name string) (int, bool) {
	for {
		_, parent, ok := strings.Cut(name, ".")
		if !ok {
			return 0, false
		}
		if i, ok := x.below[parent]; ok {
			return i, true
		}
		name = parent
	}
}

// Addr decides whether an address and port may be connected to.
func (p *Policy) Addr(ap netip.AddrPort) Decision {
	if p == nil {
		return Decision{Reason: "no policy"}
	}
	if d, done := p.mode(); done {
		return d
	}
	addr := ap.Addr().Unmap()
	if !addr.IsValid() || addr.Zone() != "" || ap.Port() == 0 {
		return Decision{Reason: "not an address of the internet"}
	}
	ap = netip.AddrPortFrom(addr, ap.Port())
	if slices.Contains(p.HostServices, ap) {
		return Decision{Allowed: true, Rule: "host service " + ap.String()}
	}
	if reason := BlockedReason(addr); reason != "" {
		return Decision{Reason: reason}
	}
	if !slices.Contains(p.Ports, ap.Port()) {
		return Decision{Reason: fmt.Sprintf("port %d is not allowed", ap.Port())}
	}
	return Decision{Allowed: true, Rule: fmt.Sprintf("port %d", ap.Port())}
}

// mode decides what the mode alone decides.
func (p *Policy) mode() (d Decision, done bool) {
	switch {
	case p.Version != Version:
		return Decision{Reason: "policy of an unknown version"}, true
	case p.Mode == Isolated:
		return Decision{Reason: "mode isolated"}, true
	case p.Mode.width() < 0:
		return Decision{Reason: "unknown network mode"}, true
	}
	return Decision{}, false
}

var errName = errors.New("not a host name")

// Canonical returns the one spelling of a name as DNS asks for it: lower case,
// no root dot. Underscores are accepted, which services' names have. What looks
// like an address is refused, so that it is never taken for a name.
func Canonical(name string) (string, error) {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > maxName {
		return "", errName
	}
	folded := make([]byte, len(name))
	start := 0
	for i := range len(name) {
		c := name[i]
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		switch {
		case c == '.':
			if i == start {
				return "", errName
			}
			start = i + 1
		case !isLDH(c) && c != '_', i-start >= maxLabel:
			return "", errName
		}
		folded[i] = c
	}
	if start == len(name) || allDigits(string(folded[start:])) {
		return "", errName
	}
	return string(folded), nil
}
