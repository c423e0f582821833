package netguard

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
)

func TestWhoAsks(t *testing.T) {
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	us := strings.TrimSpace(string(comm))
	target, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	for _, dial := range []struct{ network, addr string }{
		{"udp4", "127.0.0.1:53"}, {"udp4", "anywhere"}, {"tcp4", target.Addr().String()},
	} {
		var local net.Addr
		if dial.addr == "anywhere" { // like programs that query several resolvers
			c, err := net.ListenPacket(dial.network, "0.0.0.0:0")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			local = c.LocalAddr()
		} else {
			c, err := net.Dial(dial.network, dial.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			local = c.LocalAddr()
		}
		from := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddrPort(local.String()).Port())
		a := newDNSClients()
		if got := a.programOf(from, "evil.example"); got != us {
			t.Errorf("%+v: programOf(%s, evil.example) = %q, want %q", dial, from, got, us)
		}
		// The first program is cached and needs no second lookup.
		for range maxLooks {
			a.queue <- struct{}{}
		}
		if got := a.programOf(netip.MustParseAddrPort("127.0.0.1:1"), "evil.example"); got != us {
			t.Errorf("%+v: programOf of a cached name = %q, want %q", dial, got, us)
		}
		if got := a.programOf(from, "other.example"); got != "" {
			t.Errorf("%+v: programOf with a full queue = %q, want %q", dial, got, "")
		}
		<-a.queue
		if got := a.programOf(from, "other.example"); got != us {
			t.Errorf("%+v: programOf once the queue has space = %q, want %q", dial, got, us)
		}
	}
	a := newDNSClients()
	if got := a.programOf(netip.AddrPort{}, "evil.example"); got != "" {
		t.Errorf("programOf of an unknown address = %q, want %q", got, "")
	}
	for i := range maxDNSClients {
		a.first[fmt.Sprint(i)] = ""
	}
	if a.programOf(netip.AddrPort{}, "one.more"); len(a.first) != 1 {
		t.Errorf("%d names are cached after one more than %d, want 1", len(a.first), maxDNSClients)
	}
}

func TestKernelAddr(t *testing.T) {
	for text, want := range map[string]string{
		"0205A8C0":                         "192.168.5.2",
		"00000000":                         "0.0.0.0",
		"00000000000000000000000001000000": "::1",
		"0000000000000000FFFF00000100007F": "::ffff:127.0.0.1",
		"B80D0120000000000000000010000000": "2001:db8::10",
		"":                                 "invalid IP",
		"0205":                             "invalid IP",
		"xx05A8C0":                         "invalid IP",
	} {
		if got := kernelAddr(text).String(); got != want {
			t.Errorf("kernelAddr(%q) = %s, want %s", text, got, want)
		}
	}
}
