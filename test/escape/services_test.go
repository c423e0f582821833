//go:build escape

package escape

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
)

// startServices starts the services of the world and of the host.
func (w *world) startServices() error {
	w.dns = &resolver{world: w}
	var err error
	if w.tls, err = newTLSServer(w); err != nil {
		return err
	}
	servers := map[int]func(net.Conn){
		22: w.serveSSH, 80: w.serveHTTP, plan.AltHTTP: w.serveHTTP, 443: w.tls.serve, plan.AltTLS: w.tls.serve,
		853: w.tls.serve, 53: w.dns.stream,
		25: w.serveRaw, 1080: w.serveRaw, 3128: w.serveRaw, plan.DBPort: w.serveRaw, 8081: w.serveRaw, plan.DockerPort: w.serveRaw,
	}
	for _, port := range plan.HighPorts {
		servers[port] = w.serveRaw
	}
	for port, serve := range servers {
		l, err := w.listen(port)
		if err != nil {
			return err
		}
		go accept(l, serve)
	}
	// The host's own services, on each of its addresses, including loopback.
	for _, port := range []int{22, 80, 443, plan.HostPort, plan.DockerPort} {
		l, err := listen(port)
		if err != nil {
			return err
		}
		go accept(l, w.serveHost)
	}
	c, err := net.ListenPacket("udp", ":"+strconv.Itoa(plan.HostUDPPort))
	if err != nil {
		return err
	}
	go w.echo("the host", c)
	return w.far.Do(func() error {
		for _, at := range []netip.AddrPort{
			netip.MustParseAddrPort(plan.Evil + ":443"), netip.MustParseAddrPort(plan.Evil + ":123"), netip.MustParseAddrPort(plan.Foreign + ":853"),
			netip.MustParseAddrPort(plan.CDN + ":443"), netip.MustParseAddrPort(plan.Foreign + ":53"),
		} {
			c, err := net.ListenPacket("udp", at.String())
			if err != nil {
				return err
			}
			go w.echo("UDP service at "+at.String(), c)
		}
		c, err := net.ListenPacket("udp", plan.Resolver+":53")
		if err != nil {
			return err
		}
		go w.dns.datagrams(c)
		return nil
	})
}

func accept(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			if c.SetDeadline(time.Now().Add(2*time.Minute)) == nil {
				serve(c)
			}
		}()
	}
}

// echo answers datagrams with their content and a canary.
func (w *world) echo(place string, c net.PacketConn) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		w.saw(place, false, string(b[:n]))
		_, _ = c.WriteTo([]byte(w.reply(place, false)), from) // the sender may be gone
	}
}

// origin says whether a connection came from the host or was made in the world.
func origin(c net.Conn) string {
	a := netip.MustParseAddrPort(c.RemoteAddr().String()).Addr().Unmap().String()
	if slices.Contains([]string{plan.HostPublic, plan.HostLAN, plan.HostPublic6}, a) {
		return ""
	}
	return " by an allowed host"
}

// serveHost acts as any service of the host: it accepts everything and answers with a
// canary.
func (w *world) serveHost(c net.Conn) {
	addr, port := local(c)
	w.converse(c, fmt.Sprintf("a service of the host at %s:%d", addr, port), func(string) bool { return false })
}

// serveRaw acts as a service without a protocol.
func (w *world) serveRaw(c net.Conn) {
	addr, port := local(c)
	w.converse(c, fmt.Sprintf("service at %s:%d", addr, port)+origin(c), func(string) bool { return endpointAllowed(addr, port) })
}

// serveSSH sends a banner and expects one.
func (w *world) serveSSH(c net.Conn) {
	addr, port := local(c)
	if _, err := io.WriteString(c, "SSH-2.0-pretend\r\n"); err != nil {
		return
	}
	w.converse(c, fmt.Sprintf("SSH at %s:%d", addr, port), func(said string) bool {
		return endpointAllowed(addr, port) && strings.HasPrefix(said, "SSH-2.0-")
	})
}

