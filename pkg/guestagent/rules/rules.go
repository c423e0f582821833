// Package rules generates a guest's packet filter: the input of iptables-restore
// and ip6tables-restore for a policy on a network.
//
// It is pure text. It never runs iptables and never inspects the machine. The
// description of the network can narrow the rules, but never opens more than the
// policy allows. Outgoing packets are judged one by one and not by their
// connection, so that a narrower policy also ends open connections.
package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	// Mark is set on the packets of the DNS proxy: only they may reach a resolver.
	// Setting it needs CAP_NET_ADMIN, which no container has in the guest's network
	// namespace.
	Mark = 0x41475344
	// RedirectPort receives DNS queries that were sent to any other address.
	RedirectPort = 1053
)

// Network describes the guest's network.
type Network struct {
	Gateways []netip.Addr // may log in over SSH; if none is known, any IPv4 address may
	Upstream []netip.Addr // resolvers that the DNS proxy asks
	IPv6     bool         // the guest has a global IPv6 address; IPv6 is closed without one
}

// Table is one table of one family: our chains, and the built-in chains that must
// jump to them first.
type Table struct {
	Name  string            // "filter" or "nat"
	Jumps map[string]string // built-in chain → our chain
	Drop  bool              // the built-in chains' policy is DROP
	Chain []string          // our chains, in order
	Rules []string          // "-A CHAIN …"
}

// Family is the tables of one address family.
type Family struct {
	IPv6   bool
	Tables []Table
}

// bridges returns the interfaces of containers. The names are fixed, because a name
// read from the machine could belong to an interface that leads outside.
func bridges() []string {
	return []string{"docker0", "br-+", "docker_gwbridge", "podman+", "cni+"}
}

// Compile returns the rules of both families. A nil policy means lockdown: only
// loopback, DHCP, and SSH from the host.
func Compile(p *policy.Policy, n Network) []Family {
	return []Family{family(p, n, false), family(p, n, true)}
}

func family(p *policy.Policy, n Network, six bool) Family {
	w := &writer{six: six}
	w.in(n)
	w.out(p, n)
	w.forward()
	w.egress(p, n)
	w.reject()
	filter := Table{
		Name: "filter", Drop: true, Rules: w.rules,
		Chain: []string{"AGENT-IN", "AGENT-OUT", "AGENT-FWD", "AGENT-CNT", "AGENT-EGRESS", "AGENT-REJECT"},
		Jumps: map[string]string{"INPUT": "AGENT-IN", "OUTPUT": "AGENT-OUT", "FORWARD": "AGENT-FWD", "DOCKER-USER": "AGENT-FWD"},
	}
	w.rules = nil
	w.nat()
	nat := Table{
		Name: "nat", Rules: w.rules,
		Chain: []string{"AGENT-DNS", "AGENT-DNS-FWD"},
		Jumps: map[string]string{"OUTPUT": "AGENT-DNS", "PREROUTING": "AGENT-DNS-FWD"},
	}
	return Family{IPv6: six, Tables: []Table{filter, nat}}
}

// writer collects the rules of one table.
type writer struct {
	six   bool
	rules []string
}

func (w *writer) add(chain, format string, args ...any) {
	w.rules = append(w.rules, "-A "+chain+" "+fmt.Sprintf(format, args...))
}

// pick returns the argument for the writer's address family.
func (w *writer) pick(four, six string) string {
	if w.six {
		return six
	}
	return four
}

