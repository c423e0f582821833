package gateway

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"time"
)

const (
	sshBanner    = "SSH-2.0-"
	maxFirstLine = 16 << 10
)

// sshOnly reads from a guest that must speak SSH. It returns no bytes before the start
// of the guest's banner was checked.
type sshOnly struct {
	*guestEnd
	checked bool
}

func (s *sshOnly) Read(b []byte) (int, error) {
	if s.checked {
		return s.guestEnd.Read(b)
	}
	no := &deniedError{decision: decision{Reason: "the client does not speak SSH"}}
	if err := s.SetReadDeadline(time.Now().Add(firstTime)); err != nil {
		return 0, err
	}
	seen := 0
	for seen < len(sshBanner) {
		n, err := s.guestEnd.Read(b[seen:])
		seen += n
		checked := min(seen, len(sshBanner))
		switch {
		case string(b[:checked]) != sshBanner[:checked]:
			return 0, no
		case err != nil && (seen > 0 || isTimeout(err)):
			return 0, no
		case err != nil:
			return 0, err
		}
	}
	s.checked = true
	return seen, s.SetReadDeadline(time.Time{})
}

func isTimeout(err error) bool {
	var e net.Error // the guest's end returns its own error type
	return errors.As(err, &e) && e.Timeout()
}

// protocol is the protocol of a client's first bytes.
type protocol int

const (
	undecided protocol = iota
	speaksTLS
	speaksHTTP
	speaksOther
)

// sniff classifies the first bytes of a client. Input counts as HTTP if its first line
// contains an HTTP version, whatever the method is, because servers accept any. The
// line stays undecided until it ends or has a byte that no server accepts: a control
// character in place of the method, or a NUL. Further bytes never change a decision.
func sniff(b []byte) protocol {
	if speaks, sure := sniffTLS(b); sure {
		return speaks
	}
	line := bytes.TrimLeft(b, "\r\n") // servers of HTTP skip these
	end := bytes.IndexAny(line, "\n\x00")
	if end >= 0 {
		line = line[:end]
	}
	method := line
	if space := bytes.IndexAny(line, " \t"); space >= 0 {
		method = line[:space]
	}
	control := func(r rune) bool { return r < ' ' && r != '\r' || r == 0x7f }
	switch {
	case bytes.ContainsFunc(method, control):
		return speaksOther
	case strings.Contains(strings.ToUpper(string(line)), "HTTP/"):
		return speaksHTTP
	case end >= 0 && bytes.HasPrefix(line, []byte("GET /")): // HTTP/0.9; a second request may follow
		return speaksHTTP
	case end >= 0:
		return speaksOther
	default:
		return undecided
	}
}

// sniffTLS recognises everything that a TLS server accepts, including records before a
// hello or in place of one. It recognises a record of any type, since servers skip
// alerts, and an SSL 2 hello, which has no server name. sure is false for anything
// else.
func sniffTLS(b []byte) (speaks protocol, sure bool) {
	const handshake, changeCipherSpec, heartbeat = 0x16, 0x14, 0x18
	switch {
	case len(b) == 0:
		return undecided, false
	case b[0] == handshake: // would be a control character in text
		return speaksTLS, true
	case b[0] >= changeCipherSpec && b[0] <= heartbeat: // the version, 3.x, follows
		if len(b) < 2 {
			return undecided, true
		}
		return speaksTLS, b[1] == 3
	case b[0]&0x80 != 0: // two bytes of length, then a hello
		if len(b) < 3 {
			return undecided, true
		}
		return speaksTLS, b[2] == 1
	}
	return undecided, false
}

// serveUnknown serves a port that a rule opened and that has no known protocol. If the
// server speaks first, the guest may then send anything, because no TLS or HTTP server
// speaks first.
func (c *conn) serveUnknown() {
	up, d, addr, err := c.dial()
	if err != nil {
		c.fail("", err)
		return
	}
	guest, err := c.accept()
	if err != nil {
		return
	}
	first, server, err := joined{c, guest, up}.firstWords()
	if err != nil {
		c.fail("", err)
		return
	}
	speaks := sniff(first)
	if len(server) > 0 {
		speaks = speaksOther
	}
	if settingsFrame(server) {
		c.deny(protoHTTP, decision{Reason: "HTTP/2 without TLS"})
		return
	}
	switch speaks {
	case speaksTLS:
		h, err := readClientHello(c.ctx, guest, first)
		if err == nil {
			err = h.check(c.name)
		}
		if err != nil {
			c.deny(protoTLS, decision{Reason: err.Error()})
			return
		}
		c.open(protoTLS, d, addr)
		joined{c, guest, up}.spliceTLS(h)
		return
	case speaksHTTP:
		c.serveHTTP(&replayed{Conn: guest, first: bytes.NewReader(first)}, &dialled{up, d, addr})
		return
	case undecided:
		if len(first) >= maxFirstLine {
			c.deny("", decision{Reason: "the first line is too long"})
			return
		}
		c.open(protoRaw, d, addr) // neither side spoke, or the guest sent less than a line
	default:
		c.open(protoRaw, d, addr)
	}
	if _, err := guest.Write(server); err != nil {
		return
	}
	if _, err := up.Write(first); err != nil {
		return
	}
	joined{c, guest, up}.splice(guest)
}

// settingsFrame reports whether b begins with an HTTP/2 SETTINGS frame, which is the
// only frame that may come first.
func settingsFrame(b []byte) bool { return len(b) >= 4 && b[0] == 0 && b[3] == 4 }

// firstWords waits until either side has spoken: the guest enough to recognise its
// protocol, or the server at all.
func (j joined) firstWords() (first, server []byte, err error) {
	type words struct {
		b   []byte
		err error
	}
	long := time.Now().Add(-time.Hour) // makes a read return what it has
	heard := make(chan words, 1)
	j.g.tasks.Go(func() {
		b := make([]byte, smallRead)
		n, err := j.up.Read(b)
		heard <- words{b[:n], errors.Join(err, j.guest.SetReadDeadline(long))}
	})
	b := make([]byte, smallRead)
	var readErr error
	for readErr == nil && sniff(first) == undecided && len(first) < maxFirstLine {
		var n int
		n, readErr = j.guest.Read(b)
		first = append(first, b[:n]...)
	}
	if err := j.up.SetReadDeadline(long); err != nil {
		return nil, nil, err
	}
	w := <-heard
	if err := errors.Join(j.up.SetReadDeadline(time.Time{}), j.guest.SetReadDeadline(time.Time{})); err != nil {
		return nil, nil, err
	}
	// The next read reports an end or an error again.
	for _, err := range []error{readErr, w.err} {
		if err != nil && !errors.Is(err, io.EOF) && !isTimeout(err) {
			return nil, nil, err
		}
	}
	return first, w.b, nil
}
