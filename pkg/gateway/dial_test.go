package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/hostnet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// TestRebinding checks that an allowed name that resolves to a blocked address cannot be
// reached.
func TestRebinding(t *testing.T) {
	hello := clientHelloFor(t, "example.org")
	own := netip.MustParseAddr("203.0.113.200")
	w := newWorld(t, config{policy: allow("example.org"), host: []string{"203.0.113.200/32"}})
	addrs := []netip.Addr{own, netip.MustParseAddr("64:ff9b::203.0.113.200")}
	for _, p := range policy.Blocked() {
		addrs = append(addrs, p.Addr(), last(p))
		if p.Addr().Is4() {
			a := p.Addr().As4()
			mapped := netip.AddrFrom16(netip.AddrFrom4(a).As16())
			nat64 := netip.MustParseAddr("64:ff9b::").As16()
			copy(nat64[12:], a[:])
			addrs = append(addrs, mapped, netip.AddrFrom16(nat64))
		}
	}
	addrs = append(addrs, netip.MustParseAddr("192.168.5.2"), netip.MustParseAddr("192.168.5.15"), netip.MustParseAddr("fe80::1%lo"))
	fake, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		w.names["example.org"] = []netip.Addr{a}
		w.g.resolver.resolved = resolvedNames{}
		c := w.dial("example.org", 443)
		c.Write(hello)
		expectReset(t, c)
		if got := w.dials(); len(got) > 0 {
			t.Fatalf("example.org resolves to %s: dialled %s, want nothing", a, got)
		}
	}
	denials := w.all(func(r Record) bool { return r.Kind == KindTCP && !r.Allowed })
	if len(denials) != len(addrs) {
		t.Errorf("%d denials were recorded, want %d", len(denials), len(addrs))
	}
	// If an answer mixes blocked and allowed addresses, only the allowed one is used.
	w.names["example.org"] = append(addrs[:5:5], netip.MustParseAddr("203.0.113.1"))
	w.servers[netip.MustParseAddrPort("203.0.113.1:443")] = serveTCP(t, func(c net.Conn) { io.WriteString(c, "hi"); echo(c) })
	w.g.resolver.resolved = resolvedNames{}
	c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(fake, 443))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write(hello)
	expectRead(t, c, "hi")
	if got := fmt.Sprint(w.dials()); got != "[203.0.113.1:443]" {
		t.Errorf("dialled %s, want %s", got, "[203.0.113.1:443]")
	}
}

