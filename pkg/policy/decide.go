package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Question is a question to the policy. It may be incomplete:
//
//   - A name alone asks whether the name may be resolved.
//   - A name and a port ask whether a connection to them is allowed.
//   - An additional address asks whether the name may resolve to that address.
//   - An address and a port ask whether a connection without a name is allowed.
type Question struct {
	Name string
	Addr netip.Addr
	Port uint16
}

// Decision is the answer to one question, with an explanation for the user.
type Decision struct {
	Allowed bool
	Asks    bool   // not allowed, unless a person allows it now
	Rule    string // what decided: a rule as a person writes it, "host service ADDRESS:PORT" or "mode open"; "" if no rule applies
	Source  string // where that rule comes from
	Reason  string // a short reason; never empty
}

// index finds the rules of a name with as many look-ups as the name has labels. The key
// of a wildcard starts with its dot. Every key that can match a name is therefore a
// suffix of it, and looking up allocates no memory.
type index map[string][]hit

type hit struct {
	rule *Rule
	text string // the rule as a person writes it
}

func newIndex(rules []Rule) index {
	x := make(index, len(rules))
	for i := range rules {
		r := &rules[i]
		// An invalid rule matches nothing; Validate refuses it.
		if pattern, err := ParsePattern(r.Pattern); err == nil {
			key := strings.TrimPrefix(pattern, "*")
			x[key] = append(x[key], hit{r, r.String()})
		}
	}
	return x
}

// parentPattern returns the next more general key that matches what key matches: after the name
// itself, the wildcards above it, from the nearest to the farthest.
func parentPattern(key string) (string, bool) {
	for i := 1; i < len(key); i++ {
		if key[i] == '.' {
			return key[i:], true
		}
	}
	return "", false
}

func (p *Policy) build() {
	p.once.Do(func() {
		p.names, p.denied, p.asked, p.requests = newIndex(p.Names), newIndex(p.Denied), newIndex(p.Asked), parseRequests(p.Requests)
	})
}

// Decide answers a question. It denies everything that it does not understand.
func (p *Policy) Decide(q Question) Decision {
	if p == nil {
		return Decision{Reason: "no policy"}
	}
	if reason := p.whyAllDenied(); reason != "" {
		return Decision{Reason: reason}
	}
	addr := q.Addr.Unmap()
	if addr.Zone() != "" {
		return Decision{Reason: "not an internet address"}
	}
	switch {
	case q.Name != "":
		return p.decideName(q.Name, addr, q.Port)
	case !addr.IsValid():
		return Decision{Reason: "neither a name nor an address"}
	case q.Port == 0:
		return Decision{Reason: "address without a port"}
	}
	return p.decideAddr(addr, q.Port)
}

// whyAllDenied returns why nothing at all is allowed, or "" if something may be.
func (p *Policy) whyAllDenied() string {
	switch {
	case p.Version != Version:
		return "unknown policy version"
	case p.Mode == Isolated:
		return "mode isolated"
	case p.Mode.width() < 0:
		return "unknown network mode"
	}
	return ""
}

func (p *Policy) decideName(name string, addr netip.Addr, port uint16) Decision {
	name, err := Canonical(name)
	if err != nil {
		return Decision{Reason: err.Error()}
	}
	p.build()
	if h, ok := p.denies(name, port); ok {
		return Decision{Rule: h.text, Source: h.rule.Source, Reason: "denied by name"}
	}
	d := p.allows(name, port)
	if !d.Allowed {
		d = p.asks(name, port, d)
	}
	if !d.Resolves() || !addr.IsValid() {
		return d
	}
	if reason := BlockedReason(addr); reason != "" && !p.isHostService(addr, port) {
		d.Allowed, d.Asks, d.Reason = false, false, "the name resolves to "+addr.String()+", a "+reason
	}
	return d
}

