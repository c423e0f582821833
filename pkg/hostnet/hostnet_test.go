package hostnet

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

// parse reads the addresses of interfaces and lines of "PREFIX HOP".
func parse(t *testing.T, interfaces, routes string) *Networks {
	t.Helper()
	var i []netip.Prefix
	for _, s := range strings.Fields(interfaces) {
		i = append(i, netip.MustParsePrefix(s))
	}
	var r []Route
	for line := range strings.Lines(routes) {
		to, hop, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			continue
		}
		r = append(r, Route{To: netip.MustParsePrefix(to), Hop: hop})
	}
	return New(i, r)
}

// withoutPrivate holds the routes of a VPN that carries the whole internet except
// private networks.
const withoutPrivate = `
	0.0.0.0/5 wg0
	8.0.0.0/7 wg0
	11.0.0.0/8 wg0
	12.0.0.0/6 wg0
	16.0.0.0/4 wg0
	32.0.0.0/3 wg0
	64.0.0.0/2 wg0
	128.0.0.0/3 wg0
	160.0.0.0/5 wg0
	168.0.0.0/6 wg0
	172.0.0.0/12 wg0
	172.32.0.0/11 wg0
	172.64.0.0/10 wg0
	172.128.0.0/9 wg0
	173.0.0.0/8 wg0
	174.0.0.0/7 wg0
	176.0.0.0/4 wg0
	192.0.0.0/9 wg0
	192.128.0.0/11 wg0
	192.160.0.0/13 wg0
	192.169.0.0/16 wg0
	192.170.0.0/15 wg0
	192.172.0.0/14 wg0
	192.176.0.0/12 wg0
	192.192.0.0/10 wg0
	193.0.0.0/8 wg0
	194.0.0.0/7 wg0
	196.0.0.0/6 wg0
	200.0.0.0/5 wg0
	2000::/3 wg0`

