// Package resolver is the DNS proxy of a guest: it answers for names that the
// policy allows, and for no others.
//
// It sends its own queries to the resolvers of the guest's network. From a client's
// packet it passes on only a checked name and type. From the answer it passes back
// only records that cannot lead around the policy. It does not decide (package
// policy does), and it keeps no log (its Log does).
package resolver

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	workers     = 256             // concurrent queries
	sockets     = 256             // concurrent TCP connections per listener
	timeout     = 2 * time.Second // for one query to one resolver
	attempts    = 2               // queries to the network per step of a chain
	maxChain    = 8               // aliases followed
	maxRecords  = 64              // in one answer
	hostTTL     = 5               // seconds; short because the service may be closed
	maxTTL      = 300             // seconds; short so that a changed policy takes effect soon
	maxPrograms = 4096            // cached names and their programs
	maxReports  = 4               // concurrent reports of denials to the network's resolver
)

// hostName is Lima's name for the host.
const hostName = "host.lima.internal"

// ClientLookup sends one query to a resolver of the network and returns its answer.
type ClientLookup interface {
	Ask(ctx context.Context, name string, qtype uint16) (*dns.Msg, error)
}

// Proxy answers queries. It calls Policy for every query, so a new policy applies
// from the next one. It asks Upstream for allowed names.
type Proxy struct {
	Policy   func() *policy.Policy
	Upstream ClientLookup
	Log      func(guestproto.Query)
	// Host returns the host's address as seen from the guest. It answers for
	// hostName while the policy opens a service on the host's loopback. It may be
	// nil.
	Host func() (netip.Addr, bool)
	// Who returns the program that asks for a denied name from an address of the
	// guest, or "" if unknown. It may be nil.
	Who func(from netip.AddrPort, name string) string

	now       func() time.Time // time.Now, except in tests
	once      sync.Once
	slots     chan struct{}
	limit     *limiter
	cache     *cache
	reports   chan struct{}
	reporting sync.WaitGroup

	mu       sync.Mutex
	programs map[string]string // program found for each denied name
}

func (p *Proxy) setup() {
	p.slots = make(chan struct{}, workers)
	if p.now == nil {
		p.now = time.Now
	}
	p.limit = newLimiter(p.now)
	p.cache = newCache(p.now)
	p.programs = map[string]string{}
	p.reports = make(chan struct{}, maxReports)
}

// Wait waits for pending reports. The caller must not send further queries.
func (p *Proxy) Wait() { p.reporting.Wait() }

// ServeDNS answers one query.
func (p *Proxy) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	p.once.Do(p.setup)
	reply := new(dns.Msg)
	from := source(w.RemoteAddr())
	switch {
	case !p.limit.allow(from.Addr()):
		reply.SetRcode(req, dns.RcodeRefused)
	case req.Opcode != dns.OpcodeQuery:
		reply.SetRcode(req, dns.RcodeNotImplemented)
	case req.Response || len(req.Question) != 1:
		reply.SetRcode(req, dns.RcodeFormatError)
	default:
		select {
		case p.slots <- struct{}{}:
			reply = p.Answer(context.Background(), req, from)
			<-p.slots
		default:
			reply.SetRcode(req, dns.RcodeServerFailure)
		}
	}
	fit(reply, req, w.RemoteAddr().Network() == "udp")
	// If the client is gone, an error needs no handling.
	_ = w.WriteMsg(reply)
}

// fit truncates a reply to the size that its client accepts.
func fit(reply, req *dns.Msg, datagram bool) {
	size := dns.MaxMsgSize
	if datagram {
		size = dns.MinMsgSize
		if opt := req.IsEdns0(); opt != nil {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), 1232)
		}
	}
	reply.Truncate(size)
}