func (w *writer) in(n Network) {
	const c = "AGENT-IN"
	w.add(c, "-i lo -j ACCEPT")
	w.add(c, "-m conntrack --ctstate ESTABLISHED -j ACCEPT")
	w.add(c, "-p %s -m conntrack --ctstate RELATED -j ACCEPT", w.pick("icmp", "ipv6-icmp"))
	if w.six {
		w.neighbours(c)
		w.add(c, "-p udp --sport 547 --dport 546 -j ACCEPT")
	} else {
		w.add(c, "-p udp --sport 67 --dport 68 -j ACCEPT")
	}
	for _, b := range bridges() {
		for _, proto := range []string{"udp", "tcp"} {
			w.add(c, "-i %s -p %s --dport %d -j ACCEPT", b, proto, RedirectPort)
		}
		w.add(c, "-i %s -j AGENT-REJECT", b)
	}
	// The host logs in over IPv4.
	if !w.six {
		gateways := slices.DeleteFunc(slices.Clone(n.Gateways), func(a netip.Addr) bool { return !a.Is4() })
		for _, a := range gateways {
			w.add(c, "-s %s -p tcp --dport 22 -j ACCEPT", a)
		}
		if len(gateways) == 0 {
			w.add(c, "-p tcp --dport 22 -j ACCEPT")
		}
	}
	w.add(c, "-j DROP")
}

func (w *writer) out(p *policy.Policy, n Network) {
	const c = "AGENT-OUT"
	w.add(c, "-o lo -j ACCEPT")
	// Redirected DNS packets already have their new address here, but still the old
	// device.
	w.add(c, "-d %s -j ACCEPT", w.pick("127.0.0.0/8", "::1/128"))
	w.add(c, "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j ACCEPT")
	if w.six {
		w.neighbours(c)
		w.add(c, "-p udp --sport 546 --dport 547 -j ACCEPT")
	} else {
		w.add(c, "-p udp --sport 68 --dport 67 -j ACCEPT")
	}
	if resolves(p) {
		for _, a := range n.Upstream {
			if a.Is6() != w.six || a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
				continue
			}
			for _, proto := range []string{"udp", "tcp"} {
				w.add(c, "-d %s -p %s --dport 53 -m mark --mark %#x -j ACCEPT", a, proto, Mark)
			}
		}
	}
	w.foreignDNS(c)
	for _, b := range bridges() {
		w.add(c, "-o %s -j ACCEPT", b)
	}
	w.add(c, "-j AGENT-EGRESS")
}

// forward lets containers talk to each other as Docker decides, and to the outside
// like every other program. Nothing from outside reaches them.
func (w *writer) forward() {
	w.add("AGENT-FWD", "-m conntrack --ctstate ESTABLISHED,RELATED --ctdir REPLY -j ACCEPT")
	for _, b := range bridges() {
		w.add("AGENT-FWD", "-i %s -g AGENT-CNT", b)
	}
	w.add("AGENT-FWD", "-j DROP")
	for _, b := range bridges() {
		w.add("AGENT-CNT", "-o %s -j RETURN", b)
	}
	w.foreignDNS("AGENT-CNT")
	w.add("AGENT-CNT", "-j AGENT-EGRESS")
}

// egress adds the rules of the policy itself.
func (w *writer) egress(p *policy.Policy, n Network) {
	const c = "AGENT-EGRESS"
	if resolves(p) {
		for _, s := range p.HostServices {
			for _, a := range serviceAddrs(s.Addr(), n) {
				if a.Is6() == w.six {
					w.add(c, "-d %s -p tcp --dport %d -j ACCEPT", a, s.Port())
				}
			}
		}
		for _, prefix := range policy.Blocked() {
			if prefix.Addr().Is6() == w.six {
				w.add(c, "-d %s -j AGENT-REJECT", prefix)
			}
		}
		if !w.six || n.IPv6 {
			for _, ports := range ranges(p.PortsOut()) {
				w.add(c, "-p tcp --dport %s -j ACCEPT", ports)
			}
		}
	}
	w.add(c, "-j AGENT-REJECT")
}

// serviceAddrs returns the addresses at which a guest reaches a host service. The host's
// loopback is reachable at the gateway's address, every other address directly.
func serviceAddrs(service netip.Addr, n Network) []netip.Addr {
	if !service.IsLoopback() {
		return []netip.Addr{service}
	}
	return n.Gateways
}

