package resolver_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/resolver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// zone is a stand-in for the internet: zone-file lines by lower-case name.
const zone = `
ok.example.         9000 IN A     203.0.113.1
ok.example.         0    IN AAAA  2001:db8::1
ok.example.         60   IN HTTPS 1 evil.example. alpn=h2 ech=AAAA
ok.example.         60   IN TXT   "hello"
ok.example.         60   IN MX    1 evil.example.
ok.example.         60   IN MX    2 mail.ok.example.
ok.example.         60   IN NS    ns.evil.example.
_http._tcp.ok.example. 60 IN SRV  1 1 80 evil.example.
_http._tcp.ok.example. 60 IN SRV  1 1 80 mail.ok.example.
alias.ok.example.   60   IN CNAME cdn.evil.example.
cdn.evil.example.   60   IN CNAME edge.evil.example.
edge.evil.example.  60   IN A     203.0.113.2
loop.ok.example.    60   IN CNAME loop2.ok.example.
loop2.ok.example.   60   IN CNAME loop.ok.example.
rebind.ok.example.  60   IN A     192.168.5.2
rebind.ok.example.  60   IN A     169.254.169.254
rebind.ok.example.  60   IN AAAA  ::ffff:10.0.0.1
half.ok.example.    60   IN A     10.0.0.1
half.ok.example.    60   IN A     203.0.113.3
many.ok.example.    60   IN TXT   "` + "0123456789012345678901234567890123456789012345678901234567890123456789" + `"
`

// upstream answers from zone; chase makes it follow aliases itself.
type upstream struct {
	chase bool

	mu    sync.Mutex
	asked []string
}

// names returns the names that the proxy has asked for so far.
func (u *upstream) names() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.asked)
}

func (u *upstream) ServeDNS(w dns.ResponseWriter, req *dns.Msg) {
	q := req.Question[0]
	u.mu.Lock()
	u.asked = append(u.asked, q.Name)
	u.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(req)
	switch q.Name {
	case "servfail.ok.example.":
		m.Rcode = dns.RcodeServerFailure
	case "liar.ok.example.":
		m.Question[0].Name = "other.example."
		m.Answer = lookup("ok.example.", dns.TypeA, false)
	case "foreign.ok.example.": // records of another owner
		m.Answer = lookup("ok.example.", dns.TypeA, false)
	default:
		m.Answer = lookup(q.Name, q.Qtype, u.chase)
		if len(m.Answer) == 0 && len(lookup(q.Name, dns.TypeANY, false)) == 0 {
			m.Rcode = dns.RcodeNameError
		}
	}
	if q.Name == "many.ok.example." {
		for range 30 {
			m.Answer = append(m.Answer, m.Answer[0])
		}
		if w.RemoteAddr().Network() == "udp" {
			m.Truncate(512)
		}
	}
	_ = w.WriteMsg(m)
}

func lookup(name string, qtype uint16, chase bool) []dns.RR {
	var found []dns.RR
	parser := dns.NewZoneParser(strings.NewReader(zone), ".", "")
	for rr, ok := parser.Next(); ok; rr, ok = parser.Next() {
		if rr.Header().Name != name {
			continue
		}
		switch v := rr.(type) {
		case *dns.CNAME:
			found = append(found, rr)
			if chase && len(found) < 3 && !strings.HasPrefix(name, "loop") {
				found = append(found, lookup(v.Target, qtype, true)...)
			}
		default:
			if rr.Header().Rrtype == qtype || qtype == dns.TypeANY {
				found = append(found, rr)
			}
		}
	}
	return found
}

// setup is a proxy in front of a real stand-in resolver, both on loopback.
type setup struct {
	*upstream
	addr  string
	proxy *resolver.Proxy
	log   func() []guestproto.Query
}

func start(t *testing.T, p *policy.Policy, chase bool) *setup {
	t.Helper()
	return startWith(t, func() *policy.Policy { return p }, chase)
}

func startWith(t *testing.T, p func() *policy.Policy, chase bool) *setup {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	up := &upstream{chase: chase}
	pc, err := resolver.Bind(ctx, "4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	mux := dns.HandlerFunc(up.ServeDNS)
	server := serveStandIn(t, mux)
	var mu sync.Mutex
	var log []guestproto.Query
	proxy := &resolver.Proxy{
		Policy:   p,
		Upstream: &resolver.Upstream{Servers: func() []netip.AddrPort { return []netip.AddrPort{server} }},
		Log: func(q guestproto.Query) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, q)
		},
	}
	proxy.StopClock()
	done := make(chan error, 1)
	go func() { done <- pc.Serve(ctx, proxy) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return &setup{upstream: up, addr: pc.Addr(), proxy: proxy, log: func() []guestproto.Query {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(log)
	}}
}

