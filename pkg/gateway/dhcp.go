package gateway

import (
	"bytes"
	"fmt"
	"net"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const leaseTime = 24 * time.Hour

// startDHCP serves the network's only lease.
func (g *Gateway) startDHCP() error {
	var queue waiter.Queue
	endpoint, terr := g.stack.NewEndpoint(udp.ProtocolNumber, ipv4.ProtocolNumber, &queue)
	if terr != nil {
		return tcpipError(terr)
	}
	endpoint.SocketOptions().SetBroadcast(true)
	if terr := endpoint.Bind(tcpip.FullAddress{NIC: nicID, Port: dhcpServer}); terr != nil {
		endpoint.Close()
		return tcpipError(terr)
	}
	conn := gonet.NewUDPConn(&queue, endpoint)
	everybody := &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpClient}
	g.run(conn, func() {
		packet := make([]byte, 2048)
		for {
			n, _, err := conn.ReadFrom(packet)
			if err != nil {
				return
			}
			if reply := g.dhcp(packet[:n]); reply != nil {
				if _, err := conn.WriteTo(reply, everybody); err != nil {
					g.nic.drops[dropUnsent].Add(1) // the client asks again
				}
			}
		}
	})
	return nil
}

// dhcp returns the reply to one packet, or nil if the packet gets no reply.
func (g *Gateway) dhcp(packet []byte) []byte {
	defer g.recoverPanic()
	ask, err := dhcpv4.FromBytes(packet)
	if err != nil || ask.OpCode != dhcpv4.OpcodeBootRequest || !bytes.Equal(ask.ClientHWAddr, g.mac) {
		return nil
	}
	host, guest := net.IP(g.host.AsSlice()), net.IP(g.guest.AsSlice())
	if server := ask.ServerIdentifier(); server != nil && !server.Equal(host) {
		return nil // the client chose another server
	}
	kind, address := dhcpv4.MessageTypeOffer, guest
	switch ask.MessageType() {
	case dhcpv4.MessageTypeDiscover:
	case dhcpv4.MessageTypeRequest:
		kind = dhcpv4.MessageTypeAck
		wanted := ask.RequestedIPAddress()
		if wanted == nil {
			wanted = ask.ClientIPAddr
		}
		if !wanted.IsUnspecified() && !wanted.Equal(guest) {
			kind, address = dhcpv4.MessageTypeNak, net.IPv4zero
		}
	case dhcpv4.MessageTypeInform:
		kind, address = dhcpv4.MessageTypeAck, net.IPv4zero
	default:
		return nil
	}
	reply, err := dhcpv4.New(
		dhcpv4.WithReply(ask),
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithYourIP(address),
		dhcpv4.WithServerIP(host),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(host)),
	)
	if err != nil {
		return nil
	}
	if kind != dhcpv4.MessageTypeNak {
		reply.UpdateOption(dhcpv4.OptIPAddressLeaseTime(leaseTime))
		reply.UpdateOption(dhcpv4.OptSubnetMask(net.CIDRMask(g.subnet.Bits(), 32)))
		reply.UpdateOption(dhcpv4.OptRouter(host))
		reply.UpdateOption(dhcpv4.OptDNS(host))
		reply.UpdateOption(dhcpv4.Option{Code: dhcpv4.OptionInterfaceMTU, Value: dhcpv4.Uint16(uint16(g.mtu))})
	}
	return reply.ToBytes()
}

// lease returns the addresses of the gateway and the guest with their MAC addresses.
func (g *Gateway) lease() map[string]string {
	return map[string]string{
		g.host.String():  fmt.Sprint(net.HardwareAddr(gatewayMAC)),
		g.guest.String(): g.mac.String(),
	}
}
