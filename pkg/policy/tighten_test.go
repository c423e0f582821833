package policy_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func TestTightenPorts(t *testing.T) {
	for _, c := range []struct{ name, user, repo, want string }{
		{"the narrower", "github.com", "github.com:22", "github.com:22"},
		{"not more ports", "github.com:443", "github.com", "github.com:443"},
		{"both", "github.com:22,443", "github.com:443,8443", "github.com:443"},
		{"none in common", "github.com:22", "github.com:443", ""},
		{"below a wildcard", "*.a.org:22,443", "x.a.org:443\nx.a.org:22", "x.a.org:22,443"},
		{"two of the user's", "a.org:22\na.org:9418", "a.org:9418,22,25", "a.org:22,9418"},
		{"as many as the policy's", "a.org", "a.org:22,80,443,8443", "a.org"},
	} {
		got := policy.Tighten(allowlist(t, c.user), &policy.Policy{Names: allowlist(t, c.repo).Names})
		if rules := fmt.Sprint(got.Names); rules != "["+c.want+"]" {
			t.Errorf("names for %s = %s, want [%s]", c.name, rules, c.want)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("Validate for %s = %v, want nil", c.name, err)
		}
	}
	got := policy.Tighten(allowlist(t, "a.org\nb.org:22\nc.org:22,443"), &policy.Policy{Ports: []uint16{443}})
	if rules := fmt.Sprint(got.Names, got.Ports); rules != "[a.org c.org:443] [443]" {
		t.Errorf("names and ports = %s, want [a.org c.org:443] [443]", rules)
	}
	user := allowlist(t, "a.org")
	user.Denied, user.Enforced = []policy.Rule{{Pattern: "b.org"}}, true
	got = policy.Tighten(user, &policy.Policy{Denied: []policy.Rule{{Pattern: "a.org", Ports: []uint16{80}}}})
	if rules := fmt.Sprint(got.Names, got.Denied); rules != "[a.org] [b.org a.org:80]" || !got.Enforced {
		t.Errorf("names and denials = %s, enforced %t, want [a.org] [b.org a.org:80], true", rules, got.Enforced)
	}
}

// dice generates small policies with few names, so that they overlap.
type dice struct{ *rand.Rand }

func (d dice) ports() []uint16 {
	var ports []uint16
	for _, port := range []uint16{22, 80, 443, 5432} {
		if d.IntN(2) == 0 {
			ports = append(ports, port)
		}
	}
	return ports
}

func names() []string { return []string{"a.org", "b.a.org", "c.b.a.org", "x.org", "b.x.org"} }

func (d dice) rules() []policy.Rule {
	rules := []policy.Rule{}
	for range d.IntN(5) {
		r := policy.Rule{Pattern: names()[d.IntN(5)]}
		if d.IntN(2) == 0 {
			r.Pattern = "*." + r.Pattern
		}
		if d.IntN(2) == 0 {
			r.Ports = d.ports()
		}
		rules = append(rules, r)
	}
	return rules
}

func addrs() []netip.Addr {
	return []netip.Addr{{}, netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("127.0.0.1")}
}

func (d dice) policy() *policy.Policy {
	p := policy.Default()
	p.Mode = []policy.Mode{policy.Isolated, policy.Allowlist, policy.Open, policy.Allowlist}[d.IntN(4)]
	p.Names, p.Denied, p.Ports = d.rules(), d.rules()[:0], append([]uint16{}, d.ports()...)
	if d.IntN(2) == 0 {
		p.Denied = d.rules()
	}
	if d.IntN(2) == 0 {
		p.HostServices = append(p.HostServices, netip.AddrPortFrom(addrs()[2+d.IntN(2)], 5432))
	}
	return p
}

// asWritten returns the meaning of a repository's policy: parts that it leaves out
// allow everything.
func asWritten(r *policy.Policy) *policy.Policy {
	p := &policy.Policy{Version: policy.Version, Mode: r.Mode, Names: r.Names, Denied: r.Denied, Ports: r.Ports, HostServices: r.HostServices}
	if p.Mode == "" || r.Names == nil && p.Mode == policy.Allowlist {
		p.Mode = policy.Open
	}
	if r.Names != nil && p.Mode == policy.Open {
		p.Mode = policy.Allowlist
	}
	if r.Ports == nil {
		p.Ports = []uint16{22, 80, 443, 5432}
	}
	return p
}

