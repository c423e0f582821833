//go:build bench

package bench

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/bench/load"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	serverAddr   = "203.0.113.10"
	resolverAddr = "203.0.113.53"
)

// world is the network namespace of the servers.
var world *realvm.Namespace

// newWorld starts the servers behind a cable.
func newWorld() error {
	far, err := realvm.NewNamespace()
	if err != nil {
		return err
	}
	world = far
	if err := realvm.Resolver(resolverAddr); err != nil {
		return err
	}
	if err := realvm.IP(
		"link add name uplink type veth peer name downlink netns "+strconv.Itoa(far.TID),
		"addr add 198.51.100.2/24 dev uplink", "link set uplink up",
	); err != nil {
		return err
	}
	var files net.Listener
	var questions net.PacketConn
	if err := far.Do(func() error {
		err := realvm.IP(
			"link set lo up", "addr add 198.51.100.1/24 dev downlink", "link set downlink up",
			"addr add "+serverAddr+"/32 dev lo", "addr add "+resolverAddr+"/32 dev lo",
		)
		if err == nil {
			files, err = net.Listen("tcp", net.JoinHostPort(serverAddr, strconv.Itoa(load.Port)))
		}
		if err == nil {
			questions, err = net.ListenPacket("udp", resolverAddr+":53")
		}
		return err
	}); err != nil {
		return err
	}
	if err := realvm.IP("route add default via 198.51.100.1"); err != nil {
		return err
	}
	go load.Serve(files)
	go serveDNS(questions)
	return nil
}

// serveDNS resolves all names of the zone, and no others.
func serveDNS(c net.PacketConn) {
	addr := netip.MustParseAddr(serverAddr).AsSlice()
	s := &dns.Server{PacketConn: c, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(q)
		switch name := q.Question[0].Name; {
		case !strings.HasSuffix(strings.ToLower(name), "."+load.Zone):
			m.Rcode = dns.RcodeNameError
		case q.Question[0].Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: addr}}
		}
		_ = w.WriteMsg(m) // a client without an answer asks again, and counts it as lost
	})}
	_ = s.ActivateAndServe() // until the process ends
}
