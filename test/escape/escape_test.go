//go:build escape

package escape

import (
	"encoding/hex"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/escape/plan"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// arrivalTime is how long a technique may take to be seen when no gateway blocks it.
// Only a technique that does not work takes this long.
const arrivalTime = 5 * time.Second

// guest is one VM whose guest firewall was removed.
type guest struct {
	*suite
	name  string
	stock bool
	port  int    // of another VM's SSH server, on the host's loopback address
	other string // a placeholder of another session
}

type suite struct {
	*realvm.Box
	*world
	t      *testing.T
	attack string
	random string
}

// TestEscape runs the whole suite: its parts share the VMs and run in order.
func TestEscape(t *testing.T) {
	began := time.Now()
	s := &suite{Box: realvm.NewBox(t), world: theWorld, t: t, random: random()}
	s.attack = filepath.Join(s.Home, "attack")
	if err := realvm.Build(t.Context(), s.attack, "./attack", "-tags=escape"); err != nil {
		t.Fatal(err)
	}
	s.Write("ca.pem", string(s.tls.pem))
	s.Env = append(s.Env, "SSL_CERT_FILE="+filepath.Join(s.Home, "ca.pem"))
	s.Write(".config/agent-sessionizer/network-allowlist.txt", strings.Join(plan.AllowedNames(), "\n")+"\n")

	all := selected(t)
	var stock *guest
	if !testing.Short() { // first, because sessions follow the settings
		stock = s.open(false)
	}
	enforced := s.open(true)
	enforced.port = s.sshPort(enforced.name)
	if slices.ContainsFunc(all, func(n int) bool { return plan.Techniques[n-1].Name == "secret-session" }) {
		enforced.other = s.foreignPlaceholder()
	}
	if stock != nil {
		stock.port, enforced.port = enforced.port, s.sshPort(stock.name)
		for _, n := range all {
			stock.show(n)
		}
		stock.settle()
	}
	before, err := listeners()
	if err != nil {
		t.Fatal(err)
	}
	escapes := map[int][]string{}
	start := s.mark()
	for _, n := range all {
		if by := enforced.try(n, before); len(by) > 0 {
			escapes[n] = by
		}
	}
	s.late(start, escapes)
	if stock != nil {
		for _, token := range tokens.FindAllString(s.MustIn(stock.name, "cat /tmp/heard"), -1) {
			if n, ok := s.whose(token, false); ok {
				escapes[n] = append(escapes[n], "another VM's network card")
			}
		}
	}
	if n, err := s.missed(); err != nil || n > 0 {
		t.Errorf("packets missed = %d, %v, want 0", n, err)
	}
	count := 0
	for _, n := range all {
		if plan.Techniques[n-1].Limit == "" {
			count++
		}
	}
	for _, n := range slices.Sorted(maps.Keys(escapes)) {
		t.Errorf("technique %d (%s) escapes: %v, want no escape", n, plan.Techniques[n-1].What, escapes[n])
	}
	s.say("%d limits shown, in %v", len(all)-count, time.Since(began).Round(time.Second))
	verdict = fmt.Sprintf("%d techniques, %d escapes", count, len(escapes))
}

// shortStep is the number of techniques for each one that the short form tries. They
// are ordered by subject, so every subject is tried.
const shortStep = 6

// selected returns the numbers of the techniques to try, by default all. The short
// form tries one of several, those that once escaped, and the limits. While writing a
// technique, ESCAPE_ONLY can list numbers or names.
func selected(t *testing.T) (numbers []int) {
	only := strings.FieldsFunc(os.Getenv("ESCAPE_ONLY"), func(r rune) bool { return r == ',' || r == ' ' })
	for i, technique := range plan.Techniques {
		if len(only) == 0 && testing.Short() && i%shortStep != 0 && !technique.Found && technique.Limit == "" {
			continue
		}
		if len(only) == 0 || slices.ContainsFunc(only, func(o string) bool {
			return o == technique.Name || o == strconv.Itoa(i+1) || strings.HasSuffix(o, "*") && strings.HasPrefix(technique.Name, o[:len(o)-1])
		}) {
			numbers = append(numbers, i+1)
		}
	}
	if len(numbers) == 0 {
		t.Fatalf("techniques for ESCAPE_ONLY=%v = none, want some", only)
	}
	return numbers
}

// say prints progress: the test's own output would add file names.
func (s *suite) say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// open creates a session, removes its guest firewall and copies the attack program
// in.
func (s *suite) open(enforce bool) *guest {
	s.t.Helper()
	s.Write(".config/agent-sessionizer/config.yaml", fmt.Sprintf("network:\n  enforce: %v\n%s", enforce, s.secretSettings(enforce)))
	g := &guest{suite: s, stock: !enforce}
	repo := map[bool]string{true: "enforced", false: "stock"}[enforce]
	path := s.Repo(repo)
	if enforce { // as a clone from GitHub, whose rules are about the session's repository
		if r := s.Run("git", "-C", path, "remote", "add", "origin", "https://"+plan.Forge+"/"+plan.Project); r.Code != 0 {
			s.t.Fatal(r.All())
		}
		s.Asz("trust", path)
	}
	g.name = strings.TrimSpace(s.Asz("open", "-d", "--cpus=1", "--memory=1GiB", "--disk=6GiB", "./"+repo))
	if enforce {
		g.uses()
	}
	s.MustIn(g.name, tearDown(!enforce))
	s.Asz("cp", s.attack, g.name+":/tmp/attack")
	s.MustIn(g.name, "chmod 755 /tmp/attack")
	return g
}

// tearDown returns what root does first: remove the guest firewall and every filter,
// and use the network's own resolver.
func tearDown(stock bool) string {
	resolver := plan.Gateway
	if stock {
		resolver = plan.StockDNS
	}
	return `sudo sh -ec '
systemctl disable --now --quiet agent-guest.service
systemctl stop --quiet docker.socket docker.service containerd.service || true
if systemctl is-active --quiet agent-guest.service; then exit 1; fi
for tables in iptables ip6tables iptables-legacy ip6tables-legacy; do
	command -v $tables >/dev/null || continue
	for table in filter nat mangle raw; do $tables -t $table -F; $tables -t $table -X; done 2>/dev/null || true
	for chain in INPUT OUTPUT FORWARD; do $tables -P $chain ACCEPT || true; done
done
if command -v nft >/dev/null; then nft flush ruleset; fi
rm -f /etc/resolv.conf
echo nameserver ` + resolver + ` >/etc/resolv.conf
for key in all default; do
	sysctl -qw net.ipv4.conf.$key.rp_filter=0 net.ipv4.conf.$key.route_localnet=1
	sysctl -qw net.ipv6.conf.$key.disable_ipv6=0 net.ipv6.conf.$key.accept_ra=2 || true
done
for dev in /sys/class/net/e*; do
	sysctl -qw net.ipv6.conf.${dev##*/}.disable_ipv6=0 net.ipv6.conf.${dev##*/}.accept_ra=2 || true
	# up again, so that the kernel looks for routers
	ip -6 addr show dev ${dev##*/} | grep -q fe80 || sysctl -qw net.ipv6.conf.${dev##*/}.disable_ipv6=1 net.ipv6.conf.${dev##*/}.disable_ipv6=0 || true
done'`
}

// foreignPlaceholder returns the placeholder of another session, which has ended.
func (s *suite) foreignPlaceholder() string {
	s.t.Helper()
	s.Repo("foreign")
	name := strings.TrimSpace(s.Asz("open", "-d", "--cpus=1", "--memory=1GiB", "--disk=6GiB", "./foreign"))
	text := strings.TrimSpace(s.MustIn(name, `printf %s "$`+plan.Key+`"`))
	s.Asz("stop", name) // it stays valid, if anything would accept it
	if !strings.HasPrefix(text, "bk/") || len(s.keys.in(text)) > 0 {
		s.t.Fatalf("placeholder of another session = %q, want one", text)
	}
	return text
}

// sshPort returns the port of a session's SSH server on the host's loopback address.
func (s *suite) sshPort(name string) int {
	s.t.Helper()
	for line := range strings.Lines(s.Asz("ssh-config", name)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "Port" {
			if port, err := strconv.Atoi(f[1]); err == nil {
				return port
			}
		}
	}
	s.t.Fatalf("SSH port of %s = none, want one", name)
	return 0
}

// run tries a technique in the guest. It returns what the guest printed, and the
// index of the first sight that can belong to it.
func (g *guest) run(n int) (token, output string, mark int, err error) {
	technique := plan.Techniques[n-1]
	g.spend(technique.Room)
	token = plan.Token(n, g.stock, g.random)
	g.issue(token)
	mark = g.mark()
	args := []string{"agent-sessionizer", "exec", g.name, "--", "sudo", "/tmp/attack", "-ech", hex.EncodeToString(g.tls.ech), "-port", strconv.Itoa(g.port)}
	if g.stock {
		args = append(args, "-stock")
	}
	if technique.Name == "secret-session" {
		args = append(args, "-other", g.other)
	}
	r := g.Run(append(args, strconv.Itoa(n), token)...)
	if r.Code != 0 || !strings.Contains(r.Stdout, "fence passed") {
		err = fmt.Errorf("exit %d", r.Code)
	}
	output = r.All()
	if technique.Name == "secret-host" {
		for _, place := range g.searchHost() {
			output += "\n" + g.canary + place
		}
	}
	if technique.Room > 0 && g.budget.left() >= technique.Room {
		g.t.Errorf("technique %d: requests within the budget = 0, want %d", n, technique.Room)
	}
	return token, output, mark, err
}

// canaries returns the forbidden places that an output shows, and the secrets.
func (g *guest) canaries(output string) (places []string) {
	for _, name := range g.keys.in(output) {
		places = append(places, "the guest shows "+name)
	}
	output = strings.NewReplacer(`\n`, "\n", `\"`, `"`).Replace(output) // the output is quoted
	for line := range strings.Lines(output) {
		if _, place, ok := strings.Cut(line, g.canary); ok {
			places = append(places, "the guest shows the canary "+strings.TrimSpace(place))
		}
	}
	return places
}

// show tries a technique without an egress gateway. It must work there, or the plan
// must say why it cannot.
func (g *guest) show(n int) {
	technique := plan.Techniques[n-1]
	if technique.Limit != "" {
		return
	}
	if technique.Kills {
		g.say("%3d  no gateway: not tried (%s)  %s", n, technique.NoStock, technique.What)
		return
	}
	token, output, mark, err := g.run(n)
	if err != nil {
		g.t.Errorf("technique %d without the gateway = %v, want nil\n%s", n, err, output)
		return
	}
	works := func() (place string, more <-chan struct{}) {
		if c := g.canaries(output); len(c) > 0 {
			return c[0], nil
		}
		sights, more := g.since(mark)
		for _, s := range sights {
			// A SYN has no space for a token; only techniques use that address.
			bare := s.token == "" && strings.HasPrefix(s.place, "packet: TCP to "+plan.Evil+":")
			if (s.token == token || bare) && !s.allowed {
				return s.place, nil
			}
		}
		return "", more
	}
	place, more := works()
	for end := time.After(arrivalTime); place == "" && technique.NoStock == "" && more != nil; {
		select {
		case <-more:
			place, more = works()
		case <-end:
			more = nil
		}
	}
	switch {
	case place == "" && technique.NoStock != "":
		g.say("%3d  no gateway: cannot (%s)  %s", n, technique.NoStock, technique.What)
	case place == "":
		g.t.Errorf("technique %d without the gateway does not work, so it proves nothing: %s\n%s\nwant it to work", n, technique.What, output)
	case technique.NoStock != "":
		g.t.Errorf("technique %d without the gateway works, at %s, want a failure as the plan says: %s", n, place, technique.NoStock)
	default:
		g.say("%3d  no gateway: out, at %s  %s", n, place, technique.What)
	}
}

// settle turns the VM without a gateway into one that only listens: the second VM.
func (g *guest) settle() {
	g.MustIn(g.name, `sudo sh -ec '
CANARY="`+g.reply("the second VM", false)+`" setsid /tmp/attack listen >/tmp/heard 2>&1 </dev/null &
until grep -q listening /tmp/heard; do sleep 0.2; done
for tables in iptables ip6tables; do
	$tables -A OUTPUT -o lo -j ACCEPT
	$tables -A OUTPUT -p tcp -m multiport --sports 22,`+strconv.Itoa(plan.GuestPort)+` -j ACCEPT
	$tables -P OUTPUT DROP
done'`)
}

// try tries a technique against the gateway, and returns the forbidden places that it
// reached.
func (g *guest) try(n int, before map[string]bool) (escapes []string) {
	technique := plan.Techniques[n-1]
	token, output, mark, err := g.run(n)
	if err != nil {
		g.t.Errorf("technique %d: network afterwards = %v, want it usable\n%s", n, err, output)
	}
	limit := func(place string) bool { return technique.Limit != "" && strings.Contains(place, technique.Reach) }
	shown := ""
	for _, place := range g.canaries(output) {
		if limit(place) {
			shown = place
		} else {
			escapes = append(escapes, place)
		}
	}
	sights, _ := g.since(mark)
	for _, s := range sights {
		switch {
		case s.token == token && limit(s.place):
			shown = s.place
		case !s.allowed && (s.token == token || s.token == "") && !limit(s.place):
			escapes = append(escapes, s.String())
		}
	}
	after, err := listeners()
	if err != nil {
		g.t.Error(err)
	}
	for port := range after {
		if !before[port] {
			escapes = append(escapes, "the host listens at "+port)
		}
	}
	switch {
	case len(escapes) > 0:
		g.say("%3d  ESCAPE %v  %s", n, escapes, technique.What)
		g.t.Logf("technique %d printed:\n%s", n, output)
	case technique.Limit != "" && shown == "":
		g.t.Errorf("technique %d: limit %s does not show, want it to, as in the security model\n%s\n%v", n, technique.What, output, sights)
	case technique.Limit != "":
		g.say("%3d  gateway: limit (%s), seen at %s  %s", n, technique.Limit, shown, technique.What)
	default:
		g.say("%3d  gateway: blocked  %s", n, technique.What)
		if testing.Verbose() && os.Getenv("ESCAPE_ONLY") != "" {
			g.t.Logf("technique %d printed:\n%s\n%v", n, output, sights)
		}
	}
	return escapes
}

// late adds what arrived after its technique had ended.
func (s *suite) late(start int, escapes map[int][]string) {
	sights, _ := s.since(start)
	for _, sight := range sights {
		n, ok := s.whose(sight.token, false)
		if !ok || sight.allowed || len(escapes[n]) > 0 {
			continue
		}
		if t := plan.Techniques[n-1]; t.Limit == "" || !strings.Contains(sight.place, t.Reach) {
			escapes[n] = append(escapes[n], "late: "+sight.String())
		}
	}
}

// whose returns the number of the technique that a token belongs to.
func (s *suite) whose(token string, stock bool) (int, bool) {
	if len(token) < 6 {
		return 0, false
	}
	n, err := strconv.Atoi(token[2:5])
	return n, err == nil && n >= 1 && n <= len(plan.Techniques) && token == plan.Token(n, stock, s.random)
}

// TestPlan checks that the plan is consistent.
func TestPlan(t *testing.T) {
	names := map[string]bool{}
	counted := 0
	for i, technique := range plan.Techniques {
		if technique.Name == "" || technique.What == "" || names[technique.Name] || (technique.Limit == "") != (technique.Reach == "") {
			t.Errorf("technique %d = %+v, want a unique name, a description, limit and reach together", i+1, technique)
		}
		names[technique.Name] = true
		if technique.Limit == "" {
			counted++
		}
	}
	if counted < 40 {
		t.Errorf("techniques = %d, want at least 40", counted)
	}
}

// TestWorld checks that the world is reachable: if it were not, every technique would
// seem to be blocked.
func TestWorld(t *testing.T) {
	for _, addr := range []string{
		plan.Evil, plan.CDN, plan.LAN, plan.Neighbour, plan.Neighbour6, plan.Routed, "172.16.3.4", "192.168.77.1", "100.64.1.1", "169.254.169.254", "168.63.129.16", "192.0.0.192",
		"198.18.7.7", "240.1.2.3", plan.Evil6, "fd00::5", "64:ff9b::a63:5", "2002:a63:5::1",
	} {
		c, err := net.DialTimeout("tcp", net.JoinHostPort(addr, "80"), time.Minute)
		if err != nil {
			t.Error(err)
			continue
		}
		token := plan.Token(1, true, random())
		mark := theWorld.mark()
		if _, err := fmt.Fprintf(c, "GET /%s HTTP/1.1\r\nHost: unknown\r\n\r\n", token); err != nil {
			t.Error(err)
		}
		b := make([]byte, 1024)
		n, err := c.Read(b)
		c.Close()
		if !strings.Contains(string(b[:n]), theWorld.canary) {
			t.Errorf("%s = %q, %v, want %q", addr, b[:n], err, theWorld.canary)
		}
		sights, _ := theWorld.since(mark)
		if !slices.ContainsFunc(sights, func(s sight) bool { return s.token == token && !s.allowed }) {
			t.Errorf("sights of %s = %v, want the request", addr, sights)
		}
	}
	if addrs, err := net.LookupHost(plan.Allowed); err != nil || !slices.Equal(addrs, []string{plan.CDN}) {
		t.Errorf("addresses of %s = %v, %v, want %s", plan.Allowed, addrs, err, plan.CDN)
	}
}