func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// TestConnectLooksAtTheAddress checks that the last check sees the address that the kernel
// is about to connect to.
func TestConnectLooksAtTheAddress(t *testing.T) {
	reached := make(chan struct{}, 1)
	at := netip.MustParseAddrPort(serveTCP(t, func(net.Conn) { reached <- struct{}{} }))
	no := errors.New("no")
	_, err := connect(t.Context(), at, func(got netip.AddrPort) error {
		if got != at {
			t.Errorf("allowed() was asked about %s, want %s", got, at)
		}
		return no
	})
	if !errors.Is(err, no) {
		t.Errorf("connect to a refused address: error %v, want %v", err, no)
	}
	c, err := connect(t.Context(), at, func(netip.AddrPort) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	<-reached
	if len(reached) > 0 {
		t.Errorf("%d more connections were made, want 0", len(reached))
	}
	// With the real last step, loopback is out of reach, whatever name is used.
	g := quietGateway(t, allow("example.org"))
	var denied *deniedError
	conn := &conn{g: g, name: "example.org", ctx: t.Context(), to: netip.AddrPortFrom(fakeAddr(9), 443)}
	if _, err := conn.dialAddr(netip.AddrPortFrom(at.Addr(), 443)); !errors.As(err, &denied) {
		t.Errorf("dialAddr of loopback: error %v, want a %T", err, denied)
	}
}

// TestLocalNetworksWithGlobalAddresses checks that a host network with global addresses
// counts as its LAN, as one with private addresses does: for allowed names, in mode open,
// and by address.
func TestLocalNetworksWithGlobalAddresses(t *testing.T) {
	var routes []hostnet.Route
	for to, hop := range map[string]string{
		"0.0.0.0/0": "router", "198.51.100.0/24": "eth0", "192.0.2.0/25": "another router",
		"::/0": "router6", "2001:db8:1::/64": "eth0", "2001:db8:2::/48": "another router6",
	} {
		routes = append(routes, hostnet.Route{To: prefix(to), Hop: hop})
	}
	near := []string{"198.51.100.9", "192.0.2.9", "2001:db8:1::9", "2001:db8:2:3::9", "64:ff9b::198.51.100.9", "203.0.113.254"}
	hello := clientHelloFor(t, "example.org")
	for _, mode := range []policy.Mode{policy.Allowlist, policy.Open} {
		t.Run(string(mode), func(t *testing.T) {
			p := allow("example.org")
			p.Mode = mode
			p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("198.51.100.9:8443")}
			p.Ports = append(p.Ports, 8443)
			w := newWorld(t, config{policy: p, host: []string{"203.0.113.250/28", "2001:db8:1::7/64"}, routes: routes})
			for _, a := range near {
				addr := netip.MustParseAddr(a)
				w.names["example.org"] = []netip.Addr{addr}
				w.g.resolver.resolved = resolvedNames{}
				if c, err := w.guest.DialName(w.ctx(), "example.org", 443); err == nil { // mode open refuses earlier
					c.Write(hello)
					expectReset(t, c)
				}
				if addr.Is4() {
					if c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(addr, 443)); err == nil {
						t.Errorf("mode %s: Dial(%s:443) succeeded, want an error", mode, a)
						c.Close()
					}
				}
			}
			if got := w.dials(); len(got) > 0 {
				t.Errorf("mode %s: dialled %s, want nothing", mode, got)
			}
			if got := w.waitDenied("local network 198.51.100.0/24"); got.Addr != netip.MustParseAddr(near[0]) {
				t.Errorf("mode %s: denial record = %+v, want address %s", mode, got, near[0])
			}
			// A service that the user opened there can be reached by address and by an allowed
			// name.
			service := p.HostServices[0]
			w.servers[service] = serveTCP(t, func(c net.Conn) { io.WriteString(c, "hi"); echo(c) })
			c, err := w.guest.Dial(w.ctx(), service)
			if err != nil {
				t.Fatal(err)
			}
			expectRead(t, c, "hi")
			c.Close()
			// Addresses next to these networks belong to the internet.
			w.internet("other.example.org", 443, w.servers[service])
			p = allow("other.example.org")
			p.Mode = mode
			w.g.SetPolicy(p)
			far := w.dial("other.example.org", 443)
			far.Write(clientHelloFor(t, "other.example.org"))
			expectRead(t, far, "hi")
		})
	}
}

// TestNetworksAreReadAgain checks that a host that joins another network has another LAN.
// The address is checked again when the kernel is about to connect.
func TestNetworksAreReadAgain(t *testing.T) {
	at := netip.MustParseAddrPort(serveTCP(t, echo))
	to := netip.MustParseAddrPort("203.0.113.9:443")
	g := quietGateway(t, allow("example.org"))
	var now atomic.Pointer[hostnet.Networks]
	now.Store(hostnet.New(nil, nil))
	g.networks.read = func() (*hostnet.Networks, error) { return now.Load(), nil }
	g.connect = func(_ context.Context, _ netip.AddrPort, allowed func(netip.AddrPort) error) (net.Conn, error) {
		now.Store(hostnet.New(prefixes("203.0.113.1/24"), nil)) // after the first check
		g.networks.until = time.Time{}
		if err := allowed(to); err != nil {
			return nil, err
		}
		return net.Dial("tcp", at.String())
	}
	g.resolver.resolve = func(context.Context, string) ([]netip.Addr, error) { return []netip.Addr{to.Addr()}, nil }
	c := &conn{g: g, name: "example.org", ctx: t.Context(), to: netip.AddrPortFrom(fakeAddr(9), 443)}
	var denied *deniedError
	if _, _, _, err := c.dial(); !errors.As(err, &denied) || !strings.Contains(denied.Reason, "local network") {
		t.Errorf("dial: error %v, want a %T with %q", err, denied, "local network")
	}
	if wait := time.Until(g.networks.until); wait <= 0 || wait > time.Second {
		t.Errorf("the host's networks are believed for %s, want at most %s", wait, time.Second)
	}
}

