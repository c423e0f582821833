// Package gateway is a user-space network for one virtual machine: the guest's only
// network card ends in it, and only traffic that the policy allows leaves.
//
// It owns the other end of that network card, DHCP, DNS, and every connection of the
// guest. It answers a name with an address that means nothing outside (198.18.0.0/15), and
// the host resolves the name when the guest connects. A decision about a name can therefore not
// be redirected to another address. There is no switch, hence no other machine; no UDP
// except DHCP and DNS; and no IPv6 inside. Nothing of a guest's DNS question ever
// leaves the host.
//
// It trusts nothing that the guest sends, and bounds everything that the guest can make
// grow. It never decides: pkg/policy does. Gateway itself never reads files; the
// process around it owns the sockets, the log and the policy file.
package gateway

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/sync/semaphore"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/hostnet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// gatewayMAC is the address of the host's network card, the same as in Lima's own
// gateway.
const gatewayMAC = "\x5a\x94\xef\xe4\x0c\xdd"

// Bounds on everything that a guest can make grow.
const (
	maxConnections = 1024      // concurrent connections of the guest
	maxExposed     = 256       // concurrent connections of the host into the guest
	maxHeap        = 192 << 20 // live bytes; above this no connection is accepted
)

// Options configures a gateway. Only Subnet, MAC and MTU have no useful zero value.
type Options struct {
	Subnet netip.Prefix // IPv4; the host's side is its address +2, the guest's +15
	MAC    string       // of the guest's card; frames from any other are dropped
	MTU    int          // 1500…65520
	Policy *policy.Policy
	Log    func(Record) // called for every decision, from many goroutines; must not block

	// Resolve resolves a name when the guest connects to it; nil means the host's
	// resolver.
	Resolve func(ctx context.Context, name string) ([]netip.Addr, error)
	// Proxy returns the proxy that the host itself would use for a URL, or nil. A nil
	// Proxy means the proxy of the environment. For a connection through a proxy only
	// the name can be checked: only the proxy knows which address the name resolves to.
	Proxy func(*url.URL) (*url.URL, error)
	// HostNetworks reads the host's own addresses and its local networks, where the
	// guest can reach nothing but host services; nil means hostnet.Read.
	HostNetworks func() (*hostnet.Networks, error)
	// Remember is a file with what programs in the guest have read of an earlier gateway of the
	// VM: certificate authority and placeholders. They are used again, because a guest that
	// resumes still uses them. "" means none.
	Remember string
	// Names have their addresses from the beginning: a guest that resumes may not look them up
	// again. What connections to them may do is decided as always.
	Names []string
}

// Gateway is the network of one virtual machine. Its methods may be called
// concurrently.
type Gateway struct {
	reporter
	// connect is the last step of a dial to an allowed address. Tests redirect it to
	// loopback; they cannot change any earlier step.
	connect func(ctx context.Context, to netip.AddrPort, allowed func(netip.AddrPort) error) (net.Conn, error)
	heap    func() uint64 // heapLive, except in tests

	subnet netip.Prefix
	host   netip.Addr // the gateway's own address
	guest  netip.Addr
	mac    net.HardwareAddr
	mtu    int

	policy currentPolicy
	stack  *stack.Stack
	nic    *nic
	names  *nameTable // fake addresses
	hosts  hostTable  // names of the gateway and the guest
	dns    dnsServer
	conns  conns // connections of the guest
	held   heldTargets
	ports  exposed // ports of the guest on the host's loopback
	web    *web
	quiet  limiter // keeps repeated packets from flooding the log

	networks hostNetworks
	resolver resolver
	proxy    hostProxy

	interceptMu  sync.Mutex // held while intercepted changes
	intercepted  atomic.Pointer[interception]
	rememberFile string
	metering     atomic.Pointer[metering]
	loginMu      sync.Mutex     // held while a login is read
	roots        *x509.CertPool // of the servers of intercepted connections; nil for the host's own

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	mu     sync.Mutex
	closed bool
	open   map[closer]struct{} // closed by Close to end the tasks
}

type closer interface{ Close() error }

