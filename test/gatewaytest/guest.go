// Package gatewaytest is a guest without a virtual machine: a network stack that
// connects to a gateway as a VM does, for tests and measurements.
//
// It does what a guest can do and no more. To simulate a misbehaving guest, Send sends
// arbitrary bytes. It knows nothing of package gateway.
package gatewaytest

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/miekg/dns"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const (
	nicID    = 1
	maxFrame = header.EthernetMinimumSize + 65535
)

// Options configures a guest.
type Options struct {
	Addr    netip.Addr
	Gateway netip.Addr
	Bits    int // length of the network's prefix
	MAC     net.HardwareAddr
	MTU     int
	Tap     func(frame []byte) // receives every arriving frame; may be nil
}

// Guest is a running guest.
type Guest struct {
	options Options
	stack   *stack.Stack
	link    *link
	tasks   sync.WaitGroup
	ports   atomic.Uint32 // number of local ports used so far
}

// New starts a guest on a connection to a gateway, which is either a stream of
// length-prefixed frames or a datagram socket.
func New(conn net.Conn, stream bool, o Options) (*Guest, error) {
	g := &Guest{options: o}
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	sack := tcpip.TCPSACKEnabled(true)
	timeWait := tcpip.TCPTimeWaitReuseGlobal // for thousands of connections in sequence
	for _, option := range []tcpip.SettableTransportProtocolOption{
		&sack, &timeWait,
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 2 << 20, Max: 4 << 20},
		&tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: 2 << 20, Max: 4 << 20},
	} {
		if err := g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return nil, errors.New(err.String())
		}
	}
	g.link = &link{o: o, conn: conn, stream: stream}
	g.link.wake.L = &g.link.mu
	if err := g.stack.CreateNIC(nicID, g.link); err != nil {
		return nil, errors.New(err.String())
	}
	address := tcpip.AddrFrom4(o.Addr.As4())
	if err := g.stack.AddProtocolAddress(nicID, tcpip.ProtocolAddress{
		Protocol: ipv4.ProtocolNumber, AddressWithPrefix: address.WithPrefix(),
	}, stack.AddressProperties{}); err != nil {
		return nil, errors.New(err.String())
	}
	network, err := tcpip.NewSubnet(
		tcpip.AddrFrom4(netip.PrefixFrom(o.Addr, o.Bits).Masked().Addr().As4()),
		tcpip.MaskFromBytes(net.CIDRMask(o.Bits, 32)))
	if err != nil {
		return nil, err
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: network, NIC: nicID},
		{Destination: header.IPv4EmptySubnet, Gateway: tcpip.AddrFrom4(o.Gateway.As4()), NIC: nicID},
	})
	g.tasks.Go(g.link.write)
	g.tasks.Go(g.link.read)
	return g, nil
}

// Close disconnects the guest and stops it.
func (g *Guest) Close() {
	g.link.close()
	g.stack.Close()
	g.tasks.Wait()
	g.stack.RemoveNIC(nicID)
	g.stack.Wait()
}

// Send sends a frame unchanged.
func (g *Guest) Send(frame []byte) error { return g.link.send(frame) }

// Dial connects to an address. It assigns local ports in sequence, as a Linux guest
// does. The stack would choose them at random, and among thousands of connections would
// soon choose one that the other side has not yet released.
func (g *Guest) Dial(ctx context.Context, to netip.AddrPort) (*gonet.TCPConn, error) {
	const first, count = 32768, 28232 // net.ipv4.ip_local_port_range
	for {
		from := netip.AddrPortFrom(g.options.Addr, uint16(first+g.ports.Add(1)%count))
		conn, err := gonet.DialTCPWithBind(ctx, g.stack, full(from), full(to), ipv4.ProtocolNumber)
		if err == nil || ctx.Err() != nil || !strings.Contains(err.Error(), (&tcpip.ErrPortInUse{}).String()) {
			return conn, err
		}
	}
}

// DialUDP opens a UDP socket to an address.
func (g *Guest) DialUDP(to netip.AddrPort) (*gonet.UDPConn, error) {
	remote := full(to)
	return gonet.DialUDP(g.stack, nil, &remote, ipv4.ProtocolNumber)
}

// Listen listens on a port of the guest.
func (g *Guest) Listen(port uint16) (net.Listener, error) {
	return gonet.ListenTCP(g.stack, full(netip.AddrPortFrom(g.options.Addr, port)), ipv4.ProtocolNumber)
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nicID, Addr: tcpip.AddrFrom4(a.Addr().As4()), Port: a.Port()}
}

// Ask sends a question to the gateway's resolver, over "udp" or "tcp".
func (g *Guest) Ask(ctx context.Context, network string, m *dns.Msg) (*dns.Msg, error) {
	to := netip.AddrPortFrom(g.options.Gateway, 53)
	var conn net.Conn
	var err error
	if network == "tcp" {
		conn, err = g.Dial(ctx, to)
	} else {
		conn, err = g.DialUDP(to)
	}
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	c := &dns.Conn{Conn: conn, UDPSize: dns.MaxMsgSize}
	if err := c.WriteMsg(m); err != nil {
		return nil, err
	}
	return c.ReadMsg()
}

