// Package policy is the network policy of a session: which names may be
// resolved, which addresses and ports may be reached, and why not.
//
// It parses allowlists, validates, narrows and decides. It is pure: it never
// resolves, dials, reads files or keeps state beyond an index of its own rules.
// Everything it does not understand it denies. It imports the standard library
// only, because the guest program and the host's gateway both decide with it.
package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"sync"
)

// Version is the version of the compiled form; another one is refused.
const Version = 2

// Mode says how much of the internet a session sees.
type Mode string

// The modes, from narrow to wide.
const (
	Isolated  Mode = "isolated"  // nothing
	Allowlist Mode = "allowlist" // the listed names
	Open      Mode = "open"      // the internet, never the local network
)

// Bounds of a policy. They keep a hostile or damaged file from costing memory.
const (
	MaxRules        = 50_000
	MaxPorts        = 64  // of the policy, and of one rule
	MaxPortsOut     = 256 // of the policy and all its rules together
	MaxHostServices = 64
	maxSource       = 1024 // bytes of Rule.Source
)

// Rule is about one name, "github.com", or every name of one or more labels
// below a zone, "*.npmjs.org"; and about TCP ports. What HTTP requests a host
// takes and whether its TLS is opened will be further fields of a rule.
type Rule struct {
	Pattern string   `json:"pattern"`
	Ports   []uint16 `json:"ports,omitempty"`  // nil: those of the policy, and in a denial all
	Source  string   `json:"source,omitempty"` // "file:line" or "net allow"
}

// String is the rule as a person writes it: NAME, or NAME:PORT,PORT.
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

// Policy is what the guest program and the gateway decide with, and the file
// the guest reads. It must not be changed or copied once it was asked for a
// decision; it may then be used by any number of goroutines.
type Policy struct {
	Version int      `json:"version"`
	Mode    Mode     `json:"mode"`
	Names   []Rule   `json:"names"`
	Denied  []Rule   `json:"denied,omitempty"` // beats every allowance, in every mode
	Ports   []uint16 `json:"ports"`            // of every name whose rule has none

	// HostServices are opted-in exceptions to the blocked ranges. A loopback
	// address is the host's own, which a guest reaches at its gateway's address.
	HostServices []netip.AddrPort `json:"host_services,omitempty"`

	// Walled says that the host's gateway enforces this policy too, so that a
	// guest may tell its resolver, which is that gateway, of denied names.
	Walled bool `json:"walled,omitempty"`

	once   sync.Once
	names  index
	denied index
}

// Default is the policy of a session that nothing was said about: allowlist
// mode, web and SSH ports, and no names (they stand in a file, not in code).
func Default() *Policy {
	return &Policy{Version: Version, Mode: Allowlist, Names: []Rule{}, Ports: []uint16{22, 80, 443}}
}

// Validate returns everything that is wrong with p, or nil.
func (p *Policy) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if p.Version != Version {
		bad("policy version %d; this program understands %d", p.Version, Version)
	}
	if p.Mode.width() < 0 {
		bad("network mode %q; use isolated, allowlist or open", clip(string(p.Mode)))
	}
	if len(p.Names) > MaxRules || len(p.Denied) > MaxRules {
		bad("%d names and %d denied ones; at most %d of each are allowed", len(p.Names), len(p.Denied), MaxRules)
		return errors.Join(errs...)
	}
	for _, rules := range [][]Rule{p.Names, p.Denied} {
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
		bad("port 0 is not a port")
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
			bad("host service %q: not an address and port of a machine; write ADDRESS:PORT, such as 127.0.0.1:8080", s)
		}
	}
	return errors.Join(errs...)
}

// validate returns what is wrong with a rule. A list of ports that is there and
// empty would come back from its JSON as no list, which opens more.
func (r Rule) validate() error {
	canonical, err := ParsePattern(r.Pattern)
	switch {
	case err != nil:
		return err
	case canonical != r.Pattern:
		return fmt.Errorf("not in its canonical form; write %q", clip(canonical))
	case r.Ports != nil && len(r.Ports) == 0:
		return errors.New("an empty list of ports; leave it out or list ports")
	case len(r.Ports) > MaxPorts:
		return fmt.Errorf("%d ports; at most %d are allowed", len(r.Ports), MaxPorts)
	case slices.Contains(r.Ports, 0):
		return errors.New("port 0 is not a port")
	case len(r.Source) > maxSource:
		return fmt.Errorf("its source is over %d bytes", maxSource)
	}
	return nil
}

// PortsOut returns every TCP port that the policy or a rule of it opens for some
// name, sorted, for a packet filter. Host services are not among them.
func (p *Policy) PortsOut() []uint16 {
	if p == nil || p.shut() != "" {
		return nil
	}
	return p.portsOut()
}

func (p *Policy) portsOut() []uint16 {
	ports := slices.Clone(p.Ports)
	for _, r := range p.Names {
		ports = append(ports, r.Ports...)
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// width orders the modes; -1 is no mode at all.
func (m Mode) width() int { return slices.Index([]Mode{Isolated, Allowlist, Open}, m) }
