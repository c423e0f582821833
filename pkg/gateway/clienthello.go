package gateway

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	maxClientHello = 64 << 10
	firstTime      = 60 * time.Second // time in which a client must identify its protocol

	extensionECH = 0xfe0d // RFC 9849
)

// clientHello is a client's TLS ClientHello and the bytes that carried it.
type clientHello struct {
	name      string
	encrypted bool // contains an encrypted ClientHello
	bytes     []byte
	rest      []byte // bytes that arrived together with the hello, after it
}

// check returns an error if the hello is not for name. It rejects an encrypted
// ClientHello, because that could ask the server for a name that the gateway cannot
// see.
func (h clientHello) check(name string) error {
	switch got, err := policy.Canonical(h.name); {
	case h.name == "":
		return errors.New("TLS without a server name")
	case err != nil || got != name:
		return fmt.Errorf("TLS server name %q differs from the dialled name", h.name)
	case h.encrypted:
		return errors.New("TLS with an encrypted ClientHello")
	}
	return nil
}

var errSeen = errors.New("seen")

// readClientHello reads a ClientHello, of which first has already been read. It reads no
// further, except for bytes that arrive together with the hello. crypto/tls assembles
// and parses the hello, and refuses ambiguous input.
func readClientHello(ctx context.Context, c net.Conn, first []byte) (clientHello, error) {
	if err := c.SetReadDeadline(time.Now().Add(firstTime)); err != nil {
		return clientHello{}, err
	}
	var h clientHello
	seen := false
	before := bytes.NewReader(first)
	recording := &recordingConn{Conn: &replayed{Conn: c, first: before}}
	err := tls.Server(recording, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
		h.name, h.encrypted, seen = i.ServerName, slices.Contains(i.Extensions, extensionECH), true
		return nil, errSeen
	}}).HandshakeContext(ctx)
	if !seen {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return h, fmt.Errorf("not a TLS ClientHello: %w", err)
	}
	end, err := helloEnd(recording.read)
	if err != nil {
		return h, err
	}
	h.bytes, h.rest = recording.read[:end:end], slices.Concat(recording.read[end:], first[len(first)-before.Len():])
	return h, c.SetReadDeadline(time.Time{})
}

// recordingConn records everything that is read and discards everything that is written, since
// crypto/tls would answer.
type recordingConn struct {
	net.Conn
	read []byte
}

func (t *recordingConn) Read(b []byte) (int, error) {
	left := maxClientHello - len(t.read)
	if left <= 0 {
		return 0, errors.New("too long for a ClientHello")
	}
	n, err := t.Conn.Read(b[:min(len(b), left)])
	t.read = append(t.read, b[:n]...)
	return n, err
}

func (t *recordingConn) Write(b []byte) (int, error) { return len(b), nil }
func (t *recordingConn) Close() error                { return nil }