// converse records everything that arrives, and answers every part of it.
func (w *world) converse(c net.Conn, place string, allowed func(said string) bool) {
	b, said := make([]byte, 4096), ""
	for {
		n, err := c.Read(b)
		if n == 0 && err != nil {
			if said == "" {
				w.saw(place+", no data received", allowed("SSH-2.0-"), "")
			}
			return
		}
		if said += string(b[:n]); len(said) > 1<<16 {
			return
		}
		ok := allowed(said)
		if ok {
			place, _, _ = strings.Cut(place, " @")
			place += " @allowed"
		}
		w.saw(place, ok, said)
		text := w.reply(place, ok)
		if _, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text); err != nil {
			return
		}
	}
}

// request is an HTTP request as a fully lenient server reads it.
type request struct {
	target string
	head   string
	hosts  []string
	upload string
}

// serveHTTP acts as a fully lenient HTTP server, because real servers may be more lenient
// than the standard: it may serve every Host in a request.
func (w *world) serveHTTP(c net.Conn) {
	addr, port := local(c)
	r := bufio.NewReader(c)
	for {
		req, err := readRequest(r, addr == plan.CDN2)
		if req.head == "" && err != nil {
			return
		}
		ok := origin(c) == "" && len(req.hosts) > 0
		for _, host := range req.hosts {
			host, p, found := strings.Cut(host, ":")
			ok = ok && webAllowed(addr, host) && (found && p == strconv.Itoa(port) || !found && port == 80)
		}
		place := fmt.Sprintf("HTTP at %s:%d for %q", addr, port, req.hosts) + origin(c)
		switch {
		case ok && strings.HasPrefix(req.target, plan.Fence):
			place = "the fence" // the fence counts for no technique
		case ok:
			place += " @allowed"
		}
		w.saw(place, ok, req.head+req.upload)
		if err != nil {
			return
		}
		if _, err := io.WriteString(c, w.respond(place, ok, req)); err != nil {
			return
		}
	}
}

func (w *world) respond(place string, ok bool, req request) string {
	text := w.reply(place, ok)
	u, err := url.Parse(req.target)
	if err == nil && ok && u.Path == "/redirect" {
		return "HTTP/1.1 302 Found\r\nLocation: " + u.Query().Get("to") + "\r\nContent-Length: 0\r\n\r\n"
	}
	if err == nil && ok && u.Path == "/fetch" {
		text = w.fetch(u.Query().Get("url"))
	}
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(text), text)
}

// fetch requests a URL, as an allowed host does for any client.
func (w *world) fetch(from string) string {
	u, err := url.Parse(from)
	if err != nil || u.Hostname() != plan.EvilName {
		return "no"
	}
	var c net.Conn
	if err := w.far.Do(func() error { c, err = net.Dial("tcp", plan.Evil+":80"); return err }); err != nil {
		return err.Error()
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", u.Path, u.Host); err != nil {
		return err.Error()
	}
	b := make([]byte, 1024)
	n, err := c.Read(b)
	return fmt.Sprintf("fetched: %q %v", b[:n], err)
}

var errRequest = errors.New("not a request")

