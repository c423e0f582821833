package gateway

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const toGateway = tcpip.LinkAddress(gatewayMAC)

func tcpHeader(dport uint16, flags header.TCPFlags) []byte {
	b := make([]byte, header.TCPMinimumSize)
	header.TCP(b).Encode(&header.TCPFields{SrcPort: 40000, DstPort: dport, SeqNum: 1, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 1000})
	return b
}

func arpFrame(op header.ARPOp, senderMAC, sender, target string) []byte {
	f := make([]byte, header.EthernetMinimumSize+header.ARPSize)
	mac, _ := net.ParseMAC(guestMAC)
	header.Ethernet(f).Encode(&header.EthernetFields{SrcAddr: tcpip.LinkAddress(mac), DstAddr: header.EthernetBroadcastAddress, Type: header.ARPProtocolNumber})
	a := header.ARP(f[header.EthernetMinimumSize:])
	a.SetIPv4OverEthernet()
	a.SetOp(op)
	m, _ := net.ParseMAC(senderMAC)
	copy(a.HardwareAddressSender(), m)
	copy(a.ProtocolAddressSender(), net.ParseIP(sender).To4())
	copy(a.ProtocolAddressTarget(), net.ParseIP(target).To4())
	return f
}

// changed returns a copy of a frame with one byte changed.
func changed(f []byte, at int, to byte) []byte {
	f = bytes.Clone(f)
	f[at] = to
	return f
}

