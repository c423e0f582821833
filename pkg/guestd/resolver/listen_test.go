package resolver_test

import (
	"net"
	"net/netip"
	"testing"
)

// listenPair listens on one free loopback port with both protocols.
func listenPair(t *testing.T) (net.PacketConn, net.Listener, netip.AddrPort) {
	t.Helper()
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenPacket("udp4", tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return udp, tcp, netip.MustParseAddrPort(tcp.Addr().String())
}