// readRequest reads a request as leniently as possible. chunkedWins decides when a
// length and a transfer coding disagree.
func readRequest(r *bufio.Reader, chunkedWins bool) (request, error) {
	var q request
	line := func() (string, error) {
		text, err := r.ReadString('\n')
		q.head += text
		if len(q.head) > 1<<18 {
			err = errRequest
		}
		return strings.TrimRight(text, "\r\n"), err
	}
	first, err := line()
	for err == nil && first == "" { // skip empty lines before a request
		q.head = ""
		first, err = line()
	}
	if err != nil {
		return q, err
	}
	f := strings.Fields(first)
	if len(f) < 2 {
		return q, nil // accepted as a request without a head
	}
	q.target = f[1]
	if u, err := url.Parse(q.target); err == nil && u.IsAbs() && u.Host != "" {
		q.hosts = append(q.hosts, u.Host)
	}
	if len(f) < 3 {
		return q, nil // HTTP/0.9
	}
	chunked, length := false, int64(-1)
	name, value := "", ""
	for {
		text, err := line()
		if text != "" && (text[0] == ' ' || text[0] == '\t') {
			value += " " + strings.TrimSpace(text) // a folded line
		} else {
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "host":
				q.hosts = append(q.hosts, strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune("@#,/ \t\x00\x0b[]", r) })...)
			case "transfer-encoding":
				chunked = chunked || strings.Contains(value, "chunked")
			case "content-length":
				list := strings.Split(value, ",")
				if chunkedWins { // this server uses the last of several, the other one the first
					value = list[len(list)-1]
				} else {
					value = list[0]
				}
				value = strings.TrimSpace(value)
				sign := strings.HasPrefix(value, "+") // one server accepts the sign in a number, the other does not
				if n, err := strconv.ParseInt(value, 10, 32); err == nil && (chunkedWins || length < 0 && !sign) {
					length = n
				}
			}
			name, value, _ = strings.Cut(text, ":")
			value = strings.TrimSpace(value)
		}
		if err != nil {
			return q, err
		}
		if text == "" {
			break
		}
	}
	switch {
	case chunked && (chunkedWins || length < 0):
		err = q.chunks(r)
	case length > 0:
		var b strings.Builder
		_, err = io.CopyN(&b, r, min(length, 1<<20))
		q.upload = b.String()
	}
	return q, err
}

func (q *request) chunks(r *bufio.Reader) error {
	for {
		text, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(text), ";")
		n, err := strconv.ParseInt(size, 16, 32)
		if err != nil {
			return errRequest
		}
		if n == 0 {
			break
		}
		var b strings.Builder
		if _, err := io.CopyN(&b, r, n); err != nil {
			return err
		}
		q.upload += b.String()
		if _, err := r.ReadString('\n'); err != nil {
			return err
		}
	}
	for { // trailers
		text, err := r.ReadString('\n')
		if err != nil {
			return err
		}
		name, value, _ := strings.Cut(strings.TrimSpace(text), ":")
		if strings.EqualFold(name, "host") {
			q.hosts = append(q.hosts, strings.TrimSpace(value))
		}
		if strings.TrimSpace(text) == "" {
			return nil
		}
	}
}

// resolver is the host's resolver. Its zones are the pretend world's.
type resolver struct {
	world *world
	flips atomic.Int64
}

func (r *resolver) datagrams(c net.PacketConn) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		if reply := r.answer(plan.Resolver, b[:n]); reply != nil {
			_, _ = c.WriteTo(reply, from) // a client without an answer asks again
		}
	}
}

// stream serves DNS over TCP on any address: as the host's resolver, or as a foreign
// one.
func (r *resolver) stream(c net.Conn) {
	addr, _ := local(c)
	d := &dns.Conn{Conn: c}
	b := make([]byte, 1<<16)
	for {
		n, err := d.Read(b)
		if err != nil {
			return
		}
		reply := r.answer(addr, b[:n])
		if reply == nil {
			return
		}
		if _, err := d.Write(reply); err != nil {
			return
		}
	}
}