func frames() map[string]struct {
	frame []byte
	why   drop
} {
	const guest, host = "192.168.5.15", "192.168.5.2"
	const ip = header.EthernetMinimumSize
	syn := ipFrame(toGateway, guest, "203.0.113.1", 6, tcpHeader(443, header.TCPFlagSyn))
	question := udpFrame(toGateway, guest, host, 5000, 53, make([]byte, 20))
	discover := udpFrame(header.EthernetBroadcastAddress, "0.0.0.0", "255.255.255.255", 68, 67, make([]byte, 240))
	ping := []byte{8, 0, 0, 0, 0, 0, 0, 0}
	withOptions := func(options ...byte) []byte {
		f := make([]byte, ip+header.IPv4MinimumSize+len(options)+header.TCPMinimumSize)
		copy(f, syn[:ip+header.IPv4MinimumSize])
		copy(f[ip+header.IPv4MinimumSize:], options)
		copy(f[ip+header.IPv4MinimumSize+len(options):], tcpHeader(443, header.TCPFlagSyn))
		f[ip] = 0x40 | byte((header.IPv4MinimumSize+len(options))/4)
		binary.BigEndian.PutUint16(f[ip+2:], uint16(len(f)-ip))
		return f
	}
	type c = struct {
		frame []byte
		why   drop
	}
	return map[string]c{
		"SYN":                          {syn, accepted},
		"padded":                       {append(bytes.Clone(syn), 0, 0, 0, 0, 0, 0), accepted},
		"question":                     {question, accepted},
		"DHCP":                         {discover, accepted},
		"DHCP renewal":                 {udpFrame(toGateway, guest, host, 68, 67, make([]byte, 240)), accepted},
		"ping":                         {ipFrame(toGateway, guest, host, 1, ping), accepted},
		"ARP for the gateway":          {arpFrame(header.ARPRequest, guestMAC, guest, host), accepted},
		"ARP probe":                    {arpFrame(header.ARPRequest, guestMAC, "0.0.0.0", host), accepted},
		"nothing":                      {nil, dropMalformed},
		"no header":                    {syn[:13], dropMalformed},
		"no packet":                    {syn[:14], dropMalformed},
		"a piece of a packet":          {syn[:40], dropMalformed},
		"longer than the MTU":          {ipFrame(toGateway, guest, host, 6, make([]byte, 1481)), dropTooLong},
		"foreign MAC":                  {changed(syn, 11, 0x57), dropForeignMAC},
		"the gateway's MAC":            {append(append(bytes.Clone(syn[:6]), gatewayMAC...), syn[12:]...), dropForeignMAC},
		"multicast MAC":                {changed(syn, 6, 0x53), dropForeignMAC},
		"to another MAC":               {changed(syn, 5, 0xde), dropDestination},
		"to a multicast MAC":           {changed(syn, 0, 0x01), dropDestination},
		"TCP to everybody's MAC":       {ipFrame(header.EthernetBroadcastAddress, guest, host, 6, tcpHeader(53, header.TCPFlagSyn)), dropDestination},
		"IPv6":                         {changed(changed(syn, 12, 0x86), 13, 0xdd), dropProtocol},
		"VLAN":                         {changed(changed(syn, 12, 0x81), 13, 0x00), dropProtocol},
		"a length and no type":         {changed(changed(syn, 12, 0x00), 13, 0x2e), dropProtocol},
		"version 6 within IPv4":        {changed(syn, ip, 0x65), dropMalformed},
		"header of 16 bytes":           {changed(syn, ip, 0x44), dropMalformed},
		"header of 60 bytes":           {changed(syn, ip, 0x4f), dropMalformed},
		"longer than it is":            {changed(syn, ip+2, 0x05), dropMalformed},
		"shorter than its header":      {changed(changed(syn, ip+2, 0), ip+3, 19), dropMalformed},
		"first fragment":               {changed(syn, ip+6, 0x20), dropFragment},
		"last fragment":                {changed(syn, ip+7, 0x01), dropFragment},
		"loose source route":           {withOptions(0x83, 7, 4, 10, 0, 0, 1, 0), dropOptions},
		"strict source route":          {withOptions(0x89, 7, 4, 10, 0, 0, 1, 0), dropOptions},
		"record route":                 {withOptions(7, 7, 4, 0, 0, 0, 0, 0), dropOptions},
		"another source":               {ipFrame(toGateway, "192.168.5.16", host, 6, tcpHeader(53, header.TCPFlagSyn)), dropForeignSource},
		"the gateway's source":         {ipFrame(toGateway, host, host, 6, tcpHeader(53, header.TCPFlagSyn)), dropForeignSource},
		"loopback source":              {ipFrame(toGateway, "127.0.0.1", host, 6, tcpHeader(53, header.TCPFlagSyn)), dropForeignSource},
		"no source":                    {ipFrame(toGateway, "0.0.0.0", host, 6, tcpHeader(53, header.TCPFlagSyn)), dropForeignSource},
		"to itself":                    {ipFrame(toGateway, guest, guest, 6, tcpHeader(53, header.TCPFlagSyn)), dropDestination},
		"to loopback":                  {ipFrame(toGateway, guest, "127.0.0.1", 6, tcpHeader(22, header.TCPFlagSyn)), dropDestination},
		"to zero":                      {ipFrame(toGateway, guest, "0.0.0.0", 6, tcpHeader(22, header.TCPFlagSyn)), dropDestination},
		"to a multicast group":         {udpFrame(toGateway, guest, "224.0.0.251", 5353, 5353, make([]byte, 20)), dropDestination},
		"to everybody":                 {udpFrame(toGateway, guest, "255.255.255.255", 5000, 5000, make([]byte, 20)), dropDestination},
		"to the network":               {udpFrame(toGateway, guest, "192.168.5.255", 137, 137, make([]byte, 20)), dropDestination},
		"to the network's zero":        {udpFrame(toGateway, guest, "192.168.5.0", 137, 137, make([]byte, 20)), dropDestination},
		"DHCP to another server":       {udpFrame(toGateway, guest, "10.0.0.1", 68, 67, make([]byte, 240)), dropDestination},
		"DHCP from another source":     {udpFrame(header.EthernetBroadcastAddress, "10.0.0.9", "255.255.255.255", 68, 67, make([]byte, 240)), dropForeignSource},
		"DHCP from another port":       {udpFrame(header.EthernetBroadcastAddress, "0.0.0.0", "255.255.255.255", 53, 67, make([]byte, 240)), dropProtocol},
		"UDP longer than it is":        {changed(question, ip+24, 0x05), dropMalformed},
		"UDP shorter than its header":  {changed(question, ip+25, 7), dropMalformed},
		"TCP with a short header":      {changed(syn, ip+32, 0x40), dropMalformed},
		"TCP with a long header":       {changed(syn, ip+32, 0xf0), dropMalformed},
		"TCP without a header":         {ipFrame(toGateway, guest, host, 6, make([]byte, 19)), dropMalformed},
		"GRE":                          {ipFrame(toGateway, guest, host, 47, make([]byte, 40)), dropProtocol},
		"IPv6 in IPv4":                 {ipFrame(toGateway, guest, "192.88.99.1", 41, make([]byte, 60)), dropProtocol},
		"SCTP":                         {ipFrame(toGateway, guest, host, 132, make([]byte, 60)), dropProtocol},
		"IGMP":                         {ipFrame(toGateway, guest, host, 2, make([]byte, 8)), dropProtocol},
		"ping of another":              {ipFrame(toGateway, guest, "8.8.8.8", 1, ping), dropICMP},
		"ICMP redirect":                {ipFrame(toGateway, guest, host, 1, changed(ping, 0, 5)), dropICMP},
		"ICMP too big":                 {ipFrame(toGateway, guest, host, 1, changed(changed(ping, 0, 3), 1, 4)), dropICMP},
		"a piece of ICMP":              {ipFrame(toGateway, guest, host, 1, ping[:7]), dropICMP},
		"ARP for another":              {arpFrame(header.ARPRequest, guestMAC, guest, "192.168.5.3"), dropARP},
		"ARP as the gateway":           {arpFrame(header.ARPReply, guestMAC, host, host), dropARP},
		"ARP with another card within": {arpFrame(header.ARPReply, "52:55:55:00:00:09", guest, host), dropARP},
		"ARP of another operation":     {arpFrame(9, guestMAC, guest, host), dropARP},
		"a piece of ARP":               {arpFrame(header.ARPRequest, guestMAC, guest, host)[:41], dropMalformed},
		"ARP of another hardware":      {changed(arpFrame(header.ARPRequest, guestMAC, guest, host), 15, 6), dropMalformed},
	}
}

