package gateway

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/netutil"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	dnsPort     = 53
	dnsTTL      = 60 // seconds; well below nameMemory
	maxUDPReply = 1232
	maxQuestion = 4096 // bytes of a message; enough for one question
	dnsClients  = 64   // concurrent clients over TCP
	dnsIdle     = 30 * time.Second
)

// dnsServer answers the guest's questions.
type dnsServer struct {
	*reporter
	policy *currentPolicy
	hosts  *hostTable
	names  *nameTable
	unsent *atomic.Uint64 // counts replies that could not be sent
}

// startDNS serves DNS on the gateway's address. Every answer is computed here, without
// asking another server. One goroutine can therefore keep up with any guest, and a flood of
// questions costs only the guest's own time.
func (g *Gateway) startDNS() error {
	at := tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(g.host.As4()), Port: dnsPort}
	datagrams, err := gonet.DialUDP(g.stack, &at, nil, ipv4.ProtocolNumber)
	if err != nil {
		return err
	}
	g.run(datagrams, func() { g.dns.serveDatagrams(datagrams) })
	streams, err := gonet.ListenTCP(g.stack, at, ipv4.ProtocolNumber)
	if err != nil {
		return err
	}
	limited := netutil.LimitListener(streams, dnsClients)
	g.run(limited, func() {
		for {
			c, err := limited.Accept()
			if err != nil {
				return
			}
			if !g.run(c, func() { g.dns.serveStream(c) }) {
				c.Close()
			}
		}
	})
	return nil
}

func (s *dnsServer) serveDatagrams(c net.PacketConn) {
	message := make([]byte, maxQuestion)
	for {
		n, from, err := c.ReadFrom(message)
		if err != nil {
			return
		}
		if reply := s.reply(message[:n], maxUDPReply); reply != nil {
			if _, err := c.WriteTo(reply, from); err != nil {
				s.unsent.Add(1) // the client asks again
			}
		}
	}
}

func (s *dnsServer) serveStream(c net.Conn) {
	message := make([]byte, maxQuestion)
	for {
		if err := c.SetDeadline(time.Now().Add(dnsIdle)); err != nil {
			return
		}
		var prefix [2]byte
		if _, err := io.ReadFull(c, prefix[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(prefix[:]))
		if n > len(message) {
			return
		}
		if _, err := io.ReadFull(c, message[:n]); err != nil {
			return
		}
		reply := s.reply(message[:n], dns.MaxMsgSize)
		if reply == nil {
			return
		}
		framed := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(reply)), uint16(len(reply)))
		if _, err := c.Write(append(framed, reply...)); err != nil {
			return
		}
	}
}

// reply returns the reply to one message, of at most size bytes, or nil if there is none.
func (s *dnsServer) reply(message []byte, size int) (packed []byte) {
	defer s.recoverPanic()
	s.stats.questions.Add(1)
	ask := new(dns.Msg)
	// Do not answer a message that is not a question: two servers that answered each
	// other's errors would never stop.
	if len(message) < 12 || message[2]&0x80 != 0 {
		return nil
	}
	reply := new(dns.Msg)
	if err := ask.Unpack(message); err != nil {
		reply.SetRcodeFormatError(&dns.Msg{MsgHdr: dns.MsgHdr{Id: binary.BigEndian.Uint16(message)}})
	} else {
		var why string
		reply.SetReply(ask)
		reply.RecursionAvailable = true
		reply.Rcode, reply.Answer, why = s.answer(ask)
		if opt := ask.IsEdns0(); opt != nil {
			size = min(size, max(int(opt.UDPSize()), dns.MinMsgSize))
			explain(reply, why)
		} else if size == maxUDPReply {
			size = dns.MinMsgSize
		}
	}
	reply.Truncate(size)
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// explain adds the reason why a name was denied (RFC 8914). Resolvers such as
// systemd-resolved show it to their user.
func explain(reply *dns.Msg, why string) {
	opt := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	opt.SetUDPSize(maxUDPReply)
	if why != "" {
		opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeProhibited, ExtraText: why})
	}
	reply.Extra = append(reply.Extra, opt)
}

// answer decides about the only question of a message.
func (s *dnsServer) answer(ask *dns.Msg) (code int, answer []dns.RR, why string) {
	if ask.Opcode != dns.OpcodeQuery {
		return dns.RcodeNotImplemented, nil, ""
	}
	if len(ask.Question) != 1 || ask.Question[0].Qclass != dns.ClassINET {
		return dns.RcodeRefused, nil, ""
	}
	q := ask.Question[0]
	name, err := policy.Canonical(q.Name)
	if err != nil {
		return s.denied(q.Name, decision{Reason: err.Error()})
	}
	if addr, ok := s.hosts.addr(name); ok {
		if q.Qtype == dns.TypeA {
			answer = []dns.RR{addressRecord(q.Name, addr)}
		}
		return dns.RcodeSuccess, answer, ""
	}
	d := s.policy.decide(question{Name: name})
	if !d.Resolves() {
		return s.denied(name, d)
	}
	d.Allowed = true // to be resolved
	// Records of other types do not exist: there is no IPv6 inside, there are no keys for
	// an encrypted ClientHello, and no answer can reveal to anyone what the guest asked.
	if q.Qtype != dns.TypeA {
		return dns.RcodeSuccess, nil, ""
	}
	addr, ok := s.names.addr(name)
	if !ok {
		d.Allowed, d.Reason = false, "too many names are in use"
		s.reportDNS(name, addr, d)
		return dns.RcodeServerFailure, nil, d.Reason
	}
	s.reportDNS(name, addr, d)
	return dns.RcodeSuccess, []dns.RR{addressRecord(q.Name, addr)}, ""
}

func (s *dnsServer) denied(name string, d decision) (int, []dns.RR, string) {
	d.Allowed = false
	s.reportDNS(name, netip.Addr{}, d)
	return dns.RcodeNameError, nil, clean("agent-sessionizer: " + d.Reason)
}

func (s *dnsServer) reportDNS(name string, addr netip.Addr, d decision) {
	s.report(Record{
		Kind: KindDNS, Name: clean(name), Addr: addr, Port: dnsPort,
		Allowed: d.Allowed, Rule: d.Rule, Source: d.Source, Reason: d.Reason,
	})
}

// addressRecord spells the name exactly as the client did, because some clients compare the
// case.
func addressRecord(name string, addr netip.Addr) dns.RR {
	return &dns.A{
		Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: dnsTTL},
		A:   addr.AsSlice(),
	}
}
