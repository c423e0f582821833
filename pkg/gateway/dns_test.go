package gateway

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func ask(name string, kind uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), kind)
	return m
}

func TestDNSAnswers(t *testing.T) {
	asked := make(chan string, 100)
	w := newWorld(t, config{
		policy:  allow("example.org", "*.zone.example"),
		resolve: func(_ context.Context, name string) ([]netip.Addr, error) { asked <- name; return nil, nil },
	})
	for _, network := range []string{"udp", "tcp"} {
		for _, test := range []struct {
			name    string
			kind    uint16
			code    int
			answers int
		}{
			{"example.org", dns.TypeA, dns.RcodeSuccess, 1},
			{"EXAMPLE.oRg", dns.TypeA, dns.RcodeSuccess, 1},
			{"a.b.zone.example", dns.TypeA, dns.RcodeSuccess, 1},
			{"example.org", dns.TypeAAAA, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeHTTPS, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeSVCB, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeTXT, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeNULL, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeANY, dns.RcodeSuccess, 0},
			{"example.org", dns.TypeMX, dns.RcodeSuccess, 0},
			{"example.org", 65280, dns.RcodeSuccess, 0},
			{"zone.example", dns.TypeA, dns.RcodeNameError, 0},
			{"other.example", dns.TypeA, dns.RcodeNameError, 0},
			{"other.example", dns.TypeTXT, dns.RcodeNameError, 0},
			{"secret.data.other.example", dns.TypeNULL, dns.RcodeNameError, 0},
			{"example.org.other.example", dns.TypeA, dns.RcodeNameError, 0},
			{"1.2.3.4", dns.TypeA, dns.RcodeNameError, 0},
			{`exam\000ple.org`, dns.TypeA, dns.RcodeNameError, 0},
			{`\027[2Jexample.org`, dns.TypeA, dns.RcodeNameError, 0},
			{".", dns.TypeNS, dns.RcodeNameError, 0},
			{"host.lima.internal", dns.TypeA, dns.RcodeSuccess, 1},
			{"host.lima.internal", dns.TypeAAAA, dns.RcodeSuccess, 0},
		} {
			reply, err := w.guest.Ask(w.ctx(), network, ask(test.name, test.kind))
			if err != nil {
				t.Fatalf("%s %s: %v", network, test.name, err)
			}
			if reply.Rcode != test.code || len(reply.Answer) != test.answers {
				t.Errorf("%s %s %s: Rcode %s with %d answers, want %s with %d; %s", network, test.name, dns.TypeToString[test.kind], dns.RcodeToString[reply.Rcode], len(reply.Answer), dns.RcodeToString[test.code], test.answers, reply)
			}
			if reply.Question[0].Name != dns.Fqdn(test.name) {
				t.Errorf("question in the reply = %q, want %q", reply.Question[0].Name, dns.Fqdn(test.name))
			}
		}
	}
	if len(asked) > 0 {
		t.Errorf("the host was asked for %q; nothing of a question may leave", <-asked)
	}
	if r := w.wait("the question for other.example", func(r Record) bool { return r.Name == "other.example" }); r.Kind != KindDNS || r.Allowed || r.Reason == "" {
		t.Errorf("record of a denial = %+v, want Kind %s, not Allowed, a Reason", r, KindDNS)
	}
	if r := w.wait("the question for example.org", func(r Record) bool { return r.Name == "example.org" }); !r.Allowed || r.Rule != "example.org" || r.Source != "test:1" {
		t.Errorf("record of an allowed name = %+v, want Allowed, Rule example.org, Source test:1", r)
	}
	for _, r := range w.all(func(Record) bool { return true }) {
		if strings.ContainsAny(r.Name, "\x00\x1b") {
			t.Errorf("record = %+v, want a Name without control characters", r)
		}
	}
}

func TestDNSAddresses(t *testing.T) {
	w := newWorld(t, config{policy: allow("*.example.org", "example.org")})
	seen := map[netip.Addr]string{}
	for i := range 300 {
		name := fmt.Sprintf("n%d.example.org", i)
		addr, err := w.guest.Lookup(w.ctx(), name)
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[addr]; ok || !fakeRange.Contains(addr) {
			t.Fatalf("Lookup(%q) = %s, want an address in %s of its own; %q has this one", name, addr, fakeRange, other)
		}
		seen[addr] = name
	}
	for addr, name := range seen {
		again, err := w.guest.Lookup(w.ctx(), strings.ToUpper(name))
		if err != nil || again != addr {
			t.Fatalf("second Lookup(%q) = %s, %v, want %s", name, again, err, addr)
		}
	}
	if n := w.g.Stats().Names; n != 300 {
		t.Errorf("Stats().Names = %d, want 300", n)
	}
}