func TestFilter(t *testing.T) {
	g := quietGateway(t, nil)
	for name, test := range frames() {
		if why := g.nic.filter.check(test.frame); why != test.why {
			t.Errorf("%s: check(% x) = %q, want %q", name, test.frame[:min(len(test.frame), 60)], why, test.why)
		}
	}
}

func TestDropsAreCounted(t *testing.T) {
	w := newWorld(t, config{})
	mac := changed(ipFrame(toGateway, "192.168.5.15", "192.168.5.2", 6, tcpHeader(53, header.TCPFlagSyn)), 11, 9)
	for range 1000 {
		w.guest.Send(mac)
	}
	w.wait("a dropped frame", func(r Record) bool { return r.Kind == KindLink && r.Reason == "frame dropped: foreign_mac" })
	testenv.WaitFor(t, "1000 frames were dropped", func() bool { return w.g.Stats().Dropped["foreign_mac"] == 1000 })
	if n := len(w.all(func(r Record) bool { return r.Kind == KindLink && !r.Allowed })); n > 100 {
		t.Errorf("%d records of the same drop, want at most 100", n)
	}
}

// TestHostileFrames checks that the gateway survives arbitrary frames, stays within its
// memory bounds, and serves the guest afterwards.
func TestHostileFrames(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:7777")})
	w.server("example.org", 7777, echo)
	before := heapAfterGC()
	random := rand.New(rand.NewPCG(1, 2))
	var seeds [][]byte
	for _, f := range frames() {
		seeds = append(seeds, f.frame)
	}
	mac, _ := net.ParseMAC(guestMAC)
	fill := func(b []byte) {
		for i := range b {
			b[i] = byte(random.Uint32())
		}
	}
	for i := range 20_000 {
		f := bytes.Clone(seeds[random.IntN(len(seeds))])
		switch i % 4 {
		case 0: // random bytes
			f = make([]byte, random.IntN(3000))
			fill(f)
		case 1: // random bytes after a valid Ethernet header
			f = make([]byte, 14+random.IntN(1500))
			fill(f)
			copy(f, gatewayMAC)
			copy(f[6:], mac)
			f[12], f[13] = 8, 0
		default: // a few bytes changed, at the end of the link header or later
			for range 1 + random.IntN(4) {
				if len(f) > 14 {
					f[14+random.IntN(len(f)-14)] = byte(random.Uint32())
				}
			}
			if random.IntN(4) == 0 {
				f = f[:random.IntN(len(f)+1)]
			}
		}
		if err := w.guest.Send(f); err != nil {
			t.Fatalf("Send frame %d (% x): %v", i, f[:min(len(f), 60)], err)
		}
	}
	// Flood an allowed name with SYNs from every port that are never answered.
	fake, err := w.guest.Lookup(w.ctx(), "example.org")
	if err != nil {
		t.Fatal(err)
	}
	for port := range 5000 {
		syn := tcpHeader(443, header.TCPFlagSyn)
		header.TCP(syn).SetSourcePort(uint16(10000 + port))
		header.TCP(syn).SetDestinationPort(uint16(7777 + port%2))
		w.guest.Send(ipFrame(toGateway, "192.168.5.15", fake.String(), 6, syn))
	}
	testenv.WaitFor(t, "25000 frames arrived", func() bool { return w.g.Stats().FramesIn >= 25_000 })
	c := w.dialPatiently("example.org", 7777)
	io.WriteString(c, "alive\n")
	expectRead(t, c, "alive\n")
	if grown := int64(heapAfterGC()) - int64(before); grown > 64<<20 {
		t.Errorf("the heap grew by %d bytes, want at most %d", grown, 64<<20)
	}
	if n := runtime.NumGoroutine(); n > 4000 {
		t.Errorf("%d goroutines run, want at most 4000", n)
	}
}

