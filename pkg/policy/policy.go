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
	"sync"
)

// Version is the version of the compiled form; another one is refused.
const Version = 1

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
	MaxPorts        = 64
	MaxHostServices = 64
	maxSource       = 1024 // bytes of Rule.Source
)

// Rule allows one name, "github.com", or every name of one or more labels
// below a zone, "*.npmjs.org".
type Rule struct {
	Pattern string `json:"pattern"`
	Source  string `json:"source,omitempty"` // "file:line" or "net allow"
}

// Policy is what the guest program and the gateway decide with, and the file
// the guest reads. It must not be changed or copied once it was asked for a
// decision; it may then be used by any number of goroutines.
type Policy struct {
	Version      int              `json:"version"`
	Mode         Mode             `json:"mode"`
	Names        []Rule           `json:"names"`
	Ports        []uint16         `json:"ports"`
	HostServices []netip.AddrPort `json:"host_services,omitempty"` // opted-in exceptions to the blocked ranges

	once  sync.Once
	index index
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
	if len(p.Names) > MaxRules {
		bad("%d names; at most %d are allowed", len(p.Names), MaxRules)
		return errors.Join(errs...)
	}
	for _, r := range p.Names {
		if len(errs) >= maxErrors {
			break
		}
		switch canonical, err := ParsePattern(r.Pattern); {
		case err != nil:
			bad("name %q: %w", clip(r.Pattern), err)
		case canonical != r.Pattern:
			bad("name %q: not in its canonical form; write %q", clip(r.Pattern), canonical)
		}
		if len(r.Source) > maxSource {
			bad("name %q: its source is over %d bytes", clip(r.Pattern), maxSource)
		}
	}
	if len(p.Ports) > MaxPorts {
		bad("%d ports; at most %d are allowed", len(p.Ports), MaxPorts)
	}
	if slices.Contains(p.Ports, 0) {
		bad("port 0 is not a port")
	}
	if len(p.HostServices) > MaxHostServices {
		bad("%d host services; at most %d are allowed", len(p.HostServices), MaxHostServices)
	}
	for _, s := range p.HostServices {
		a := s.Addr()
		if !a.IsValid() || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || s.Port() == 0 {
			bad("host service %q: not an address and port of another machine; write ADDRESS:PORT, such as 192.168.5.2:8080", s)
		}
	}
	return errors.Join(errs...)
}

// width orders the modes; -1 is no mode at all.
func (m Mode) width() int { return slices.Index([]Mode{Isolated, Allowlist, Open}, m) }
