//go:build netns

package netguard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// These tests verify the firewall with the kernel's own. Three network namespaces
// represent a guest, a container in it, and everything outside. The test's binary
// runs itself inside them in a role.
const roleEnv = "GUESTD_NETNS_ROLE"

func TestMain(m *testing.M) {
	switch role, arg, _ := strings.Cut(os.Getenv(roleEnv), " "); role {
	case "":
		os.Exit(m.Run())
	case "daemon":
		ctx := context.Background()
		if err := Daemon(ctx, sys.Guest{Root: arg}, "test", nil, func() { fmt.Println("ready") }); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "serve", "internet":
		serve(strings.Fields(arg), role == "internet")
	case "probe":
		json.NewEncoder(os.Stdout).Encode(probe(strings.Split(arg, ",")))
	}
}

// serve echoes on TCP ports and may act as a resolver, also on ports where clients
// do not expect one. Names that start with "asked." return how often it was asked
// for the rest of the name.
func serve(ports []string, resolves bool) {
	for _, port := range ports {
		l, err := net.Listen("tcp", ":"+port)
		if err != nil {
			panic(err)
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go io.Copy(c, c)
			}
		}()
	}
	var mu sync.Mutex
	asked := map[string]byte{}
	h := dns.HandlerFunc(func(w dns.ResponseWriter, req *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(req)
		name, a := req.Question[0].Name, net.IPv4(203, 0, 113, 99)
		mu.Lock()
		if rest, ok := strings.CutPrefix(name, "asked."); ok {
			a = net.IPv4(203, 0, 113, asked[rest])
		} else {
			asked[name]++
		}
		mu.Unlock()
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: 1, Ttl: 60}, A: a}}
		w.WriteMsg(m)
	})
	if resolves {
		go dns.ListenAndServe(":53", "tcp", h)
		go dns.ListenAndServe(":53", "udp", h)
		go dns.ListenAndServe(":443", "udp", h)
		go dns.ListenAndServe(":853", "tcp", h)
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin) // until the test ends
}

// probe returns the result of each "tcp ADDR [SOURCE]" and "dns[/tcp] ADDR NAME".
// Each is preceded by the time to wait for an answer.
func probe(what []string) map[string]string {
	results := map[string]string{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, w := range what {
		wg.Go(func() {
			wait, w, _ := strings.Cut(w, " ")
			patience, err := time.ParseDuration(wait)
			if err != nil {
				panic(err)
			}
			f := strings.Fields(w)
			var r string
			if f[0] == "tcp" {
				d := net.Dialer{Timeout: patience}
				if len(f) > 2 {
					d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(f[2]), 0))
				}
				c, err := d.Dial("tcp", f[1])
				r = verdict(err)
				if err == nil {
					c.Close()
				}
			} else {
				network := strings.TrimPrefix(strings.TrimPrefix(f[0], "dns"), "/")
				m := new(dns.Msg)
				m.SetQuestion(f[2], dns.TypeA)
				reply, _, err := (&dns.Client{Net: network, Timeout: patience}).Exchange(m, f[1])
				if r = verdict(err); err == nil {
					r = dns.RcodeToString[reply.Rcode]
					for _, rr := range reply.Answer {
						r = rr.(*dns.A).A.String()
					}
				}
			}
			mu.Lock()
			results[w] = r
			mu.Unlock()
		})
	}
	wg.Wait()
	return results
}

func verdict(err error) string {
	var timeout net.Error
	switch {
	case err == nil:
		return "open"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence"
	}
	return "refused"
}

type lab struct {
	*testing.T
	guest, outside, container string
	root                      string
	daemon                    *exec.Cmd
}

