package gateway

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
)

// retryRequest returns a minimal HelloRetryRequest of a server.
func retryRequest() []byte {
	body := append(append([]byte{serverHelloType, 0, 0, 40, 3, 3}, helloRetryRequest...), 0, 0x13, 0x01, 0, 0, 0)
	return record(handshake, body)
}

func record(kind byte, body []byte) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{kind, 3, 3}, uint16(len(body))), body...)
}

// pieces splits the records of b into records of n bytes.
func pieces(b []byte, n int) []byte {
	var cut []byte
	for len(b) > 0 {
		end := recordHeader + int(binary.BigEndian.Uint16(b[3:]))
		for part := range slices.Chunk(b[recordHeader:end], n) {
			cut = append(cut, record(b[0], part)...)
		}
		b = b[end:]
	}
	return cut
}

// TestSecondHello checks that a second ClientHello must carry the name that was
// dialled, as the first one must. A server may ask for a second one, and uses its
// server name.
func TestSecondHello(t *testing.T) {
	first := clientHelloFor(t, "example.org")
	evil := clientHelloFor(t, "evil.example")
	hidden := makeClientHello(t, &tls.Config{
		ServerName: "evil.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(t, "example.org"),
	})
	ccs, early := record(changeCipher, []byte{1}), record(applicationData, []byte("early data"))
	tls12 := record(handshake, slices.Concat([]byte{serverHelloType, 0, 0, 38, 3, 3}, make([]byte, 32), []byte{0, 0x13, 1, 0}))
	both := record(handshake, append(bytes.Clone(first[recordHeader:]), evil[recordHeader:]...))
	for name, test := range map[string]struct {
		first, server, second []byte // second is sent at once if server is nil
		reason                string // "" if it must pass
	}{
		"the same name":          {first, retryRequest(), first, ""},
		"with what is between":   {first, retryRequest(), slices.Concat(ccs, early, early, first, ccs), ""},
		"in pieces":              {first, pieces(retryRequest(), 1), pieces(first, 9), ""},
		"none":                   {first, tls12, slices.Concat(ccs, record(handshake, []byte("\x01 is encrypted, and the first byte a random one"))), ""},
		"none, a certificate":    {first, tls12, record(handshake, []byte{11, 0, 0, 0}), ""},
		"another name":           {first, retryRequest(), evil, "differs from the dialled name"},
		"after a cipher change":  {first, retryRequest(), append(bytes.Clone(ccs), evil...), "differs from the dialled name"},
		"after early data":       {first, retryRequest(), slices.Concat(ccs, early, evil), "differs from the dialled name"},
		"after an alert":         {first, retryRequest(), append(record(alert, []byte{1, 90}), evil...), "differs from the dialled name"},
		"another name in pieces": {first, pieces(retryRequest(), 7), pieces(evil, 1), "differs from the dialled name"},
		"after an empty record":  {first, retryRequest(), append(record(handshake, nil), evil...), "differs from the dialled name"},
		"after a server's alert": {first, append(record(alert, []byte{1, 112}), retryRequest()...), evil, "differs from the dialled name"},
		"encrypted":              {first, retryRequest(), hidden, "encrypted ClientHello"},
		"something else":         {first, retryRequest(), []byte("GET / HTTP/1.1\r\n"), "not a TLS ClientHello"},
		"another message":        {first, retryRequest(), record(handshake, []byte{16, 0, 0, 0}), "not a TLS ClientHello"},
		"in the second's record": {first, retryRequest(), both, "extra data in its record"},
		"in the first's record":  {both, nil, nil, "extra data in its record"},
		"not asked for":          {first, tls12, evil, "did not request it"},
		"in one go":              {append(bytes.Clone(first), evil...), retryRequest(), nil, "differs from the dialled name"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, config{policy: allow("example.org", "example.org:8443")})
			heard := make(chan []byte, 1)
			for _, port := range []uint16{443, 8443} {
				w.server("example.org", port, func(c net.Conn) {
					io.ReadFull(c, make([]byte, min(len(test.first), len(first))))
					c.Write(test.server)
					b := make([]byte, len(test.second))
					if test.reason != "" { // anything that arrives before the end
						b = make([]byte, 1<<16)
					}
					n, _ := io.ReadFull(c, b)
					heard <- b[:n]
					io.WriteString(c, "over")
				})
				c := w.dial("example.org", port)
				c.Write(test.first)
				switch test.reason {
				case "":
					expectRead(t, c, string(test.server))
					c.Write(test.second)
					expectRead(t, c, "over")
					if got := <-heard; !bytes.Equal(got, test.second) {
						t.Errorf("the server read %q, want %q", got, test.second)
					}
				default:
					if test.second != nil {
						expectRead(t, c, string(test.server))
						c.Write(test.second)
					}
					expectReset(t, c)
					w.wait("a TLS denial because "+test.reason, func(r Record) bool {
						return !r.Allowed && r.Proto == protoTLS && r.Port == port && strings.Contains(r.Reason, test.reason)
					})
					if len(w.dials()) > 0 {
						if got := <-heard; bytes.Contains(got, []byte("evil")) || bytes.Contains(got, hidden[:recordHeader+40]) {
							t.Errorf("the server read %q, want nothing of the second ClientHello", got)
						}
					}
				}
			}
		})
	}
}

