package rules_test

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func filter(p *policy.Policy, n rules.Network, six int) string {
	return strings.Join(rules.Compile(p, n)[six].Tables[0].Rules, "\n")
}

func TestLockdownHasNoWayOut(t *testing.T) {
	network := rules.Network{Upstream: []netip.Addr{netip.MustParseAddr("192.168.5.3")}, IPv6: true}
	isolated := policy.Default()
	isolated.Mode = policy.Isolated
	unknown := policy.Default()
	unknown.Mode = "wide"
	for name, p := range map[string]*policy.Policy{"no policy": nil, "isolated": isolated, "unknown mode": unknown} {
		for six := range 2 {
			text := filter(p, network, six)
			for _, line := range strings.Split(text, "\n") {
				if strings.HasPrefix(line, "-A AGENT-EGRESS") && line != "-A AGENT-EGRESS -j AGENT-REJECT" || strings.Contains(line, "192.168.5.3") {
					t.Errorf("%s: %s", name, line)
				}
			}
		}
	}
}

func TestPolicyRules(t *testing.T) {
	p := policy.Default()
	p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080"), netip.MustParseAddrPort("127.0.0.1:5432")}
	p.Names = []policy.Rule{{Pattern: "a.org", Ports: []uint16{81, 82, 9418}}, {Pattern: "b.org", Ports: []uint16{65535, 23}}}
	network := rules.Network{
		Gateways: []netip.Addr{netip.MustParseAddr("192.168.5.2"), netip.MustParseAddr("fe80::1")},
		Upstream: []netip.Addr{netip.MustParseAddr("192.168.5.3"), netip.MustParseAddr("127.0.0.53"), netip.MustParseAddr("2001:db8::53")},
	}
	four, six := filter(p, network, 0), filter(p, network, 1)
	for _, want := range []string{
		"-A AGENT-IN -s 192.168.5.2 -p tcp --dport 22 -j ACCEPT",
		"-A AGENT-OUT -d 192.168.5.3 -p udp --dport 53 -m mark --mark 0x41475344 -j ACCEPT",
		"-A AGENT-EGRESS -d 192.168.5.2 -p tcp --dport 8080 -j ACCEPT",
		"-A AGENT-EGRESS -d 192.168.0.0/16 -j AGENT-REJECT",
		"-A AGENT-EGRESS -d 192.168.5.2 -p tcp --dport 5432 -j ACCEPT",
		"-A AGENT-EGRESS -p tcp --dport 22:23 -j ACCEPT",
		"-A AGENT-EGRESS -p tcp --dport 80:82 -j ACCEPT",
		"-A AGENT-EGRESS -p tcp --dport 443 -j ACCEPT",
		"-A AGENT-EGRESS -p tcp --dport 9418 -j ACCEPT",
		"-A AGENT-EGRESS -p tcp --dport 65535 -j ACCEPT",
	} {
		if !strings.Contains(four, want) {
			t.Errorf("missing: %s", want)
		}
	}
	for _, never := range []string{"-A AGENT-IN -p tcp --dport 22", "127.0.0.53", "-d 127.0.0.1 -p tcp", "fe80::1 ", "--dport 853 -j ACCEPT"} {
		if strings.Contains(four, never) {
			t.Errorf("IPv4 holds %q", never)
		}
	}
	if strings.Contains(six, "--dport 443 -j ACCEPT") || strings.Contains(six, "--dport 22") {
		t.Error("IPv6 is open without a global address")
	}
	network.IPv6 = true
	if !strings.Contains(filter(p, network, 1), "--dport 443 -j ACCEPT") {
		t.Error("IPv6 is closed with a global address")
	}
}

// Packets that match no rule of a chain are refused. Foreign resolvers are refused
// before their port or address is allowed.
func TestChainsEndInARefusal(t *testing.T) {
	open := policy.Default()
	open.Mode = policy.Open
	open.Ports = []uint16{53, 443, 853}
	old := policy.Default()
	old.Version--
	network := rules.Network{
		Gateways: []netip.Addr{netip.MustParseAddr("192.168.5.2")}, IPv6: true,
		Upstream: []netip.Addr{netip.MustParseAddr("192.168.5.3"), netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("224.0.0.251"), netip.MustParseAddr("::1"), netip.MustParseAddr("fe80::1%eth0")},
	}
	for name, p := range map[string]*policy.Policy{"no policy": nil, "open": open, "allowlist": policy.Default(), "of another version": old} {
		for six := range 2 {
			chains := map[string][]string{}
			for _, rule := range rules.Compile(p, network)[six].Tables[0].Rules {
				chain, body, _ := strings.Cut(strings.TrimPrefix(rule, "-A "), " ")
				chains[chain] = append(chains[chain], body)
			}
			for chain, last := range map[string]string{
				"AGENT-IN": "-j DROP", "AGENT-OUT": "-j AGENT-EGRESS", "AGENT-FWD": "-j DROP", "AGENT-CNT": "-j AGENT-EGRESS", "AGENT-EGRESS": "-j AGENT-REJECT",
			} {
				if r := chains[chain]; len(r) == 0 || r[len(r)-1] != last {
					t.Errorf("%s, IPv6 %d: %s does not end in %s: %q", name, six, chain, last, r)
				}
			}
			for _, chain := range []string{"AGENT-OUT", "AGENT-CNT"} {
				for _, port := range []string{"53", "853"} {
					for _, proto := range []string{"udp", "tcp"} {
						if !slices.Contains(chains[chain], "-p "+proto+" --dport "+port+" -j AGENT-REJECT") {
							t.Errorf("%s, IPv6 %d: %s lets %s to port %s pass", name, six, chain, proto, port)
						}
					}
				}
			}
			for _, r := range chains["AGENT-OUT"] {
				for _, never := range []string{"0.0.0.0 ", "224.0.0.251", "::1 ", "%eth0"} {
					if strings.Contains(r, "-d "+never) {
						t.Errorf("%s, IPv6 %d: a resolver at %s: %s", name, six, never, r)
					}
				}
			}
			if (p == nil || p == old) && len(chains["AGENT-EGRESS"]) != 1 {
				t.Errorf("%s, IPv6 %d: something gets out: %q", name, six, chains["AGENT-EGRESS"])
			}
		}
	}
}