func newLab(t *testing.T) *lab {
	if os.Geteuid() != 0 {
		t.Fatal("network namespaces need root: sudo go test -tags netns ./pkg/guestagent")
	}
	for _, tool := range []string{"ip", "iptables-restore", "ip6tables-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%s is missing: sudo apt-get install iproute2 iptables", tool)
		}
	}
	id := fmt.Sprint(os.Getpid())
	l := &lab{T: t, guest: "agtg" + id, outside: "agto" + id, container: "agtc" + id, root: t.TempDir()}
	for _, ns := range []string{l.guest, l.outside, l.container} {
		l.sh("ip netns add " + ns)
		t.Cleanup(func() { exec.Command("ip", "netns", "del", ns).Run() })
	}
	l.sh(strings.NewReplacer("G!", "ip -n "+l.guest+" ", "O!", "ip -n "+l.outside+" ", "C!", "ip -n "+l.container+" ", "G$", l.guest, "O$", l.outside, "C$", l.container).Replace(`
ip netns exec O$ sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
ip netns exec G$ sysctl -qw net.ipv4.ip_forward=1
ip link add gw0 netns G$ type veth peer name out0 netns O$
ip link add dock netns G$ type veth peer name eth0 netns C$
G! link set lo up
G! link set gw0 up
G! addr add 192.168.5.15/24 dev gw0
G! addr add 2001:db8:5::15/64 dev gw0 nodad
O! link set lo up
O! link set out0 up
O! addr add 192.168.5.2/24 dev out0
O! addr add 192.168.5.3/24 dev out0
O! addr add 2001:db8:5::2/64 dev out0 nodad
O! addr add 203.0.113.10/32 dev lo
O! addr add 8.8.8.8/32 dev lo
O! addr add 10.1.2.3/32 dev lo
O! addr add 169.254.169.254/32 dev lo
O! addr add 2001:db8:100::10/128 dev lo nodad
O! addr add fd00:1::1/128 dev lo nodad
G! route add default via 192.168.5.2
G! -6 route add default via 2001:db8:5::2
G! link add docker0 type bridge
G! link set docker0 up
G! addr add 172.17.0.1/16 dev docker0
G! link set dock master docker0 up
C! link set lo up
C! link set eth0 up
C! addr add 172.17.0.2/16 dev eth0
C! route add default via 172.17.0.1
ip netns exec G$ iptables -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
ip netns exec G$ iptables -A FORWARD -i docker0 -j ACCEPT
ip netns exec G$ iptables -A FORWARD -o docker0 -j ACCEPT
`))
	l.role(l.outside, "internet 22 25 80 443 8080")
	l.role(l.guest, "serve 22 8000")
	l.role(l.container, "serve 80")
	if err := sys.WriteFile(sys.Guest{Root: l.root}.Path(upstreams), []byte("192.168.5.3\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return l
}

func (l *lab) sh(script string) {
	l.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		l.Fatalf("sh -ec %q: %v: %s", script, err, out)
	}
}

func (l *lab) inGuest(script string) {
	l.Helper()
	l.sh("ip netns exec " + l.guest + " sh -ec '" + script + "'")
}

// role starts this binary in a namespace and waits until it is ready.
func (l *lab) role(ns, role string) *exec.Cmd {
	l.Helper()
	cmd := exec.Command("ip", "netns", "exec", ns, os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		l.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		l.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { stdin.Close(); cmd.Process.Kill(); cmd.Wait() })
	if n, err := io.ReadFull(out, make([]byte, 6)); n != 6 {
		l.Fatalf("%q printed %d bytes, %v, want %q", role, n, err, "ready\n")
	}
	return cmd
}

// expect probes from a namespace. Only probes that expect silence wait until their
// timeout.
func (l *lab) expect(ns string, want map[string]string) {
	l.Helper()
	var what []string
	for w, verdict := range want {
		patience := time.Minute
		if verdict == "silence" {
			patience = 2 * time.Second
		}
		what = append(what, patience.String()+" "+w)
	}
	for w, got := range l.probe(ns, what...) {
		if got != want[w] {
			l.Errorf("from %s: %s = %s, want %s", ns[:4], w, got, want[w])
		}
	}
}