func TestHostNetworksUnknown(t *testing.T) {
	g := quietGateway(t, allow("example.org"))
	g.networks.read = func() (*hostnet.Networks, error) { return nil, errors.New("no netlink") }
	if reason := g.networks.find(netip.MustParseAddr("203.0.113.1")); !strings.Contains(reason, "no netlink") {
		t.Errorf("findOnHost without the host's networks = %q, want %q in it", reason, "no netlink")
	}
}

// TestDialTriesAllAddresses checks that dead addresses and address families that do not
// work only delay the connection.
func TestDialTriesAllAddresses(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777", "six.example:7777")})
	at := serveTCP(t, echo)
	for i := range 6 { // these never answer
		dead := netip.AddrFrom4([4]byte{203, 0, 113, byte(100 + i)})
		w.names["example.org"] = append(w.names["example.org"], dead)
		if i%2 == 0 {
			w.servers[netip.AddrPortFrom(dead, 7777)] = ""
		}
	}
	six := netip.MustParseAddr("2001:db8::1")
	w.names["example.org"] = append(w.names["example.org"], six)
	w.names["six.example"] = []netip.Addr{six}
	w.servers[netip.AddrPortFrom(six, 7777)] = at
	for _, name := range []string{"example.org", "six.example"} {
		c := w.dial(name, 7777)
		io.WriteString(c, "hi\n")
		expectRead(t, c, "hi\n")
		r := w.wait("the connection to "+name, func(r Record) bool { return r.Name == name && r.Kind == KindTCP })
		if r.Addr != six {
			t.Errorf("%s: record = %+v, want address %s", name, r, six)
		}
	}
}

func TestUsable(t *testing.T) {
	var many []netip.Addr
	for i := range 40 {
		many = append(many, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}))
	}
	if n := len(usable(many)); n != maxAddresses {
		t.Errorf("usable of %d addresses returned %d, want %d", len(many), n, maxAddresses)
	}
	var in []netip.Addr
	for _, s := range []string{"203.0.113.1", "203.0.113.2", "::ffff:203.0.113.1", "2001:db8::1", "203.0.113.3"} {
		in = append(in, netip.MustParseAddr(s))
	}
	if got, want := fmt.Sprint(usable(append(in, netip.Addr{}))), "[203.0.113.1 2001:db8::1 203.0.113.2 203.0.113.3]"; got != want {
		t.Errorf("usable(%v) = %s, want %s", in, got, want)
	}
	if got := usable(nil); len(got) != 0 {
		t.Errorf("usable(nil) = %v, want none", got)
	}
}

// TestLookupsAreShared checks that concurrent lookups of a name ask the host once, and that
// the answer is reused for a while.
func TestLookupsAreShared(t *testing.T) {
	asked := make(chan string, 100)
	release := make(chan struct{})
	w := newWorld(t, config{policy: allow("example.org:7777"), resolve: func(_ context.Context, name string) ([]netip.Addr, error) {
		asked <- name
		<-release
		return []netip.Addr{netip.MustParseAddr("203.0.113.1")}, nil
	}})
	w.servers[netip.MustParseAddrPort("203.0.113.1:7777")] = serveTCP(t, echo)
	addr, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 20)
	for range cap(done) {
		go func() {
			c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(addr, 7777))
			if err == nil {
				c.Close()
			}
			done <- err
		}()
	}
	<-asked
	close(release)
	for range cap(done) {
		if err := <-done; err != nil {
			t.Errorf("Dial(%s:7777) beside others: %v", addr, err)
		}
	}
	if n := len(asked); n > 0 {
		t.Errorf("the host was asked %d more times, want 0", n)
	}
}

