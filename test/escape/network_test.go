//go:build escape

package escape

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// The host's side and the world's are two network namespaces joined by a cable:
//
//	guest ── QEMU ── gateway or slirp ── host (lo, uplink) ══ world (every other address)
//
// The world accepts every address for which the host has no better route, so that no
// packet that leaves can miss it.
type world struct {
	*judge
	far  *realvm.Namespace
	dns  *resolver
	tls  *tlsServer
	taps []*tap
}

const uplink = "uplink"

func newWorld() (*world, error) {
	w := &world{judge: newJudge()}
	var err error
	if w.far, err = realvm.NewNamespace(); err != nil {
		return nil, err
	}
	if err := realvm.Resolver(plan.Resolver); err != nil {
		return nil, err
	}
	if err := realvm.IP(
		fmt.Sprintf("link add name %s type veth peer name downlink netns %d", uplink, w.far.TID),
		"addr add "+plan.HostPublic+"/24 dev "+uplink,
		"addr add "+plan.HostLAN+"/24 dev "+uplink,
		"addr add "+plan.HostPublic6+"/64 dev "+uplink+" nodad",
		"link set "+uplink+" up",
	); err != nil {
		return nil, err
	}
	// The stock network pings with the host's unprivileged sockets, if permitted.
	for key, value := range map[string]string{"ipv4/ping_group_range": "0 2147483647", "ipv4/ip_unprivileged_port_start": "0"} {
		if err := os.WriteFile("/proc/sys/net/"+key, []byte(value), 0o644); err != nil {
			return nil, err
		}
	}
	if err := w.far.Do(func() error {
		return realvm.IP(
			"link set lo up", "addr add 198.51.100.1/24 dev downlink", "addr add 2001:db8:1::1/64 dev downlink nodad", "addr add "+plan.Neighbour+"/32 dev downlink", "addr add "+plan.Neighbour6+"/128 dev downlink nodad", "link set downlink up",
			// Every address except the host's is local here: the longest prefix wins.
			"route add "+plan.HostPublic+"/32 dev downlink table local", "route add "+plan.HostLAN+"/32 dev downlink table local",
			"route add local default dev lo table local",
			"-6 route add "+plan.HostPublic6+"/128 dev downlink table local", "-6 route add fe80::/64 dev downlink table local",
			"-6 route add local default dev lo table local",
		)
	}); err != nil {
		return nil, err
	}
	if err := realvm.IP("route add default via 198.51.100.1", "route add "+plan.RoutedNet+" via "+plan.LAN, "-6 route add default via 2001:db8:1::1"); err != nil {
		return nil, err
	}
	if err := w.startServices(); err != nil {
		return nil, err
	}
	return w, w.watch()
}

func (w *world) listen(port int) (l net.Listener, err error) {
	err = w.far.Do(func() error { l, err = listen(port); return err })
	return l, err
}

func listen(port int) (net.Listener, error) { return net.Listen("tcp", ":"+strconv.Itoa(port)) }

// local returns the address and port that a client addressed.
func local(c net.Conn) (string, int) {
	a := netip.MustParseAddrPort(c.LocalAddr().String())
	return a.Addr().Unmap().WithZone("").String(), int(a.Port())
}

// tap reads every frame that passes an interface of the host.
type tap struct {
	fd   int
	name string
}

// watch taps the host's loopback interface and its cable to the world.
func (w *world) watch() error {
	for _, name := range []string{"lo", uplink} {
		i, err := net.InterfaceByName(name)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		if err != nil {
			return err
		}
		// A large buffer, for moments in which this process does not run.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: i.Index}); err != nil {
			return err
		}
		t := &tap{fd: fd, name: name}
		w.taps = append(w.taps, t)
		go w.listenTo(t)
	}
	return nil
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func (w *world) listenTo(t *tap) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(t.fd, b, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			w.saw("the tap on "+t.name+" failed: "+err.Error(), false, "")
			return
		}
		ll, ok := from.(*unix.SockaddrLinklayer)
		if !ok || ll.Pkttype != unix.PACKET_OUTGOING {
			continue // the loopback interface delivers it a second time
		}
		if place, allowed, data := w.packet(t.name, htons(ll.Protocol), b[:n]); place != "" {
			w.saw(place, allowed, string(data))
		}
	}
}

// missed returns how many packets were not captured.
func (w *world) missed() (n uint32, err error) {
	for _, t := range w.taps {
		s, err := unix.GetsockoptTpacketStats(t.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			return 0, err
		}
		n += s.Drops
	}
	return n, nil
}

// packet describes a packet if it is worth a sight. On the cable these are packets to
// endpoints that no allowed name leads to; on loopback, packets with a token. The
// server at an allowed endpoint sees more of its own traffic.
func (w *world) packet(on string, kind uint16, b []byte) (place string, allowed bool, data []byte) {
	var proto byte
	var dst netip.Addr
	switch {
	case kind == unix.ETH_P_ARP:
		return "", false, nil
	case kind == unix.ETH_P_IP && len(b) >= 20 && len(b) >= int(b[0]&15)*4:
		proto, dst, data = b[9], netip.AddrFrom4([4]byte(b[16:20])), b[int(b[0]&15)*4:]
	case kind == unix.ETH_P_IPV6 && len(b) >= 40:
		proto, dst, data = b[6], netip.AddrFrom16([16]byte(b[24:40])), b[40:]
	default:
		return fmt.Sprintf("frame of type %#04x on %s", kind, on), false, b
	}
	if on == "lo" {
		if !tokens.Match(data) {
			return "", false, nil
		}
		return fmt.Sprintf("the host's loopback: protocol %d to %s", proto, dst), false, data
	}
	switch {
	case (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP) && len(data) >= 8:
		port := int(binary.BigEndian.Uint16(data[2:]))
		if endpointAllowed(dst.String(), port) && (proto == unix.IPPROTO_TCP || port == 53) {
			return "", true, nil
		}
		if proto == unix.IPPROTO_TCP && (len(data) < 20 || data[13]&0x12 != 2) && !tokens.Match(data) {
			return "", false, nil // its SYN was recorded
		}
		return fmt.Sprintf("packet: %s to %s", map[byte]string{unix.IPPROTO_TCP: "TCP", unix.IPPROTO_UDP: "UDP"}[proto], netip.AddrPortFrom(dst, uint16(port))), false, data
	case proto == unix.IPPROTO_ICMP && len(data) >= 8 && data[0] == 3 && !tokens.Match(data):
		return "", false, nil // the host's kernel reports a closed port
	case proto == unix.IPPROTO_ICMPV6 && len(data) > 0 && (data[0] >= 130 && data[0] <= 136 || data[0] == 143) || proto == 0 && dst.IsMulticast():
		return "", false, nil // neighbour discovery and group reports of the host's kernel
	}
	return fmt.Sprintf("packet: protocol %d to %s", proto, dst), false, data
}

// listeners returns the open TCP ports of the host's namespace.
func listeners() (map[string]bool, error) {
	open := map[string]bool{}
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(filepath.Join("/proc/thread-self/net", table))
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > 3 && f[3] == "0A" {
				open[f[1]] = true
			}
		}
	}
	return open, nil
}

func random() string {
	b := make([]byte, 4)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}