func (l *lab) probe(ns string, what ...string) map[string]string {
	l.Helper()
	cmd := exec.Command("ip", "netns", "exec", ns, os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=probe "+strings.Join(what, ","))
	out, err := cmd.Output()
	if err != nil {
		l.Fatal(err)
	}
	var got map[string]string
	if err := json.Unmarshal(out, &got); err != nil {
		l.Fatal(err)
	}
	return got
}

func (l *lab) set(p *policy.Policy) {
	l.Helper()
	data, err := policy.Marshal(p)
	if err != nil {
		l.Fatal(err)
	}
	s, err := SetPolicy(l.Context(), sys.Guest{Root: l.root}, strings.NewReader(string(data)))
	if err != nil || !s.Ready() {
		l.Fatalf("SetPolicy: status %+v, %v, want ready", s, err)
	}
}

func TestFirewallInNamespaces(t *testing.T) {
	l := newLab(t)
	l.checkOpenLab()
	l.daemon = l.role(l.guest, "daemon "+l.root)
	l.checkLockdown()
	p := policy.Default()
	p.Names = []policy.Rule{{Pattern: "ok.example", Source: "test"}}
	l.set(p)
	l.checkPolicy()
	for _, step := range []struct {
		name  string
		check func(*testing.T, *policy.Policy)
	}{
		{"host service", l.checkHostService},
		{"ports of a name", l.checkPortsOfName},
		{"denied names", l.checkDeniedNames},
		{"reasserted", l.checkReasserted},
		{"counters", l.checkCounters},
		{"isolated ends open connections", l.checkIsolated},
		{"the lockdown script closes the network", l.checkLockdownScript},
	} {
		t.Run(step.name, func(t *testing.T) { step.check(t, p) })
	}
}

// checkOpenLab verifies that the lab itself lets everything through.
func (l *lab) checkOpenLab() {
	l.Helper()
	l.expect(l.guest, map[string]string{"tcp 203.0.113.10:25": "open", "tcp 10.1.2.3:80": "open", "tcp [2001:db8:100::10]:443": "open"})
	l.expect(l.container, map[string]string{"tcp 203.0.113.10:25": "open"})
}

// checkLockdown checks the daemon without a policy.
func (l *lab) checkLockdown() {
	l.Helper()
	l.expect(l.guest, map[string]string{
		"tcp 203.0.113.10:443":         "refused",
		"tcp [2001:db8:100::10]:443":   "refused",
		"dns 127.0.0.1:53 ok.example.": "NXDOMAIN",
		"tcp 127.0.0.1:8000":           "open",
	})
	l.expect(l.outside, map[string]string{"tcp 192.168.5.15:22 192.168.5.2": "open", "tcp 192.168.5.15:8000": "silence"})
}

// checkPolicy checks what guest, outside and container reach with a policy that allows
// one name.
func (l *lab) checkPolicy() {
	l.Helper()
	l.expect(l.guest, map[string]string{
		"tcp 203.0.113.10:443":                    "open",
		"tcp 203.0.113.10:80":                     "open",
		"tcp 203.0.113.10:22":                     "open",
		"tcp 203.0.113.10:25":                     "refused",
		"tcp 203.0.113.10:853":                    "refused",
		"tcp 10.1.2.3:443":                        "refused",
		"tcp 169.254.169.254:80":                  "refused",
		"tcp 192.168.5.2:22":                      "refused",
		"tcp 192.168.5.2:8080":                    "refused",
		"tcp 192.168.5.3:80":                      "refused",
		"tcp [2001:db8:100::10]:443":              "open",
		"tcp [2001:db8:100::10]:25":               "refused",
		"tcp [fd00:1::1]:443":                     "refused",
		"tcp 172.17.0.2:80":                       "open",
		"dns 127.0.0.1:53 ok.example.":            "203.0.113.99",
		"dns/tcp 127.0.0.1:53 ok.example.":        "203.0.113.99",
		"dns [::1]:53 ok.example.":                "203.0.113.99",
		"dns 127.0.0.1:53 evil.example.":          "NXDOMAIN",
		"dns 8.8.8.8:53 evil.example.":            "NXDOMAIN", // redirected
		"dns/tcp 8.8.8.8:53 evil.example.":        "NXDOMAIN",
		"dns 192.168.5.3:53 evil.example.":        "NXDOMAIN",
		"dns 8.8.8.8:53 ok.example.":              "203.0.113.99",
		"dns [2001:db8:100::10]:53 evil.example.": "NXDOMAIN",
		"dns 203.0.113.10:443 evil.example.":      "refused", // UDP 443
	})
	l.expect(l.outside, map[string]string{
		"tcp 192.168.5.15:22 192.168.5.2": "open",
		"tcp 192.168.5.15:22 192.168.5.3": "silence",
		"tcp 192.168.5.15:8000":           "silence",
		"tcp 192.168.5.15:1053":           "silence",
		"tcp [2001:db8:5::15]:22":         "silence",
		"tcp 172.17.0.2:80":               "refused", // no route
	})
	l.sh("ip -n " + l.outside + " route add 172.17.0.0/16 via 192.168.5.15")
	l.expect(l.outside, map[string]string{"tcp 172.17.0.2:80": "silence"})
	l.expect(l.container, map[string]string{
		"tcp 203.0.113.10:443":               "open",
		"tcp 203.0.113.10:25":                "refused",
		"tcp 10.1.2.3:443":                   "refused",
		"tcp 192.168.5.2:22":                 "refused",
		"tcp 172.17.0.1:8000":                "refused",
		"dns 8.8.8.8:53 ok.example.":         "203.0.113.99",
		"dns/tcp 8.8.8.8:53 evil.example.":   "NXDOMAIN",
		"dns 8.8.8.8:53 evil.example.":       "NXDOMAIN",
		"dns 172.17.0.1:53 ok.example.":      "203.0.113.99",
		"dns 203.0.113.10:443 evil.example.": "refused",
	})
}

// checkHostService opens services of the host and its loopback.
func (l *lab) checkHostService(t *testing.T, p *policy.Policy) {
	opted := policy.Default()
	opted.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080")}
	l.set(opted)
	l.expect(l.guest, map[string]string{"tcp 192.168.5.2:8080": "open", "tcp 192.168.5.2:80": "refused", "tcp 192.168.5.3:8080": "refused"})
	l.expect(l.container, map[string]string{"tcp 192.168.5.2:8080": "open"})
	// The host's own loopback is reached at the gateway's address.
	opted = policy.Default()
	opted.HostServices = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:8080")}
	l.set(opted)
	l.expect(l.guest, map[string]string{"tcp 192.168.5.2:8080": "open", "tcp 192.168.5.2:80": "refused", "tcp 192.168.5.3:8080": "refused", "tcp 10.1.2.3:8080": "refused"})
	l.set(p)
}

// checkPortsOfName opens the ports of a single name.
func (l *lab) checkPortsOfName(t *testing.T, p *policy.Policy) {
	own := policy.Default()
	own.Ports = []uint16{443}
	own.Names = []policy.Rule{{Pattern: "ok.example", Ports: []uint16{8080, 22}}}
	l.set(own)
	l.expect(l.guest, map[string]string{"tcp 203.0.113.10:8080": "open", "tcp 203.0.113.10:22": "open", "tcp 203.0.113.10:443": "open", "tcp 203.0.113.10:80": "refused"})
	l.set(p)
}

// checkDeniedNames checks who receives and who logs denied names, with and without network
// enforcement.
func (l *lab) checkDeniedNames(t *testing.T, p *policy.Policy) {
	// So far no denied name was sent outside, and none is without network
	// enforcement.
	l.expect(l.guest, map[string]string{"dns 127.0.0.1:53 named.example.": "NXDOMAIN", "dns 8.8.8.8:53 far.example.": "NXDOMAIN"})
	l.expect(l.container, map[string]string{"dns 8.8.8.8:53 inner.example.": "NXDOMAIN"})
	for _, name := range []string{"evil", "named", "far", "inner"} {
		l.expect(l.outside, map[string]string{"dns 192.168.5.3:53 asked." + name + ".example.": "203.0.113.0"})
	}
	// The log names the program that asked, if it can be found.
	var out strings.Builder
	if err := PrintLog(t.Context(), sys.Guest{Root: l.root}, &out, LogOptions{Since: -1}); err != nil {
		t.Fatal(err)
	}
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	us, found := strings.TrimSpace(string(comm)), 0
	for q, err := range guestproto.Queries(strings.NewReader(out.String())) {
		if err != nil {
			t.Fatal(err)
		}
		want, ok := map[string]string{"named.example.": us, "far.example.": us, "inner.example.": ""}[q.Name]
		if !ok {
			continue
		}
		if found++; q.Process != want {
			t.Errorf("process that asked for %s = %q, want %q", q.Name, q.Process, want)
		}
	}
	if found != 3 {
		t.Errorf("%d denied names are in the log, want 3", found)
	}

	enforced := policy.Default()
	enforced.Enforced = true
	l.set(enforced)
	l.expect(l.guest, map[string]string{"dns 127.0.0.1:53 told.example.": "NXDOMAIN"})
	l.until("the network's resolver hears of it", func() bool {
		w := "dns 192.168.5.3:53 asked.told.example."
		return l.probe(l.outside, "1m "+w)[w] == "203.0.113.1"
	})
	l.set(p)
}

// checkReasserted damages the rules in several ways and waits for the daemon to repair them.
func (l *lab) checkReasserted(t *testing.T, p *policy.Policy) {
	for _, damage := range []string{
		"iptables -D OUTPUT -j AGENT-OUT; iptables -P OUTPUT ACCEPT",
		"iptables -I OUTPUT -j ACCEPT",
		"iptables -I AGENT-EGRESS -j ACCEPT",
		"ip6tables -I OUTPUT -j ACCEPT",
		"iptables -t nat -I OUTPUT -p udp -j ACCEPT",
		"iptables -N DOCKER-FORWARD; iptables -I FORWARD -j DOCKER-FORWARD; iptables -A DOCKER-FORWARD -j ACCEPT",
		"iptables -F; iptables -t nat -F; iptables -P OUTPUT ACCEPT; iptables -P FORWARD ACCEPT; iptables -P INPUT ACCEPT",
	} {
		before := l.reasserted()
		l.inGuest(damage)
		l.until(damage, func() bool { return l.reasserted() > before })
		l.expect(l.guest, map[string]string{
			"tcp 203.0.113.10:25": "refused", "tcp [2001:db8:100::10]:25": "refused",
			"tcp 203.0.113.10:443": "open", "dns 8.8.8.8:53 evil.example.": "NXDOMAIN",
		})
		l.inGuest("iptables -t nat -C POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE 2>/dev/null || iptables -t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE")
		l.expect(l.container, map[string]string{"tcp 203.0.113.10:25": "refused", "tcp 203.0.113.10:443": "open"})
	}
	calm := l.reasserted()
	l.until("a second look", l.ticks(2))
	if got := l.reasserted(); got != calm {
		t.Errorf("rules were reasserted %d times without damage, want 0", got-calm)
	}
}

// checkCounters checks that decisions and refused packets are counted.
func (l *lab) checkCounters(t *testing.T, p *policy.Policy) {
	s, err := Ask(t.Context(), sys.Guest{Root: l.root}, "status")
	if err != nil || s.Counters.Denied == 0 || s.Counters.Allowed == 0 || s.Counters.Dropped["AGENT-EGRESS"] == 0 || s.Counters.Dropped["AGENT-IN"] == 0 || !s.Firewall.IPv6 {
		t.Errorf("status = %+v, %v, want IPv6, and allowed, denied and dropped counts above 0", s, err)
	}
}

// checkIsolated checks that the isolated mode ends open connections.
func (l *lab) checkIsolated(t *testing.T, p *policy.Policy) {
	if !l.echoes(func() {}) {
		t.Fatal("no echo of an open connection, want one")
	}
	isolated := policy.Default()
	isolated.Mode = policy.Isolated
	if l.echoes(func() { l.set(isolated) }) {
		t.Error("an open connection carries data after the policy isolated, want that it has ended")
	}
	l.expect(l.guest, map[string]string{"tcp 203.0.113.10:443": "refused", "dns 127.0.0.1:53 ok.example.": "NXDOMAIN"})
	l.expect(l.outside, map[string]string{"tcp 192.168.5.15:22 192.168.5.2": "open"})
}

// checkLockdownScript kills the daemon and runs the script that replaces it.
func (l *lab) checkLockdownScript(t *testing.T, p *policy.Policy) {
	l.set(p)
	if err := l.daemon.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	l.daemon.Wait()
	l.expect(l.guest, map[string]string{"tcp 203.0.113.10:443": "open", "tcp 203.0.113.10:25": "refused", "dns 8.8.8.8:53 ok.example.": "refused"})
	if _, err := os.Stat(sys.Binary); err == nil {
		t.Fatalf("%s exists on this machine and would be run, want none: remove it", sys.Binary)
	}
	script := l.root + "/lockdown.sh"
	if err := os.WriteFile(script, []byte(rules.LockdownScript()), 0o600); err != nil {
		t.Fatal(err)
	}
	l.inGuest("sh " + script + "; sh " + script)
	l.expect(l.guest, map[string]string{"tcp 203.0.113.10:443": "refused", "tcp [2001:db8:100::10]:443": "refused", "dns 8.8.8.8:53 ok.example.": "refused"})
	l.expect(l.outside, map[string]string{"tcp 192.168.5.15:22 192.168.5.2": "open", "tcp 192.168.5.15:8000": "silence"})
}

// echoes reports whether a connection out of the guest still carries data after a
// call to between.
func (l *lab) echoes(between func()) bool {
	l.Helper()
	cmd := exec.Command("ip", "netns", "exec", l.guest, "bash", "-c",
		"exec 3<>/dev/tcp/203.0.113.10/443; echo up; read -r; echo ping >&3; read -r -t 60 x <&3; echo got:$x")
	in, errIn := cmd.StdinPipe()
	out, errOut := cmd.StdoutPipe()
	if err := errors.Join(errIn, errOut, cmd.Start()); err != nil {
		l.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("up\n"))); err != nil {
		l.Fatal(err)
	}
	between()
	fmt.Fprintln(in)
	rest, _ := io.ReadAll(out)
	cmd.Wait()
	return strings.Contains(string(rest), "got:ping")
}

func (l *lab) reasserted() int64 {
	l.Helper()
	s, err := Ask(l.Context(), sys.Guest{Root: l.root}, "status")
	if err != nil {
		l.Fatal(err)
	}
	return s.Firewall.Reasserted
}

// until polls for a change that the daemon makes on its own schedule.
func (l *lab) until(what string, done func() bool) {
	l.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			l.Fatalf("two minutes passed before: %s", what)
		}
	}
}

// ticks returns a function that is true once the daemon must have run n more
// checks.
func (l *lab) ticks(n int) func() bool {
	end := time.Now().Add(time.Duration(n) * recheckEvery)
	return func() bool { return time.Now().After(end) }
}
