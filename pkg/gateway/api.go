package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const maxAPIBody = 1 << 20

// API returns the handler for Lima's requests on the endpoint socket of a user-v2 network.
// It serves the part of gvisor-tap-vsock's HTTP interface that Lima calls. It is meant for
// a socket on the host; the guest's network cannot reach it.
func (g *Gateway) API() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /services/dhcp/leases", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(g.lease()) // Lima asks again after an error
	})
	mux.HandleFunc("POST /services/dns/add", handle(g.addZone))
	mux.HandleFunc("POST /services/forwarder/expose", handle(func(f forward) error { return g.Expose(f.Local, f.Remote) }))
	mux.HandleFunc("POST /services/forwarder/unexpose", handle(func(f forward) error { return g.Unexpose(f.Local) }))
	return mux
}

type forward struct {
	Local    string `json:"local"`
	Remote   string `json:"remote"`
	Protocol string `json:"protocol"`
}

func (f forward) check() error {
	if f.Protocol != "" && f.Protocol != "tcp" {
		return fmt.Errorf("protocol must be tcp, got %q", f.Protocol)
	}
	return nil
}

// zone is the form in which Lima adds names: either records within a zone, or a single name
// given as a zone with an address.
type zone struct {
	Name    string
	Records []struct {
		Name string
		IP   net.IP
	}
	DefaultIP net.IP
}

func (zone) check() error { return nil }

func handle[T interface{ check() error }](do func(T) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var body T
		err := json.NewDecoder(io.LimitReader(r.Body, maxAPIBody)).Decode(&body)
		if err == nil {
			err = body.check()
		}
		if err == nil {
			err = do(body)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError) // Lima reports the body
		}
	}
}

// addZone adds the names that point at the gateway or at the guest. It ignores names for
// other addresses: a guest could not connect through them, so they are left to the policy.
func (g *Gateway) addZone(z zone) error {
	add := func(name string, ip net.IP) error {
		addr, ok := netip.AddrFromSlice(ip)
		if addr = addr.Unmap(); !ok || addr != g.host && addr != g.guest {
			return nil
		}
		name, err := policy.Canonical(name)
		if err != nil {
			return fmt.Errorf("name %q: %w", clean(name), err)
		}
		if !g.hosts.set(name, addr) {
			return errors.New("too many names")
		}
		return nil
	}
	errs := []error{add(z.Name, z.DefaultIP)}
	if len(z.DefaultIP) == 0 {
		errs = nil
	}
	for _, r := range z.Records {
		errs = append(errs, add(strings.TrimSuffix(r.Name, ".")+"."+z.Name, r.IP))
	}
	return errors.Join(errs...)
}

// exposed holds the guest's ports for which the host listens.
type exposed struct {
	mu   sync.Mutex
	m    map[string]exposedPort // by local address, spelled as the caller did
	open atomic.Int64
}

type exposedPort struct {
	listener net.Listener
	remote   netip.AddrPort
}

// Expose makes a port of the guest reachable at an address on the host's loopback. Exposing
// the same pair again is not an error.
func (g *Gateway) Expose(local, remote string) error {
	to, err := netip.ParseAddrPort(remote)
	if err != nil || to.Addr() != g.guest || to.Port() == 0 {
		return fmt.Errorf("remote must be a port of the guest, got %q; the guest is %s", clean(remote), g.guest)
	}
	at, err := netip.ParseAddrPort(local)
	if err != nil || !at.Addr().IsLoopback() {
		return fmt.Errorf("local must be a port on the host's loopback, got %q", clean(local))
	}
	g.ports.mu.Lock()
	defer g.ports.mu.Unlock()
	if p, ok := g.ports.m[local]; ok {
		if p.remote == to {
			return nil
		}
		return fmt.Errorf("%s is already forwarded to %s", local, p.remote)
	}
	l, err := new(net.ListenConfig).Listen(g.ctx, "tcp", local)
	if err != nil {
		return err
	}
	if !g.run(l, func() { _ = g.acceptLoop(l, func(c net.Conn) { g.intoGuest(c, to.Port()) }) }) {
		l.Close()
		return net.ErrClosed
	}
	if g.ports.m == nil {
		g.ports.m = map[string]exposedPort{}
	}
	g.ports.m[local] = exposedPort{l, to}
	return nil
}

// Unexpose closes the listener that Expose opened. Open connections stay.
func (g *Gateway) Unexpose(local string) error {
	g.ports.mu.Lock()
	defer g.ports.mu.Unlock()
	p, ok := g.ports.m[local]
	if !ok {
		return fmt.Errorf("%s is not exposed", clean(local))
	}
	delete(g.ports.m, local)
	return p.listener.Close()
}

// intoGuest connects a client on the host to a port of the guest.
func (g *Gateway) intoGuest(client net.Conn, port uint16) {
	defer g.ports.open.Add(-1)
	if g.ports.open.Add(1) > maxExposed {
		return
	}
	ctx, cancel := context.WithTimeout(g.ctx, tryTime)
	defer cancel()
	guest, err := gonet.DialContextTCP(ctx, g.stack, tcpip.FullAddress{
		NIC: nicID, Addr: tcpip.AddrFrom4(g.guest.As4()), Port: port,
	}, ipv4.ProtocolNumber)
	if err != nil {
		return
	}
	defer guest.Close()
	stop := context.AfterFunc(g.ctx, func() { guest.Close(); client.Close() })
	defer stop()
	done := make(chan struct{})
	g.tasks.Go(func() {
		defer close(done)
		if err := pump(guest, client); err != nil {
			guest.Close()
			client.Close()
		}
	})
	if to, ok := client.(halfCloser); ok {
		if err := pump(to, guest); err != nil {
			guest.Close()
			client.Close()
		}
	}
	<-done
}
