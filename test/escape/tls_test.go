//go:build escape

package escape

import (
	"bytes"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// tlsServer is every TLS server in the world. It has a certificate for any name and a
// key for Encrypted ClientHello, and records what a client sends before the TLS
// library interprets it.
type tlsServer struct {
	*world
	config *tls.Config
	ech    []byte // an ECHConfigList for clients
	pem    []byte // the certificate
	inner  chan net.Conn
}

func newTLSServer(w *world) (*tlsServer, error) {
	s := &tlsServer{world: w, inner: make(chan net.Conn)}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: append([]string{"*.example.com"}, secretHosts...), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return nil, err
	}
	ech, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	s.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	config := echConfig(ech.PublicKey().Bytes(), plan.Allowed)
	s.ech = append(binary.BigEndian.AppendUint16(nil, uint16(len(config))), config...)
	s.config = &tls.Config{
		NextProtos:               []string{"h2", "http/1.1"},
		Certificates:             []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		EncryptedClientHelloKeys: []tls.EncryptedClientHelloKey{{Config: config, PrivateKey: ech.Bytes(), SendAsRetry: true}},
	}
	web := &http.Server{Handler: s, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	go func() { _ = web.Serve(s) }() // as long as the test runs
	return s, nil
}

// echConfig returns what a server publishes for Encrypted ClientHello (RFC 9849).
func echConfig(key []byte, public string) []byte {
	c := binary.BigEndian.AppendUint16([]byte{7}, 0x0020) // its number; X25519
	c = append(binary.BigEndian.AppendUint16(c, uint16(len(key))), key...)
	c = append(c, 0, 4, 0, 1, 0, 1) // HKDF-SHA256, AES-128-GCM
	c = append(append(c, 64, byte(len(public))), public...)
	c = append(c, 0, 0)
	return append(binary.BigEndian.AppendUint16([]byte{0xfe, 0x0d}, uint16(len(c))), c...)
}

// Accept implements net.Listener; it returns connections after their handshake.
func (s *tlsServer) Accept() (net.Conn, error) { return <-s.inner, nil }

// Close implements net.Listener.
func (s *tlsServer) Close() error { return nil }

// Addr implements net.Listener.
func (s *tlsServer) Addr() net.Addr { return &net.TCPAddr{} }

// handed is a connection that signals when it is no longer in use.
type handed struct {
	net.Conn
	once sync.Once
	done chan struct{}
}

func (h *handed) Close() error {
	h.once.Do(func() { close(h.done) })
	return h.Conn.Close()
}

func (s *tlsServer) serve(c net.Conn) {
	addr, port := local(c)
	hello := &helloTape{Conn: c}
	first := make([]byte, 1)
	if _, err := io.ReadFull(c, first); err != nil {
		s.saw(fmt.Sprintf("TLS port at %s:%d, no data received", addr, port), endpointAllowed(addr, port), "")
		return
	}
	hello.seen = first
	if first[0] != 22 && first[0] != 21 {
		s.converse(c, fmt.Sprintf("no TLS at %s:%d, after %q", addr, port, first), func(string) bool { return false })
		return
	}
	outer := &handed{Conn: &rewound{hello, bytes.NewReader(first)}, done: make(chan struct{})}
	server := tls.Server(outer, s.config)
	err := server.Handshake()
	if err != nil {
		hello.rest()
	}
	h := parseHello(hello.seen)
	ok := webAllowed(addr, strings.Join(h.names, "+")) && len(h.names) == 1 && !h.ech && endpointAllowed(addr, port)
	place := fmt.Sprintf("TLS at %s:%d for %q, ech %v", addr, port, h.names, h.ech)
	s.saw(place, ok, string(hello.seen)+place)
	if err != nil {
		_, _ = io.WriteString(c, s.reply(place, ok)) // for a client that does not read TLS
		return
	}
	if port == 853 {
		s.serveDoT(addr, server)
		return
	}
	if name := server.ConnectionState().ServerName; slices.Contains(secretHosts, name) && server.ConnectionState().NegotiatedProtocol != "h2" {
		s.serveLenient(addr, name, server)
		return
	}
	s.inner <- server
	<-outer.done
}

func (s *tlsServer) serveDoT(addr string, c net.Conn) {
	d := &dns.Conn{Conn: c}
	b := make([]byte, 1<<16)
	if n, err := d.Read(b); err == nil {
		s.saw("DNS over TLS at "+addr, false, string(b[:n]))
		_, _ = io.WriteString(c, s.reply("DNS over TLS", false)) // this is not DNS, but the client reads it
	}
}

// ServeHTTP answers behind TLS: it serves any Host.
func (s *tlsServer) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	a, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	addr, _, _ := net.SplitHostPort(a.String())
	addr = strings.TrimPrefix(addr, "::ffff:")
	if slices.Contains(secretHosts, r.TLS.ServerName) {
		s.serveSecretH2(rw, r, addr, r.TLS.ServerName)
		return
	}
	host, _, _ := strings.Cut(r.Host, ":")
	named := webAllowed(addr, r.TLS.ServerName)
	ok := named && webAllowed(addr, host)
	place := fmt.Sprintf("HTTPS at %s for %q and server name %q", addr, r.Host, r.TLS.ServerName)
	switch {
	case ok:
		place += " @allowed"
	case named && !r.TLS.ECHAccepted:
		place += " inside TLS"
	}
	var head strings.Builder
	_ = r.Header.Write(&head) // a builder takes everything
	s.saw(place, ok, r.URL.String()+"\n"+head.String())
	_, _ = io.WriteString(rw, s.reply(place, ok)) // the client may be gone
}

