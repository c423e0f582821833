//go:build linux && escape

package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

const (
	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeIPv6 = 0x86dd

	protoICMP = 1
	protoTCP  = 6
	protoUDP  = 17
)

// card is the guest's network card, written to below the kernel's network stack.
type card struct {
	fd      int
	index   int
	mac     net.HardwareAddr
	gateway net.HardwareAddr
}

func (a *attempt) openCard() (*card, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range interfaces {
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		for _, addr := range addrs {
			if !strings.HasPrefix(addr.String(), plan.Guest+"/") {
				continue
			}
			// Asking the gateway something puts it into the ARP table.
			a.ask("udp", net.JoinHostPort(plan.Gateway, "53"), plan.Allowed, 1)
			gateway, err := neighbour(plan.Gateway)
			if err != nil {
				return nil, err
			}
			fd, err := syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW, int(htons(syscall.ETH_P_ALL)))
			if err != nil {
				return nil, err
			}
			return &card{fd: fd, index: i.Index, mac: i.HardwareAddr, gateway: gateway}, nil
		}
	}
	return nil, fmt.Errorf("no card has %s", plan.Guest)
}

func (c *card) Close() error { return syscall.Close(c.fd) }

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// neighbour returns the kernel's ARP entry for an address.
func neighbour(addr string) (net.HardwareAddr, error) {
	table, err := os.ReadFile("/proc/net/arp")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 3 && f[0] == addr {
			return net.ParseMAC(f[3])
		}
	}
	return nil, fmt.Errorf("the ARP table does not contain %s", addr)
}

// broadcastMAC addresses every card.
var broadcastMAC = net.HardwareAddr{255, 255, 255, 255, 255, 255}

func frame(dst, src net.HardwareAddr, kind uint16, payload []byte) []byte {
	b := append(append(make([]byte, 0, 14+len(payload)), dst...), src...)
	return append(binary.BigEndian.AppendUint16(b, kind), payload...)
}

// send writes frames a few times, because a card may lose some.
func (c *card) send(frames ...[]byte) {
	for round := range 3 {
		if round > 0 {
			time.Sleep(200 * time.Millisecond) // spread out, so that one full queue does not drop all of them
		}
		for _, f := range frames {
			to := &syscall.SockaddrLinklayer{Protocol: htons(binary.BigEndian.Uint16(f[12:])), Ifindex: c.index, Halen: 6}
			if err := syscall.Sendto(c.fd, f, 0, to); err != nil {
				say("frame of %d bytes: %v", len(f), err)
			}
		}
	}
	say("sent %d frames", len(frames))
}

// out sends IPv4 packets to the gateway unchanged.
func (c *card) out(packets ...[]byte) {
	frames := make([][]byte, len(packets))
	for i, p := range packets {
		frames[i] = frame(c.gateway, c.mac, typeIPv4, p)
	}
	c.send(frames...)
}

// withCard runs a technique that needs frames.
func withCard(try func(a *attempt, c *card)) func(*attempt) {
	return func(a *attempt) {
		c, err := a.openCard()
		if err != nil {
			say("card: %v", err)
			return
		}
		defer c.Close()
		try(a, c)
	}
}

// header4 is an IPv4 header with its forgeable fields.
type header4 struct {
	src, dst string
	proto    byte
	id       uint16
	fragment uint16 // flags and offset
	options  []byte
}

func (h header4) packet(payload []byte) []byte {
	options := h.options
	for len(options)%4 != 0 {
		options = append(options, 0)
	}
	src, dst := netip.MustParseAddr(h.src).As4(), netip.MustParseAddr(h.dst).As4()
	n := 20 + len(options)
	b := make([]byte, n, n+len(payload))
	b[0] = byte(4<<4 | n/4)
	binary.BigEndian.PutUint16(b[2:], uint16(n+len(payload)))
	binary.BigEndian.PutUint16(b[4:], h.id)
	binary.BigEndian.PutUint16(b[6:], h.fragment)
	b[8], b[9] = 64, h.proto
	copy(b[12:], src[:])
	copy(b[16:], dst[:])
	copy(b[20:], options)
	binary.BigEndian.PutUint16(b[10:], checksum(b, 0))
	return append(b, payload...)
}

// udp returns a datagram with its checksum over the pseudo header.
func (h header4) udp(port uint16, data string) []byte {
	b := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(b, 40000)
	binary.BigEndian.PutUint16(b[2:], port)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(data)))
	b = append(b, data...)
	binary.BigEndian.PutUint16(b[6:], checksum(b, h.pseudo(protoUDP, len(b))))
	return b
}

// These are the flags of a TCP segment.
const (
	flagSYN = 2
	flagRST = 4
	flagPSH = 8
	flagACK = 16
)

// tcp returns a segment; options are padded.
func (h header4) tcp(from, to uint16, seq, ack uint32, flags byte, options []byte, data string) []byte {
	for len(options)%4 != 0 {
		options = append(options, 0)
	}
	n := 20 + len(options)
	b := make([]byte, n, n+len(data))
	binary.BigEndian.PutUint16(b, from)
	binary.BigEndian.PutUint16(b[2:], to)
	binary.BigEndian.PutUint32(b[4:], seq)
	binary.BigEndian.PutUint32(b[8:], ack)
	b[12], b[13] = byte(n/4<<4), flags
	binary.BigEndian.PutUint16(b[14:], 65535)
	copy(b[20:], options)
	b = append(b, data...)
	binary.BigEndian.PutUint16(b[16:], checksum(b, h.pseudo(protoTCP, len(b))))
	return b
}

// icmp returns a message of any type with the token as its data.
func icmp(kind, code byte, data string) []byte {
	b := append([]byte{kind, code, 0, 0, 0x12, 0x34, 0, 1}, data...)
	binary.BigEndian.PutUint16(b[2:], checksum(b, 0))
	return b
}

func (h header4) pseudo(proto byte, length int) uint32 {
	src, dst := netip.MustParseAddr(h.src).As4(), netip.MustParseAddr(h.dst).As4()
	return sum(src[:]) + sum(dst[:]) + uint32(proto) + uint32(length)
}

func sum(b []byte) (s uint32) {
	for ; len(b) > 1; b = b[2:] {
		s += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	return s
}

func checksum(b []byte, start uint32) uint16 {
	s := start + sum(b)
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// udp6 returns a whole IPv6 packet with a datagram in it.
func udp6(src, dst string, port uint16, data string) []byte {
	s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
	u := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(u, 40000)
	binary.BigEndian.PutUint16(u[2:], port)
	binary.BigEndian.PutUint16(u[4:], uint16(8+len(data)))
	u = append(u, data...)
	binary.BigEndian.PutUint16(u[6:], checksum(u, sum(s[:])+sum(d[:])+protoUDP+uint32(len(u))))
	return ip6(src, dst, protoUDP, u)
}

func ip6(src, dst string, next byte, payload []byte) []byte {
	s, d := netip.MustParseAddr(src).As16(), netip.MustParseAddr(dst).As16()
	b := make([]byte, 40, 40+len(payload))
	b[0] = 6 << 4
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	b[6], b[7] = next, 64
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	return append(b, payload...)
}

func arp(op uint16, senderMAC net.HardwareAddr, sender string, targetMAC net.HardwareAddr, target string) []byte {
	s, t := netip.MustParseAddr(sender).As4(), netip.MustParseAddr(target).As4()
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, op)
	b = append(append(b, senderMAC...), s[:]...)
	return append(append(b, targetMAC...), t[:]...)
}
