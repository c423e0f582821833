// Package resolver is the DNS proxy of a guest: it answers for names that the
// policy allows, and for no others.
//
// It asks the resolvers of the guest's network in its own words: nothing of a
// client's packet is passed on but a checked name and type, and nothing of the
// answer is passed back but records that cannot lead off the policy. It does
// not decide (package policy does), and it keeps no log (its Log does).
package resolver

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

const (
	workers    = 256             // questions answered at once
	sockets    = 256             // TCP connections at once, per listener
	timeout    = 2 * time.Second // of one question to one resolver
	attempts   = 2               // questions to the network per step of a chain
	maxChain   = 8               // aliases followed
	maxRecords = 64              // in one answer
	hostTTL    = 5               // seconds; a service may be closed
	maxTTL     = 300             // seconds; a changed policy is felt soon
	maxAskers  = 4096            // names with the program that asked for them
	maxReports = 4               // denials that the network's resolver is told of at once
)

// hostName is Lima's name for the host.
const hostName = "host.lima.internal"

// Asker sends one question to a resolver of the network and returns its answer.
type Asker interface {
	Ask(ctx context.Context, name string, qtype uint16) (*dns.Msg, error)
}

// Proxy answers questions. Policy and Upstream are asked for every question,
// so a new policy is in force with the next one.
type Proxy struct {
	Policy   func() *policy.Policy
	Upstream Asker
	Log      func(wire.Query)
	// Host is the host as the guest reaches it, which answers for hostName while
	// a service of the host's own is open to the guest. It may be nil.
	Host func() (netip.Addr, bool)
	// Who names the program that asks for a denied name from an address of the
	// guest, "" when it is not known. It may be nil.
	Who func(from netip.AddrPort, name string) string

	now       func() time.Time // time.Now, but for tests
	once      sync.Once
	slots     chan struct{}
	limit     *limiter
	cache     *cache
	reports   chan struct{}
	reporting sync.WaitGroup

	mu     sync.Mutex
	askers map[string]string // the program that was found for a denied name
}

func (p *Proxy) setup() {
	p.slots = make(chan struct{}, workers)
	if p.now == nil {
		p.now = time.Now
	}
	p.limit = newLimiter(p.now)
	p.cache = newCache(p.now)
	p.askers = map[string]string{}
	p.reports = make(chan struct{}, maxReports)
}

// Wait returns once nothing of the proxy runs; nobody may ask any more.
func (p *Proxy) Wait() { p.reporting.Wait() }

// ServeDNS answers one question.
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
	// A client that is gone needs no answer, and there is nobody else to tell.
	_ = w.WriteMsg(reply)
}

// fit cuts a reply to what its client takes.
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

// atOnce returns the packed reply to a datagram, if nobody has to be waited for
// and the message is a plain question. Whoever reads datagrams can do this
// itself; what it returns nil for is ServeDNS's.
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

// Answer makes the reply to a message with exactly one question.
func (p *Proxy) Answer(ctx context.Context, req *dns.Msg, from netip.AddrPort) *dns.Msg {
	p.once.Do(p.setup)
	reply, _ := p.answer(ctx, req, from, true)
	return reply
}

// answer makes a reply. Without wait it reports false, and has done nothing,
// when the network or the process table would have to be asked.
func (p *Proxy) answer(ctx context.Context, req *dns.Msg, from netip.AddrPort, wait bool) (_ *dns.Msg, done bool) {
	q := req.Question[0]
	reply := new(dns.Msg)
	reply.SetReply(req)
	reply.RecursionAvailable = true
	entry := wire.Query{Time: time.Now().UTC(), Name: wire.Clean(q.Name), Type: typeName(q.Qtype)}
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
	if !decision.Allowed {
		var ok bool
		if entry.Process, ok = p.who(from, name, wait); !ok {
			return nil, false
		}
		if pol != nil && pol.Walled {
			p.report(name, q.Qtype)
		}
		return fail(req, reply, dns.RcodeNameError, dns.ExtendedErrorCodeBlocked, decision.Reason), true
	}
	if entry.Name = name; !passes(q.Qtype) {
		// HTTPS and SVCB carry targets, addresses and ECH keys, CNAME a foreign
		// name; an empty answer makes every client ask for addresses instead.
		entry.Allowed = true
		return reply, true
	}
	found, known := p.cache.get(name, q.Qtype)
	if !known && !wait {
		return nil, false
	}
	if !known {
		if found, err = p.follow(ctx, name, q.Qtype); err != nil {
			entry.Allowed, entry.Reason, entry.Answer = true, "no answer from the network's resolver", []string{"SERVFAIL"}
			return fail(req, reply, dns.RcodeServerFailure, dns.ExtendedErrorCodeNetworkError, entry.Reason), true
		}
		p.cache.put(name, q.Qtype, found)
	}
	records, blocked := keep(pol, found.records, q, found.ttl)
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

// who names the program that asks for a denied name. Whoever was found for a
// name is not looked for again; without wait nobody is.
func (p *Proxy) who(from netip.AddrPort, name string, wait bool) (program string, ok bool) {
	if p.Who == nil {
		return "", true
	}
	p.mu.Lock()
	program, ok = p.askers[name]
	p.mu.Unlock()
	if ok || !wait {
		return program, ok
	}
	if program = p.Who(from, name); program != "" {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.askers) >= maxAskers {
			clear(p.askers)
		}
		p.askers[name] = program
	}
	return program, true
}

// host is the host's address while a policy opens a service of its loopback.
func (p *Proxy) host(pol *policy.Policy) (netip.Addr, bool) {
	if p.Host == nil || pol == nil || !slices.ContainsFunc(pol.HostServices, func(s netip.AddrPort) bool { return s.Addr().IsLoopback() }) {
		return netip.Addr{}, false
	}
	addr, ok := p.Host()
	return addr, ok && addr.Is4()
}

// report tells the network's resolver, which is the host's gateway, of a denied
// name by asking it the same: it denies the name too, and the host's own log has
// it. Without a wall the question would leave the host. Nobody waits for the
// answer, and what is over the bound is not reported.
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
		// Whatever comes back, the name stays denied.
		_, _ = p.Upstream.Ask(ctx, name, qtype)
	})
}

// fail turns reply into a failure, with the reason for clients that can show it.
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
