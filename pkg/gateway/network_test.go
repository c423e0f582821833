package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/hostnet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/test/gatewaytest"
)

const guestMAC = "52:55:55:12:34:56"

// patience is how long a test waits for an event that must happen, on any machine.
const patience = 60 * time.Second

var (
	prefix     = netip.MustParsePrefix
	testSubnet = prefix("192.168.5.0/24")
	zeroSubnet netip.Prefix
)

// world is a gateway, a guest on its link, and a simulated internet: documentation
// addresses that lead to listeners on loopback. Only the very last step of a dial is
// redirected there, after the address has been allowed.
type world struct {
	t        *testing.T
	g        *Gateway
	guest    *gatewaytest.Guest
	guestEnd net.Conn // the guest's end

	mu      sync.Mutex
	names   map[string][]netip.Addr
	servers map[netip.AddrPort]string // where an address on the internet leads
	dialled []netip.AddrPort
	records []Record
	changed chan struct{}
}

// config holds a test's options.
type config struct {
	policy   *policy.Policy
	mtu      int
	datagram bool
	proxy    func(*url.URL) (*url.URL, error)
	host     []string // the host's addresses, each with its prefix length
	routes   []hostnet.Route
	tap      func([]byte)
	resolve  func(context.Context, string) ([]netip.Addr, error)
	unguest  bool // no stack on the link: the test sends frames itself
}

// allow returns a policy with rules.
func allow(rules ...string) *policy.Policy {
	p := policy.Default()
	for _, text := range rules {
		r, err := policy.ParseRule(text)
		if err != nil {
			panic(err)
		}
		r.Source = "test:1"
		p.Names = append(p.Names, r)
	}
	return p
}

func prefixes(text ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, s := range text {
		all = append(all, prefix(s))
	}
	return all
}

func newWorld(t *testing.T, c config) *world {
	t.Helper()
	before := runtime.NumGoroutine()
	w := &world{t: t, names: map[string][]netip.Addr{}, servers: map[netip.AddrPort]string{}, changed: make(chan struct{})}
	if c.mtu == 0 {
		c.mtu = 1500
	}
	if c.proxy == nil {
		c.proxy = func(*url.URL) (*url.URL, error) { return nil, nil }
	}
	if c.resolve == nil {
		c.resolve = w.resolve
	}
	g, err := New(Options{
		Subnet: netip.MustParsePrefix("192.168.5.0/24"), MAC: guestMAC, MTU: c.mtu,
		Policy: c.policy, Log: w.log, Resolve: c.resolve, Proxy: c.proxy,
		HostNetworks: func() (*hostnet.Networks, error) { return hostnet.New(prefixes(c.host...), c.routes), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	w.g = g
	g.connect = w.connect
	var near net.Conn
	if c.datagram {
		near = w.attachDatagram()
	} else {
		near = w.attachStream()
	}
	w.guestEnd = near
	if !c.unguest {
		mac, err := net.ParseMAC(guestMAC)
		if err != nil {
			t.Fatal(err)
		}
		w.guest, err = gatewaytest.New(near, !c.datagram, gatewaytest.Options{
			Addr: g.guest, Gateway: g.host, Bits: 24, MAC: mac, MTU: c.mtu, Tap: c.tap,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if w.guest != nil {
			w.guest.Close()
		}
		near.Close()
		if err := g.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		if n := g.Stats().Panics; n > 0 {
			t.Errorf("Stats().Panics = %d, want 0; links: %+v", n, w.all(func(r Record) bool { return r.Kind == KindLink }))
		}
		http.DefaultClient.CloseIdleConnections()
		expectGoroutines(t, before)
	})
	return w
}

// expectGoroutines waits until no more goroutines run than before. The goroutines of a
// test's own servers end in their own cleanups, which run later.
func expectGoroutines(t *testing.T, most int) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		buf := make([]byte, 4<<20)
		all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		ours := slices.DeleteFunc(all, func(s string) bool {
			return !strings.Contains(s, "gvisor.dev/") && !strings.Contains(s, "gateway.(*")
		})
		if len(ours) == 0 || len(all) <= most {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("%d goroutines run, want at most %d; those of the gateway:\n%s", len(all), most, strings.Join(ours, "\n\n"))
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func (w *world) attachStream() net.Conn {
	w.t.Helper()
	path := w.t.TempDir() + "/s"
	l, err := net.Listen("unix", path)
	if err != nil {
		w.t.Fatal(err)
	}
	go w.g.ServeStream(l) // ends with the gateway
	c, err := net.Dial("unix", path)
	if err != nil {
		w.t.Fatal(err)
	}
	w.attached()
	return c
}

func (w *world) attached() {
	w.wait("the link of the guest", func(r Record) bool { return r.Kind == KindLink && r.Allowed && !r.End })
}

func (w *world) log(r Record) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = append(w.records, r)
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait returns the first record that matches. What names it in the failure message.
func (w *world) wait(what string, meant func(Record) bool) Record {
	w.t.Helper()
	timeout := time.After(patience)
	for {
		w.mu.Lock()
		i := slices.IndexFunc(w.records, meant)
		if i >= 0 {
			defer w.mu.Unlock()
			return w.records[i]
		}
		changed, records := w.changed, slices.Clone(w.records)
		w.mu.Unlock()
		select {
		case <-changed:
		case <-timeout:
			w.t.Fatalf("no record of %s within %v, want one among %+v", what, patience, records)
		}
	}
}

func (w *world) all(meant func(Record) bool) []Record {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(w.records), func(r Record) bool { return !meant(r) })
}

// waitDenied returns the denial of a connection whose reason contains a text.
func (w *world) waitDenied(reason string) Record {
	w.t.Helper()
	return w.wait("a TCP denial because "+reason, func(r Record) bool {
		return r.Kind == KindTCP && !r.Allowed && strings.Contains(r.Reason, reason)
	})
}

func (w *world) resolve(_ context.Context, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	addrs, ok := w.names[name]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
	}
	return addrs, nil
}

func (w *world) connect(ctx context.Context, to netip.AddrPort, allowed func(netip.AddrPort) error) (net.Conn, error) {
	if err := allowed(to); err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.dialled = append(w.dialled, to)
	at, ok := w.servers[to]
	w.mu.Unlock()
	switch {
	case !ok:
		return nil, fmt.Errorf("dial %s: connection refused", to)
	case at == "": // an address that never answers
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", at)
}

// internet gives a name an address on the internet, with a server there.
func (w *world) internet(name string, port uint16, at string) netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	addrs := w.names[name]
	if len(addrs) == 0 {
		addrs = []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(1 + len(w.names))})}
		w.names[name] = addrs
	}
	to := netip.AddrPortFrom(addrs[0], port)
	w.servers[to] = at
	return to
}