const saved = `# Generated by iptables-save
*filter
:INPUT DROP [0:0]
:FORWARD DROP [0:0]
:OUTPUT DROP [5:300]
:DOCKER-USER - [0:0]
:AGENT-IN - [0:0]
[1:2] -A INPUT -j AGENT-IN
[0:0] -A FORWARD -j DOCKER
[0:0] -A FORWARD -j AGENT-FWD
[9:9] -A OUTPUT -j AGENT-OUT
[0:0] -A DOCKER-USER -j AGENT-FWD
[7:99] -A AGENT-IN -j DROP
COMMIT
`

func TestState(t *testing.T) {
	table := rules.Compile(nil, rules.Network{})[0].Tables[0]
	table.Chain, table.Rules = []string{"AGENT-IN"}, []string{"-A AGENT-IN -j DROP"}
	state := rules.ParseState(saved)
	if state.InForce(table) {
		t.Error("docker's jump is before ours")
	}
	good := rules.ParseState(strings.Replace(saved, "[0:0] -A FORWARD -j DOCKER\n", "", 1))
	if !good.InForce(table) {
		t.Error("the table stands")
	}
	whole := strings.Replace(saved, "[0:0] -A FORWARD -j DOCKER\n", "", 1)
	for what, c := range map[string][2]string{
		"an open policy":          {":OUTPUT DROP", ":OUTPUT ACCEPT"},
		"an open policy of INPUT": {":INPUT DROP", ":INPUT ACCEPT"},
		"no jump":                 {"[9:9] -A OUTPUT -j AGENT-OUT\n", ""},
		"two jumps":               {"[9:9] -A OUTPUT -j AGENT-OUT\n", "[9:9] -A OUTPUT -j AGENT-OUT\n[9:9] -A OUTPUT -j AGENT-OUT\n"},
		"a rule before the jump":  {"[9:9] -A OUTPUT", "[1:1] -A OUTPUT -j ACCEPT\n[9:9] -A OUTPUT"},
		"no jump of DOCKER-USER":  {"[0:0] -A DOCKER-USER -j AGENT-FWD\n", ""},
		"a rule that is missing":  {"[7:99] -A AGENT-IN -j DROP\n", ""},
		"a rule that was added":   {"[7:99] -A AGENT-IN", "[0:0] -A AGENT-IN -j ACCEPT\n[7:99] -A AGENT-IN"},
	} {
		if rules.ParseState(strings.Replace(whole, c[0], c[1], 1)).InForce(table) {
			t.Errorf("the table stands with %s", what)
		}
	}
	if n := state.Refused(table)["AGENT-IN"]; n != 7 {
		t.Errorf("refused: got %d", n)
	}
	if !good.SameChains(state, table) || good.SameChains(rules.ParseState(""), table) {
		t.Error("chains compared wrongly")
	}
	text := table.Restore(state.Jumps(table))
	if strings.Count(text, "-D FORWARD -j AGENT-FWD") != 1 || !strings.Contains(text, "-I FORWARD 1 -j AGENT-FWD") || strings.Contains(text, ":DOCKER-USER") {
		t.Errorf("restore:\n%s", text)
	}
	if text = table.Restore(map[string]int{}); !strings.Contains(text, ":DOCKER-USER - ") {
		t.Errorf("restore of an empty table:\n%s", text)
	}
}

// One command prints all tables; each must parse as it does alone.
func TestParseStatesOfAllTables(t *testing.T) {
	nat := "*nat\n:OUTPUT ACCEPT [1:60]\n:AGENT-NAT - [0:0]\n[1:60] -A OUTPUT -j AGENT-NAT\nCOMMIT\n"
	mine := "*filter\n:INPUT DROP [0:0]\n:AGENT-IN - [0:0]\n[0:0] -A INPUT -j AGENT-IN\n[7:420] -A AGENT-IN -j DROP\nCOMMIT\n"
	states := rules.ParseStates("# Generated\n" + nat + "# Completed\n# Generated\n" + mine)
	if len(states) != 2 || !reflect.DeepEqual(states["nat"], rules.ParseState(nat)) || !reflect.DeepEqual(states["filter"], rules.ParseState(mine)) {
		t.Errorf("%+v", states)
	}
	if got := rules.ParseStates(""); len(got) != 0 {
		t.Errorf("nothing is %+v", got)
	}
}
