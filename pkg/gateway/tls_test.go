package gateway

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// makeClientHello returns the ClientHello that crypto/tls sends to a name.
func makeClientHello(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		tls.Client(near, c).Handshake()
		near.Close()
	}()
	far.SetDeadline(time.Now().Add(patience))
	head := make([]byte, 5)
	if _, err := io.ReadFull(far, head); err != nil {
		t.Fatal(err)
	}
	rest := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(far, rest); err != nil {
		t.Fatal(err)
	}
	far.Close()
	return append(head, rest...)
}

// echConfigs returns the configuration that a server publishes if it accepts encrypted
// ClientHellos.
func echConfigs(t testing.TB, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	b = append(b, 7)                                 // config id
	b = binary.BigEndian.AppendUint16(b, 0x20)       // X25519
	b = binary.BigEndian.AppendUint16(b, 32)         // key
	b = append(b, key.PublicKey().Bytes()...)        // the key itself
	b = binary.BigEndian.AppendUint16(b, 4)          // suites
	b = append(b, 0, 1, 0, 1, 32, byte(len(public))) // HKDF-SHA256 with AES-128-GCM; maximum name length; the name
	b = append(append(b, public...), 0, 0)
	config := binary.BigEndian.AppendUint16(nil, 0xfe0d)
	config = append(binary.BigEndian.AppendUint16(config, uint16(len(b))), b...)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(config))), config...)
}

func TestTLS(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org", "other.example")})
	w.secureWeb("example.org", 443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.WriteString(rw, r.Proto+" "+r.Host)
	}))
	w.secureWeb("other.example", 443, http.NotFoundHandler())
	status, body, err := w.get(w.client(), "https://example.org/")
	if err != nil || status != 200 || body != "HTTP/2.0 example.org" {
		t.Fatalf("GET https://example.org/ = %d %q, %v, want 200 %q", status, body, err, "HTTP/2.0 example.org")
	}
	opened := w.wait("an allowed TLS connection", func(r Record) bool { return r.Kind == KindTCP && r.Proto == "tls" && r.Allowed })
	if opened.Name != "example.org" || opened.Addr.String() != "203.0.113.1" || opened.Port != 443 || opened.Conn == 0 || opened.Rule != "example.org" {
		t.Errorf("record = %+v, want Name and Rule example.org, Addr 203.0.113.1, Port 443, a Conn", opened)
	}

	hello := makeClientHello(t, &tls.Config{ServerName: "example.org"})
	for name, test := range map[string]struct {
		said   []byte
		reason string
	}{
		"another name":  {makeClientHello(t, &tls.Config{ServerName: "other.example"}), "differs from the dialled name"},
		"no name":       {makeClientHello(t, &tls.Config{InsecureSkipVerify: true}), "without a server name"},
		"a longer name": {makeClientHello(t, &tls.Config{ServerName: "example.org.other.example"}), "differs from the dialled name"},
		"encrypted": {makeClientHello(t, &tls.Config{
			ServerName: "other.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(t, "example.org"),
		}), "encrypted ClientHello"},
		"not TLS":      {[]byte("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"), "first record does not look like a TLS handshake"},
		"SSH":          {[]byte("SSH-2.0-OpenSSH_9.9\r\n"), "not a TLS ClientHello"},
		"SSLv2":        {append([]byte{0x80, 0x2e, 1, 3, 1}, make([]byte, 60)...), "not a TLS ClientHello"},
		"garbage":      {append([]byte{0x16, 3, 1, 0, 40}, make([]byte, 40)...), "not a TLS ClientHello"},
		"a huge hello": {append([]byte{0x16, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, make([]byte, 0x4000-4)...), "not a TLS ClientHello"},
		"two names":    {twoNames(hello), "not a TLS ClientHello"},
		"cut":          {hello[:len(hello)-1], "not a TLS ClientHello: unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			before := len(w.dials())
			c := w.dial("example.org", 443)
			c.Write(test.said)
			if name == "cut" {
				c.(interface{ CloseWrite() error }).CloseWrite()
			}
			expectReset(t, c)
			w.waitDenied(test.reason)
			if n := len(w.dials()); n != before {
				t.Errorf("%d connections were dialled, want %d", n, before)
			}
		})
	}
}

// twoNames returns a hello with two server names: the first for the gateway, the second
// for the server.
func twoNames(hello []byte) []byte {
	one := append([]byte{0, 0, 11}, "example.org"...)
	at := bytes.Index(hello, one)
	h := bytes.Clone(hello)
	copy(h[at+3:], "example.org")
	// The list keeps its length but holds two entries of type host name.
	copy(h[at:], []byte{0, 0, 3, 'a', '.', 'b', 0, 0, 5, 'c', '.', 'd', 'e', 'f'})
	return h
}

func (w *world) dials() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, a := range w.dialled {
		all = append(all, a.String())
	}
	return all
}

// TestTLSInPieces sends the ClientHello in single bytes and in two records.
func TestTLSInPieces(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org")})
	got := make(chan []byte, 1)
	hello := makeClientHello(t, &tls.Config{ServerName: "example.org"})
	body := hello[5:]
	var records []byte
	for len(body) > 0 {
		n := min(100, len(body))
		records = append(binary.BigEndian.AppendUint16(append(records, 0x16, 3, 1), uint16(n)), body[:n]...)
		body = body[n:]
	}
	for name, said := range map[string][]byte{"one record": hello, "many records": records} {
		t.Run(name, func(t *testing.T) {
			w.t = t
			w.server("example.org", 443, func(c net.Conn) {
				b := make([]byte, len(said))
				io.ReadFull(c, b)
				got <- b
				io.WriteString(c, "hello, too")
			})
			c := w.dial("example.org", 443)
			for i := range said {
				c.Write(said[i : i+1])
			}
			expectRead(t, c, "hello, too")
			if got := <-got; !bytes.Equal(got, said) {
				t.Errorf("the server read % x, want % x", got, said)
			}
		})
	}
}

// TestTLSElsewhere checks that TLS is recognised by its content on a port that only a
// rule opened.
func TestTLSElsewhere(t *testing.T) {
	w := newWorld(t, config{policy: allow("example.org:8443")})
	w.secureWeb("example.org", 8443, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, r.Host) }))
	status, body, err := w.get(w.client(), "https://example.org:8443/")
	if err != nil || status != 200 || body != "example.org:8443" {
		t.Fatalf("GET https://example.org:8443/ = %d %q, %v, want 200 %q", status, body, err, "example.org:8443")
	}
	for _, said := range [][]byte{
		makeClientHello(t, &tls.Config{ServerName: "other.example"}),
		makeClientHello(t, &tls.Config{InsecureSkipVerify: true}),
		{0x16, 3, 1, 0, 5, 1, 0, 0, 1, 0},
	} {
		c := w.dial("example.org", 8443)
		c.Write(said)
		expectReset(t, c)
	}
	w.waitDenied("differs from the dialled name")
	w.waitDenied("without a server name")
	w.waitDenied("not a TLS ClientHello")
}

func clientHelloFor(t testing.TB, name string) []byte {
	return makeClientHello(t, &tls.Config{ServerName: name})
}