// proxy starts a simulated proxy of the host.
func proxy(t *testing.T, ports string, to func(string) string) (string, chan string) {
	asked := make(chan string, 100)
	at := serveTCP(t, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		asked <- r.Method + " " + r.RequestURI + " " + r.Header.Get("Proxy-Authorization") + r.Header.Get("X-Forwarded-For")
		_, port, _ := net.SplitHostPort(r.Host)
		if r.Method != http.MethodConnect {
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nby proxy!")
			return
		}
		up, err := net.Dial("tcp", to(r.RequestURI))
		if err != nil || !strings.Contains(ports, port) {
			fmt.Fprint(c, "HTTP/1.1 403 Forbidden\r\n\r\n")
			return
		}
		defer up.Close()
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { io.Copy(up, c); up.(*net.TCPConn).CloseWrite() }()
		io.Copy(c, up)
	})
	return at, asked
}

func TestProxyOfTheHost(t *testing.T) {
	hello := clientHelloFor(t, "example.org")
	hi := serveTCP(t, func(c net.Conn) { io.WriteString(c, "hi"); echo(c) })
	at, asked := proxy(t, "443 7777", func(string) string { return hi })
	via := &url.URL{Scheme: "http", Host: at, User: url.UserPassword("me", "secret")}
	w := newWorld(t, config{
		policy: allow("example.org", "example.org:7777", "direct.example"),
		proxy: func(u *url.URL) (*url.URL, error) {
			if u.Hostname() == "direct.example" {
				return nil, nil
			}
			return via, nil
		},
	})
	w.server("example.org", 22, func(c net.Conn) { io.WriteString(c, "SSH-2.0-direct\r\n"); echo(c) })
	w.server("direct.example", 443, func(c net.Conn) { io.WriteString(c, "direct"); echo(c) })
	c := w.dial("example.org", 443)
	c.Write(hello)
	expectRead(t, c, "hi"+string(hello))
	if got, want := <-asked, "CONNECT example.org:443 Basic bWU6c2VjcmV0"; got != want {
		t.Errorf("the proxy was asked for %q, want %q", got, want)
	}
	c = w.dial("example.org", 7777)
	expectRead(t, c, "hi")
	if got, want := <-asked, "CONNECT example.org:7777 "; !strings.HasPrefix(got, want) {
		t.Errorf("the proxy was asked for %q, want prefix %q", got, want)
	}
	status, body, err := w.get(w.client(), "http://example.org/x")
	if err != nil || status != 200 || body != "by proxy!" {
		t.Errorf("GET http://example.org/x = %d %q, %v, want 200 %q", status, body, err, "by proxy!")
	}
	if got, want := <-asked, "GET http://example.org/x Basic bWU6c2VjcmV0"; got != want {
		t.Errorf("the proxy was asked for %q, want %q", got, want)
	}
	if status, _, err := w.get(w.client(), "http://other.example/x"); err == nil {
		t.Errorf("GET of a denied name through the proxy = %d, want an error", status)
	}
	if len(w.dials()) > 0 {
		t.Errorf("dialled %v, want nothing", w.dials())
	}
	// The proxy does not allow SSH, so SSH bypasses it.
	expectRead(t, w.dial("example.org", 22), "SSH-2.0-direct\r\n")
	c = w.dial("direct.example", 443)
	c.Write(clientHelloFor(t, "direct.example"))
	expectRead(t, c, "direct")
	// The gateway still checks connections that go through the proxy.
	c = w.dial("example.org", 443)
	c.Write(clientHelloFor(t, "other.example"))
	expectReset(t, c)
	// If the proxy is down, the connection fails and does not bypass it.
	via.Host = "127.0.0.1:1"
	c = w.dial("example.org", 443)
	c.Write(hello)
	expectReset(t, c)
}
