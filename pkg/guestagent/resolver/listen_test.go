package resolver_test

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/resolver"
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

// Bind does not use a port that is busy for one of the protocols.
func TestBindOfABusyPort(t *testing.T) {
	udp, tcp, addr := listenPair(t)
	if err := tcp.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := resolver.Bind(t.Context(), "4", addr.String()); b != nil || !errors.Is(err, syscall.EADDRINUSE) || !strings.HasPrefix(err.Error(), "listen for DNS: ") {
		t.Errorf("Bind with a busy UDP port = %v, %v, want nil and %v with prefix %q", b, err, syscall.EADDRINUSE, "listen for DNS: ")
	}
	again, err := net.Listen("tcp4", addr.String())
	if err != nil {
		t.Fatalf("Listen on the TCP port after a failed Bind: %v, want it free", err)
	}
	if err := udp.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := resolver.Bind(t.Context(), "4", addr.String()); b != nil || !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("Bind with a busy TCP port = %v, %v, want nil and %v", b, err, syscall.EADDRINUSE)
	}
	free, err := net.ListenPacket("udp4", addr.String())
	if err != nil {
		t.Fatalf("ListenPacket on the UDP port after a failed Bind: %v, want it free", err)
	}
	if err := errors.Join(again.Close(), free.Close()); err != nil {
		t.Fatal(err)
	}
}
