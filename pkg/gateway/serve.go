package gateway

import (
	"bytes"
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
	c.unchecked = c.g.policy.allowsUnchecked()
	lax := c.unchecked
	c.mu.Unlock()
	port := c.to.Port()
	q := question{Name: c.name, Port: port}
	d := c.ask(q)
	if d.Asks {
		if d = c.hold(q, d); d.Allowed {
			d = c.ask(q) // a still newer policy is asked from here on
		}
	}
	if !d.Allowed {
		c.deny("", d)
		return
	}
	switch {
	case port == portHTTPS && c.g.intercepted.Load().find(c.name) != nil:
		c.serveTLS()
	case lax && (port != portHTTP || !c.g.proxy.servesPlain(c.name) && !c.g.policy.Load().ReadsRequests(c.name)):
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

// serveHost serves a connection to the gateway's own address. It reaches the opted-in
// services on the host's loopback, on the same port.
func (c *conn) serveHost() {
	for _, s := range c.g.policy.services() {
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
		joined{c, guest, up}.splice(guest)
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
	joined{c, guest, up}.splice(guest)
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
	x := c.g.intercepted.Load()
	if x.find(c.name) != nil {
		c.serveIntercepted(&replayed{Conn: guest, first: io.MultiReader(bytes.NewReader(hello.bytes), bytes.NewReader(hello.rest))}, x)
		return
	}
	up, d, addr, err := c.dial()
	if err != nil {
		c.fail(protoTLS, err)
		return
	}
	c.open(protoTLS, d, addr)
	joined{c, guest, up}.spliceTLS(hello)
}

// joined is an accepted connection with its connection to the outside.
type joined struct {
	*conn
	guest *guestEnd
	up    *upstream
}

// spliceTLS passes everything after a ClientHello that was checked. Another ClientHello
// must carry the same name.
func (j joined) spliceTLS(h clientHello) {
	if _, err := j.up.Write(h.bytes); err != nil {
		return
	}
	if err := j.up.SetReadDeadline(time.Now().Add(firstTime)); err != nil {
		return
	}
	retry, err := passServerHello(j.guest, j.up)
	if err := errors.Join(err, j.up.SetReadDeadline(time.Time{})); err != nil {
		return
	}
	j.splice(&secondHelloReader{guestEnd: j.guest, name: j.name, rest: h.rest, retry: retry})
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
	joined{c, guest, up}.splice(&sshOnly{guestEnd: guest})
}

// splice copies in both directions until both sides have finished. An end of one stream
// is passed on as an end, and an error as a reset of both sides.
func (j joined) splice(from io.Reader) {
	var toGuest error
	var wg sync.WaitGroup
	wg.Go(func() {
		defer j.g.recoverPanic()
		ended := false
		defer func() {
			if !ended {
				j.reset()
			}
		}()
		toGuest = pump(j.guest, j.up)
		ended = toGuest == nil
	})
	fromGuest := pump(j.up, from)
	if fromGuest != nil {
		j.reset()
	}
	wg.Wait()
	j.finish(fromGuest, toGuest)
}

// reset aborts both sides, which ends a pump that waits for one of them.
func (j joined) reset() {
	j.guest.abort()
	j.up.abort()
}

// finish reports denials, and closes both sides normally if both streams ended
// normally.
func (j joined) finish(fromGuest, toGuest error) {
	for _, err := range []error{fromGuest, toGuest} {
		var no *deniedError
		if errors.As(err, &no) {
			j.deny(j.record.Proto, no.decision)
		}
	}
	if fromGuest == nil && toGuest == nil && j.ctx.Err() == nil {
		j.guest.Close() //nolint:errcheck // both sides have finished
		j.up.Close()    //nolint:errcheck // likewise
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