func serveStandIn(t *testing.T, h dns.Handler) netip.AddrPort {
	t.Helper()
	udp, tcp, addr := listenPair(t)
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait) // runs after both have been shut down
	for _, s := range []*dns.Server{{PacketConn: udp, Handler: h}, {Listener: tcp, Handler: h}} {
		ready := make(chan struct{})
		s.NotifyStartedFunc = func() { close(ready) }
		wg.Go(func() { _ = s.ActivateAndServe() })
		<-ready
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return addr
}

func (s *setup) ask(t *testing.T, network, name string, qtype uint16) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), qtype)
	m.SetEdns0(1232, false)
	c := dns.Client{Net: network}
	reply, _, err := c.ExchangeContext(t.Context(), m, s.addr)
	if err != nil {
		t.Fatalf("%s %s: %v", name, dns.TypeToString[qtype], err)
	}
	return reply
}

func list(names ...string) *policy.Policy {
	p := policy.Default()
	for _, n := range names {
		p.Names = append(p.Names, policy.Rule{Pattern: n, Source: "test"})
	}
	return p
}

// show returns an answer as text: its code if it failed, otherwise its records.
func show(m *dns.Msg) string {
	if m.Rcode != dns.RcodeSuccess {
		return dns.RcodeToString[m.Rcode]
	}
	var s []string
	for _, rr := range m.Answer {
		s = append(s, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	slices.Sort(s)
	return strings.Join(s, "|")
}

func TestAnswers(t *testing.T) {
	for _, chase := range []bool{true, false} {
		s := start(t, list("ok.example", "*.ok.example"), chase)
		for question, want := range map[string]string{
			"ok.example. A":                 "ok.example. 300 IN A 203.0.113.1",
			"oK.eXample. A":                 "oK.eXample. 300 IN A 203.0.113.1",
			"ok.example. AAAA":              "ok.example. 1 IN AAAA 2001:db8::1",
			"ok.example. HTTPS":             "",
			"ok.example. SVCB":              "",
			"ok.example. ANY":               "",
			"ok.example. CNAME":             "",
			"ok.example. SOA":               "",
			"ok.example. TXT":               `ok.example. 60 IN TXT "hello"`,
			"ok.example. MX":                "ok.example. 60 IN MX 2 mail.ok.example.",
			"ok.example. NS":                "NXDOMAIN",
			"_http._tcp.ok.example. SRV":    "_http._tcp.ok.example. 60 IN SRV 1 1 80 mail.ok.example.",
			"alias.ok.example. A":           "alias.ok.example. 60 IN A 203.0.113.2",
			"alias.ok.example. HTTPS":       "",
			"loop.ok.example. A":            "SERVFAIL",
			"rebind.ok.example. A":          "NXDOMAIN",
			"rebind.ok.example. AAAA":       "NXDOMAIN",
			"half.ok.example. A":            "half.ok.example. 60 IN A 203.0.113.3",
			"missing.ok.example. A":         "NXDOMAIN",
			"servfail.ok.example. A":        "SERVFAIL",
			"liar.ok.example. A":            "SERVFAIL",
			"foreign.ok.example. A":         "",
			"evil.example. A":               "NXDOMAIN",
			"edge.evil.example. A":          "NXDOMAIN",
			"1.113.0.203.in-addr.arpa. PTR": "NXDOMAIN",
			". NS":                          "NXDOMAIN",
			`a\.ok.example. A`:              "NXDOMAIN",
			`a\000.ok.example. A`:           "NXDOMAIN",
		} {
			name, qtype, _ := strings.Cut(question, " ")
			for _, network := range []string{"udp", "tcp"} {
				if got := show(s.ask(t, network, name, dns.StringToType[qtype])); got != want {
					t.Errorf("%s (%s, chase %v): got %q, want %q", question, network, chase, got, want)
				}
			}
		}
		for _, name := range s.names() {
			if name != strings.ToLower(name) || strings.HasPrefix(name, "evil.") {
				t.Errorf("asked the network for %s", name)
			}
		}
	}
}

func TestDeniedSaysWhy(t *testing.T) {
	s := start(t, list("ok.example"), true)
	opt := s.ask(t, "udp", "evil.example", dns.TypeA).IsEdns0()
	if opt == nil || len(opt.Option) != 1 {
		t.Fatal("no extended error")
	}
	if ede, ok := opt.Option[0].(*dns.EDNS0_EDE); !ok || ede.InfoCode != dns.ExtendedErrorCodeBlocked || !strings.Contains(ede.ExtraText, "allowlist") {
		t.Errorf("got %v", opt.Option[0])
	}
	s.ask(t, "udp", "ok.example", dns.TypeA)
	log := s.log()
	if len(log) != 2 || log[0].Allowed || log[0].Name != "evil.example." || log[0].Reason == "" || !log[1].Allowed || log[1].Rule != "ok.example" || log[1].Answer[0] != "203.0.113.1" {
		t.Errorf("log: %+v", log)
	}
}

// With network enforcement, the gateway, which is the network's resolver, receives
// denied names. Without it, the proxy sends them nowhere: the query would leave the
// host.
func TestDeniedIsReportedToTheGateway(t *testing.T) {
	for _, enforced := range []bool{false, true} {
		p := list("ok.example")
		p.Enforced = enforced
		s := start(t, p, true)
		for _, name := range []string{"Evil.Example", "ok.example", `a\.b.example`} {
			s.ask(t, "udp", name, dns.TypeAAAA)
		}
		s.proxy.Wait()
		want := "ok.example."
		if enforced {
			want = "evil.example. ok.example."
		}
		asked := s.names()
		slices.Sort(asked)
		if got := strings.Join(asked, " "); got != want {
			t.Errorf("enforced %v: the network was asked for %s", enforced, got)
		}
	}
}

// silent does not answer until it is released.
type silent struct {
	asked   atomic.Int32
	release chan struct{}
}

func (s *silent) Ask(context.Context, string, uint16) (*dns.Msg, error) {
	s.asked.Add(1)
	<-s.release
	return nil, errors.New("no answer")
}

func TestReportsAreBounded(t *testing.T) {
	up := &silent{release: make(chan struct{})}
	pol := list()
	pol.Enforced = true
	p := &resolver.Proxy{Policy: func() *policy.Policy { return pol }, Upstream: up, Log: func(guestproto.Query) {}}
	for i := range 100 {
		m := new(dns.Msg)
		m.SetQuestion(fmt.Sprintf("evil%d.example.", i), dns.TypeA)
		// Reports do not block: Answer returns although none is answered.
		if reply := p.Answer(t.Context(), m, netip.AddrPort{}); reply.Rcode != dns.RcodeNameError {
			t.Fatal(reply)
		}
	}
	close(up.release)
	p.Wait()
	if n := up.asked.Load(); n != 4 {
		t.Errorf("%d reports at once", n)
	}
}

func TestWhoAskedForDenied(t *testing.T) {
	var entries []guestproto.Query
	pol := list("ok.example")
	p := &resolver.Proxy{
		Policy: func() *policy.Policy { return pol }, Upstream: scripted(nil), Log: func(q guestproto.Query) { entries = append(entries, q) },
		Who: func(from netip.AddrPort, name string) string { return from.String() + " " + name },
	}
	for _, name := range []string{"Evil.example.", "ok.example.", `a\000b.`} {
		m := new(dns.Msg)
		m.SetQuestion(name, dns.TypeA)
		p.Answer(t.Context(), m, netip.MustParseAddrPort("127.0.0.1:4321"))
	}
	if len(entries) != 3 || entries[0].Process != "127.0.0.1:4321 evil.example" || entries[1].Process != "" || entries[2].Process != "" || entries[1].Source != "test" {
		t.Errorf("%+v", entries)
	}
}

// A program is looked up until it is found, and then cached.
func TestWhoIsKnownOnceFound(t *testing.T) {
	var looks int
	var entries []guestproto.Query
	pol := list("ok.example")
	p := &resolver.Proxy{
		Policy: func() *policy.Policy { return pol }, Upstream: scripted(nil), Log: func(q guestproto.Query) { entries = append(entries, q) },
		Who: func(netip.AddrPort, string) string {
			looks++
			return []string{"", "curl", "another"}[looks-1]
		},
	}
	for range 4 {
		m := new(dns.Msg)
		m.SetQuestion("evil.example.", dns.TypeA)
		p.Answer(t.Context(), m, netip.MustParseAddrPort("127.0.0.1:4321"))
	}
	if len(entries) != 4 || entries[0].Process != "" || entries[1].Process != "curl" || entries[3].Process != "curl" || looks != 2 {
		t.Errorf("%d looks: %+v", looks, entries)
	}
}

// Answers of the network are cached, decisions are not.
func TestAnswersAreRememberedAndDecidedAnew(t *testing.T) {
	var pol atomic.Pointer[policy.Policy]
	pol.Store(list("ok.example", "*.ok.example"))
	s := startWith(t, pol.Load, true)
	want := func(network, question, answer string) {
		t.Helper()
		if got := show(s.ask(t, network, question, dns.TypeA)); got != answer {
			t.Errorf("%s over %s: %q, want %q", question, network, got, answer)
		}
	}
	for range 3 {
		want("udp", "ok.example", "ok.example. 300 IN A 203.0.113.1")
		want("tcp", "OK.example", "OK.example. 300 IN A 203.0.113.1")
		want("udp", "missing.ok.example", "NXDOMAIN")
	}
	if got := s.names(); len(got) != 4 {
		t.Errorf("the network was asked for %v; only a name that does not exist is asked for again", got)
	}
	want("udp", "rebind.ok.example", "NXDOMAIN") // only private addresses
	open := list("ok.example", "*.ok.example")
	open.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:80")}
	pol.Store(open)
	want("udp", "rebind.ok.example", "rebind.ok.example. 60 IN A 192.168.5.2")
	pol.Store(list("*.ok.example"))
	want("udp", "ok.example", "NXDOMAIN")
	want("tcp", "rebind.ok.example", "NXDOMAIN")
	pol.Store(nil)
	want("udp", "ok.example", "NXDOMAIN")
	if got := s.names(); len(got) != 5 {
		t.Errorf("the network was asked for %v", got)
	}
	log := s.log()
	if n := len(log); n != 9+5 || !log[0].Allowed || log[n-1].Allowed || log[6].Name != "ok.example" || !slices.Equal(log[6].Answer, []string{"203.0.113.1"}) {
		t.Errorf("the log has %d entries: %+v", n, log)
	}
}

func TestModes(t *testing.T) {
	isolated, open := list("ok.example"), policy.Default()
	isolated.Mode, open.Mode = policy.Isolated, policy.Open
	s := start(t, isolated, true)
	if got := show(s.ask(t, "udp", "ok.example", dns.TypeA)); got != "NXDOMAIN" || len(s.names()) > 0 {
		t.Errorf("isolated: %s, asked %v", got, s.names())
	}
	s = start(t, nil, true)
	if got := show(s.ask(t, "udp", "ok.example", dns.TypeA)); got != "NXDOMAIN" || len(s.names()) > 0 {
		t.Errorf("no policy: %s, asked %v", got, s.names())
	}
	s = start(t, open, true)
	if got := show(s.ask(t, "udp", "edge.evil.example", dns.TypeA)); got != "edge.evil.example. 60 IN A 203.0.113.2" {
		t.Errorf("open: %s", got)
	}
	if got := show(s.ask(t, "udp", "rebind.ok.example", dns.TypeA)); got != "NXDOMAIN" {
		t.Errorf("open, private address: %s", got)
	}
	optedIn := list("*.ok.example")
	optedIn.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080")}
	s = start(t, optedIn, true)
	if got := show(s.ask(t, "udp", "rebind.ok.example", dns.TypeA)); got != "rebind.ok.example. 60 IN A 192.168.5.2" {
		t.Errorf("host service: %s", got)
	}
}

func TestLargeAnswersTakeTCP(t *testing.T) {
	s := start(t, list("*.ok.example"), true)
	if m := s.ask(t, "udp", "many.ok.example", dns.TypeTXT); !m.Truncated {
		t.Error("an answer of 2 KB came over UDP whole")
	}
	if m := s.ask(t, "tcp", "many.ok.example", dns.TypeTXT); len(m.Answer) != 31 {
		t.Errorf("got %d records", len(m.Answer))
	}
}

func TestOddMessages(t *testing.T) {
	s := start(t, list("ok.example"), true)
	chaos := new(dns.Msg)
	chaos.SetQuestion("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	two := new(dns.Msg)
	two.SetQuestion("ok.example.", dns.TypeA)
	two.Question = append(two.Question, two.Question[0])
	update := new(dns.Msg)
	update.SetUpdate("ok.example.")
	for name, c := range map[string]struct {
		m     *dns.Msg
		rcode int
	}{
		"class":     {chaos, dns.RcodeRefused},
		"questions": {two, dns.RcodeFormatError},
		"opcode":    {update, dns.RcodeNotImplemented},
	} {
		reply, _, err := new(dns.Client).ExchangeContext(t.Context(), c.m, s.addr)
		if err != nil || reply.Rcode != c.rcode {
			t.Errorf("%s: %v, %v", name, reply, err)
		}
	}
	if len(s.names()) > 0 {
		t.Errorf("asked %v", s.names())
	}
}

func TestConcurrent(t *testing.T) {
	s := start(t, list("ok.example"), true)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 10 {
				m := new(dns.Msg)
				m.SetQuestion("ok.example.", dns.TypeA)
				if reply, _, err := new(dns.Client).ExchangeContext(t.Context(), m, s.addr); err != nil || len(reply.Answer) != 1 {
					t.Errorf("%v, %v", reply, err)
				}
			}
		})
	}
	wg.Wait()
}

