package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func TestSSH(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	w.server("example.org", 22, func(c net.Conn) {
		io.WriteString(c, "SSH-2.0-server\r\n")
		echo(c)
	})
	c := w.dial("example.org", 22)
	expectRead(t, c, "SSH-2.0-server\r\n") // the server speaks first
	for _, b := range []byte("SSH-2.0-client\r\n") {
		c.Write([]byte{b})
	}
	expectRead(t, c, "SSH-2.0-client\r\n")
	for _, said := range []string{"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "SSH-1.99-old\r\n", "SSH-2.0", "\x16\x03\x01\x00"} {
		c := w.dial("example.org", 22)
		io.WriteString(c, said)
		if said == "SSH-2.0" {
			c.(interface{ CloseWrite() error }).CloseWrite()
		}
		// The server's greeting may arrive before the reset; an echo must not.
		b, err := io.ReadAll(c)
		if echoed := bytes.TrimPrefix(b, []byte("SSH-2.0-server\r\n")); err == nil || strings.Contains(err.Error(), "timeout") || bytes.Contains(echoed, []byte(said)) {
			t.Errorf("after %q: read %q, %v, want a reset", said, b, err)
		}
	}
	w.waitDenied("does not speak SSH")
}

func TestHalfClose(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, func(c net.Conn) {
		b, _ := io.ReadAll(c) // until the client has finished sending
		c.Write(bytes.ToUpper(b))
	})
	c := w.dial("example.org", 7777)
	io.WriteString(c, "everything\n")
	c.(interface{ CloseWrite() error }).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "EVERYTHING\n" {
		t.Errorf("read after the guest's half-close = %q, %v, want %q", b, err, "EVERYTHING\n")
	}
	end := w.wait("the end of a connection", func(r Record) bool { return r.End })
	if end.BytesOut != 11 || end.BytesIn != 11 || end.Elapsed <= 0 || end.Reason != "" || end.Proto != "raw" {
		t.Errorf("end record = %+v, want BytesOut 11, BytesIn 11, Elapsed > 0, no Reason, Proto raw", end)
	}
	// The opposite case: the server ends first and still reads.
	heard := make(chan string, 1)
	w.server("example.org", 7777, func(c net.Conn) {
		io.WriteString(c, "bye\n")
		c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		heard <- string(b)
	})
	c = w.dial("example.org", 7777)
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye\n" {
		t.Errorf("read before the server's half-close = %q, %v, want %q", b, err, "bye\n")
	}
	io.WriteString(c, "good bye\n")
	c.(interface{ CloseWrite() error }).CloseWrite()
	if got := <-heard; got != "good bye\n" {
		t.Errorf("the server read %q after its half-close, want %q", got, "good bye\n")
	}
}

func TestServerSpeaksFirst(t *testing.T) {
	w := newWorld(t, config{policy: allow("mail.example:25", "h2.example:25")})
	w.server("mail.example", 25, func(c net.Conn) {
		io.WriteString(c, "220 ready\r\n")
		echo(c)
	})
	c := w.dial("mail.example", 25)
	expectRead(t, c, "220 ready\r\n")
	io.WriteString(c, "no newline")
	expectRead(t, c, "no newline")
	// A server of HTTP/2 does not count as one that speaks first. It sends only after the
	// guest has its connection, because a reset may overtake the end of a handshake.
	dialled := make(chan struct{})
	w.server("h2.example", 25, func(c net.Conn) {
		<-dialled
		c.Write([]byte{0, 0, 0, 4, 0, 0, 0, 0, 0})
		echo(c)
	})
	h2 := w.dial("h2.example", 25)
	close(dialled)
	expectReset(t, h2)
	w.waitDenied("HTTP/2 without TLS")
}