// dialPatiently retries while a flood takes all places.
func (w *world) dialPatiently(name string, port uint16) net.Conn {
	w.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		c, err := w.guest.DialName(w.ctx(), name, port)
		if err == nil {
			c.SetDeadline(time.Now().Add(patience))
			w.t.Cleanup(func() { c.Close() })
			return c
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("dial %s:%d for %v: %v", name, port, patience, err)
		}
	}
}

func heapAfterGC() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestStreamLengths checks that the gateway does not trust the lengths in the stream.
func TestStreamLengths(t *testing.T) {
	w := newWorld(t, config{unguest: true})
	send := func(n uint32, b []byte) {
		t.Helper()
		if _, err := w.guestEnd.Write(append(binary.BigEndian.AppendUint32(nil, n), b...)); err != nil {
			t.Fatal(err)
		}
	}
	send(0, nil)
	send(1, []byte{1})
	send(70_000, make([]byte, 70_000)) // a frame that no stack produces is skipped
	send(maxSkipped, make([]byte, maxSkipped))
	send(5, []byte("after"))
	testenv.WaitFor(t, "5 frames arrived", func() bool { return w.g.Stats().FramesIn == 5 })
	if d := w.g.Stats().Dropped; d["too_long"] != 2 || d["malformed"] != 3 {
		t.Errorf("Stats().Dropped = %v, want too_long 2, malformed 3", d)
	}
	send(maxSkipped+1, nil) // this is not a stream of frames
	<-w.g.Detached()
	w.wait("the end of the link", func(r Record) bool { return r.Kind == KindLink && r.End })
}

// TestFrozenMachine checks that a VM that does not read blocks nothing: not its own
// frames, not a change of policy, and not Close.
func TestFrozenMachine(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org"), unguest: true})
	ping := ipFrame(toGateway, "192.168.5.15", "192.168.5.2", 1, echoRequest(1400))
	frame := append(binary.BigEndian.AppendUint32(nil, uint32(len(ping))), ping...)
	batch := bytes.Repeat(frame, 100)
	for range 100 {
		if _, err := w.guestEnd.Write(batch); err != nil {
			t.Fatal(err)
		}
	}
	testenv.WaitFor(t, "10000 frames arrived", func() bool { return w.g.Stats().FramesIn == 10_000 })
	w.g.SetPolicy(nil)
	w.g.nic.mu.Lock()
	transport := w.g.nic.transport
	w.g.nic.mu.Unlock()
	transport.mu.Lock()
	waiting := len(transport.pending)
	transport.mu.Unlock()
	if waiting > maxPending {
		t.Errorf("%d bytes wait for the VM, want at most %d", waiting, maxPending)
	}
	if d := w.g.Stats().Dropped; d["unsent"] == 0 {
		t.Errorf("Stats().Dropped = %v, want some unsent frames: the limit was not reached", d)
	}
}

func echoRequest(size int) []byte {
	ping := make([]byte, size)
	header.ICMPv4(ping).SetType(header.ICMPv4Echo)
	header.ICMPv4(ping).SetChecksum(header.ICMPv4Checksum(ping, 0))
	return ping
}

// TestPing checks that only the gateway answers a ping.
func TestPing(t *testing.T) {
	replies := make(chan string, 10)
	w := newWorld(t, config{tap: func(f []byte) {
		ip := header.IPv4(f[header.EthernetMinimumSize:])
		if header.Ethernet(f).Type() == header.IPv4ProtocolNumber && ip.TransportProtocol() == header.ICMPv4ProtocolNumber &&
			header.ICMPv4(ip.Payload()).Type() == header.ICMPv4EchoReply {
			replies <- ip.SourceAddress().String()
		}
	}})
	for _, to := range []string{"8.8.8.8", "192.168.5.1", "192.168.5.2"} {
		w.guest.Send(ipFrame(toGateway, "192.168.5.15", to, 1, echoRequest(64)))
	}
	select {
	case from := <-replies:
		if from != "192.168.5.2" {
			t.Errorf("%s answered the ping, want 192.168.5.2", from)
		}
	case <-time.After(patience):
		t.Fatalf("no answer to the ping within %v", patience)
	}
}
