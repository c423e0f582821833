package resolver

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// passes reports whether records of a type are looked up at all. ANY is not: such a
// client gets an empty answer and asks for the type that it needs.
func passes(t uint16) bool {
	switch t {
	case dns.TypeA, dns.TypeAAAA, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypeNS, dns.TypePTR:
		return true
	}
	return false
}

// answer is the network's answer for a name, at the end of its aliases.
type answer struct {
	rcode   int
	records []dns.RR // of the requested type, of the last name in the chain
	ttl     uint32
}

// follow looks up a name and its aliases. It does not check the aliases against the
// policy: they are up to the owner of the name, and only allowed addresses are
// returned at the end.
func (p *Proxy) follow(ctx context.Context, name string, qtype uint16) (answer, error) {
	a := answer{ttl: maxTTL}
	for range maxChain {
		msg, err := p.Upstream.Ask(ctx, name, qtype)
		if err != nil {
			return a, err
		}
		if msg.Rcode != dns.RcodeSuccess && msg.Rcode != dns.RcodeNameError {
			return a, fmt.Errorf("resolver answered %s", dns.RcodeToString[msg.Rcode])
		}
		end, err := a.walk(msg, name, qtype)
		if err != nil {
			return a, err
		}
		a.rcode = msg.Rcode
		if len(a.records) > 0 {
			a.rcode = dns.RcodeSuccess
		}
		if len(a.records) > 0 || end == name || msg.Rcode == dns.RcodeNameError {
			return a, nil
		}
		name = end
	}
	return a, fmt.Errorf("more than %d aliases", maxChain)
}

// walk follows the aliases inside one message, collects the records at their end,
// and returns the last name. It ignores records of any other owner.
func (a *answer) walk(msg *dns.Msg, name string, qtype uint16) (string, error) {
	records := msg.Answer[:min(len(msg.Answer), 4*maxRecords)]
	for range maxChain {
		alias := ""
		for _, rr := range records {
			h := rr.Header()
			if owner, err := policy.Canonical(h.Name); err != nil || owner != name || h.Class != dns.ClassINET {
				continue
			}
			switch v := rr.(type) {
			case *dns.CNAME:
				target, err := policy.Canonical(v.Target)
				if err != nil {
					return "", fmt.Errorf("alias to %q: %w", v.Target, err)
				}
				alias = target
			default:
				if h.Rrtype != qtype || len(a.records) >= maxRecords {
					continue
				}
				a.records = append(a.records, rr)
			}
			a.ttl = min(a.ttl, h.Ttl)
		}
		if alias == "" || len(a.records) > 0 {
			return name, nil
		}
		name = alias
	}
	return "", fmt.Errorf("more than %d aliases", maxChain)
}

// filterRecords converts records into ones for the requested name, spelled as in the query,
// and leaves out the records that the policy denies. blocked is the reason for the
// last one left out.
func filterRecords(pol *policy.Policy, found []dns.RR, q dns.Question, ttl uint32) (kept []dns.RR, blocked string) {
	for _, rr := range found {
		h := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: max(1, min(ttl, maxTTL))}
		reason := ""
		var copied dns.RR
		switch v := rr.(type) {
		case *dns.A:
			reason = address(pol, q.Name, v.A.To4())
			copied = &dns.A{Hdr: h, A: v.A}
		case *dns.AAAA:
			reason = address(pol, q.Name, v.AAAA.To16())
			copied = &dns.AAAA{Hdr: h, AAAA: v.AAAA}
		case *dns.TXT:
			copied = &dns.TXT{Hdr: h, Txt: v.Txt}
		case *dns.MX:
			reason = target(pol, v.Mx)
			copied = &dns.MX{Hdr: h, Preference: v.Preference, Mx: v.Mx}
		case *dns.SRV:
			reason = target(pol, v.Target)
			copied = &dns.SRV{Hdr: h, Priority: v.Priority, Weight: v.Weight, Port: v.Port, Target: v.Target}
		case *dns.NS:
			reason = target(pol, v.Ns)
			copied = &dns.NS{Hdr: h, Ns: v.Ns}
		case *dns.PTR:
			reason = target(pol, v.Ptr)
			copied = &dns.PTR{Hdr: h, Ptr: v.Ptr}
		default:
			continue
		}
		if reason != "" {
			blocked = reason
			continue
		}
		kept = append(kept, copied)
	}
	return kept, blocked
}

// address returns the reason to leave an address out, or "": an allowed name must
// not give access to the local network, unless the policy opens a service there.
func address(pol *policy.Policy, name string, raw []byte) string {
	addr, ok := netip.AddrFromSlice(raw)
	if !ok {
		return "not an address"
	}
	return refused(pol, policy.Question{Name: name, Addr: addr}, "")
}

func target(pol *policy.Policy, name string) string {
	return refused(pol, policy.Question{Name: name}, "alias to a denied name: ")
}

func refused(pol *policy.Policy, q policy.Question, prefix string) string {
	if d := pol.Decide(q); !d.Resolves() {
		return prefix + d.Reason
	}
	return ""
}

// texts returns the records as text for the log.
func texts(records []dns.RR) []string {
	var list []string
	for _, rr := range records {
		if len(list) == 16 {
			return append(list, "…")
		}
		switch v := rr.(type) {
		case *dns.A: // fast path for the most common type
			list = append(list, v.A.String())
		default:
			list = append(list, strings.TrimPrefix(rr.String(), rr.Header().String()))
		}
	}
	return list
}