func TestDNSExplains(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	m := ask("other.example", dns.TypeA)
	m.SetEdns0(4096, true)
	reply, err := w.guest.Ask(w.ctx(), "udp", m)
	if err != nil {
		t.Fatal(err)
	}
	var why string
	for _, o := range reply.IsEdns0().Option {
		if e, ok := o.(*dns.EDNS0_EDE); ok {
			why = e.ExtraText
		}
	}
	if !strings.Contains(why, "not on the allowlist") {
		t.Errorf("extended error = %q, want %q in it; reply: %s", why, "not on the allowlist", reply)
	}
	plain, err := w.guest.Ask(w.ctx(), "udp", ask("other.example", dns.TypeA))
	if err != nil || plain.IsEdns0() != nil {
		t.Errorf("reply to a client without EDNS = %s, %v, want one without EDNS", plain, err)
	}
}

func TestDNSOddMessages(t *testing.T) {
	g := quietGateway(t, allow("example.org"))
	two := ask("example.org", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	chaos := ask("example.org", dns.TypeA)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	update := ask("example.org", dns.TypeA)
	update.Opcode = dns.OpcodeUpdate
	none := new(dns.Msg)
	for name, test := range map[string]struct {
		m    *dns.Msg
		code int
	}{
		"two questions": {two, dns.RcodeRefused},
		"no question":   {none, dns.RcodeRefused},
		"chaos class":   {chaos, dns.RcodeRefused},
		"update":        {update, dns.RcodeNotImplemented},
	} {
		b, err := test.m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(g.dns.reply(b, maxUDPReply)); err != nil || reply.Rcode != test.code || len(reply.Answer) > 0 {
			t.Errorf("%s: reply %s, %v, want Rcode %s and no answers", name, reply, err, dns.RcodeToString[test.code])
		}
	}
	answer := ask("example.org", dns.TypeA)
	answer.Response = true
	b, err := answer.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for name, m := range map[string][]byte{"a reply": b, "11 bytes": b[:11], "nothing": nil} {
		if got := g.dns.reply(m, maxUDPReply); got != nil {
			t.Errorf("%s: dns() = % x, want no reply", name, got)
		}
	}
	garbage := append(binary.BigEndian.AppendUint16(nil, 0xabcd), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0x0c)
	reply := new(dns.Msg)
	if err := reply.Unpack(g.dns.reply(garbage, maxUDPReply)); err != nil || reply.Rcode != dns.RcodeFormatError || reply.Id != 0xabcd {
		t.Errorf("garbage: reply %s, %v, want Rcode %s, Id %d", reply, err, dns.RcodeToString[dns.RcodeFormatError], 0xabcd)
	}
}

// quietGateway returns a gateway without a VM; tests call its parts directly.
func quietGateway(t testing.TB, p *policy.Policy) *Gateway {
	t.Helper()
	g, err := New(Options{Subnet: testSubnet, MAC: guestMAC, MTU: 1500, Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := g.Stats().Panics; n > 0 {
			t.Errorf("Stats().Panics = %d, want 0", n)
		}
		if err := g.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return g
}

// TestDNSSilentClients checks that many silent clients over TCP cannot block other clients
// for ever, nor keep the gateway from closing.
func TestDNSSilentClients(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	to := netip.AddrPortFrom(w.g.host, dnsPort)
	for range dnsClients / 2 {
		c, err := w.guest.Dial(w.ctx(), to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if _, err := w.guest.Ask(w.ctx(), "tcp", ask("example.org", dns.TypeA)); err != nil {
		t.Fatalf("Ask over TCP beside silent clients: %v", err)
	}
	// A length that exceeds any question ends the connection.
	c, err := w.guest.Dial(w.ctx(), to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	c.Write([]byte{0xff, 0xff, 0})
	if b, err := io.ReadAll(c); len(b) > 0 || err != nil && strings.Contains(err.Error(), "timeout") {
		t.Errorf("read after a length that is too long = %q, %v, want the end of the connection", b, err)
	}
}

func TestForeignResolversAreRefusedAtOnce(t *testing.T) {
	unreachable := make(chan netip.AddrPort, 100)
	w := newWorld(t, config{policy: allow("example.org"), tap: func(f []byte) {
		ip := header.IPv4(f[header.EthernetMinimumSize:])
		if header.Ethernet(f).Type() != header.IPv4ProtocolNumber || ip.TransportProtocol() != header.ICMPv4ProtocolNumber {
			return
		}
		icmp := header.ICMPv4(ip.Payload())
		if icmp.Type() == header.ICMPv4DstUnreachable && icmp.Code() == header.ICMPv4PortUnreachable {
			sent := header.IPv4(icmp.Payload())
			unreachable <- netip.AddrPortFrom(netip.AddrFrom4(sent.DestinationAddress().As4()), header.UDP(sent.Payload()).DestinationPort())
		}
	}})
	fake, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"8.8.8.8:53", "192.168.5.2:5353", "192.168.5.2:68", "10.0.0.1:53", fake.String() + ":443"} {
		c, err := w.guest.DialUDP(netip.MustParseAddrPort(to))
		if err != nil {
			t.Fatal(err)
		}
		c.Write([]byte("let me out"))
		select {
		case at := <-unreachable:
			if at.String() != to {
				t.Errorf("%s was reported as unreachable, want %s", at, to)
			}
		case <-time.After(patience):
			t.Errorf("%s: no answer within %v, want that it is unreachable", to, patience)
		}
		c.Close()
	}
	r := w.wait("UDP to port 443", func(r Record) bool { return r.Kind == KindUDP && r.Port == 443 })
	if r.Name != "example.org" || r.Allowed {
		t.Errorf("record of QUIC = %+v, want Name example.org, not Allowed", r)
	}
	// Connect to another resolver over TCP and TLS.
	for _, to := range []string{"8.8.8.8:53", "8.8.8.8:853", "1.1.1.1:443"} {
		if c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort(to)); err == nil {
			c.Close()
			t.Errorf("Dial(%s) succeeded, want an error", to)
		}
	}
}

func TestNamesAreReclaimed(t *testing.T) {
	now := time.Unix(1e9, 0)
	n := newNameTable(func() time.Time { return now })
	first, ok := n.addr("first.example")
	if !ok {
		t.Fatalf("addr(%q) has no address", "first.example")
	}
	busy, _ := n.addr("busy.example")
	_, release, ok := n.acquire(busy)
	if !ok {
		t.Fatalf("acquire(%s) does not know the address of busy.example", busy)
	}
	for i := n.len(); i < maxNames; i++ {
		if _, ok := n.addr(fmt.Sprintf("n%d.example", i)); !ok {
			t.Fatalf("addr has no address for name %d, want %d names", i, maxNames)
		}
	}
	now = now.Add(nameMemory - time.Second)
	if a, ok := n.addr("late.example"); ok {
		t.Errorf("addr(%q) = %s while all names are remembered, want none", "late.example", a)
	}
	if a, ok := n.addr("first.example"); !ok || a != first {
		t.Errorf("addr(%q) = %s, %t, want %s, true", "first.example", a, ok, first)
	}
	now = now.Add(2 * time.Second)
	for i := range 100 { // everything but first.example and busy.example may be evicted
		if _, ok := n.addr(fmt.Sprintf("late%d.example", i)); !ok {
			t.Fatalf("addr(late%d.example) has no address, want that of a name that was forgotten", i)
		}
	}
	if n.len() != maxNames {
		t.Errorf("len() = %d, want %d", n.len(), maxNames)
	}
	if name := n.name(busy); name != "busy.example" {
		t.Errorf("name(%s), the address of a live connection, = %q, want %q", busy, name, "busy.example")
	}
	if name := n.name(first); name != "first.example" {
		t.Errorf("name(%s), the address of a name in use, = %q, want %q", first, name, "first.example")
	}
	release()
	for addr, e := range n.byAddr {
		if e.addr != addr || n.byName[e.name] != e {
			t.Fatalf("byAddr[%s] has address %s and name %q, want the same entry as in byName", addr, e.addr, e.name)
		}
		if last := addr.As4()[3]; last == 0 || last == 255 || !fakeRange.Contains(addr) {
			t.Fatalf("assigned address %s, want one in %s that ends with neither 0 nor 255", addr, fakeRange)
		}
	}
}

// TestNamesAreStable checks that a name keeps its address after a restart of the gateway.
func TestNamesAreStable(t *testing.T) {
	a, _ := newNameTable(time.Now).addr("example.org")
	other := newNameTable(time.Now)
	other.addr("another.example")
	if b, _ := other.addr("example.org"); a != b {
		t.Errorf("addr(%q) of a second table = %s, want %s", "example.org", b, a)
	}
}