func TestResetsPass(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, func(c net.Conn) {
		c.Read(make([]byte, 2))
		c.(*net.TCPConn).SetLinger(0)
	})
	c := w.dial("example.org", 7777)
	io.WriteString(c, "x\n")
	expectReset(t, c)
	// The opposite direction, from the guest to the server: the server's process ends with
	// unread data.
	seen := make(chan error, 1)
	w.server("example.org", 7777, func(c net.Conn) {
		io.WriteString(c, "unread")
		_, err := io.ReadAll(c)
		seen <- err
	})
	c = w.dial("example.org", 7777)
	c.Read(make([]byte, 1))
	c.Close()
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server's read ended with %v, want %v", err, syscall.ECONNRESET)
	}
	// A port without a listener is refused at once.
	w.internet("example.org", 7777, "127.0.0.1:1")
	if c, err := w.guest.DialName(w.ctx(), "example.org", 7777); err == nil {
		c.Close()
		t.Error("Dial of a port without a listener succeeded, want an error")
	}
}

func TestDenials(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org", "ports.example:7777")})
	w.server("example.org", 443, echo)
	w.names["example.org"] = append(w.names["example.org"], netip.MustParseAddr("10.0.0.1"))
	addr, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	ports, err := w.guest.Lookup(w.ctx(), "ports.example")
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{
		addr.String() + ":8443", ports.String() + ":443", // another port
		"203.0.113.1:443", "8.8.8.8:443", // a real address, even the right one
		"198.18.255.254:443", "198.19.0.1:443", // an address that stands for no name
		"192.168.5.2:22", "192.168.5.2:443", "192.168.5.2:67", // the gateway
		"192.168.1.1:80", "10.0.0.1:443", "172.16.0.1:443", "169.254.169.254:80", "100.64.0.1:443",
	} {
		if c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort(to)); err == nil {
			c.Close()
			t.Errorf("Dial(%s) succeeded, want a refusal", to)
		} else if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Dial(%s) had no answer, want a refusal", to)
		}
	}
	if len(w.dials()) > 0 {
		t.Errorf("dialled %v, want nothing", w.dials())
	}
	if got := len(w.all(func(r Record) bool { return r.Kind == KindTCP && !r.Allowed && r.Reason != "" })); got != 14 {
		t.Errorf("%d denials were recorded, want 14", got)
	}
}

func TestNoPolicyDeniesEverything(t *testing.T) {
	for name, p := range map[string]*policy.Policy{"none": nil, "isolated": {Version: policy.Version, Mode: policy.Isolated, Ports: []uint16{443}}, "zero": {}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, config{policy: p})
			if a, err := w.guest.Lookup(w.ctx(), "example.org"); err == nil {
				t.Errorf("Lookup(%q) = %s, want an error", "example.org", a)
			}
			if c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort("8.8.8.8:443")); err == nil {
				c.Close()
				t.Errorf("Dial(%s) succeeded, want an error", "8.8.8.8:443")
			}
		})
	}
}

// TestSetPolicyIsLive checks that a new policy cuts the connections that it does not allow,
// and no others.
func TestSetPolicyIsLive(t *testing.T) {
	w := newWorld(t, config{policy: allow("stays.example:7777", "goes.example:7777", "*.wild.example:7777")})
	for _, name := range []string{"stays.example", "goes.example", "a.wild.example"} {
		w.server(name, 7777, echo)
	}
	stays, goes, wild := w.dial("stays.example", 7777), w.dial("goes.example", 7777), w.dial("a.wild.example", 7777)
	for _, c := range []net.Conn{stays, goes, wild} {
		io.WriteString(c, "hello\n")
		expectRead(t, c, "hello\n")
	}
	w.g.SetPolicy(allow("stays.example:7777", "a.wild.example:7777", "new.example:7777"))
	expectReset(t, goes)
	for range 10 {
		for _, c := range []net.Conn{stays, wild} {
			io.WriteString(c, "still here\n")
			expectRead(t, c, "still here\n")
		}
	}
	end := w.wait("the end of the connection to goes.example", func(r Record) bool { return r.End && r.Name == "goes.example" })
	if !strings.Contains(end.Reason, "policy changed") {
		t.Errorf("end record = %+v, want a Reason with %q", end, "policy changed")
	}
	// A newly allowed name works at once; the address of a removed name does not.
	w.server("new.example", 7777, echo)
	c := w.dial("new.example", 7777)
	io.WriteString(c, "new\n")
	expectRead(t, c, "new\n")
	if _, err := w.guest.DialName(w.ctx(), "goes.example", 7777); err == nil {
		t.Errorf("Dial of %s after the policy changed succeeded, want an error", "goes.example")
	}
	w.g.SetPolicy(nil)
	for _, c := range []net.Conn{stays, wild, c} {
		expectReset(t, c)
	}
}

