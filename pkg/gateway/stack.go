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

// Buffers of a connection toward the guest, each way. The first connections get
// large ones; when there are many, each gets little, so that all of them full
// stay within what a host can spare.
const (
	largeBuffer      = 1 << 20
	smallBuffer      = 128 << 10
	largeConnections = 48
	maxHandshakes    = 512
)

// newStack makes the network: one card, one route, one neighbour.
func newStack(l *link, subnet netip.Prefix, host, guest netip.Addr, mac net.HardwareAddr) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	sack := tcpip.TCPSACKEnabled(true)
	control := tcpip.CongestionControlOption("cubic")
	// A SYN that meets a TIME-WAIT left by a forwarder is dropped, as there is no
	// listener to hand it to: a client that uses its ports again waits until it
	// sends another. Nothing old can turn up on a cable that keeps order, and if
	// our last word is lost, the answer to the client's is a reset of what is over.
	timeWait := tcpip.TCPTimeWaitTimeoutOption(5 * time.Millisecond)
	autotune := tcpip.TCPModerateReceiveBufferOption(false) // the upstream is the bottleneck, not this cable
	retries := tcpip.TCPSynRetriesOption(4)                 // a handshake nobody ends holds a place for half a minute
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
		// The guest may mean any address with its packets, and is answered from it.
		func() tcpip.Error { return s.SetPromiscuousMode(nicID, true) },
		func() tcpip.Error { return s.SetSpoofing(nicID, true) },
		// Nothing the guest says in ARP is needed or believed.
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

// handlePackets sets what becomes of packets for which there is no socket.
func (g *Gateway) handlePackets() {
	connections := tcp.NewForwarder(g.stack, 0, maxHandshakes, g.connection)
	g.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, connections.HandlePacket)
	// Not handled means an ICMP port unreachable: QUIC and other resolvers fail
	// at once and their users turn to what works.
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