// New creates a gateway and starts its services. The gateway has no guest until
// ServeStream or ServeDatagram connects a virtual machine.
func New(o Options) (*Gateway, error) {
	subnet := o.Subnet.Masked()
	if !subnet.IsValid() || !subnet.Addr().Is4() || subnet.Bits() > 27 || subnet.Bits() < 8 {
		return nil, fmt.Errorf("subnet %s: must be an IPv4 network of at least 32 addresses", o.Subnet)
	}
	if subnet.Overlaps(fakeRange) {
		return nil, fmt.Errorf("subnet %s: %s is reserved for names", o.Subnet, fakeRange)
	}
	mac, err := net.ParseMAC(o.MAC)
	if err != nil || len(mac) != 6 || mac[0]&1 != 0 || string(mac) == gatewayMAC {
		return nil, fmt.Errorf("MAC %q: must be the address of a network card", o.MAC)
	}
	if o.MTU < 1500 || o.MTU > 65520 {
		return nil, fmt.Errorf("MTU %d: must be 1500 to 65520", o.MTU)
	}
	g := &Gateway{
		reporter: reporter{log: o.Log}, proxy: o.Proxy, networks: hostNetworks{read: o.HostNetworks}, connect: connect, heap: heapLive,
		subnet: subnet, host: offset(subnet, 2), guest: offset(subnet, 15), mac: mac, mtu: o.MTU, rememberFile: o.Remember,
		names: newNameTable(time.Now),
		open:  map[closer]struct{}{},
	}
	if o.Resolve == nil {
		o.Resolve = hostResolver
	}
	if g.proxy == nil {
		g.proxy = httpproxy.FromEnvironment().ProxyFunc()
	}
	if g.networks.read == nil {
		g.networks.read = hostnet.Read
	}
	g.hosts.set("host.lima.internal", g.host)
	g.policy.Store(o.Policy)
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.resolver = resolver{ctx: g.ctx, resolve: o.Resolve, asking: semaphore.NewWeighted(maxLookups)}
	g.nic = newNIC(g)
	for _, name := range o.Names {
		g.names.addr(name)
	}
	g.dns = dnsServer{reporter: &g.reporter, policy: &g.policy, hosts: &g.hosts, names: g.names, unsent: &g.nic.drops[dropUnsent]}
	if err := g.start(); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

func (g *Gateway) start() error {
	var err error
	if g.stack, err = newStack(g.nic, g.subnet, g.host, g.guest, g.mac); err != nil {
		return fmt.Errorf("network stack: %w", err)
	}
	g.handlePackets()
	if err := g.startDHCP(); err != nil {
		return fmt.Errorf("DHCP service: %w", err)
	}
	if err := g.startDNS(); err != nil {
		return fmt.Errorf("DNS service: %w", err)
	}
	g.web = newWeb(g)
	return g.readRuledHosts()
}

// offset returns the nth address of a network.
func offset(p netip.Prefix, n byte) netip.Addr {
	a := p.Addr().As4()
	a[3] += n // at least the network's last five bits are zero
	return netip.AddrFrom4(a)
}

// SetPolicy applies another policy immediately. It cuts the connections that the new
// policy does not allow; the others continue. A nil policy denies everything.
func (g *Gateway) SetPolicy(p *policy.Policy) {
	g.policy.Store(p)
	if err := g.readRuledHosts(); err != nil {
		g.policy.Store(nil) // otherwise requests would pass without a decision
	}
	g.conns.each(func(c *conn) { c.review() })
}

// Detached returns a channel that is closed when the connection to the virtual machine
// has ended. The network cannot be connected again: the gateway's work is over.
func (g *Gateway) Detached() <-chan struct{} { return g.nic.detached }

// run starts a goroutine that Close waits for. If c is not nil, Close closes it to end
// the goroutine. run reports false when the gateway is already closed.
func (g *Gateway) run(c closer, task func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	if c != nil {
		g.open[c] = struct{}{}
	}
	g.tasks.Go(func() {
		if c != nil {
			defer g.release(c)
		}
		defer g.recoverPanic()
		task()
	})
	return true
}

func (g *Gateway) release(c closer) {
	c.Close() //nolint:errcheck // the task has ended; closing twice does no harm
	g.mu.Lock()
	delete(g.open, c)
	g.mu.Unlock()
}

// Close cuts all connections and waits for the gateway's goroutines.
func (g *Gateway) Close() error {
	g.mu.Lock()
	g.closed = true
	open := make([]closer, 0, len(g.open))
	for c := range g.open {
		open = append(open, c)
	}
	g.mu.Unlock()
	g.cancel()
	g.conns.each(func(c *conn) { c.abort("the gateway was closed") })
	g.nic.close()
	for _, c := range open {
		c.Close() //nolint:errcheck // ends the task; its error is no longer of use
	}
	if g.web != nil {
		g.web.close()
	}
	if g.stack != nil {
		g.stack.Close()
	}
	g.tasks.Wait()
	if g.stack != nil {
		g.stack.RemoveNIC(nicID)
		g.stack.Wait()
	}
	return nil
}

// tcpipError converts an error of the network stack into a Go error.
func tcpipError(err tcpip.Error) error {
	if err == nil {
		return nil
	}
	return errors.New(err.String())
}
