//go:build netns

package hostnet

import (
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestReadInNamespaces reads the kernel's own tables in a network namespace that the
// test fills.
func TestReadInNamespaces(t *testing.T) {
	runtime.LockOSThread() // for good: the thread ends with its namespace
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal("make a network namespace: ", err, "; run as root, as make test does")
	}
	ip := func(lines ...string) {
		t.Helper()
		for _, line := range lines {
			if out, err := exec.CommandContext(t.Context(), "ip", strings.Fields(line)...).CombinedOutput(); err != nil {
				t.Fatalf("ip %s: %v: %s", line, err, out)
			}
		}
	}
	expect := func(when, local, internet string) {
		t.Helper()
		n, err := Read()
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range strings.Fields(local) {
			if n.Find(netip.MustParseAddr(s)) == "" {
				t.Errorf("%s: Find(%s) = %q, want a reason", when, s, "")
			}
		}
		for _, s := range strings.Fields(internet) {
			if reason := n.Find(netip.MustParseAddr(s)); reason != "" {
				t.Errorf("%s: Find(%s) = %q, want none", when, s, reason)
			}
		}
	}
	ip("link set lo up", "link add eth0 type veth peer name eth1", "link set eth0 up", "link set eth1 up")
	expect("no network", "127.0.0.1 127.9.9.9 ::1", "203.0.113.9 2001:db8::9")

	ip("addr add 198.51.100.7/24 dev eth0", "route add default via 198.51.100.1",
		"addr add 2001:db8:1::7/64 dev eth0 nodad", "-6 route add default via fe80::1 dev eth0")
	expect("one network", "198.51.100.9 2001:db8:1::9", "203.0.113.9 192.0.2.9 2001:db8:2::9")

	ip("addr add 192.0.2.1/32 peer 192.0.2.2/32 dev eth1", "route add 203.0.113.0/25 via 192.0.2.2",
		"-6 route add 2001:db8:2::/48 via fe80::2 dev eth1", "route add 203.0.113.192/26 dev eth1 table 99",
		"route add local 203.0.113.176/28 dev lo")
	expect("a second router", "192.0.2.1 192.0.2.2 203.0.113.9 203.0.113.200 203.0.113.180 2001:db8:2::9", "192.0.2.3 203.0.113.129 2001:db8:3::9")

	ip("route flush dev eth1", "route add 0.0.0.0/1 dev eth1", "route add 128.0.0.0/1 dev eth1", "-6 route add 2000::/3 dev eth1")
	expect("a VPN", "198.51.100.9 203.0.113.180", "192.0.2.9 203.0.113.9 9.9.9.9 2001:db8:3::9")

	ip("route flush dev eth1", "route del default",
		"route add default nexthop via 198.51.100.1 dev eth0 nexthop via 198.51.100.2 dev eth0",
		"route add 203.0.113.64/27 nexthop via 198.51.100.3 dev eth0 nexthop via 198.51.100.4 dev eth0", "route add unreachable 203.0.113.0/27")
	expect("several hops", "198.51.100.9 203.0.113.70", "203.0.113.9 192.0.2.9")

	ip("link del eth0")
	expect("unplugged", "127.0.0.1", "198.51.100.9 203.0.113.70 2001:db8:1::9")
}