// Only the four record types of TLS, up to the largest size, are records (RFC 8446, 5.1).
func TestReadRecord(t *testing.T) {
	for kind, want := range map[byte]bool{0: false, changeCipher - 1: false, changeCipher: true, handshake: true, applicationData: true, applicationData + 1: false, 255: false} {
		in := []byte{kind, 3, 3, 0, 2, 'o', 'k'}
		got, isTLS, err := readRecord(bytes.NewReader(in))
		if isTLS != want || err != nil || want && !bytes.Equal(got, in) || !want && len(got) != recordHeader {
			t.Errorf("readRecord of type %d = %q, %t, %v, want %t", kind, got, isTLS, err, want)
		}
	}
	for size, want := range map[int]bool{maxRecord: true, maxRecord + 1: false} {
		in := append(binary.BigEndian.AppendUint16([]byte{applicationData, 3, 3}, uint16(size)), make([]byte, size)...)
		if _, isTLS, err := readRecord(bytes.NewReader(in)); isTLS != want || err != nil {
			t.Errorf("readRecord of %d bytes = %t, %v, want %t", size, isTLS, err, want)
		}
	}
}

// TestHelloRetry checks that clients and servers that agree on the second attempt do so
// through the gateway.
func TestHelloRetry(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Host) }))
	s.TLS = &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP521}, MinVersion: tls.VersionTLS13}
	s.StartTLS()
	t.Cleanup(s.Close)
	w.internet("example.org", 443, s.Listener.Addr().String())
	if status, body, err := w.get(w.client(), "https://example.org/"); err != nil || status != 200 || body != "example.org" {
		t.Fatalf("GET https://example.org/ = %d %q, %v, want 200 %q", status, body, err, "example.org")
	}
}

// TestServerWithoutHello checks that the guest receives the answer of a server that
// does not speak TLS, and the end of a silent one.
func TestServerWithoutHello(t *testing.T) {
	for _, says := range []string{"", "no", "HTTP/1.1 400 Bad Request\r\n\r\n", "\x16\x03\x03\xff\xff too long", "\x15\x03\x03\x00\x02\x02", "\x17\x03\x03\x00\x01x"} {
		w := newWorld(t, config{policy: allow("example.org")})
		w.server("example.org", 443, func(c net.Conn) { io.WriteString(c, says) })
		c := w.dial("example.org", 443)
		c.Write(clientHelloFor(t, "example.org"))
		b, err := io.ReadAll(c)
		if !strings.HasPrefix(says, string(b)) || err == nil && string(b) != says {
			t.Errorf("a server that sends %q: read %q, %v, want the same", says, b, err)
		}
	}
}