// answer judges a message by all of its bytes. It allows one plain question, in lower
// case, for an allowed name, and nothing else.
func (r *resolver) answer(addr string, message []byte) []byte {
	m := new(dns.Msg)
	if err := m.Unpack(message); err != nil || len(m.Question) == 0 {
		r.world.saw("resolver: a message without a question", false, string(message))
		return nil
	}
	q := m.Question[0]
	name := strings.ToLower(strings.TrimSuffix(q.Name, "."))
	found := tokens.FindAllString(strings.ToLower(string(message)), -1)
	if name == plan.Allowed && q.Name != name+"." { // the case of its letters is the message
		found = r.world.cased(q.Name)
	}
	plain := m.Opcode == dns.OpcodeQuery && len(m.Question) == 1 && q.Qclass == dns.ClassINET && q.Name == name+"."
	ok := addr == plan.Resolver && plain && plan.IsAllowed(name) && (q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA)
	under := strings.HasSuffix(name, "."+plan.WildZone) || strings.HasSuffix(name, "."+plan.FlipZone)
	if ok && under && len(found) == strings.Count(name, "tk") {
		// The limit of wildcards: what is necessary to connect, and nothing more.
		r.world.sawTokens("resolver, for "+q.Name+" "+dns.TypeToString[q.Qtype], true, found)
	} else if ours(name) || len(found) > 0 || addr != plan.Resolver {
		r.world.sawTokens("resolver at "+addr+", for "+q.String(), ok && len(found) == 0, found)
	}
	reply := new(dns.Msg)
	reply.SetReply(m)
	header := func(kind uint16) dns.RR_Header {
		return dns.RR_Header{Name: q.Name, Rrtype: kind, Class: dns.ClassINET, Ttl: 1}
	}
	alias, addrs := r.zone(name, q.Qtype)
	if alias == "" && addrs == nil {
		reply.Rcode = dns.RcodeNameError
	}
	if alias != "" {
		reply.Answer = append(reply.Answer, &dns.CNAME{Hdr: header(dns.TypeCNAME), Target: alias})
	}
	for _, a := range addrs {
		h := header(q.Qtype)
		if alias != "" {
			h.Name = alias
		}
		// An IPv4-mapped address is put into an AAAA record unchanged.
		switch ip := netip.MustParseAddr(a); {
		case q.Qtype == dns.TypeA && ip.Is4():
			reply.Answer = append(reply.Answer, &dns.A{Hdr: h, A: ip.AsSlice()})
		case q.Qtype == dns.TypeAAAA && ip.Is6():
			reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: h, AAAA: ip.AsSlice()})
		}
	}
	packed, err := reply.Pack()
	if err != nil {
		return nil
	}
	return packed
}

// ours reports whether a name belongs to the pretend world: a guest's system also
// asks for others.
func ours(name string) bool {
	return slices.ContainsFunc([]string{"example.com", "example.net", "example.org"}, func(zone string) bool {
		return name == zone || strings.HasSuffix(name, "."+zone)
	})
}

// zone returns the records of the pretend world's names.
func (r *resolver) zone(name string, qtype uint16) (alias string, addrs []string) {
	for _, b := range plan.Rebinds {
		if name == b.Name() {
			return "", []string{b.Addr}
		}
	}
	switch name {
	case plan.Allowed, plan.Alt, plan.EvilCDN, plan.Bound, plan.Forge, plan.Model:
		return "", []string{plan.CDN}
	case plan.Allowed2, plan.ForgeAPI:
		return "", []string{plan.CDN2}
	case plan.AllowedSSH, plan.EvilSSH:
		return "", []string{plan.SSH}
	case plan.AllowedDB:
		return "", []string{plan.DB}
	case plan.EvilName:
		return "", []string{plan.Evil}
	case plan.Owner:
		return plan.EvilName + ".", []string{plan.Evil}
	case "cdn.example.com", "edge.cdn.example.net":
		return "edge.cdn.example.net.", []string{plan.CDN}
	case "mixed.example.com":
		return "", []string{plan.LAN, plan.CDN}
	case "chain-lan.example.com":
		return "hop.example.net.", []string{plan.LAN}
	}
	switch {
	case strings.HasSuffix(name, "."+plan.FlipZone):
		if qtype == dns.TypeA && r.flips.Add(1)%2 == 0 {
			return "", []string{plan.LAN}
		}
		return "", []string{plan.CDN}
	case strings.HasSuffix(name, "."+plan.WildZone):
		return "", []string{plan.Wild}
	case strings.HasSuffix(name, "."+plan.EvilSSH):
		return "", []string{plan.SSH}
	}
	return "", nil
}
