package gateway

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/gatewaytest"
)

// benchWorld starts a gateway and a guest without any observers.
func benchWorld(b *testing.B, mtu int, serve func(net.Conn)) (*gatewaytest.Guest, netip.AddrPort) {
	b.Helper()
	g, err := New(Options{
		Subnet: testSubnet, MAC: guestMAC, MTU: mtu, Policy: allow("example.org:7777"),
		Resolve: (&world{names: map[string][]netip.Addr{"example.org": {netip.MustParseAddr("203.0.113.1")}}}).resolve,
	})
	if err != nil {
		b.Fatal(err)
	}
	w := &world{servers: map[netip.AddrPort]string{netip.MustParseAddrPort("203.0.113.1:7777"): serveTCP(b, serve)}}
	g.connect = w.connect
	l, err := net.Listen("unix", b.TempDir()+"/s")
	if err != nil {
		b.Fatal(err)
	}
	go g.ServeStream(l)
	c, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	mac, err := net.ParseMAC(guestMAC)
	if err != nil {
		b.Fatal(err)
	}
	guest, err := gatewaytest.New(c, true, gatewaytest.Options{Addr: g.guest, Gateway: g.host, Bits: 24, MAC: mac, MTU: mtu})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { guest.Close(); g.Close() })
	addr, err := guest.Lookup(b.Context(), "example.org")
	if err != nil {
		b.Fatal(err)
	}
	return guest, netip.AddrPortFrom(addr, 7777)
}

const chunk = 1 << 20

func BenchmarkUp(b *testing.B) {
	for _, mtu := range []int{1500, 65520} {
		b.Run(fmt.Sprint(mtu), func(b *testing.B) {
			done := make(chan struct{})
			guest, to := benchWorld(b, mtu, func(c net.Conn) {
				io.Copy(io.Discard, c)
				close(done)
			})
			c, err := guest.Dial(b.Context(), to)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			data := make([]byte, chunk)
			b.SetBytes(chunk)
			for b.Loop() {
				if _, err := c.Write(data); err != nil {
					b.Fatal(err)
				}
			}
			c.CloseWrite()
			<-done
		})
	}
}

func BenchmarkDown(b *testing.B) {
	for _, mtu := range []int{1500, 65520} {
		b.Run(fmt.Sprint(mtu), func(b *testing.B) {
			guest, to := benchWorld(b, mtu, func(c net.Conn) {
				data := make([]byte, chunk)
				c.Read(data)
				for {
					if _, err := c.Write(data); err != nil {
						return
					}
				}
			})
			c, err := guest.Dial(b.Context(), to)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			data := make([]byte, chunk)
			if _, err := io.WriteString(c, "go\n"); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(chunk)
			for b.Loop() {
				if _, err := io.ReadFull(c, data); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkConnections(b *testing.B) {
	guest, to := benchWorld(b, 1500, func(c net.Conn) { io.WriteString(c, "ok") })
	for b.Loop() {
		c, err := guest.Dial(b.Context(), to)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadAll(c); err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

func BenchmarkDNS(b *testing.B) {
	guest, _ := benchWorld(b, 1500, echo)
	for b.Loop() {
		if _, err := guest.Ask(b.Context(), "udp", ask("example.org", dns.TypeA)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDNSAnswer(b *testing.B) {
	g := quietGateway(b, allow("example.org"))
	m, err := ask("example.org", dns.TypeA).Pack()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		g.dns.reply(m, maxUDPReply)
	}
}
