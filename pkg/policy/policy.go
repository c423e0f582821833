// Package policy is the network policy of a session: which names may be resolved, which
// addresses and ports may be reached, and why others may not.
//
// It parses allowlists, validates, narrows and decides. It is pure: it never resolves,
// dials, reads files or keeps state beyond an index of its own rules. It denies
// everything that it does not understand. It imports only the standard library, because
// both the guest program and the host's gateway decide with it.
package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"sync"
)

// Version is the version of the compiled form. Other versions are refused.
const Version = 2

// Mode defines how much of the internet a session can reach.
type Mode string

// The modes, from narrow to wide.
const (
	Isolated  Mode = "isolated"  // nothing
	Allowlist Mode = "allowlist" // the listed names
	Open      Mode = "open"      // the internet, never the local network
)

// Bounds of a policy. They prevent a hostile or damaged file from using much memory.
const (
	MaxRules        = 50_000
	MaxPorts        = 64  // of the policy, and of one rule
	MaxPortsOut     = 256 // of the policy and all its rules together
	MaxHostServices = 64
	maxSource       = 1024 // bytes of Rule.Source
)

// Rule applies to TCP ports of one name, such as "github.com", or of every name of one
// or more labels below a zone, such as "*.npmjs.org". Future fields will define which
// HTTP requests a host may receive and whether its TLS is opened.
type Rule struct {
	Pattern string   `json:"pattern"`
	Ports   []uint16 `json:"ports,omitempty"`  // nil: the ports of the policy, or all ports in a denial
	Source  string   `json:"source,omitempty"` // "file:line" or "net allow"
}

// String returns the rule as a person writes it: NAME, or NAME:PORT,PORT.
func (r Rule) String() string {
	if len(r.Ports) == 0 {
		return r.Pattern
	}
	b := []byte(r.Pattern)
	for i, port := range r.Ports {
		sep := byte(',')
		if i == 0 {
			sep = ':'
		}
		b = strconv.AppendUint(append(b, sep), uint64(port), 10)
	}
	return string(b)
}

// Policy is the basis of the decisions of the guest program and the gateway, and the
// content of the file that the guest reads. It must not be changed or copied after its
// first decision; from then on it is safe for concurrent use.
type Policy struct {
	Version int      `json:"version"`
	Mode    Mode     `json:"mode"`
	Names   []Rule   `json:"names"`
	Denied  []Rule   `json:"denied,omitempty"` // overrides every allowance, in every mode
	Asked   []Rule   `json:"asked,omitempty"`  // names that nothing allows or denies, but a person may
	Ports   []uint16 `json:"ports"`            // for every name whose rule has none

	// HostServices holds opted-in exceptions to the blocked ranges. A loopback address
	// is the host's own, which a guest reaches at its gateway's address.
	HostServices []netip.AddrPort `json:"host_services,omitempty"`

	// Enforced says that the host's gateway enforces this policy as well. The guest may
	// then ask its resolver, which is that gateway, about denied names.
	Enforced bool `json:"enforced,omitempty"`

	// Requests says which HTTP requests the hosts may receive. Each layer must allow a
	// request, so that a layer can be added but cannot widen the others.
	Requests [][]RequestRules `json:"requests,omitempty"`

	once   sync.Once
	names  index
	denied index
	asked  index

	requests [][]hostRequests
}

// Default returns the policy of a session without any network settings: allowlist mode,
// the web and SSH ports, and no names, because those are in a file and not in code.
func Default() *Policy {
	return &Policy{Version: Version, Mode: Allowlist, Names: []Rule{}, Ports: []uint16{22, 80, 443}}
}

// Validate returns all errors in p, or nil.
func (p *Policy) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if p.Version != Version {
		bad("policy version must be %d, got %d", Version, p.Version)
	}
	if p.Mode.width() < 0 {
		bad("network mode must be isolated, allowlist or open, got %q", clip(string(p.Mode)))
	}
	if len(p.Names) > MaxRules || len(p.Denied) > MaxRules || len(p.Asked) > MaxRules {
		bad("%d allowed, %d denied and %d asked names; at most %d of each are allowed", len(p.Names), len(p.Denied), len(p.Asked), MaxRules)
		return errors.Join(errs...)
	}
	for _, rules := range [][]Rule{p.Names, p.Denied, p.Asked} {
		for _, r := range rules {
			if len(errs) >= maxErrors {
				break
			}
			if err := r.validate(); err != nil {
				bad("name %q: %w", clip(r.Pattern), err)
			}
		}
	}
	if len(p.Ports) > MaxPorts {
		bad("%d ports; at most %d are allowed", len(p.Ports), MaxPorts)
	}
	if slices.Contains(p.Ports, 0) {
		bad("port must not be 0")
	}
	if out := len(p.portsOut()); out > MaxPortsOut {
		bad("the rules open %d ports; at most %d are allowed", out, MaxPortsOut)
	}
	if len(p.HostServices) > MaxHostServices {
		bad("%d host services; at most %d are allowed", len(p.HostServices), MaxHostServices)
	}
	for _, s := range p.HostServices {
		a := s.Addr()
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() || s.Port() == 0 {
			bad("host service must be ADDRESS:PORT, such as 127.0.0.1:8080, got %q", s)
		}
	}
	if err := p.validateRequests(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// validate returns an error if a rule is invalid. It refuses an empty but non-nil list
// of ports, because its JSON would be decoded as no list, which opens more ports.
func (r Rule) validate() error {
	canonical, err := ParsePattern(r.Pattern)
	switch {
	case err != nil:
		return err
	case canonical != r.Pattern:
		return fmt.Errorf("not in its canonical form; write %q", clip(canonical))
	case r.Ports != nil && len(r.Ports) == 0:
		return errors.New("empty list of ports; omit it or list ports")
	case len(r.Ports) > MaxPorts:
		return fmt.Errorf("%d ports; at most %d are allowed", len(r.Ports), MaxPorts)
	case slices.Contains(r.Ports, 0):
		return errors.New("port must not be 0")
	case len(r.Source) > maxSource:
		return fmt.Errorf("source is longer than %d bytes", maxSource)
	}
	return nil
}

// PortsOut returns every TCP port that the policy or one of its rules opens, or may open, for any
// name, sorted, for a packet filter. It does not include host services.
func (p *Policy) PortsOut() []uint16 {
	if p == nil || p.whyAllDenied() != "" {
		return nil
	}
	return p.portsOut()
}

func (p *Policy) portsOut() []uint16 {
	ports := slices.Clone(p.Ports)
	for _, rules := range [][]Rule{p.Names, p.Asked} {
		for _, r := range rules {
			ports = append(ports, r.Ports...)
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// Wider reports whether m allows more than another mode. "" stands for no mode, which does not.
func (m Mode) Wider(other Mode) bool { return m != "" && m.width() > other.width() }

// width orders the modes; -1 means an unknown mode.
func (m Mode) width() int { return slices.Index([]Mode{Isolated, Allowlist, Open}, m) }
