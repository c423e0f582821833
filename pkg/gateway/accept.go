package gateway

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// socketBuffer is the buffer size requested for a datagram socket. macOS accepts no
// datagram larger than the buffer, and the default is smaller than a frame.
const socketBuffer = 4 << 20

// socketWait limits how long a connection may take to pass its socket.
const socketWait = 30 * time.Second

// ServeStream accepts the VM's connection on l: length-prefixed frames, as QEMU's
// stream network device sends them. The gateway accepts one VM connection in its life
// and refuses all others. ServeStream returns when l or the gateway is closed.
func (g *Gateway) ServeStream(l net.Listener) error {
	return g.accept(l, func(c net.Conn) { g.attach(newFrameTransport(c, true)) })
}

// ServeDatagram accepts the VM's connection on l. Each connection to l passes one end
// of a datagram socket pair, as Lima's vz driver does. The gateway accepts one VM
// connection in its life and refuses all others. ServeDatagram returns when l or the
// gateway is closed.
func (g *Gateway) ServeDatagram(l *net.UnixListener) error {
	return g.accept(l, func(c net.Conn) {
		u, ok := c.(*net.UnixConn)
		if !ok {
			return
		}
		end, err := receiveSocket(u, socketWait)
		c.Close()
		if err != nil {
			g.refuseConnection(err)
			return
		}
		g.attach(newFrameTransport(end, false))
	})
}

// accept serves connections on l until l or the gateway is closed.
func (g *Gateway) accept(l net.Listener, serve func(net.Conn)) error {
	result := make(chan error, 1)
	if !g.run(l, func() { result <- g.acceptLoop(l, serve) }) {
		return errors.Join(net.ErrClosed, l.Close())
	}
	return <-result
}

func (g *Gateway) acceptLoop(l net.Listener, serve func(net.Conn)) error {
	for {
		c, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED):
			select { // wait, as the shortage may pass
			case <-g.ctx.Done():
				return nil
			case <-time.After(100 * time.Millisecond):
				continue
			}
		case err != nil:
			return err
		}
		if !g.run(c, func() { serve(c) }) {
			c.Close()
		}
	}
}

// attach serves the connection of the VM until it ends.
func (g *Gateway) attach(c *frameTransport) {
	defer c.Close() //nolint:errcheck // it has ended
	if err := g.nic.attach(c); err != nil {
		g.refuseConnection(err)
		return
	}
	defer g.nic.detach()
	if !g.run(c, c.write) {
		return
	}
	g.report(Record{Kind: KindLink, Allowed: true, Reason: "VM connected"})
	err := c.read(func(frame []byte) {
		defer g.recoverPanic()
		g.nic.input(frame)
	})
	reason := "VM disconnected"
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		reason += ": " + clean(err.Error())
	}
	g.report(Record{Kind: KindLink, Allowed: true, End: true, Reason: reason})
}

func (g *Gateway) refuseConnection(err error) {
	g.report(Record{Kind: KindLink, Reason: clean("VM connection refused: " + err.Error())})
}

// receiveSocket receives the only datagram socket that c passes, and fails after wait.
func receiveSocket(c *net.UnixConn, wait time.Duration) (net.Conn, error) {
	if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return nil, err
	}
	const most = 8
	data, control := make([]byte, 1), make([]byte, syscall.CmsgSpace(4*most))
	_, n, _, _, err := c.ReadMsgUnix(data, control)
	if err != nil {
		return nil, fmt.Errorf("receive a socket: %w", err)
	}
	messages, err := syscall.ParseSocketControlMessage(control[:n])
	if err != nil {
		return nil, fmt.Errorf("receive a socket: %w", err)
	}
	var files []*os.File
	for _, m := range messages {
		fds, err := syscall.ParseUnixRights(&m)
		if err != nil {
			continue // this message carries no descriptors
		}
		for _, fd := range fds {
			f := os.NewFile(uintptr(fd), "network card")
			defer f.Close()
			files = append(files, f)
		}
	}
	if len(files) != 1 {
		return nil, fmt.Errorf("number of passed descriptors must be 1, got %d", len(files))
	}
	conn, err := net.FileConn(files[0])
	if err != nil {
		return nil, fmt.Errorf("use the passed descriptor: %w", err)
	}
	u, ok := conn.(*net.UnixConn)
	if !ok || u.LocalAddr().Network() != "unixgram" {
		conn.Close()
		return nil, errors.New("the passed descriptor must be a datagram socket of this host")
	}
	// If the kernel grants smaller buffers, only speed suffers.
	_ = u.SetReadBuffer(socketBuffer)
	_ = u.SetWriteBuffer(socketBuffer)
	return u, nil
}
