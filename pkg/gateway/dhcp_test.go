package gateway

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

func dhcpPacket(t testing.TB, kind dhcpv4.MessageType, more ...dhcpv4.Modifier) []byte {
	t.Helper()
	mac, err := net.ParseMAC(guestMAC)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithHwAddr(mac), dhcpv4.WithMessageType(kind)}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	return m.ToBytes()
}

func TestDHCP(t *testing.T) {
	g := quietGateway(t, nil)
	other, err := net.ParseMAC("52:55:55:00:00:01")
	if err != nil {
		t.Fatal(err)
	}
	wants := func(ip string) dhcpv4.Modifier {
		return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(ip)))
	}
	for name, test := range map[string]struct {
		packet []byte
		kind   dhcpv4.MessageType // 0: no answer
		yours  string
	}{
		"discover":          {dhcpPacket(t, dhcpv4.MessageTypeDiscover), dhcpv4.MessageTypeOffer, "192.168.5.15"},
		"request":           {dhcpPacket(t, dhcpv4.MessageTypeRequest, wants("192.168.5.15")), dhcpv4.MessageTypeAck, "192.168.5.15"},
		"renewal":           {dhcpPacket(t, dhcpv4.MessageTypeRequest, dhcpv4.WithClientIP(net.ParseIP("192.168.5.15"))), dhcpv4.MessageTypeAck, "192.168.5.15"},
		"another address":   {dhcpPacket(t, dhcpv4.MessageTypeRequest, wants("192.168.5.2")), dhcpv4.MessageTypeNak, "0.0.0.0"},
		"inform":            {dhcpPacket(t, dhcpv4.MessageTypeInform), dhcpv4.MessageTypeAck, "0.0.0.0"},
		"release":           {dhcpPacket(t, dhcpv4.MessageTypeRelease), 0, ""},
		"an offer":          {dhcpPacket(t, dhcpv4.MessageTypeOffer), 0, ""},
		"another card":      {dhcpPacket(t, dhcpv4.MessageTypeDiscover, dhcpv4.WithHwAddr(other)), 0, ""},
		"another server":    {dhcpPacket(t, dhcpv4.MessageTypeRequest, dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 0, 0, 1)))), 0, ""},
		"garbage":           {[]byte("garbage"), 0, ""},
		"nothing":           {nil, 0, ""},
		"cut in the option": {dhcpPacket(t, dhcpv4.MessageTypeDiscover)[:242], 0, ""},
	} {
		reply := g.dhcp(test.packet)
		if test.kind == 0 {
			if reply != nil {
				t.Errorf("%s: dhcp() = % x, want no reply", name, reply)
			}
			continue
		}
		m, err := dhcpv4.FromBytes(reply)
		if err != nil {
			t.Errorf("%s: dhcp() = % x: %v", name, reply, err)
			continue
		}
		if m.MessageType() != test.kind || m.YourIPAddr.String() != test.yours {
			t.Errorf("%s: reply %s for %s, want %s for %s; %s", name, m.MessageType(), m.YourIPAddr, test.kind, test.yours, m.Summary())
		}
		if test.kind == dhcpv4.MessageTypeNak {
			continue
		}
		mtu := m.Options.Get(dhcpv4.OptionInterfaceMTU)
		if len(mtu) != 2 || binary.BigEndian.Uint16(mtu) != 1500 || len(m.Router()) != 1 || m.Router()[0].String() != "192.168.5.2" ||
			len(m.DNS()) != 1 || m.DNS()[0].String() != "192.168.5.2" || m.ServerIdentifier().String() != "192.168.5.2" || m.SubnetMask().String() != "ffffff00" {
			t.Errorf("%s: MTU option % x, routers %v, DNS %v, server %s, mask %s, want 1500, three times 192.168.5.2, ffffff00", name, mtu, m.Router(), m.DNS(), m.ServerIdentifier(), m.SubnetMask())
		}
	}
}

// TestDHCPOnTheCable checks that the reply is broadcast, as the client has no address yet.
func TestDHCPOnTheCable(t *testing.T) {
	frames := make(chan []byte, 16)
	w := newWorld(t, config{tap: func(f []byte) {
		select {
		case frames <- bytes.Clone(f):
		default:
		}
	}})
	packet := dhcpPacket(t, dhcpv4.MessageTypeDiscover)
	if err := w.guest.Send(udpFrame(header.EthernetBroadcastAddress, "0.0.0.0", "255.255.255.255", 68, 67, packet)); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-frames:
		ip := header.IPv4(f[header.EthernetMinimumSize:])
		if header.Ethernet(f).DestinationAddress() != header.EthernetBroadcastAddress || ip.DestinationAddress() != header.IPv4Broadcast || header.UDP(ip.Payload()).DestinationPort() != 68 {
			t.Errorf("offer = % x, want one to %s, %s, port 68", f[:42], header.EthernetBroadcastAddress, header.IPv4Broadcast)
		}
	case <-time.After(patience):
		t.Fatalf("no offer within %v", patience)
	}
}

// udpFrame returns a frame from the guest's network card.
func udpFrame(to tcpip.LinkAddress, src, dst string, sport, dport uint16, payload []byte) []byte {
	b := make([]byte, header.UDPMinimumSize+len(payload))
	header.UDP(b).Encode(&header.UDPFields{SrcPort: sport, DstPort: dport, Length: uint16(len(b))})
	copy(b[header.UDPMinimumSize:], payload)
	return ipFrame(to, src, dst, uint8(header.UDPProtocolNumber), b)
}

func ipFrame(to tcpip.LinkAddress, src, dst string, protocol uint8, payload []byte) []byte {
	f := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+len(payload))
	mac, err := net.ParseMAC(guestMAC)
	if err != nil {
		panic(err)
	}
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: tcpip.LinkAddress(mac), DstAddr: to, Type: header.IPv4ProtocolNumber})
	ip := header.IPv4(f[header.EthernetMinimumSize:])
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(ip)), TTL: 64, Protocol: protocol,
		SrcAddr: tcpip.AddrFromSlice(net.ParseIP(src).To4()), DstAddr: tcpip.AddrFromSlice(net.ParseIP(dst).To4()),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	copy(ip[header.IPv4MinimumSize:], payload)
	return f
}
