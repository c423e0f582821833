package rules_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

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
					t.Errorf("%s, IPv6 %d: rule %q, want only a rejection in AGENT-EGRESS and no resolver", name, six, line)
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
			t.Errorf("IPv4 rules lack %q:\n%s", want, four)
		}
	}
	for _, never := range []string{"-A AGENT-IN -p tcp --dport 22", "127.0.0.53", "-d 127.0.0.1 -p tcp", "fe80::1 ", "--dport 853 -j ACCEPT"} {
		if strings.Contains(four, never) {
			t.Errorf("IPv4 rules contain %q, want them without it:\n%s", never, four)
		}
	}
	if strings.Contains(six, "--dport 443 -j ACCEPT") || strings.Contains(six, "--dport 22") {
		t.Errorf("IPv6 rules without a global address open ports 443 or 22, want them closed:\n%s", six)
	}
	network.IPv6 = true
	if got, want := filter(p, network, 1), "--dport 443 -j ACCEPT"; !strings.Contains(got, want) {
		t.Errorf("IPv6 rules with a global address lack %q:\n%s", want, got)
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
					t.Errorf("%s, IPv6 %d: rules of %s = %q, want the last to be %q", name, six, chain, r, last)
				}
			}
			for _, chain := range []string{"AGENT-OUT", "AGENT-CNT"} {
				for _, port := range []string{"53", "853"} {
					for _, proto := range []string{"udp", "tcp"} {
						if !slices.Contains(chains[chain], "-p "+proto+" --dport "+port+" -j AGENT-REJECT") {
							t.Errorf("%s, IPv6 %d: rules of %s = %q, want one that rejects %s to port %s", name, six, chain, chains[chain], proto, port)
						}
					}
				}
			}
			for _, r := range chains["AGENT-OUT"] {
				for _, never := range []string{"0.0.0.0 ", "224.0.0.251", "::1 ", "%eth0"} {
					if strings.Contains(r, "-d "+never) {
						t.Errorf("%s, IPv6 %d: rule %q, want none for a resolver at %s", name, six, r, never)
					}
				}
			}
			if (p == nil || p == old) && len(chains["AGENT-EGRESS"]) != 1 {
				t.Errorf("%s, IPv6 %d: rules of AGENT-EGRESS = %q, want only the rejection", name, six, chains["AGENT-EGRESS"])
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
		t.Error("InForce() with docker's jump before ours = true, want false")
	}
	good := rules.ParseState(strings.Replace(saved, "[0:0] -A FORWARD -j DOCKER\n", "", 1))
	if !good.InForce(table) {
		t.Errorf("InForce() of a whole table = false, want true; state %+v", good)
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
			t.Errorf("InForce() with %s = true, want false", what)
		}
	}
	if n := state.Refused(table)["AGENT-IN"]; n != 7 {
		t.Errorf("Refused()[AGENT-IN] = %d, want 7", n)
	}
	if !good.SameChains(state, table) {
		t.Error("SameChains() of states with the same chains = false, want true")
	}
	if good.SameChains(rules.ParseState(""), table) {
		t.Error("SameChains() with an empty state = true, want false")
	}
	text := table.Restore(state.Jumps(table))
	if strings.Count(text, "-D FORWARD -j AGENT-FWD") != 1 || !strings.Contains(text, "-I FORWARD 1 -j AGENT-FWD") || strings.Contains(text, ":DOCKER-USER") {
		t.Errorf("Restore() = %q, want one jump replaced, the first in FORWARD, and no DOCKER-USER chain", text)
	}
	if text = table.Restore(map[string]int{}); !strings.Contains(text, ":DOCKER-USER - ") {
		t.Errorf("Restore() of an empty table = %q, want %q in it", text, ":DOCKER-USER - ")
	}
}

// One command prints all tables; each must parse as it does alone.
func TestParseStatesOfAllTables(t *testing.T) {
	nat := "*nat\n:OUTPUT ACCEPT [1:60]\n:AGENT-NAT - [0:0]\n[1:60] -A OUTPUT -j AGENT-NAT\nCOMMIT\n"
	mine := "*filter\n:INPUT DROP [0:0]\n:AGENT-IN - [0:0]\n[0:0] -A INPUT -j AGENT-IN\n[7:420] -A AGENT-IN -j DROP\nCOMMIT\n"
	states := rules.ParseStates("# Generated\n" + nat + "# Completed\n# Generated\n" + mine)
	want := map[string]rules.State{"nat": rules.ParseState(nat), "filter": rules.ParseState(mine)}
	if diff := cmp.Diff(want, states, cmp.AllowUnexported(rules.State{})); diff != "" {
		t.Errorf("ParseStates() mismatch (-want +got):\n%s", diff)
	}
	if got := rules.ParseStates(""); len(got) != 0 {
		t.Errorf("ParseStates(%q) = %+v, want none", "", got)
	}
}
