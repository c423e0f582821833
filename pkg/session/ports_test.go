package session

import (
	"net"
	"net/netip"
	"testing"
)

func TestPublishedPortStays(t *testing.T) {
	port := func(l net.Listener) uint16 { return netip.MustParseAddrPort(l.Addr().String()).Port() }
	listen := func(at uint16) net.Listener {
		l, err := listenNear(t.Context(), at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	for range 100 { // an outgoing connection of another program may not get a session's port
		l := listen(0)
		if got := port(l); got < lowPorts[0] || got >= lowPorts[1] {
			t.Fatalf("port %d is not one of %v", got, lowPorts)
		}
		_ = l.Close()
	}
	first := listen(0)
	if other := listen(port(first)); port(other) == port(first) {
		t.Errorf("two listeners on %v", first.Addr())
	}
	_ = first.Close()
	if again := listen(port(first)); port(again) != port(first) {
		t.Errorf("port %d became %d", port(first), port(again))
	}
}