// FuzzTighten checks for random policies that the result allows exactly what both the
// user's policy and the repository's allow.
func FuzzTighten(f *testing.F) {
	for seed := range uint64(2000) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		d := dice{rand.New(rand.NewPCG(seed, 1))}
		user, repo := d.policy(), d.policy()
		if d.IntN(2) == 0 {
			repo.Names = nil
		}
		if d.IntN(2) == 0 {
			repo.Ports = nil
		}
		if d.IntN(2) == 0 {
			repo.Mode = ""
		}
		if repo.HostServices = nil; d.IntN(2) == 0 {
			repo.HostServices = []netip.AddrPort{netip.AddrPortFrom(addrs()[2], 5432)}
		}
		got, wish := policy.Tighten(user, repo), asWritten(repo)
		for _, name := range append(names(), "", "d.a.org") {
			for _, addr := range addrs() {
				for _, port := range []uint16{0, 22, 80, 443, 5432, 25} {
					q := policy.Question{Name: name, Addr: addr, Port: port}
					g, u, w := got.Decide(q), user.Decide(q), wish.Decide(q)
					if g.Allowed && !u.Allowed {
						t.Fatalf("seed %d: Decide(%+v) = allowed, want denied as by the user (%+v)\nuser %+v\ngot %+v", seed, q, u, user, got)
					}
					if addr.IsValid() && policy.BlockedReason(addr) != "" {
						// A repository that does not mention host services accepts the
						// user's.
						if repo.HostServices == nil {
							continue
						}
					}
					if g.Allowed && !w.Allowed {
						t.Fatalf("seed %d: Decide(%+v) = allowed, want denied as by the repository (%+v)\nrepository %+v\ngot %+v", seed, q, w, wish, got)
					}
					// If open mode ends without a list, the user's own list remains,
					// and addresses without a name are not allowed.
					ended := user.Mode == policy.Open && got.Mode == policy.Allowlist && (repo.Names == nil || name == "")
					if !g.Allowed && u.Allowed && w.Allowed && port != 0 && !ended {
						t.Fatalf("seed %d: Decide(%+v) = %+v, want allowed as by both\nuser %+v\nrepository %+v\ngot %+v", seed, q, g, user, wish, got)
					}
				}
				// A name resolves exactly if one of its ports can be used.
				use := false
				for _, port := range []uint16{22, 80, 443, 5432} {
					use = use || got.Decide(policy.Question{Name: name, Port: port}).Allowed
				}
				if resolves := got.Decide(policy.Question{Name: name}).Allowed; resolves != use {
					t.Fatalf("seed %d: %q resolves: %t, want %t, as it can be used\n%+v", seed, name, resolves, use, got)
				}
			}
		}
		if err := got.Validate(); err != nil {
			t.Fatalf("seed %d: Validate = %v, want nil", seed, err)
		}
	})
}