// ranges formats sorted ports for iptables, with consecutive ones as FIRST:LAST.
// The rules do not restrict a port to names, because the DNS proxy decides about
// names.
func ranges(ports []uint16) []string {
	var list []string
	for i := 0; i < len(ports); i++ {
		first := ports[i]
		for i+1 < len(ports) && ports[i+1] == ports[i]+1 {
			i++
		}
		if list = append(list, strconv.Itoa(int(first))); ports[i] != first {
			list[len(list)-1] += ":" + strconv.Itoa(int(ports[i]))
		}
	}
	return list
}

// reject adds the rules that answer denied packets, so that connections fail
// immediately.
func (w *writer) reject() {
	w.add("AGENT-REJECT", "-p tcp -j REJECT --reject-with tcp-reset")
	w.add("AGENT-REJECT", "-j REJECT --reject-with %s", w.pick("icmp-admin-prohibited", "icmp6-adm-prohibited"))
}

// foreignDNS rejects resolvers other than the proxy, even where the policy allows
// their port. Plain DNS has been redirected before it reaches these rules.
func (w *writer) foreignDNS(chain string) {
	for _, port := range []int{53, 853} {
		for _, proto := range []string{"udp", "tcp"} {
			w.add(chain, "-p %s --dport %d -j AGENT-REJECT", proto, port)
		}
	}
}

// neighbours adds the rules that IPv6 needs for address configuration.
func (w *writer) neighbours(chain string) {
	for _, kind := range []int{133, 134, 135, 136} {
		w.add(chain, "-p ipv6-icmp --icmpv6-type %d -j ACCEPT", kind)
	}
}

func (w *writer) nat() {
	w.add("AGENT-DNS", "-m mark --mark %#x -j RETURN", Mark)
	w.add("AGENT-DNS", "-d %s -j RETURN", w.pick("127.0.0.0/8", "::1/128"))
	for _, proto := range []string{"udp", "tcp"} {
		w.add("AGENT-DNS", "-p %s --dport 53 -j REDIRECT --to-ports %d", proto, RedirectPort)
	}
	for _, b := range bridges() {
		for _, proto := range []string{"udp", "tcp"} {
			w.add("AGENT-DNS-FWD", "-i %s -p %s --dport 53 -j REDIRECT --to-ports %d", b, proto, RedirectPort)
		}
	}
}

// resolves reports whether the policy allows any traffic at all.
func resolves(p *policy.Policy) bool {
	return p != nil && p.Version == policy.Version && (p.Mode == policy.Allowlist || p.Mode == policy.Open)
}

// Restore returns the input of iptables-restore --noflush that installs the table
// in one transaction. present counts the current jumps to our chains by built-in
// chain; a chain that is missing from it does not exist.
func (t Table) Restore(present map[string]int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", t.Name)
	for _, chain := range sortedKeys(t.Jumps) {
		_, exists := present[chain]
		switch {
		case t.Drop && chain != "DOCKER-USER":
			fmt.Fprintf(&b, ":%s DROP [0:0]\n", chain)
		case !exists:
			// Docker keeps an existing DOCKER-USER. Creating it first means that
			// Docker's rules are never active without ours.
			fmt.Fprintf(&b, ":%s - [0:0]\n", chain)
		}
	}
	for _, chain := range t.Chain {
		fmt.Fprintf(&b, ":%s - [0:0]\n", chain)
	}
	for _, chain := range sortedKeys(t.Jumps) {
		for range present[chain] {
			fmt.Fprintf(&b, "-D %s -j %s\n", chain, t.Jumps[chain])
		}
		fmt.Fprintf(&b, "-I %s 1 -j %s\n", chain, t.Jumps[chain])
	}
	for _, rule := range t.Rules {
		b.WriteString(rule + "\n")
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

func sortedKeys(m map[string]string) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