// TestSetPolicyWhileConnecting checks that a policy that changes while a connection is
// being established is consulted, too.
func TestSetPolicyWhileConnecting(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	w := newWorld(t, config{policy: allow("example.org:7777"), resolve: func(ctx context.Context, _ string) ([]netip.Addr, error) {
		close(asked)
		select {
		case <-answer:
		case <-ctx.Done():
		}
		return []netip.Addr{netip.MustParseAddr("203.0.113.1")}, nil
	}})
	w.servers[netip.MustParseAddrPort("203.0.113.1:7777")] = serveTCP(t, echo)
	addr, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	result := make(chan error, 1)
	go func() {
		c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(addr, 7777))
		if err == nil {
			c.Close()
		}
		result <- err
	}()
	<-asked
	w.g.SetPolicy(allow())
	close(answer)
	if err := <-result; err == nil {
		t.Error("Dial under a policy that no longer exists succeeded, want an error")
	}
}

func TestModeOpen(t *testing.T) {
	p := policy.Default()
	p.Mode = policy.Open
	w := newWorld(t, config{policy: p})
	w.server("example.org", 443, echo)
	w.server("example.org", 80, echo)
	w.names["lan.example"] = []netip.Addr{netip.MustParseAddr("192.168.1.1")}
	var open []net.Conn
	for _, port := range []uint16{443, 80} {
		c := w.dial("example.org", port)
		io.WriteString(c, "neither TLS nor HTTP\n")
		expectRead(t, c, "neither TLS nor HTTP\n")
		open = append(open, c)
	}
	// An address without a name works too, but not one on the host's network.
	c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort("203.0.113.1:443"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	io.WriteString(c, "hi\n")
	expectRead(t, c, "hi\n")
	for _, to := range []string{"192.168.1.1:443", "10.0.0.1:80", "169.254.169.254:80", "192.168.5.2:443", "198.18.9.9:443", "203.0.113.1:25"} {
		if c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort(to)); err == nil {
			c.Close()
			t.Errorf("Dial(%s) in mode open succeeded, want an error", to)
		}
	}
	if c, err := w.guest.DialName(w.ctx(), "lan.example", 443); err == nil {
		c.Close()
		t.Errorf("Dial of %s, which resolves to the host's network, succeeded, want an error", "lan.example")
	}
	// Connections that were not inspected end with the mode.
	w.g.SetPolicy(allow("example.org"))
	for _, c := range append(open, c) {
		expectReset(t, c)
	}
}

func TestHostServices(t *testing.T) {
	local := serveTCP(t, echo)
	at := netip.MustParseAddrPort(local)
	p := allow()
	p.HostServices = []netip.AddrPort{at, netip.MustParseAddrPort("192.168.1.9:5432"), netip.MustParseAddrPort("192.168.1.10:5432")}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	// The host's own address may be opted in as well.
	w := newWorld(t, config{policy: p, host: []string{"192.168.1.9/24"}})
	w.servers[at] = local
	w.servers[netip.MustParseAddrPort("192.168.1.9:5432")] = local
	for _, to := range []string{fmt.Sprintf("192.168.5.2:%d", at.Port()), "192.168.1.9:5432"} {
		c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort(to))
		if err != nil {
			t.Fatalf("Dial(%s) of a host service: %v", to, err)
		}
		c.SetDeadline(time.Now().Add(patience))
		io.WriteString(c, "hi")
		expectRead(t, c, "hi")
		c.Close()
	}
	r := w.wait("the allowed host service", func(r Record) bool { return r.Allowed && r.Addr == at.Addr() })
	if !strings.Contains(r.Rule, "host service") {
		t.Errorf("record = %+v, want a Rule with %q", r, "host service")
	}
	for _, to := range []string{"192.168.5.2:5432", "192.168.1.9:22", "192.168.1.11:5432"} {
		if c, err := w.guest.Dial(w.ctx(), netip.MustParseAddrPort(to)); err == nil {
			c.Close()
			t.Errorf("Dial(%s), which is not a host service, succeeded, want an error", to)
		}
	}
}