// Lookup returns the address that the gateway gives a name.
func (g *Guest) Lookup(ctx context.Context, name string) (netip.Addr, error) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeA)
	reply, err := g.Ask(ctx, "udp", m)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, rr := range reply.Answer {
		if a, ok := rr.(*dns.A); ok {
			if addr, ok := netip.AddrFromSlice(a.A.To4()); ok {
				return addr, nil
			}
		}
	}
	return netip.Addr{}, fmt.Errorf("%s: %s", name, dns.RcodeToString[reply.Rcode])
}

// DialName looks up a name and connects to it.
func (g *Guest) DialName(ctx context.Context, name string, port uint16) (*gonet.TCPConn, error) {
	addr, err := g.Lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	return g.Dial(ctx, netip.AddrPortFrom(addr, port))
}

// Transport returns an HTTP transport that connects through the guest.
func (g *Guest) Transport() *http.Transport {
	return &http.Transport{
		ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, service, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
			if err != nil {
				return nil, err
			}
			if addr, err := netip.ParseAddr(host); err == nil {
				return g.Dial(ctx, netip.AddrPortFrom(addr, uint16(port)))
			}
			return g.DialName(ctx, host, uint16(port))
		},
	}
}

// link is the guest's network card. Its queue is unbounded: a test guest sends no more
// than its TCP windows allow.
type link struct {
	o      Options
	conn   net.Conn
	stream bool

	mu      sync.Mutex
	wake    sync.Cond
	pending []byte
	closed  bool
	to      stack.NetworkDispatcher
}

func (l *link) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.wake.Broadcast()
	l.conn.Close()
}

func (l *link) send(parts ...[]byte) error {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return net.ErrClosed
	}
	l.pending = binary.BigEndian.AppendUint32(l.pending, uint32(n))
	for _, p := range parts {
		l.pending = append(l.pending, p...)
	}
	l.wake.Signal()
	return nil
}

func (l *link) write() {
	var batch []byte
	for {
		l.mu.Lock()
		for len(l.pending) == 0 && !l.closed {
			l.wake.Wait()
		}
		batch, l.pending = l.pending, batch[:0]
		closed := l.closed
		l.mu.Unlock()
		if closed {
			return
		}
		if l.stream {
			if _, err := l.conn.Write(batch); err != nil {
				return
			}
			continue
		}
		for rest := batch; len(rest) > 0; {
			end := 4 + int(binary.BigEndian.Uint32(rest))
			if _, err := l.conn.Write(rest[4:end]); err != nil {
				return
			}
			rest = rest[end:]
		}
	}
}

func (l *link) read() {
	frame := make([]byte, maxFrame)
	r := bufio.NewReaderSize(l.conn, 256<<10)
	for {
		var n int
		if l.stream {
			var prefix [4]byte
			if _, err := io.ReadFull(r, prefix[:]); err != nil {
				return
			}
			n = int(binary.BigEndian.Uint32(prefix[:]))
			if n > len(frame) {
				return
			}
			if _, err := io.ReadFull(r, frame[:n]); err != nil {
				return
			}
		} else {
			var err error
			if n, err = l.conn.Read(frame); err != nil {
				return
			}
		}
		if l.o.Tap != nil {
			l.o.Tap(frame[:n])
		}
		if n < header.EthernetMinimumSize {
			continue
		}
		l.mu.Lock()
		to := l.to
		l.mu.Unlock()
		if to == nil {
			continue
		}
		p := stack.NewPacketBuffer(stack.PacketBufferOptions{
			Payload: buffer.MakeWithData(frame[header.EthernetMinimumSize:n]),
		})
		to.DeliverNetworkPacket(header.Ethernet(frame).Type(), p)
		p.DecRef()
	}
}

func (l *link) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	n := 0
	for _, p := range packets.AsSlice() {
		if len(p.LinkHeader().Slice()) == 0 {
			l.AddHeader(p)
		}
		if err := l.send(p.AsSlices()...); err != nil {
			return n, &tcpip.ErrClosedForSend{}
		}
		n++
	}
	return n, nil
}

func (l *link) AddHeader(p *stack.PacketBuffer) {
	header.Ethernet(p.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: tcpip.LinkAddress(l.o.MAC), DstAddr: p.EgressRoute.RemoteLinkAddress, Type: p.NetworkProtocolNumber,
	})
}

func (l *link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	l.to = d
	l.mu.Unlock()
}

func (l *link) IsAttached() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to != nil
}

func (l *link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired | stack.CapabilityRXChecksumOffload
}
func (l *link) MTU() uint32                             { return uint32(l.o.MTU) }
func (l *link) SetMTU(uint32)                           {}
func (l *link) MaxHeaderLength() uint16                 { return header.EthernetMinimumSize }
func (l *link) LinkAddress() tcpip.LinkAddress          { return tcpip.LinkAddress(l.o.MAC) }
func (l *link) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *link) Wait()                                   {}
func (l *link) Close()                                  {}
func (l *link) SetOnCloseAction(func())                 {}
func (l *link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *link) ParseHeader(*stack.PacketBuffer) bool    { return true }
func (l *link) GSOMaxSize() uint32                      { return 65535 - 200 }
func (l *link) SupportedGSO() stack.SupportedGSO        { return stack.GVisorGSOSupported }
