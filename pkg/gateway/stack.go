package gateway

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

// Buffers of a connection toward the guest, in each direction. The first connections
// get large buffers. When there are many, each gets small ones, so that even if all are
// full they stay within a host's means.
const (
	largeBuffer      = 1 << 20
	smallBuffer      = 128 << 10
	largeConnections = 48
	maxHandshakes    = 512
)

// newStack creates the network stack with one card, one route and one neighbour.
func newStack(l *nic, subnet netip.Prefix, host, guest netip.Addr, mac net.HardwareAddr) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	sack := tcpip.TCPSACKEnabled(true)
	control := tcpip.CongestionControlOption("cubic")
	// The stack drops a SYN that meets a TIME-WAIT entry left by a forwarder, as there
	// is no listener to pass it to. A client that reuses its ports would then wait
	// until it sends another SYN. No stale packet can arrive on a connection that keeps
	// order. If our last ACK is lost, the client's retransmission gets a reset for a
	// connection that is already over.
	timeWait := tcpip.TCPTimeWaitTimeoutOption(5 * time.Millisecond)
	autotune := tcpip.TCPModerateReceiveBufferOption(false) // the upstream is the bottleneck, not the VM's socket
	retries := tcpip.TCPSynRetriesOption(4)                 // an unfinished handshake holds a place for half a minute
	for _, o := range []tcpip.SettableTransportProtocolOption{
		&sack, &control, &timeWait, &autotune, &retries,
		&tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: largeBuffer, Max: largeBuffer},
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: largeBuffer, Max: largeBuffer},
	} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return nil, fmt.Errorf("set a TCP option: %w", tcpipError(err))
		}
	}
	address := tcpip.AddrFrom4(host.As4())
	network, err := tcpip.NewSubnet(tcpip.AddrFrom4(subnet.Addr().As4()), tcpip.MaskFromBytes(net.CIDRMask(subnet.Bits(), 32)))
	if err != nil {
		return s, err
	}
	for _, step := range []func() tcpip.Error{
		func() tcpip.Error { return s.CreateNIC(nicID, l) },
		func() tcpip.Error {
			return s.AddProtocolAddress(nicID, tcpip.ProtocolAddress{
				Protocol: ipv4.ProtocolNumber, AddressWithPrefix: address.WithPrefix(),
			}, stack.AddressProperties{})
		},
		// The guest may send packets to any address, and the reply must come from that
		// address.
		func() tcpip.Error { return s.SetPromiscuousMode(nicID, true) },
		func() tcpip.Error { return s.SetSpoofing(nicID, true) },
		// The gateway neither needs nor trusts the guest's ARP messages.
		func() tcpip.Error {
			return s.AddStaticNeighbor(nicID, ipv4.ProtocolNumber, tcpip.AddrFrom4(guest.As4()), tcpip.LinkAddress(mac))
		},
	} {
		if err := step(); err != nil {
			return s, tcpipError(err)
		}
	}
	s.SetRouteTable([]tcpip.Route{{Destination: network, NIC: nicID}})
	return s, nil
}

// handlePackets defines what happens to packets without a socket.
func (g *Gateway) handlePackets() {
	connections := tcp.NewForwarder(g.stack, 0, maxHandshakes, g.connection)
	g.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, connections.HandlePacket)
	// Returning false sends an ICMP port unreachable. QUIC and other resolvers then
	// fail at once, and their clients fall back to what works.
	g.stack.SetTransportProtocolHandler(udp.ProtocolNumber, func(id stack.TransportEndpointID, _ *stack.PacketBuffer) bool {
		if id.LocalAddress == header.IPv4Broadcast {
			return true
		}
		to := netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort)
		if g.quiet.ok("udp " + to.String()) {
			g.report(Record{Kind: KindUDP, Name: g.names.name(to.Addr()), Addr: to.Addr(), Port: to.Port(), Reason: "UDP is not forwarded"})
		}
		return false
	})
}