func FuzzUnmarshal(f *testing.F) {
	f.Add([]byte(`{"version":2,"mode":"open","names":[{"pattern":"*.a.org","ports":[22]}],"denied":[{"pattern":"b.a.org"}],"ports":[443],"host_services":["127.0.0.1:1"],"enforced":true}`))
	f.Add([]byte(`{"version":2,"names":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := policy.Unmarshal(data)
		if err != nil {
			if p != nil {
				t.Fatalf("Unmarshal = %+v with an error, want nil", p)
			}
			return
		}
		again, err := policy.Marshal(p)
		if err != nil {
			t.Fatalf("Marshal of the decoded policy = %v, want nil", err)
		}
		back, err := policy.Unmarshal(again)
		if err != nil {
			t.Fatalf("Unmarshal of the encoded policy = %v, want nil", err)
		}
		for _, r := range p.Names {
			q := policy.Question{Name: strings.Replace(r.Pattern, "*", "x", 1), Port: 443}
			if a, b := p.Decide(q), back.Decide(q); a != b {
				t.Fatalf("Decide(%+v) = %+v, after encoding %+v, want the same", q, a, b)
			}
		}
	})
}

func FuzzExpand(f *testing.F) {
	for _, entry := range []string{"github.com", "*.a.org:22,443", "@git", "@x", "a.org:0", "[::1]:22", "a:b:c", "\xff:1"} {
		f.Add(entry)
	}
	groups := policy.Groups{"git": {{Pattern: "github.com"}}}
	f.Fuzz(func(t *testing.T, entry string) {
		rules, err := groups.Expand(entry, "f:1")
		if err != nil {
			if rules != nil || !strings.Contains(err.Error(), "; ") && !strings.Contains(err.Error(), "no such name") {
				t.Fatalf("Expand(%q) = %v, %q, want no rules with a reason", entry, rules, err)
			}
			return
		}
		p := policy.Default()
		p.Names = rules
		if err := p.Validate(); err != nil {
			t.Fatalf("Validate of the policy with %q = %v, want nil", entry, err)
		}
		// A rule's text is parsed as the same rule.
		for _, r := range rules {
			if again, err := policy.ParseRule(r.String()); err != nil || again.String() != r.String() {
				t.Fatalf("Expand(%q): ParseRule(%s) = %s, %v, want the same rule", entry, r, again, err)
			}
		}
	})
}

func FuzzDecide(f *testing.F) {
	f.Add("github.com", []byte{203, 0, 113, 7}, uint16(443))
	f.Add("x.npmjs.org.", []byte{10, 0, 0, 1}, uint16(0))
	f.Add("", []byte{127, 0, 0, 1}, uint16(5432))
	f.Fuzz(func(t *testing.T, name string, raw []byte, port uint16) {
		addr, _ := netip.AddrFromSlice(raw)
		for _, mode := range []policy.Mode{policy.Isolated, policy.Allowlist, policy.Open} {
			p := allowlist(t, "github.com\n*.npmjs.org:443\n")
			p.Mode = mode
			p.Denied = []policy.Rule{{Pattern: "bad.npmjs.org"}}
			p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5432")}
			d := p.Decide(policy.Question{Name: name, Addr: addr, Port: port})
			if d.Reason == "" || d.Allowed && d.Rule == "" {
				t.Fatalf("Decide = %+v, want a reason, and a rule if allowed", d)
			}
			if !d.Allowed {
				continue
			}
			if addr.IsValid() && policy.BlockedReason(addr) != "" && netip.AddrPortFrom(addr.Unmap(), port) != p.HostServices[0] {
				t.Fatalf("mode %s: Decide(%q, %v, port %d) = %+v, want a blocked address denied", mode, name, addr, port, d)
			}
			plain := strings.ToLower(strings.TrimSuffix(name, "."))
			if plain == "bad.npmjs.org" || mode == policy.Isolated {
				t.Fatalf("mode %s: Decide(%q) = %+v, want denied", mode, name, d)
			}
			if mode == policy.Allowlist && plain != "github.com" && (!strings.HasSuffix(plain, ".npmjs.org") || port != 443 && port != 0) && d.Rule != "host service 127.0.0.1:5432" {
				t.Fatalf("Decide(%q, port %d) = %+v, want denied", name, port, d)
			}
		}
	})
}

// TestAllowedCostsNoMemory checks that a decision allocates no memory, because the
// gateway decides for every packet that opens a connection.
func TestAllowedCostsNoMemory(t *testing.T) {
	p := allowlist(t, "*.a.org\n*.c.b.a.org:9418\n")
	p.Denied = []policy.Rule{{Pattern: "evil.org"}}
	q := policy.Question{Name: "d.c.b.a.org", Addr: netip.MustParseAddr("203.0.113.7"), Port: 443}
	if n := testing.AllocsPerRun(100, func() {
		if !p.Decide(q).Allowed {
			t.Errorf("Decide(%+v) = denied, want allowed", q)
		}
	}); n != 0 {
		t.Errorf("allocations per decision = %v, want 0", n)
	}
}

func BenchmarkDecide(b *testing.B) {
	p := policy.Default()
	for i := range 10_000 {
		p.Names = append(p.Names, policy.Rule{Pattern: fmt.Sprintf("*.zone%d.example.org", i), Source: "list"})
	}
	p.Denied = []policy.Rule{{Pattern: "evil.org"}}
	for name, q := range map[string]policy.Question{
		"allowed": {Name: "a.b.c.zone7000.example.org", Port: 443, Addr: netip.MustParseAddr("203.0.113.7")},
		"denied":  {Name: "a.b.c.elsewhere.example.org"},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Decide(q)
			}
		})
	}
}
