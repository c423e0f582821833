package gateway

import (
	"bytes"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// Bounds of a frame. QEMU forwards what the guest's driver wrote, so the guest controls
// the length. A frame longer than any packet is skipped. A length that no network card
// can send means that the stream does not consist of frames.
const (
	maxFrame   = header.EthernetMinimumSize + 65535
	maxSkipped = 1 << 20
	dhcpServer = 67
	dhcpClient = 68
)

// drop is the reason why a frame was dropped.
type drop int

const (
	accepted drop = iota
	dropTooLong
	dropMalformed
	dropForeignMAC
	dropForeignSource
	dropDestination
	dropProtocol
	dropOptions
	dropFragment
	dropARP
	dropICMP
	dropLease  // the host's lease in its cluster has ended
	dropUnsent // toward the guest: its side did not keep up
	drops
)

func (d drop) String() string {
	return [drops]string{
		"", "too_long", "malformed", "foreign_mac", "foreign_source", "destination",
		"protocol", "ip_options", "fragment", "arp", "icmp", "lease", "unsent",
	}[d]
}

// filter holds the addresses of the only guest that may send.
type filter struct {
	guestMAC, hostMAC []byte
	guest, host       tcpip.Address
	broadcast, zeroth tcpip.Address // of the subnet
	longest           int
}

func newFilter(subnet netip.Prefix, guest, host netip.Addr, mac []byte, mtu int) filter {
	last := subnet.Addr().As4()
	for i := subnet.Bits(); i < 32; i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	return filter{
		guestMAC: mac, hostMAC: []byte(gatewayMAC),
		guest: tcpip.AddrFrom4(guest.As4()), host: tcpip.AddrFrom4(host.As4()),
		zeroth: tcpip.AddrFrom4(subnet.Addr().As4()), broadcast: tcpip.AddrFrom4(last),
		longest: header.EthernetMinimumSize + mtu,
	}
}

// check applies the rules that need no state: one network card, one address, IPv4
// without options or fragments, and no broadcast or multicast except the first messages
// of ARP and DHCP. It examines the headers in the same way as the stack will, so the
// stack never sees a truncated one.
func (f *filter) check(frame []byte) drop {
	switch {
	case len(frame) < header.EthernetMinimumSize:
		return dropMalformed
	case len(frame) > f.longest:
		return dropTooLong
	}
	to, from := frame[:6], frame[6:12]
	if !bytes.Equal(from, f.guestMAC) {
		return dropForeignMAC
	}
	everybody := bytes.Equal(to, []byte(header.EthernetBroadcastAddress))
	if !everybody && !bytes.Equal(to, f.hostMAC) {
		return dropDestination
	}
	packet := frame[header.EthernetMinimumSize:]
	switch header.Ethernet(frame).Type() {
	case header.ARPProtocolNumber:
		return f.checkARP(packet)
	case header.IPv4ProtocolNumber:
		return f.checkIPv4(packet, everybody)
	default:
		return dropProtocol
	}
}

func (f *filter) checkARP(packet []byte) drop {
	if len(packet) < header.ARPSize {
		return dropMalformed
	}
	arp := header.ARP(packet[:header.ARPSize])
	switch {
	case !arp.IsValid():
		return dropMalformed
	case arp.Op() != header.ARPRequest && arp.Op() != header.ARPReply,
		!bytes.Equal(arp.HardwareAddressSender(), f.guestMAC),
		tcpip.AddrFromSlice(arp.ProtocolAddressTarget()) != f.host:
		return dropARP
	}
	if from := tcpip.AddrFromSlice(arp.ProtocolAddressSender()); from != f.guest && from != header.IPv4Any {
		return dropARP
	}
	return accepted
}

func (f *filter) checkIPv4(packet []byte, everybody bool) drop {
	ip := header.IPv4(packet)
	switch {
	case !ip.IsValid(len(packet)):
		return dropMalformed
	case ip.HeaderLength() != header.IPv4MinimumSize: // such as source routes
		return dropOptions
	case ip.More() || ip.FragmentOffset() != 0:
		return dropFragment
	}
	from, to := ip.SourceAddress(), ip.DestinationAddress()
	payload := packet[header.IPv4MinimumSize:ip.TotalLength()]
	protocol := ip.TransportProtocol()
	if protocol == header.UDPProtocolNumber {
		if !wholeUDP(payload) {
			return dropMalformed
		}
		if udp := header.UDP(payload); udp.DestinationPort() == dhcpServer {
			switch {
			case udp.SourcePort() != dhcpClient:
				return dropProtocol
			case from != f.guest && from != header.IPv4Any:
				return dropForeignSource
			case to != header.IPv4Broadcast && to != f.host:
				return dropDestination
			}
			return accepted
		}
	}
	switch {
	case from != f.guest:
		return dropForeignSource
	case everybody, to == f.guest, to == f.broadcast, to == f.zeroth, !unicast(to):
		return dropDestination
	}
	switch protocol {
	case header.UDPProtocolNumber:
		return accepted
	case header.TCPProtocolNumber:
		if !wholeTCP(payload) {
			return dropMalformed
		}
		return accepted
	case header.ICMPv4ProtocolNumber:
		// Echo requests are all that a guest needs. ICMP errors would only change what
		// the stack assumes about a path with a single hop.
		if len(payload) < header.ICMPv4MinimumSize || to != f.host || header.ICMPv4(payload).Type() != header.ICMPv4Echo {
			return dropICMP
		}
		return accepted
	default:
		return dropProtocol
	}
}

func wholeUDP(b []byte) bool {
	return len(b) >= header.UDPMinimumSize && int(header.UDP(b).Length()) >= header.UDPMinimumSize && int(header.UDP(b).Length()) <= len(b)
}

func wholeTCP(b []byte) bool {
	if len(b) < header.TCPMinimumSize {
		return false
	}
	offset := int(header.TCP(b).DataOffset())
	return offset >= header.TCPMinimumSize && offset <= len(b)
}

// unicast reports whether an address is unicast: not unspecified, loopback, multicast
// or reserved.
func unicast(a tcpip.Address) bool {
	b := a.As4()
	return b[0] != 0 && b[0] != 127 && b[0] < 224
}
