package resolver

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// passes reports whether records of a type are looked up at all. ANY is not:
// whoever asks for everything gets nothing and asks for what it needs.
func passes(t uint16) bool {
	switch t {
	case dns.TypeA, dns.TypeAAAA, dns.TypeMX, dns.TypeTXT, dns.TypeSRV, dns.TypeNS, dns.TypePTR:
		return true
	}
	return false
}

// answer is what the network says of a name, at the end of its aliases.
type answer struct {
	rcode   int
	records []dns.RR // of the asked type, of the last name of the chain
	ttl     uint32
}

// follow asks for a name and for what it is an alias of. The aliases are not
// checked against the policy: they are the business of who owns the name, and
// only addresses that may be reached come out at the end.
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

// walk follows the aliases inside one message, takes the records at their end,
// and returns the last name. Records of any other owner are not looked at.
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

// keep turns what was found into records under the asked name, spelled as it
// was asked, and leaves out what the policy does not let through. blocked says
// why the last one was left out.
func keep(pol *policy.Policy, found []dns.RR, q dns.Question, ttl uint32) (kept []dns.RR, blocked string) {
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

// address says why an address is left out: a name on the list must not be a
// way into the local network, unless a service there was opted in.
func address(pol *policy.Policy, name string, raw []byte) string {
	addr, ok := netip.AddrFromSlice(raw)
	if !ok {
		return "not an address"
	}
	return refused(pol, policy.Question{Name: name, Addr: addr}, "")
}

func target(pol *policy.Policy, name string) string {
	return refused(pol, policy.Question{Name: name}, "the name points at another: ")
}

func refused(pol *policy.Policy, q policy.Question, prefix string) string {
	if d := pol.Decide(q); !d.Allowed {
		return prefix + d.Reason
	}
	return ""
}

// texts is the records as they stand in the log.
func texts(records []dns.RR) []string {
	var list []string
	for _, rr := range records {
		if len(list) == 16 {
			return append(list, "…")
		}
		switch v := rr.(type) {
		case *dns.A: // nearly all are, and this is quick
			list = append(list, v.A.String())
		default:
			list = append(list, strings.TrimPrefix(rr.String(), rr.Header().String()))
		}
	}
	return list
}
