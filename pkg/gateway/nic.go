package gateway

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const nicID = 1

// nic is the stack's network card. Unless a VM is connected to it, it drops everything.
type nic struct {
	filter     filter
	lease      deadline // of what the guest sends
	mtu        uint32
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	dropped    func(drop)

	mu        sync.Mutex
	transport *frameTransport // set once
	used      bool            // a VM is or was connected
	detached  chan struct{}
	buffer    []byte // frames of one WritePackets call

	framesIn, framesOut, bytesIn, bytesOut atomic.Uint64
	drops                                  [drops]atomic.Uint64
}

func newNIC(g *Gateway) *nic {
	return &nic{
		filter:   newFilter(g.subnet, g.guest, g.host, g.mac, g.mtu),
		mtu:      uint32(g.mtu),
		detached: make(chan struct{}),
		dropped: func(d drop) {
			if g.quiet.ok("frame " + d.String()) {
				g.report(Record{Kind: KindLink, Reason: "frame dropped: " + d.String()})
			}
		},
	}
}

var errUsed = errors.New("the network card is already connected, or was before")

// attach connects the card to the VM, once in its life. QEMU's end of a stream never
// reconnects, so a second connection would come from another program.
func (l *nic) attach(c *frameTransport) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used {
		return errUsed
	}
	l.transport, l.used = c, true
	return nil
}

func (l *nic) detach() {
	l.mu.Lock()
	l.transport = nil
	l.mu.Unlock()
	close(l.detached)
}

// close ends the use of the card, whether a VM is connected or not.
func (l *nic) close() {
	l.mu.Lock()
	c, was := l.transport, l.used
	l.used = true
	l.mu.Unlock()
	switch {
	case c != nil:
		c.Close() //nolint:errcheck // its reader notices and detaches
	case !was:
		close(l.detached)
	}
}

// input processes one frame from the guest. The caller may reuse the slice afterwards.
func (l *nic) input(frame []byte) {
	l.framesIn.Add(1)
	l.bytesIn.Add(uint64(len(frame)))
	d := l.dispatcher.Load()
	if d == nil {
		return
	}
	why := l.filter.check(frame)
	if l.lease.passed() {
		why = dropLease
	}
	if why != accepted {
		l.drop(why)
		return
	}
	packet := stack.NewPacketBuffer(stack.PacketBufferOptions{
		Payload: buffer.MakeWithData(frame[header.EthernetMinimumSize:]),
	})
	defer packet.DecRef()
	(*d).DeliverNetworkPacket(header.Ethernet(frame).Type(), packet)
}

func (l *nic) drop(why drop) {
	l.drops[why].Add(1)
	l.dropped(why)
}

func (l *nic) count(s *Stats) {
	s.FramesIn, s.FramesOut = l.framesIn.Load(), l.framesOut.Load()
	s.BytesIn, s.BytesOut = l.bytesIn.Load(), l.bytesOut.Load()
	for why := accepted + 1; why < drops; why++ {
		if n := l.drops[why].Load(); n > 0 {
			s.Dropped[why.String()] = n
		}
	}
	l.mu.Lock()
	s.Attached = l.transport != nil
	l.mu.Unlock()
}

// WritePackets sends a batch as one write. The stack splits a large segment into
// frames, so a batch is often everything there is to send.
func (l *nic) WritePackets(packets stack.PacketBufferList) (int, tcpip.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.transport == nil {
		return 0, &tcpip.ErrClosedForSend{}
	}
	n, sum := 0, 0
	l.buffer = l.buffer[:0]
	for _, p := range packets.AsSlice() {
		if len(p.LinkHeader().Slice()) == 0 {
			l.AddHeader(p)
		}
		l.buffer = binary.BigEndian.AppendUint32(l.buffer, uint32(p.Size()))
		for _, part := range p.AsSlices() {
			l.buffer = append(l.buffer, part...)
		}
		sum += p.Size()
		n++
	}
	if err := l.transport.send(l.buffer); err != nil {
		l.drops[dropUnsent].Add(uint64(n))
		if errors.Is(err, errFull) {
			return 0, &tcpip.ErrNoBufferSpace{}
		}
		return 0, &tcpip.ErrClosedForSend{}
	}
	l.framesOut.Add(uint64(n))
	l.bytesOut.Add(uint64(sum))
	return n, nil
}

// AddHeader implements stack.LinkEndpoint.
func (l *nic) AddHeader(p *stack.PacketBuffer) {
	header.Ethernet(p.LinkHeader().Push(header.EthernetMinimumSize)).Encode(&header.EthernetFields{
		SrcAddr: gatewayMAC, DstAddr: p.EgressRoute.RemoteLinkAddress, Type: p.NetworkProtocolNumber,
	})
}

// Attach implements stack.LinkEndpoint.
func (l *nic) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		l.dispatcher.Store(nil)
		return
	}
	l.dispatcher.Store(&d)
}

// Capabilities implements stack.LinkEndpoint. The connection is a socket of this host,
// which corrupts no bits, so the stack does not verify checksums of incoming packets.
func (l *nic) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityResolutionRequired | stack.CapabilityRXChecksumOffload
}

// GSOMaxSize implements stack.GSOEndpoint. It leaves space for the headers of one
// packet.
func (l *nic) GSOMaxSize() uint32 { return 65535 - 200 }

// SupportedGSO implements stack.GSOEndpoint. The stack splits segments itself and
// passes them in a batch.
func (l *nic) SupportedGSO() stack.SupportedGSO { return stack.GVisorGSOSupported }

// The rest of stack.LinkEndpoint, which does not matter for a socket.

func (l *nic) MTU() uint32                             { return l.mtu }
func (l *nic) SetMTU(uint32)                           {}
func (l *nic) MaxHeaderLength() uint16                 { return header.EthernetMinimumSize }
func (l *nic) LinkAddress() tcpip.LinkAddress          { return gatewayMAC }
func (l *nic) SetLinkAddress(tcpip.LinkAddress)        {}
func (l *nic) IsAttached() bool                        { return l.dispatcher.Load() != nil }
func (l *nic) Wait()                                   {}
func (l *nic) Close()                                  {}
func (l *nic) SetOnCloseAction(func())                 {}
func (l *nic) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }
func (l *nic) ParseHeader(*stack.PacketBuffer) bool    { return true }
