package gateway

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// FuzzFrame checks that frames that pass the filter are complete, come from the only
// guest, and have a single receiver.
func FuzzFrame(f *testing.F) {
	for _, seed := range frames() {
		f.Add(seed.frame)
	}
	g := quietGateway(f, allow("example.org"))
	f.Fuzz(func(t *testing.T, frame []byte) {
		why := g.nic.filter.check(frame)
		g.nic.input(frame)
		if n := g.stats.panics.Load(); n > 0 {
			t.Fatalf("input(% x): %d panics", frame, n)
		}
		if why != accepted {
			return
		}
		if !bytes.Equal(frame[6:12], g.mac) {
			t.Errorf("accepted a frame from MAC %s, want %s", net.HardwareAddr(frame[6:12]), g.mac)
		}
		if header.Ethernet(frame).Type() != header.IPv4ProtocolNumber {
			return
		}
		ip := header.IPv4(frame[header.EthernetMinimumSize:])
		if ip.More() || ip.FragmentOffset() != 0 || len(ip.Options()) > 0 || header.IsV4MulticastAddress(ip.DestinationAddress()) {
			t.Errorf("accepted % x, want neither fragments, options nor multicast", frame)
		}
		if from := ip.SourceAddress(); from != g.nic.filter.guest && header.UDP(ip.Payload()).DestinationPort() != 67 {
			t.Errorf("accepted a frame from %s, want %s", from, g.nic.filter.guest)
		}
	})
}

func FuzzDHCP(f *testing.F) {
	for _, kind := range []dhcpv4.MessageType{dhcpv4.MessageTypeDiscover, dhcpv4.MessageTypeRequest, dhcpv4.MessageTypeInform} {
		f.Add(dhcpPacket(f, kind))
	}
	g := quietGateway(f, nil)
	f.Fuzz(func(t *testing.T, packet []byte) {
		reply := g.dhcp(packet)
		if n := g.stats.panics.Load(); n > 0 {
			t.Fatalf("dhcp(% x): %d panics", packet, n)
		}
		if reply == nil {
			return
		}
		m, err := dhcpv4.FromBytes(reply)
		if err != nil || len(reply) > 1400 {
			t.Fatalf("dhcp() = %d bytes, %v, want a valid message of at most 1400", len(reply), err)
		}
		if !bytes.Equal(m.ClientHWAddr, g.mac) {
			t.Errorf("dhcp() replies to card %s, want %s", m.ClientHWAddr, g.mac)
		}
		if a := m.YourIPAddr.String(); a != "192.168.5.15" && a != "0.0.0.0" {
			t.Errorf("dhcp() assigns %s, want 192.168.5.15 or 0.0.0.0", a)
		}
	})
}

func FuzzDNS(f *testing.F) {
	for _, kind := range []uint16{dns.TypeA, dns.TypeHTTPS, dns.TypeNULL} {
		for _, name := range []string{"example.org", "other.example", "a.zone.example"} {
			m := ask(name, kind)
			m.SetEdns0(1232, true)
			b, err := m.Pack()
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	p := allow("example.org", "*.zone.example")
	g := quietGateway(f, p)
	f.Fuzz(func(t *testing.T, message []byte) {
		reply := g.dns.reply(message, maxUDPReply)
		if n := g.stats.panics.Load(); n > 0 {
			t.Fatalf("dns(% x): %d panics", message, n)
		}
		if reply == nil {
			return
		}
		var m dns.Msg
		if err := m.Unpack(reply); err != nil || len(reply) > maxUDPReply || !m.Response {
			t.Fatalf("dns(% x) = %d bytes, %v, response: %t, want a valid response of at most %d", message, len(reply), err, m.Response, maxUDPReply)
		}
		for _, rr := range m.Answer {
			a, ok := rr.(*dns.A)
			name, err := policy.Canonical(rr.Header().Name)
			if !ok || err != nil || name != "host.lima.internal" && !p.Decide(policy.Question{Name: name}).Allowed {
				t.Errorf("answer %s, want only A records of allowed names", rr)
			} else if !strings.HasPrefix(a.A.String(), "198.1") && a.A.String() != "192.168.5.2" {
				t.Errorf("answer %s, want a fake address or the gateway's", rr)
			}
		}
	})
}

// scriptedConn is a connection whose whole input is given in advance.
type scriptedConn struct {
	net.Conn
	io.Reader
}

func (s scriptedConn) Read(b []byte) (int, error) { return s.Reader.Read(b) }
func (s scriptedConn) Write(b []byte) (int, error) {
	return 0, errors.New("an answer to a ClientHello")
}
func (s scriptedConn) Close() error                    { return errors.New("closed") }
func (s scriptedConn) SetReadDeadline(time.Time) error { return nil }
func (s scriptedConn) SetDeadline(time.Time) error     { return nil }

// FuzzClientHello checks that bytes that pass as a ClientHello to a name are one for a
// real server, too.
func FuzzClientHello(f *testing.F) {
	f.Add(clientHelloFor(f, "example.org"))
	f.Add(clientHelloFor(f, "other.example"))
	f.Add(makeClientHello(f, &tls.Config{ServerName: "other.example", EncryptedClientHelloConfigList: echConfigs(f, "example.org")}))
	f.Add(twoNames(clientHelloFor(f, "example.org")))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := readClientHello(t.Context(), scriptedConn{Reader: bytes.NewReader(b)}, nil)
		if len(h.bytes) > maxClientHello || !bytes.HasPrefix(b, h.bytes) {
			t.Fatalf("readClientHello took %d bytes, % x, want at most %d of the beginning of its input", len(h.bytes), h.bytes, maxClientHello)
		}
		if err != nil || h.check("example.org") != nil {
			return
		}
		name := ""
		tls.Server(quiet{scriptedConn{Reader: bytes.NewReader(h.bytes)}}, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			name = i.ServerName
			return nil, errSeen
		}}).Handshake()
		if !strings.EqualFold(name, "example.org") {
			t.Errorf("a TLS server reads the name %q, want %q", name, "example.org")
		}
	})
}