// atOnce returns the packed reply to a datagram if the message is a plain query
// that can be answered without waiting. The goroutine that reads datagrams calls it
// directly. If it returns nil, ServeDNS must answer.
func (p *Proxy) atOnce(datagram []byte, from netip.AddrPort) []byte {
	p.once.Do(p.setup)
	req := new(dns.Msg)
	if err := req.Unpack(datagram); err != nil {
		return nil
	}
	plain := !req.Response && req.Opcode == dns.OpcodeQuery && len(req.Question) == 1 &&
		len(req.Answer) == 0 && len(req.Ns) == 0 && len(req.Extra) <= 1
	if !plain {
		return nil
	}
	reply := new(dns.Msg)
	if p.limit.allow(from.Addr()) {
		var ok bool
		if reply, ok = p.answer(context.Background(), req, from, false); !ok {
			p.limit.giveBack(from.Addr())
			return nil
		}
	} else {
		reply.SetRcode(req, dns.RcodeRefused)
	}
	fit(reply, req, true)
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

func source(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.UDPAddr:
		ap = a.AddrPort()
	case *net.TCPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Answer returns the reply to a message with exactly one question.
func (p *Proxy) Answer(ctx context.Context, req *dns.Msg, from netip.AddrPort) *dns.Msg {
	p.once.Do(p.setup)
	reply, _ := p.answer(ctx, req, from, true)
	return reply
}

// answer returns the reply to a query. Without wait it has no effect and returns
// false if it would have to query the network or the process table.
func (p *Proxy) answer(ctx context.Context, req *dns.Msg, from netip.AddrPort, wait bool) (_ *dns.Msg, done bool) {
	q := req.Question[0]
	reply := new(dns.Msg)
	reply.SetReply(req)
	reply.RecursionAvailable = true
	entry := guestproto.Query{Time: time.Now().UTC(), Name: guestproto.Clean(q.Name), Type: typeName(q.Qtype)}
	defer func() {
		if done {
			p.Log(entry)
		}
	}()

	if q.Qclass != dns.ClassINET {
		entry.Reason = "not of the internet class"
		return fail(req, reply, dns.RcodeRefused, dns.ExtendedErrorCodeNotSupported, entry.Reason), true
	}
	pol := p.Policy()
	decision := pol.Decide(policy.Question{Name: q.Name})
	entry.Rule, entry.Source, entry.Reason = decision.Rule, decision.Source, decision.Reason
	name, err := policy.Canonical(q.Name)
	if err != nil {
		entry.Reason = err.Error()
		return fail(req, reply, dns.RcodeNameError, dns.ExtendedErrorCodeBlocked, entry.Reason), true
	}
	if name == hostName && !decision.Allowed {
		if addr, ok := p.host(pol); ok {
			entry.Allowed, entry.Rule, entry.Reason = true, "host service", "the host itself"
			if q.Qtype == dns.TypeA {
				reply.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: hostTTL}, A: addr.AsSlice()}}
			}
			entry.Answer = texts(reply.Answer)
			return reply, true
		}
	}
	if !decision.Resolves() {
		var ok bool
		if entry.Process, ok = p.clientProgram(from, name, wait); !ok {
			return nil, false
		}
		if pol != nil && pol.Enforced {
			p.report(name, q.Qtype)
		}
		return fail(req, reply, dns.RcodeNameError, dns.ExtendedErrorCodeBlocked, decision.Reason), true
	}
	if entry.Name = name; !passes(q.Qtype) {
		// HTTPS and SVCB carry targets, addresses and ECH keys, and CNAME a foreign
		// name. An empty answer makes every client ask for addresses instead.
		entry.Allowed = true
		return reply, true
	}
	found, known := p.cache.get(name, q.Qtype)
	if !known && !wait {
		return nil, false
	}
	if !known {
		if found, err = p.follow(ctx, name, q.Qtype); err != nil {
			entry.Allowed, entry.Reason, entry.Answer = true, "the network's resolver did not answer", []string{"SERVFAIL"}
			return fail(req, reply, dns.RcodeServerFailure, dns.ExtendedErrorCodeNetworkError, entry.Reason), true
		}
		p.cache.put(name, q.Qtype, found)
	}
	records, blocked := filterRecords(pol, found.records, q, found.ttl)
	reply.Rcode, reply.Answer = found.rcode, records
	entry.Answer = texts(records)
	if len(records) == 0 && blocked != "" {
		entry.Reason = blocked
		return fail(req, reply, dns.RcodeNameError, dns.ExtendedErrorCodeFiltered, blocked), true
	}
	entry.Allowed = true
	if found.rcode == dns.RcodeNameError {
		entry.Answer = []string{"NXDOMAIN"}
	}
	return reply, true
}

// clientProgram returns the program that asks for a denied name. It remembers each program
// found. Without wait it does not start a lookup.
func (p *Proxy) clientProgram(from netip.AddrPort, name string, wait bool) (program string, ok bool) {
	if p.Who == nil {
		return "", true
	}
	p.mu.Lock()
	program, ok = p.programs[name]
	p.mu.Unlock()
	if ok || !wait {
		return program, ok
	}
	if program = p.Who(from, name); program != "" {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.programs) >= maxPrograms {
			clear(p.programs)
		}
		p.programs[name] = program
	}
	return program, true
}

// host returns the host's address if the policy opens a service on the host's
// loopback.
func (p *Proxy) host(pol *policy.Policy) (netip.Addr, bool) {
	if p.Host == nil || pol == nil || !slices.ContainsFunc(pol.HostServices, func(s netip.AddrPort) bool { return s.Addr().IsLoopback() }) {
		return netip.Addr{}, false
	}
	addr, ok := p.Host()
	return addr, ok && addr.Is4()
}

// report sends a denied name to the network's resolver, which is the host's
// gateway. The gateway denies the name too, and so the host's own log records it.
// The caller must not report without a gateway, because the query would leave the
// host. report does not wait for the answer, and drops reports above maxReports.
func (p *Proxy) report(name string, qtype uint16) {
	select {
	case p.reports <- struct{}{}:
	default:
		return
	}
	p.reporting.Go(func() {
		defer func() { <-p.reports }()
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		// Whatever the answer, the name stays denied.
		_, _ = p.Upstream.Ask(ctx, name, qtype)
	})
}

// fail turns reply into a failure. It adds the reason for clients that can display
// it.
func fail(req, reply *dns.Msg, rcode int, info uint16, text string) *dns.Msg {
	reply.Rcode, reply.Answer = rcode, nil
	if req.IsEdns0() != nil {
		opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
		opt.SetUDPSize(1232)
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: info, ExtraText: "agent-sessionizer: " + text})
		reply.Extra = append(reply.Extra, opt)
	}
	return reply
}

func typeName(t uint16) string {
	if s, ok := dns.TypeToString[t]; ok {
		return s
	}
	return dns.Type(t).String()
}