// TestSequentialConnections checks that thousands of connections in sequence all succeed.
func TestSequentialConnections(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, func(c net.Conn) { io.WriteString(c, "ok") })
	addr, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	n := 5000
	if testing.Short() || raceEnabled {
		n = 500
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*patience)
	defer cancel()
	for i := range n {
		c, err := w.guest.Dial(ctx, netip.AddrPortFrom(addr, 7777))
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		c.SetDeadline(time.Now().Add(patience))
		if b, err := io.ReadAll(c); err != nil || string(b) != "ok" {
			t.Fatalf("connection %d: read %q, %v, want %q", i, b, err, "ok")
		}
		c.Close()
	}
	if s := w.g.Stats(); s.Allowed < uint64(n) || s.Denied > 0 {
		t.Errorf("Stats(): Allowed %d, Denied %d, want at least %d, 0", s.Allowed, s.Denied, n)
	}
}

// TestManyNames connects to many names at once and checks that each connection reaches its
// own server.
func TestManyNames(t *testing.T) {
	const names = 24
	rounds := 1000
	if testing.Short() || raceEnabled {
		rounds = 5
	}
	w := newWorld(t, config{policy: allow("*.example.org")})
	for i := range names {
		name := fmt.Sprintf("n%d.example.org", i)
		w.web(name, 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, name+" "+r.Host) }))
	}
	var wg sync.WaitGroup
	var failed atomic.Int64
	for i := range names {
		name := fmt.Sprintf("n%d.example.org", i)
		client := w.client()
		client.Transport.(*http.Transport).DisableKeepAlives = true
		wg.Go(func() {
			for range rounds {
				status, body, err := w.get(client, "http://"+name+"/")
				if err != nil || status != 200 || body != name+" "+name {
					t.Errorf("GET http://%s/ = %d %q, %v, want 200 %q; denied: %+v", name, status, body, err, name+" "+name, w.all(func(r Record) bool { return !r.Allowed }))
					failed.Add(1)
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestIdleConnections checks that hundreds of idle connections cost little memory and all
// still work.
func TestIdleConnections(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, echo)
	var all []net.Conn
	for range 300 {
		c := w.dial("example.org", 7777)
		io.WriteString(c, "1\n")
		expectRead(t, c, "1\n")
		all = append(all, c)
	}
	if n := w.g.Stats().Open; n != len(all) {
		t.Errorf("Stats().Open = %d, want %d", n, len(all))
	}
	for _, c := range all {
		io.WriteString(c, "2\n")
	}
	for _, c := range all {
		expectRead(t, c, "2\n")
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, echo)
	for i := range maxConnections {
		if !w.g.conns.add(&conn{}) {
			t.Fatalf("add of connection %d was refused, want %d connections", i, maxConnections)
		}
	}
	if _, err := w.guest.DialName(w.ctx(), "example.org", 7777); err == nil {
		t.Error("Dial beyond the limit of connections succeeded, want an error")
	}
	w.waitDenied("too many connections")
	w.g.conns.mu.Lock()
	w.g.conns.m = nil
	w.g.conns.mu.Unlock()
	var heap atomic.Uint64
	heap.Store(maxHeap + 1)
	w.g.heap = heap.Load
	if _, err := w.guest.DialName(w.ctx(), "example.org", 7777); err == nil {
		t.Error("Dial while the memory is full succeeded, want an error")
	}
	w.waitDenied("memory is full")
	heap.Store(heapLive())
	c := w.dial("example.org", 7777)
	io.WriteString(c, "hi\n")
	expectRead(t, c, "hi\n")
}