// helloTape records what a client sent.
type helloTape struct {
	net.Conn
	seen []byte
}

func (t *helloTape) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	if len(t.seen) < 1<<17 {
		t.seen = append(t.seen, b[:n]...)
	}
	return n, err
}

// rest records what else a client sends to a server that did not understand it.
func (t *helloTape) rest() {
	_ = t.SetReadDeadline(time.Now().Add(5 * time.Second)) // the read reports an error
	_, _ = io.Copy(io.Discard, io.LimitReader(t, 1<<17))   // what arrived counts
}

// rewound returns the first byte again.
type rewound struct {
	net.Conn
	first *bytes.Reader
}

func (r *rewound) Read(b []byte) (int, error) {
	if r.first.Len() > 0 {
		return r.first.Read(b)
	}
	return r.Conn.Read(b)
}

// hello is what a fully lenient reader finds in a ClientHello.
type hello struct {
	names []string // of every server name, of any type
	ech   bool
}

// parseHello parses the first handshake message, over any number of records.
func parseHello(b []byte) (h hello) {
	defer func() { _ = recover() }() // truncated: what was read counts
	var message []byte
	for len(b) >= 5 && (len(message) < 4 || len(message) < 4+int(message[1])<<16+int(message[2])<<8+int(message[3])) {
		n := int(binary.BigEndian.Uint16(b[3:]))
		body := b[5:min(len(b), 5+n)]
		if b[0] == 22 {
			message = append(message, body...)
		}
		b = b[5+len(body):]
	}
	r := reader(message[4+2+32:])
	r.take(int(r.number(1)))
	r.take(int(r.number(2)))
	r.take(int(r.number(1)))
	all := reader(r.take(int(r.number(2))))
	for len(all) > 0 {
		kind := all.number(2)
		data := reader(all.take(int(all.number(2))))
		switch kind {
		case 0:
			list := reader(data.take(int(data.number(2))))
			for len(list) > 0 {
				list.number(1)
				h.names = append(h.names, string(list.take(int(list.number(2)))))
			}
		case 0xfe0d:
			h.ech = true
		}
	}
	return h
}

type reader []byte

func (r *reader) take(n int) []byte {
	b := (*r)[:n]
	*r = (*r)[n:]
	return b
}

func (r *reader) number(size int) (n uint) {
	for _, b := range r.take(size) {
		n = n<<8 | uint(b)
	}
	return n
}
