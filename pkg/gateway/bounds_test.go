package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestExposedConnectionsAreBounded checks the separate limit on the host's connections into
// the guest.
func TestExposedConnectionsAreBounded(t *testing.T) {
	w := newWorld(t, config{policy: allow()})
	l, err := w.guest.Listen(22)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	at := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	if err := w.g.Expose(at, "192.168.5.15:22"); err != nil {
		t.Fatal(err)
	}
	w.g.ports.open.Add(maxExposed)
	over, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	if b, err := io.ReadAll(over); len(b) > 0 {
		t.Errorf("a connection over the limit read %q, %v, want nothing", b, err)
	}
	w.g.ports.open.Add(-1)
	c, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "first")
	guest := <-accepted
	expectRead(t, guest, "first")
	c.Close()
	guest.Close()
	if len(accepted) > 0 {
		t.Errorf("the guest accepted %d connections over the limit, want 0", len(accepted))
	}
}

// TestAPIBodyIsBounded checks that a request to Lima's socket is read only up to its limit.
func TestAPIBodyIsBounded(t *testing.T) {
	w := newWorld(t, config{policy: allow()})
	for size, want := range map[int]int{0: http.StatusOK, maxAPIBody: http.StatusInternalServerError} {
		body := `{"Name":"host.test.","DefaultIP":"192.168.5.2"` + strings.Repeat(" ", size) + "}"
		r := httptest.NewRequest(http.MethodPost, "/services/dns/add", strings.NewReader(body))
		answer := httptest.NewRecorder()
		w.g.API().ServeHTTP(answer, r)
		if answer.Code != want {
			t.Errorf("POST dns/add of %d bytes = %d %s, want %d", len(body), answer.Code, answer.Body, want)
		}
	}
}

// TestMemoryIsBounded checks that everything the gateway remembers on a guest's behalf is
// bounded.
func TestMemoryIsBounded(t *testing.T) {
	var resolved resolvedNames
	var known hostTable
	var quiet limiter
	said := 0
	for i := range 3 * maxResolved {
		name := fmt.Sprintf("n%d.example.org", i)
		resolved.put(name, nil)
		known.set(name, netip.Addr{})
		if quiet.ok(name) {
			said++
		}
	}
	for what, c := range map[string]struct{ got, most int }{
		"resolved names":  {len(resolved.m), maxResolved},
		"limiter entries": {len(quiet.lastReport), limiterSize},
	} {
		if c.got > c.most {
			t.Errorf("%d %s are kept, want at most %d", c.got, what, c.most)
		}
	}
	if len(known.m) != maxHosts {
		t.Errorf("%d host names are kept, want %d", len(known.m), maxHosts)
	}
	if said != limiterSize {
		t.Errorf("the limiter let %d of %d reports pass, want %d", said, 3*maxResolved, limiterSize)
	}
	if !known.set("n0.example.org", netip.Addr{}) {
		t.Errorf("set of the known host name %q = false, want true", "n0.example.org")
	}
	if got := clean(strings.Repeat("x", 1<<20)); len(got) > 1000 {
		t.Errorf("clean of a text of %d bytes has %d bytes, want at most 1000", 1<<20, len(got))
	}
	big := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(big, make([]byte, 11), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err := readFile(big, 10); err == nil {
		t.Errorf("readFile of 11 bytes with limit 10 = %d bytes, want an error", len(b))
	}
	if b, err := readFile(big, 11); err != nil || len(b) != 11 {
		t.Errorf("readFile of 11 bytes with limit 11 = %d bytes, %v, want 11 bytes", len(b), err)
	}
}

// TestRefusedByTheProxy checks that the gateway does not bypass a host proxy that refuses
// web traffic.
func TestRefusedByTheProxy(t *testing.T) {
	proxy := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, "no", http.StatusForbidden) }))
	t.Cleanup(proxy.Close)
	via, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, config{policy: allow("example.org"), proxy: func(*url.URL) (*url.URL, error) { return via, nil }})
	w.server("example.org", 443, echo)
	c := w.dial("example.org", 443)
	c.Write(clientHelloFor(t, "example.org"))
	expectReset(t, c)
	w.wait("a connection that the host's proxy refused", func(r Record) bool { return r.End && strings.Contains(r.Reason, "the host's proxy refused: 403") })
	if got := w.dials(); len(got) > 0 {
		t.Errorf("dialled %s after the proxy refused, want nothing", got)
	}
}

// TestSetPolicyAtTheLastMoment checks that a policy that changes while the kernel connects
// is consulted before any byte passes.
func TestSetPolicyAtTheLastMoment(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, func(c net.Conn) { io.WriteString(c, "hi") })
	w.g.connect = func(ctx context.Context, to netip.AddrPort, allowed func(netip.AddrPort) error) (net.Conn, error) {
		c, err := w.connect(ctx, to, allowed)
		w.g.policy.Store(allow()) // skips the review that SetPolicy makes, as that may already be over
		return c, err
	}
	if c, err := w.guest.DialName(w.ctx(), "example.org", 7777); err == nil {
		c.Close()
		t.Error("Dial under a policy that no longer exists succeeded, want an error")
	}
	w.waitDenied("not on the allowlist")
}

// TestClosingAfterACut checks that a resource registered after the connection was cut is
// closed at once.
func TestClosingAfterACut(t *testing.T) {
	g := quietGateway(t, allow())
	c := &conn{g: g}
	c.ctx, c.cancel = context.WithCancelCause(t.Context())
	c.abort("the policy changed")
	closed := false
	c.onClose(func() { closed = true })
	if !closed {
		t.Error("a resource registered after the cut is open, want it closed")
	}
}

// TestGatewayPorts checks that the gateway's own address serves only the ports that were
// opened.
func TestGatewayPorts(t *testing.T) {
	at := netip.MustParseAddrPort(serveTCP(t, echo))
	p := allow()
	p.HostServices = []netip.AddrPort{at}
	w := newWorld(t, config{policy: p})
	w.servers[at] = at.String()
	if c, err := w.guest.Dial(w.ctx(), netip.AddrPortFrom(w.g.host, at.Port()-1)); err == nil {
		c.Close()
		t.Errorf("Dial of port %d, which is not opened, succeeded, want an error", at.Port()-1)
	}
	w.waitDenied("the gateway has no service on this port")
	if got := w.dials(); len(got) > 0 {
		t.Errorf("dialled %s, want nothing", got)
	}
}