// allows decides about a name that is not denied.
func (p *Policy) allows(name string, port uint16) Decision {
	if p.Mode == Open && p.portAllowed(p.Ports, name, port) {
		return Decision{Allowed: true, Rule: "mode open", Reason: "mode open allows every name"}
	}
	var nearest hit
	for key, ok := name, true; ok; key, ok = parentPattern(key) {
		for _, h := range p.names[key] {
			ports := h.rule.Ports
			if ports == nil {
				ports = p.Ports
			}
			if p.portAllowed(ports, name, port) {
				return Decision{Allowed: true, Rule: h.text, Source: h.rule.Source, Reason: "on the allowlist"}
			}
			if nearest.rule == nil {
				nearest = h
			}
		}
	}
	d := Decision{Reason: "not on the allowlist"}
	if nearest.rule != nil {
		d.Rule, d.Source = nearest.text, nearest.rule.Source
	} else if p.Mode == Open {
		d.Rule = "mode open"
	}
	switch {
	case d.Rule != "" && port == 0:
		d.Reason = "none of its ports is open"
	case d.Rule != "":
		d.Reason = fmt.Sprintf("port %d is not open", port)
	}
	return d
}

// asks returns the decision about a name that a person may allow, or otherwise d.
func (p *Policy) asks(name string, port uint16, d Decision) Decision {
	if len(p.asked) == 0 || p.Mode != Allowlist {
		return d
	}
	for key, ok := name, true; ok; key, ok = parentPattern(key) {
		for _, h := range p.asked[key] {
			ports := h.rule.Ports
			if ports == nil {
				ports = p.Ports
			}
			if p.portAllowed(ports, name, port) {
				return Decision{Asks: true, Rule: h.text, Source: h.rule.Source, Reason: "waits for your approval"}
			}
		}
	}
	return d
}

// Resolves reports whether the name of the question may be resolved: a connection to it is
// allowed, or may be.
func (d Decision) Resolves() bool { return d.Allowed || d.Asks }

// portAllowed reports whether a port is in ports, the ports of a rule. With port 0 it reports
// whether the name may be resolved, which requires a port that is not denied: without
// one, the address is of no use.
func (p *Policy) portAllowed(ports []uint16, name string, port uint16) bool {
	if port != 0 {
		return slices.Contains(ports, port)
	}
	if len(p.denied) == 0 {
		return len(ports) > 0
	}
	return slices.ContainsFunc(ports, func(port uint16) bool {
		_, denied := p.denies(name, port)
		return !denied
	})
}

// denies returns the rule that denies a name on a port. With port 0 it returns a rule
// that denies all ports.
func (p *Policy) denies(name string, port uint16) (hit, bool) {
	if len(p.denied) == 0 {
		return hit{}, false
	}
	for key, ok := name, true; ok; key, ok = parentPattern(key) {
		for _, h := range p.denied[key] {
			if h.rule.Ports == nil || slices.Contains(h.rule.Ports, port) {
				return h, true
			}
		}
	}
	return hit{}, false
}

// isHostService reports whether a blocked address was opted in: on a port or, with port 0, on
// any port. With port 0 it excludes loopback, because a guest that receives a loopback
// address would take it for its own.
func (p *Policy) isHostService(addr netip.Addr, port uint16) bool {
	if port != 0 {
		return slices.Contains(p.HostServices, netip.AddrPortFrom(addr, port))
	}
	return !addr.IsLoopback() && slices.ContainsFunc(p.HostServices, func(s netip.AddrPort) bool { return s.Addr() == addr })
}

// decideAddr decides about a connection to an address whose name is unknown.
func (p *Policy) decideAddr(addr netip.Addr, port uint16) Decision {
	if p.isHostService(addr, port) {
		return Decision{Allowed: true, Rule: "host service " + netip.AddrPortFrom(addr, port).String(), Reason: "allowed host service"}
	}
	if reason := BlockedReason(addr); reason != "" {
		return Decision{Reason: reason}
	}
	switch {
	case p.Mode != Open:
		return Decision{Reason: "address without an allowed name"}
	case !slices.Contains(p.Ports, port):
		return Decision{Rule: "mode open", Reason: fmt.Sprintf("port %d is not open", port)}
	}
	return Decision{Allowed: true, Rule: "mode open", Reason: "mode open allows every public address"}
}

var errName = errors.New("not a host name")

// Canonical returns the canonical spelling of a DNS name: lower case, no trailing dot.
// It accepts underscores, which occur in service names. It refuses text that looks like
// an address, so that an address is never taken for a name.
func Canonical(name string) (string, error) {
	name = strings.TrimSuffix(name, ".")
	if name == "" || len(name) > maxName {
		return "", errName
	}
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
	}
	if start == len(name) || allDigits(name[start:]) {
		return "", errName
	}
	return strings.ToLower(name), nil
}