func (w *world) web(name string, port uint16, h http.Handler) *httptest.Server {
	s := httptest.NewServer(h)
	w.t.Cleanup(s.Close)
	w.internet(name, port, s.Listener.Addr().String())
	return s
}

func (w *world) secureWeb(name string, port uint16, h http.Handler) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // from connections that the gateway cut
	s.EnableHTTP2 = true
	s.StartTLS()
	w.t.Cleanup(s.Close)
	w.internet(name, port, s.Listener.Addr().String())
	return s
}

// server runs serve for every connection to a port of a name.
func (w *world) server(name string, port uint16, serve func(net.Conn)) netip.AddrPort {
	w.t.Helper()
	return w.internet(name, port, serveTCP(w.t, serve))
}

func serveTCP(t testing.TB, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(2 * patience))
				serve(c)
			})
		}
	})
	t.Cleanup(func() { l.Close() })
	return l.Addr().String()
}

func echo(c net.Conn) { io.Copy(c, c) }

// ctx returns a context that ends before the test does.
func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	w.t.Cleanup(cancel)
	return ctx
}

// client returns the guest's HTTP client, which trusts any certificate.
func (w *world) client() *http.Client {
	tr := w.guest.Transport()
	tr.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (w *world) get(c *http.Client, url string) (int, string, error) {
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	return do(c, r)
}

func do(c *http.Client, r *http.Request) (int, string, error) {
	a, err := c.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	return a.StatusCode, string(b), err
}

// dial connects the guest to a name; a failure is fatal.
func (w *world) dial(name string, port uint16) net.Conn {
	w.t.Helper()
	c, err := w.guest.DialName(w.ctx(), name, port)
	if err != nil {
		w.t.Fatalf("dial %s:%d: %v", name, port, err)
	}
	c.SetDeadline(time.Now().Add(patience))
	w.t.Cleanup(func() { c.Close() })
	return c
}

// expectReset reads from a connection that must be reset and not merely end.
func expectReset(t *testing.T, c net.Conn) {
	t.Helper()
	b, err := io.ReadAll(c)
	if err == nil || errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "timeout") {
		t.Fatalf("read %q, %v, want a reset", b, err)
	}
}

func expectRead(t *testing.T, c io.Reader, want string) {
	t.Helper()
	b := make([]byte, len(want))
	if n, err := io.ReadFull(c, b); err != nil || string(b) != want {
		t.Fatalf("read %q, %v, want %q", b[:n], err, want)
	}
}