type quiet struct{ scriptedConn }

func (quiet) Write(b []byte) (int, error) { return len(b), nil }

// FuzzHTTP checks that the server sees only whole requests to the name, whatever the
// guest sends on the web port.
func FuzzHTTP(f *testing.F) {
	for _, seed := range []string{
		"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
		"GET http://example.org/ HTTP/1.1\r\nHost: other.example\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: example.org\r\nContent-Length: 3\r\n\r\nabcGET / HTTP/1.1\r\nHost: other.example\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: example.org\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n",
		"CONNECT example.org:80 HTTP/1.1\r\nHost: example.org\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: example.org\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	g := quietGateway(f, allow("example.org"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &conn{g: g, name: "example.org", to: netip.AddrPortFrom(fakeAddr(9), portHTTP)}
		c.ctx, c.cancel = context.WithCancelCause(t.Context())
		near, far := net.Pipe()
		toServer, server := net.Pipe()
		seen := make(chan error, 1)
		go func() { seen <- serveStrictly(server) }()
		served := make(chan struct{})
		go func() {
			defer close(served)
			c.serveHTTP(far, &dialled{conn: &upstream{Conn: toServer, forget: func() {}}})
		}()
		go func() {
			near.Write(b)
			near.Close()
		}()
		io.Copy(io.Discard, near)
		<-served
		toServer.Close()
		if err := <-seen; err != nil {
			t.Errorf("after %q, the server's input: %v", b, err)
		}
		c.cancel(nil)
	})
}

// serveStrictly reads requests and returns an error for one that is not to example.org.
func serveStrictly(c net.Conn) error {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		q, err := http.ReadRequest(r)
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.ErrClosedPipe):
			return nil
		case err != nil:
			return err
		case q.Host != "example.org" || q.ProtoMajor != 1 || q.Method == http.MethodConnect || q.Header.Get("Upgrade") != "" && !isWebSocket(q):
			return errors.New("the server was asked for " + q.Host + " by " + q.Method)
		}
		if _, err := io.Copy(io.Discard, q.Body); err != nil {
			return nil
		}
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"); err != nil {
			return nil
		}
	}
}

func FuzzSniff(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Add([]byte("EHLO me\r\n"))
	f.Add([]byte{0x16, 3, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1000 {
			return
		}
		// After a decision, more bytes of the same input do not change it; and bytes
		// that a server takes for a request are recognised as one.
		for i := range b {
			if was := sniff(b[:i]); was == speaksTLS || was == speaksOther {
				if now := sniff(b); now != was {
					t.Errorf("sniff(%q) = %v, want %v as for its beginning", b, now, was)
				}
				break
			}
		}
		if _, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b))); err == nil && sniff(b) != speaksHTTP {
			t.Errorf("sniff(%q) = %v, want %v: it is a request", b, sniff(b), speaksHTTP)
		}
	})
}