// scripted answers with the given bytes.
type scripted []byte

func (s scripted) Ask(context.Context, string, uint16) (*dns.Msg, error) {
	m := new(dns.Msg)
	if m.Unpack(s) != nil {
		return nil, errors.New("not a message")
	}
	return m, nil
}

func FuzzAnswer(f *testing.F) {
	ask := new(dns.Msg)
	ask.SetQuestion("ok.example.", dns.TypeA)
	question, _ := ask.Pack()
	ask.Answer = lookup("rebind.ok.example.", dns.TypeA, true)
	reply, _ := ask.Pack()
	f.Add(question, reply)
	f.Fuzz(func(t *testing.T, question, reply []byte) {
		req := new(dns.Msg)
		if req.Unpack(question) != nil || len(req.Question) != 1 {
			return
		}
		pol := list("ok.example", "*.ok.example")
		logged := 0
		p := &resolver.Proxy{Policy: func() *policy.Policy { return pol }, Upstream: scripted(reply), Log: func(guestproto.Query) { logged++ }}
		m := p.Answer(t.Context(), req, netip.AddrPort{})
		if logged != 1 || m.Id != req.Id {
			t.Fatalf("logged %d times, id %d for %d", logged, m.Id, req.Id)
		}
		if len(m.Answer) > 0 && !pol.Decide(policy.Question{Name: req.Question[0].Name}).Allowed {
			t.Fatalf("answered %s", req.Question[0].Name)
		}
		for _, rr := range m.Answer {
			var addr netip.Addr
			switch v := rr.(type) {
			case *dns.A:
				addr, _ = netip.AddrFromSlice(v.A)
			case *dns.AAAA:
				addr, _ = netip.AddrFromSlice(v.AAAA)
			case *dns.CNAME, *dns.HTTPS, *dns.SVCB:
				t.Fatalf("leads off: %s", rr)
			default:
				continue
			}
			if policy.BlockedReason(addr) != "" {
				t.Fatalf("blocked address: %s", rr)
			}
		}
		if _, err := m.Pack(); err != nil && len(m.Answer) > 0 {
			t.Fatalf("cannot be packed: %v", err)
		}
	})
}