func TestFind(t *testing.T) {
	for name, c := range map[string]struct {
		interfaces, routes string
		local, internet    string
	}{
		"no network at all": {internet: "203.0.113.1 2001:db8::1"},
		"one router": {
			interfaces: "127.0.0.1/8 198.51.100.7/24 ::1/128 2001:db8:1::7/64",
			routes: `
				0.0.0.0/0 198.51.100.1 eth0
				198.51.100.0/24 eth0
				::/0 fe80::1 eth0
				2001:db8:1::/64 eth0`,
			local:    "198.51.100.1 198.51.100.7 198.51.100.255 2001:db8:1::1 2001:db8:1:0:ffff::1 ::ffff:198.51.100.9 64:ff9b::198.51.100.9",
			internet: "203.0.113.1 198.51.101.1 198.51.99.255 2001:db8:1:1::1 2001:db8::1 64:ff9b::203.0.113.1",
		},
		"networks of which only the interface or only a route tells": {
			interfaces: "198.51.100.7/24",
			routes: `
				0.0.0.0/0 198.51.100.1 eth0
				192.0.2.0/28 eth1
				2001:db8:1::/64 eth1
				::/0 fe80::1 eth0`,
			local:    "198.51.100.9 192.0.2.15 2001:db8:1::9",
			internet: "192.0.2.16 203.0.113.1 2001:db8:2::1",
		},
		"another router": {
			routes: `
				0.0.0.0/0 198.51.100.1 eth0
				203.0.113.0/24 198.51.100.2 eth0
				192.0.2.9/32 198.51.100.2 eth0
				2001:db8:9::/48 fe80::2 eth0`,
			local:    "203.0.113.9 192.0.2.9 2001:db8:9:1::1",
			internet: "192.0.2.8 2001:db8:8::1 203.0.114.1",
		},
		"a network behind the only router": {
			routes: `
				0.0.0.0/0 198.51.100.1 eth0
				203.0.113.0/24 198.51.100.1 eth0
				192.0.2.9/32 198.51.100.1 eth0`,
			local:    "203.0.113.9",
			internet: "192.0.2.9 203.0.112.1",
		},
		"no way to the internet": {
			routes:   "203.0.113.0/24 198.51.100.1 eth0\n64.0.0.0/2 eth1",
			local:    "203.0.113.9 64.0.0.1",
			internet: "192.0.2.9",
		},
		"a VPN's default route": {
			interfaces: "198.51.100.7/24 10.8.0.2/32",
			routes: `
				0.0.0.0/0 tun0
				0.0.0.0/0 198.51.100.1 eth0
				198.51.100.0/24 eth0
				192.0.2.0/28 198.51.100.1 eth0
				192.0.2.200/32 198.51.100.1 eth0
				10.8.0.1/32 tun0`,
			local:    "198.51.100.9 10.8.0.2",
			internet: "203.0.113.1 192.0.2.200 192.0.2.3",
		},
		"a VPN's default route in two halves": {
			interfaces: "198.51.100.7/24 203.0.113.2/29",
			routes: `
				0.0.0.0/1 203.0.113.1 tun0
				128.0.0.0/1 203.0.113.1 tun0
				0.0.0.0/0 198.51.100.1 eth0
				198.51.100.0/24 eth0
				203.0.113.0/29 tun0
				::/1 tun0
				8000::/1 tun0`,
			local:    "198.51.100.9 203.0.113.1",
			internet: "192.0.2.9 203.0.113.8 9.9.9.9 2001:db8::1",
		},
		"two halves and no other default route": {
			routes:   "0.0.0.0/1 tun0\n128.0.0.0/1 tun0\n0.0.0.0/0 tun0\n2000::/4 tun0\n3000::/4 tun0\nfc00::/7 tun0",
			internet: "192.0.2.9 9.9.9.9 2001:db8::1",
		},
		"the internet without private networks": {
			interfaces: "198.51.100.7/24",
			routes:     withoutPrivate + "\n0.0.0.0/0 198.51.100.1 eth0\n198.51.100.0/24 eth0\n",
			local:      "198.51.100.9",
			internet:   "203.0.113.1 9.9.9.9 11.1.1.1 192.169.0.1 172.32.0.1 2001:db8::1",
		},
		"the same without another default route": {
			routes:   withoutPrivate,
			internet: "203.0.113.1 9.9.9.9 11.1.1.1 192.169.0.1 2001:db8::1",
		},
		"a VPN of a company's networks": {
			routes: `
				0.0.0.0/0 198.51.100.1 eth0
				203.0.113.0/24 tun0
				64.0.0.0/3 tun0`,
			local:    "203.0.113.9 65.1.1.1",
			internet: "192.0.2.9",
		},
		"parts that are counted once": { // overlapping parts, which cover only a quarter
			routes:   "0.0.0.0/2 eth1\n0.0.0.0/2 eth1\n0.0.0.0/3 eth1\n0.0.0.0/0 eth0",
			local:    "9.9.9.9",
			internet: "192.0.2.9",
		},
		"an interface with a mask of everything": {
			interfaces: "198.51.100.7/0 203.0.113.9/1 2001:db8::7/2",
			local:      "198.51.100.7 203.0.113.9 2001:db8::7",
			internet:   "192.0.2.9 9.9.9.9 2001:db8::1",
		},
	} {
		n := parse(t, c.interfaces, c.routes)
		for _, s := range strings.Fields(c.local) {
			if n.Find(netip.MustParseAddr(s)) == "" {
				t.Errorf("%s: Find(%s) = %q, want a reason", name, s, "")
			}
		}
		for _, s := range strings.Fields(c.internet) {
			if reason := n.Find(netip.MustParseAddr(s)); reason != "" {
				t.Errorf("%s: Find(%s) = %q, want none", name, s, reason)
			}
		}
	}
}

func TestFindTellsWhy(t *testing.T) {
	n := parse(t, "198.51.100.7/24", "")
	for addr, want := range map[string]string{
		"198.51.100.7": "an address of the host itself",
		"198.51.100.8": "an address of the host's local network 198.51.100.0/24",
	} {
		if got := n.Find(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Find(%s) = %q, want %q", addr, got, want)
		}
	}
}

func TestPrefix(t *testing.T) {
	for _, c := range []struct {
		ip   string
		mask net.IPMask
		want string
	}{
		{"198.51.100.7", net.CIDRMask(24, 32), "198.51.100.7/24"},
		{"198.51.100.7", net.CIDRMask(120, 128), "198.51.100.7/24"},
		{"2001:db8::7", net.CIDRMask(64, 128), "2001:db8::7/64"},
		{"198.51.100.7", net.IPv4Mask(255, 0, 255, 0), "invalid Prefix"},
	} {
		if got, _ := prefix(net.ParseIP(c.ip), c.mask); got.String() != c.want {
			t.Errorf("prefix(%s, %s) = %s, want %s", c.ip, c.mask, got, c.want)
		}
	}
}

// TestRead checks that Read works on any host, with any tables.
func TestRead(t *testing.T) {
	n, err := Read()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := n.Find(netip.MustParseAddr("127.0.0.1")), "an address of the host itself"; got != want {
		t.Errorf("Find(127.0.0.1) = %q, want %q; read %+v", got, want, n)
	}
}

func BenchmarkRead(b *testing.B) {
	for b.Loop() {
		if _, err := Read(); err != nil {
			b.Fatal(err)
		}
	}
}
