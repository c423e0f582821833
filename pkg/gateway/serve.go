package gateway

import (
	"errors"
	"io"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// Ports on which the gateway requires a protocol. On other ports it recognises the
// protocol.
const (
	portSSH   = 22
	portHTTP  = 80
	portHTTPS = 443
)

// serve finds out what the dialled address stands for and handles the connection
// accordingly.
func (c *conn) serve() {
	addr := c.to.Addr()
	name, release, ok := c.g.names.acquire(addr)
	defer release()
	switch {
	case ok:
		c.name = name
		c.serveName()
	case fakeRange.Contains(addr):
		c.deny("", decision{Reason: "no name has this address; resolve a name first"})
	case addr == c.g.host:
		c.serveHost()
	default:
		c.serveAddr(c.to)
	}
}

// serveName serves a connection to the address of a name.
func (c *conn) serveName() {
	c.mu.Lock()
	c.unchecked = c.g.allowsUnchecked()
	lax := c.unchecked
	c.mu.Unlock()
	port := c.to.Port()
	if d := c.ask(question{Name: c.name, Port: port}); !d.Allowed {
		c.deny("", d)
		return
	}
	switch {
	case lax && (port != portHTTP || !c.plainProxy()):
		c.serveRaw(protoRaw)
	case port == portHTTPS:
		c.serveTLS()
	case port == portHTTP:
		if guest, err := c.accept(); err == nil {
			c.serveHTTP(guest, nil)
		}
	case port == portSSH:
		c.serveSSH()
	default:
		c.serveUnknown()
	}
}

// plainProxy reports whether the host reaches plain HTTP through a proxy.
func (c *conn) plainProxy() bool {
	via, err := c.g.proxyFor("http", c.name, c.to.Port())
	return err == nil && via != nil
}

// serveHost serves a connection to the gateway's own address. It reaches the opted-in
// services on the host's loopback, on the same port.
func (c *conn) serveHost() {
	for _, s := range c.g.services() {
		if s.Addr().IsLoopback() && s.Port() == c.to.Port() {
			c.serveAddr(s)
			return
		}
	}
	c.deny("", decision{Reason: "the gateway has no service on this port"})
}

// serveAddr serves a connection to an address that does not stand for a name: an
// opted-in service or, in mode open, an address on the internet.
func (c *conn) serveAddr(to netip.AddrPort) {
	d := c.ask(question{Addr: to.Addr(), Port: to.Port()})
	if d.Allowed {
		up, err := c.dialAddr(to)
		if err != nil {
			c.fail(protoRaw, err)
			return
		}
		guest, err := c.accept()
		if err != nil {
			return
		}
		c.open(protoRaw, d, to.Addr())
		c.splice(guest, guest, up)
		return
	}
	c.deny("", d)
}

// serveRaw passes all bytes. It dials first, so that the guest sees a refusal.
func (c *conn) serveRaw(proto string) {
	up, d, addr, err := c.dial()
	if err != nil {
		c.fail(proto, err)
		return
	}
	guest, err := c.accept()
	if err != nil {
		return
	}
	c.open(proto, d, addr)
	c.splice(guest, guest, up)
}

// serveTLS passes a connection whose ClientHello carries the name.
func (c *conn) serveTLS() {
	guest, err := c.accept()
	if err != nil {
		return
	}
	hello, err := readClientHello(c.ctx, guest, nil)
	if err == nil {
		err = hello.check(c.name)
	}
	if err != nil {
		c.deny(protoTLS, decision{Reason: err.Error()})
		return
	}
	up, d, addr, err := c.dial()
	if err != nil {
		c.fail(protoTLS, err)
		return
	}
	c.open(protoTLS, d, addr)
	c.spliceTLS(hello, guest, up)
}

// spliceTLS passes everything after a ClientHello that was checked. Another ClientHello
// must carry the same name.
func (c *conn) spliceTLS(h clientHello, guest *guestEnd, up *upstream) {
	if _, err := up.Write(h.bytes); err != nil {
		return
	}
	if err := up.SetReadDeadline(time.Now().Add(firstTime)); err != nil {
		return
	}
	retry, err := passServerHello(guest, up)
	if err := errors.Join(err, up.SetReadDeadline(time.Time{})); err != nil {
		return
	}
	c.splice(&secondHelloReader{guestEnd: guest, name: c.name, rest: h.rest, retry: retry}, guest, up)
}

// serveSSH passes the server's bytes at once, and the guest's bytes if they begin with
// an SSH banner.
func (c *conn) serveSSH() {
	up, d, addr, err := c.dial()
	if err != nil {
		c.fail(protoSSH, err)
		return
	}
	guest, err := c.accept()
	if err != nil {
		return
	}
	c.open(protoSSH, d, addr)
	c.splice(&sshOnly{guestEnd: guest}, guest, up)
}

// splice copies in both directions until both sides have finished. An end of one stream
// is passed on as an end, and an error as a reset of both sides.
func (c *conn) splice(from io.Reader, guest *guestEnd, up *upstream) {
	var toGuest error
	var wg sync.WaitGroup
	wg.Go(func() {
		defer c.g.recoverPanic()
		ended := false
		defer func() {
			if !ended {
				c.reset(guest, up)
			}
		}()
		toGuest = pump(guest, up)
		ended = toGuest == nil
	})
	fromGuest := pump(up, from)
	if fromGuest != nil {
		c.reset(guest, up)
	}
	wg.Wait()
	c.finish(guest, up, fromGuest, toGuest)
}

// reset aborts both sides, which ends a pump that waits for one of them.
func (c *conn) reset(guest *guestEnd, up *upstream) {
	guest.abort()
	up.abort()
}

// finish reports denials, and closes both sides normally if both streams ended
// normally.
func (c *conn) finish(guest *guestEnd, up *upstream, fromGuest, toGuest error) {
	for _, err := range []error{fromGuest, toGuest} {
		var no *deniedError
		if errors.As(err, &no) {
			c.deny(c.record.Proto, no.decision)
		}
	}
	if fromGuest == nil && toGuest == nil && c.ctx.Err() == nil {
		guest.Close() //nolint:errcheck // both sides have finished
		up.Close()    //nolint:errcheck // likewise
	}
}

type halfCloser interface {
	io.Writer
	CloseWrite() error
}

// Read sizes: small for a waiting connection, of which there may be hundreds, and large
// for one that transfers much.
const (
	smallRead = 4 << 10
	largeRead = 128 << 10
)

var largeReads = sync.Pool{New: func() any { return new([largeRead]byte) }}

// pump copies until the end of the stream and passes the end on.
func pump(to halfCloser, from io.Reader) error {
	small := make([]byte, smallRead)
	for {
		n, err := from.Read(small)
		if n > 0 {
			if _, err := to.Write(small[:n]); err != nil {
				return err
			}
		}
		if err == nil && n == len(small) {
			err = pumpLarge(to, from)
		}
		switch {
		case errors.Is(err, io.EOF):
			if err := to.CloseWrite(); err != nil && !errors.Is(err, syscall.ENOTCONN) {
				return err
			}
			return nil
		case err != nil:
			return err
		}
	}
}

// pumpLarge copies with a large buffer while much data arrives at a time.
func pumpLarge(to io.Writer, from io.Reader) error {
	buffer, ok := largeReads.Get().(*[largeRead]byte)
	if !ok {
		return nil
	}
	defer largeReads.Put(buffer)
	for {
		n, err := from.Read(buffer[:])
		if n > 0 {
			if _, err := to.Write(buffer[:n]); err != nil {
				return err
			}
		}
		if err != nil || n < smallRead {
			return err
		}
	}
}