// Lima's name for the host is answered while a service on the host's loopback is
// open.
func TestHostName(t *testing.T) {
	pol := policy.Default()
	p := &resolver.Proxy{
		Policy: func() *policy.Policy { return pol }, Log: func(guestproto.Query) {},
		Host: func() (netip.Addr, bool) { return netip.MustParseAddr("192.168.5.2"), true },
	}
	ask := func(qtype uint16) *dns.Msg {
		m := new(dns.Msg)
		m.SetQuestion("host.Lima.internal.", qtype)
		return p.Answer(t.Context(), m, netip.AddrPort{})
	}
	if r := ask(dns.TypeA); r.Rcode != dns.RcodeNameError {
		t.Errorf("nothing is open: %v", r)
	}
	pol = policy.Default()
	pol.HostServices = []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80")}
	if r := ask(dns.TypeA); r.Rcode != dns.RcodeNameError {
		t.Errorf("a service of the LAN is open: %v", r)
	}
	pol = policy.Default()
	pol.HostServices = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5432")}
	if r := ask(dns.TypeA); r.Rcode != dns.RcodeSuccess || len(r.Answer) != 1 || r.Answer[0].(*dns.A).A.String() != "192.168.5.2" {
		t.Errorf("a service of the host is open: %v", r)
	}
	if r := ask(dns.TypeAAAA); r.Rcode != dns.RcodeSuccess || len(r.Answer) != 0 {
		t.Errorf("AAAA: %v", r)
	}
	// If the policy allows the name, the answer comes from the network.
	pol = list("*.lima.internal")
	pol.HostServices = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5432")}
	p.Upstream = &resolver.Upstream{Servers: func() []netip.AddrPort { return nil }}
	if r := ask(dns.TypeA); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("the name is on the list: %v", r)
	}
}
