package policy_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func allowlist(t testing.TB, text string) *policy.Policy {
	t.Helper()
	rules, err := policy.Parse(strings.NewReader(text), "list", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := policy.Default()
	p.Names = rules
	return p
}

func patterns(p *policy.Policy) string {
	var s []string
	for _, r := range p.Names {
		s = append(s, r.Pattern)
	}
	return strings.Join(s, " ")
}

func TestParse(t *testing.T) {
	rules, err := policy.Parse(strings.NewReader("\ufeff# head\r\n\r\nGitHub.com # code\r\n*.npmjs.org\r\ngithub.com\nxn--bcher-kva.example"), "a/list.txt", nil)
	if err != nil {
		t.Fatal(err)
	}
	want := []policy.Rule{
		{Pattern: "github.com", Source: "a/list.txt:3"},
		{Pattern: "*.npmjs.org", Source: "a/list.txt:4"},
		{Pattern: "xn--bcher-kva.example", Source: "a/list.txt:6"},
	}
	if diff := cmp.Diff(want, rules); diff != "" {
		t.Errorf("Parse mismatch (-want +got):\n%s", diff)
	}
	if rules, err := policy.Parse(strings.NewReader("# nothing\n"), "f", nil); err != nil || rules == nil || len(rules) != 0 {
		t.Errorf("Parse of an empty list = %#v, %v, want an empty list, nil", rules, err)
	}
}

func TestParseRefuses(t *testing.T) {
	for line, want := range map[string]string{
		"1.2.3.4":                             "is an IP address",
		"1.2.3.4:80":                          "is an IP address",
		"[::1]:80":                            "is an IP address",
		"2001:db8::1":                         "is an IP address",
		"10.0.0.0/8":                          "is an address range",
		"1.2.3":                               "ends in a number",
		"0x7f.1":                              "ends in a number",
		"https://github.com":                  "is a URL",
		"github.com/cli":                      "has a path",
		"github.com:":                         "the invalid port \"\"; write NAME:PORT",
		"github.com:0":                        "the invalid port \"0\"",
		"github.com:65536":                    "the invalid port \"65536\"",
		"github.com:443,":                     "the invalid port \"\"",
		"github.com:+22":                      "the invalid port \"+22\"",
		"github.com:022":                      "the invalid port \"022\"",
		"github.com:ssh":                      "the invalid port \"ssh\"",
		"github.com:22:23":                    "contains a colon",
		"github.com:22 gitlab.com":            "one name per line",
		"1.2.3.4:443":                         "is an IP address",
		"[2001:db8::1]:443":                   "is an IP address",
		"git@github.com:o/r":                  "has a path",
		"@github":                             "groups are not allowed here; write names",
		"git@github.com":                      "contains a user name",
		"github.com gitlab.com":               "one name per line",
		"gіthub.com":                          "U+0456",
		"github.com\u00a0":                    "U+00A0",
		"git\xffhub.com":                      "is not UTF-8",
		"github\x00.com":                      "contains the character",
		"git_hub.com":                         "contains the character",
		"*":                                   "mode: open",
		"*.":                                  "mode: open",
		"*.com":                               "allows every name of a public registry",
		"*.co.uk":                             "allows every name of a public registry",
		"*.*.com":                             "not the whole first label",
		"a.*.com":                             "not the whole first label",
		"*github.com":                         "not the whole first label",
		"localhost":                           "single label",
		"github.com.":                         "ends in a dot",
		"..github.com":                        "starts with two dots",
		"github..com":                         "empty label",
		"-a.com":                              "hyphen",
		"a-.com":                              "hyphen",
		strings.Repeat("a", 64) + ".com":      "label longer than 63",
		strings.Repeat("abcdefg.", 33) + "co": "longer than 253",
	} {
		_, err := policy.Parse(strings.NewReader("ok.example\n"+line+"\n"), "list.txt", nil)
		switch {
		case err == nil:
			t.Errorf("Parse(%q) = nil, want an error", line)
		case !strings.HasPrefix(err.Error(), "list.txt:2: ") || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "; "):
			t.Errorf("Parse(%q) = %q, want list.txt:2: … %q …; what to do", line, err, want)
		}
	}
}

func TestParseReportsAllErrorsBounded(t *testing.T) {
	_, err := policy.Parse(strings.NewReader("*\nok.example\n1.2.3.4\n"), "f", nil)
	if err == nil || !strings.Contains(err.Error(), "f:1:") || !strings.Contains(err.Error(), "f:3:") {
		t.Errorf("Parse = %v, want errors for lines 1 and 3", err)
	}
	_, err = policy.Parse(strings.NewReader(strings.Repeat("*\n", 5000)), "f", nil)
	if err == nil || strings.Count(err.Error(), "\n") != 100 || !strings.Contains(err.Error(), "4900 more lines") {
		t.Errorf("Parse of 5000 bad lines = %v, want 100 lines, then \"4900 more lines\"", err)
	}
	if _, err = policy.Parse(strings.NewReader(strings.Repeat("# padding\n", 200_000)), "f", nil); err == nil {
		t.Error("Parse of an allowlist over the bound = nil, want an error")
	}
	var many strings.Builder
	for i := range policy.MaxRules + 1 {
		many.WriteString(string([]byte{'a' + byte(i%26), 'a' + byte(i/26%26), 'a' + byte(i/676%26), 'a' + byte(i/17576)}) + ".example\n")
	}
	if _, err = policy.Parse(strings.NewReader(many.String()), "f", nil); err == nil {
		t.Error("Parse of more rules than the bound = nil, want an error")
	}
}

func TestGroups(t *testing.T) {
	groups := policy.Groups{
		"git": {{Pattern: "github.com", Ports: []uint16{22, 443}, Source: "git.txt:1"}, {Pattern: "*.githubusercontent.com", Source: "git.txt:2"}},
		"go":  {{Pattern: "*.golang.org"}},
	}
	rules, err := policy.Parse(strings.NewReader("a.org:443,80,443\n@git\na.org:80,443\na.org:22\n@git # again\nA.org\n"), "list", groups)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rules {
		got = append(got, r.String()+" "+r.Source)
	}
	want := "a.org:80,443 list:1|github.com:22,443 list:2 (@git)|*.githubusercontent.com list:2 (@git)|a.org:22 list:4|a.org list:6"
	if strings.Join(got, "|") != want {
		t.Errorf("rules = %s, want %s", strings.Join(got, "|"), want)
	}
	if groups["git"][0].Source != "git.txt:1" {
		t.Errorf("source of the group's rule = %q, want git.txt:1 as before", groups["git"][0].Source)
	}
	for _, entry := range []string{"@npm", "@", "@@git", "@git:443", "@Git"} {
		if _, err := groups.Expand(entry, "f:1"); err == nil || !strings.HasSuffix(err.Error(), "; the groups are @git, @go") {
			t.Errorf("Expand(%s) = %v, want \"…; the groups are @git, @go\"", entry, err)
		}
	}
	for name, ok := range map[string]bool{"git": true, "go-1": true, "": false, "-a": false, "a.b": false, "A": false, "a/b": false, "é": false} {
		if policy.GroupName(name) != ok {
			t.Errorf("GroupName(%q) = %t, want %t", name, !ok, ok)
		}
	}
}

func TestName(t *testing.T) {
	p := allowlist(t, "github.com\n*.npmjs.org\n*.a.npmjs.org\n")
	for name, rule := range map[string]string{
		"github.com":            "github.com",
		"GitHub.COM.":           "github.com",
		"pkg.npmjs.org":         "*.npmjs.org",
		"x.y.npmjs.org":         "*.npmjs.org",
		"x.a.npmjs.org":         "*.a.npmjs.org",
		"_https._tcp.npmjs.org": "*.npmjs.org",
		"npmjs.org":             "",
		"evilnpmjs.org":         "",
		"api.github.com":        "",
		"github.com.evil.com":   "",
		"":                      "",
		".":                     "",
		"1.2.3.4":               "",
		"github.com..":          "",
		"gith\u212aub.com":      "",
		"a b.npmjs.org":         "",
		"*.npmjs.org":           "",
	} {
		d := p.Decide(policy.Question{Name: name})
		if d.Rule != rule || d.Allowed != (rule != "") || d.Reason == "" {
			t.Errorf("Decide(%q) = %+v, want rule %q", name, d, rule)
		}
	}
	if got := p.Decide(policy.Question{Name: "github.com"}).Source; got != "list:1" {
		t.Errorf("source of the rule = %q, want \"list:1\"", got)
	}
}

// TestDecide checks what the user sees: the reason for every answer, and the source of
// every rule.
func TestDecide(t *testing.T) {
	p := allowlist(t, "github.com\ngithub.com:9418\n*.github.com:8443\ndb.corp.org:5432\nonly.org:25\n*.zone.org\n")
	denied, err := policy.Parse(strings.NewReader("gist.github.com\ngithub.com:80\n*.bad.zone.org\nonly.org:25\n"), "deny", nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Denied = denied
	p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:5432"), netip.MustParseAddrPort("192.168.1.5:5432")}
	open := policy.Tighten(p, nil)
	open.Mode = policy.Open
	public, private := netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("192.168.1.5")
	loop, other := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.0.0.1")
	for _, c := range []struct {
		name             string
		addr             netip.Addr
		port             uint16
		allowed, allOpen bool // in mode allowlist, in mode open
		want             string
	}{
		{"github.com", netip.Addr{}, 0, true, true, "github.com|list:1|on the allowlist"},
		{"github.com", netip.Addr{}, 443, true, true, "github.com|list:1|on the allowlist"},
		{"github.com", netip.Addr{}, 9418, true, true, "github.com:9418|list:2|on the allowlist"},
		{"github.com", netip.Addr{}, 25, false, false, "github.com|list:1|port 25 is not open"},
		{"github.com", netip.Addr{}, 80, false, false, "github.com:80|deny:2|denied by name"},
		{"github.com", public, 443, true, true, "github.com|list:1|on the allowlist"},
		{"github.com", public, 0, true, true, "github.com|list:1|on the allowlist"},
		{"github.com", other, 443, false, false, "github.com|list:1|the name resolves to 10.0.0.1, a blocked address (private network)"},
		{"github.com", other, 0, false, false, "github.com|list:1|the name resolves to 10.0.0.1, a blocked address (private network)"},
		{"api.github.com", netip.Addr{}, 8443, true, true, "*.github.com:8443|list:3|on the allowlist"},
		{"api.github.com", netip.Addr{}, 443, false, true, "*.github.com:8443|list:3|port 443 is not open"},
		{"gist.github.com", netip.Addr{}, 0, false, false, "gist.github.com|deny:1|denied by name"},
		{"gist.github.com", netip.Addr{}, 8443, false, false, "gist.github.com|deny:1|denied by name"},
		{"x.bad.zone.org", netip.Addr{}, 443, false, false, "*.bad.zone.org|deny:3|denied by name"},
		{"bad.zone.org", netip.Addr{}, 443, true, true, "*.zone.org|list:6|on the allowlist"},
		{"only.org", netip.Addr{}, 0, false, true, "only.org:25|list:5|none of its ports is open"},
		{"only.org", netip.Addr{}, 25, false, false, "only.org:25|deny:4|denied by name"},
		{"else.org", netip.Addr{}, 0, false, true, "||not on the allowlist"},
		{"else.org", netip.Addr{}, 443, false, true, "||not on the allowlist"},
		{"db.corp.org", private, 5432, true, true, "db.corp.org:5432|list:4|on the allowlist"},
		{"db.corp.org", private, 0, true, true, "db.corp.org:5432|list:4|on the allowlist"},
		{"db.corp.org", loop, 5432, true, true, "db.corp.org:5432|list:4|on the allowlist"},
		{"db.corp.org", loop, 0, false, false, "db.corp.org:5432|list:4|the name resolves to 127.0.0.1, a blocked address (loopback)"},
		{"", private, 5432, true, true, "host service 192.168.1.5:5432||allowed host service"},
		{"", loop, 5432, true, true, "host service 127.0.0.1:5432||allowed host service"},
		{"", private, 5433, false, false, "||blocked address (private network)"},
		{"", public, 443, false, true, "||address without an allowed name"},
		{"", public, 0, false, false, "||address without a port"},
		{"", netip.Addr{}, 443, false, false, "||neither a name nor an address"},
		{"", netip.MustParseAddr("2001:db8::1%eth0"), 443, false, false, "||not an internet address"},
		{"not a name", public, 443, false, false, "||not a host name"},
	} {
		q := policy.Question{Name: c.name, Addr: c.addr, Port: c.port}
		d := p.Decide(q)
		if got := d.Rule + "|" + d.Source + "|" + d.Reason; d.Allowed != c.allowed || got != c.want {
			t.Errorf("Decide(%+v) = allowed %t, %s, want %t, %s", q, d.Allowed, got, c.allowed, c.want)
		}
		if d := open.Decide(q); d.Allowed != c.allOpen || d.Reason == "" {
			t.Errorf("Decide(%+v) in mode open = %+v, want allowed %t with a reason", q, d, c.allOpen)
		}
	}
	shut := policy.Tighten(open, &policy.Policy{Ports: []uint16{}})
	for _, c := range []struct {
		p    *policy.Policy
		q    policy.Question
		want string
	}{
		{open, policy.Question{Name: "else.org", Port: 443}, "mode open|mode open allows every name"},
		{open, policy.Question{Name: "else.org", Port: 25}, "mode open|port 25 is not open"},
		{open, policy.Question{Addr: public, Port: 443}, "mode open|mode open allows every public address"},
		{open, policy.Question{Addr: public, Port: 25}, "mode open|port 25 is not open"},
		{shut, policy.Question{Name: "else.org"}, "mode open|none of its ports is open"},
		{&policy.Policy{Version: policy.Version, Mode: policy.Isolated}, policy.Question{Name: "a.org"}, "|mode isolated"},
		{&policy.Policy{Version: policy.Version, Mode: "x"}, policy.Question{Name: "a.org"}, "|unknown network mode"},
		{&policy.Policy{Mode: policy.Open}, policy.Question{Name: "a.org"}, "|unknown policy version"},
		{nil, policy.Question{Name: "a.org"}, "|no policy"},
	} {
		if d := c.p.Decide(c.q); d.Rule+"|"+d.Reason != c.want {
			t.Errorf("Decide(%+v) = %s|%s, want %s", c.q, d.Rule, d.Reason, c.want)
		}
	}
}

func TestPortsOut(t *testing.T) {
	p := allowlist(t, "github.com:9418,22\n*.a.org:80\nb.org\n")
	if got := fmt.Sprint(p.PortsOut()); got != "[22 80 443 9418]" {
		t.Errorf("PortsOut = %s, want [22 80 443 9418]", got)
	}
	p.Mode = policy.Isolated
	if got := p.PortsOut(); got != nil {
		t.Errorf("PortsOut of an isolated policy = %v, want nil", got)
	}
	var none *policy.Policy
	if got := none.PortsOut(); got != nil {
		t.Errorf("PortsOut without a policy = %v, want nil", got)
	}
}

func TestModes(t *testing.T) {
	public := policy.Question{Addr: netip.MustParseAddr("203.0.113.7"), Port: 443}
	for mode, want := range map[policy.Mode][3]bool{
		policy.Isolated:  {false, false, false},
		policy.Allowlist: {true, false, false},
		policy.Open:      {true, true, true},
		"outbound":       {false, false, false},
		"":               {false, false, false},
	} {
		p := allowlist(t, "github.com\n")
		p.Mode = mode
		got := [3]bool{p.Decide(policy.Question{Name: "github.com"}).Allowed, p.Decide(policy.Question{Name: "example.com"}).Allowed, p.Decide(public).Allowed}
		if got != want {
			t.Errorf("decisions in mode %q = %v, want %v", mode, got, want)
		}
	}
	var none *policy.Policy
	if none.Decide(policy.Question{Name: "github.com"}).Allowed || none.Decide(public).Allowed {
		t.Error("Decide without a policy = allowed, want denied")
	}
	p := allowlist(t, "github.com\n")
	p.Version++
	if p.Decide(policy.Question{Name: "github.com"}).Allowed {
		t.Error("Decide with an unknown version = allowed, want denied")
	}
}

func TestAddr(t *testing.T) {
	p := policy.Default()
	p.Mode = policy.Open
	p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080")}
	for addr, want := range map[string]bool{
		"203.0.113.7:443":               true,
		"192.0.2.1:22":                  true,
		"198.51.100.1:80":               true,
		"198.18.0.1:443":                true,
		"[2001:db8::1]:443":             true,
		"[2606:4700::1]:443":            true,
		"[64:ff9b::203.0.113.7]:443":    true,
		"[::ffff:203.0.113.7]:443":      true,
		"203.0.113.7:25":                false,
		"203.0.113.7:0":                 false,
		"10.1.2.3:443":                  false,
		"172.16.0.1:443":                false,
		"172.31.255.255:443":            false,
		"172.32.0.1:443":                true,
		"192.168.5.2:443":               false,
		"192.168.5.2:8080":              true,
		"[::ffff:192.168.5.2]:8080":     true,
		"169.254.169.254:80":            false,
		"168.63.129.16:80":              false,
		"100.100.100.200:80":            false,
		"100.63.0.1:80":                 true,
		"127.0.0.1:80":                  false,
		"0.0.0.0:80":                    false,
		"224.0.0.1:80":                  false,
		"255.255.255.255:80":            false,
		"[::]:80":                       false,
		"[::1]:80":                      false,
		"[::127.0.0.1]:80":              false,
		"[fd00:ec2::254]:80":            false,
		"[fe80::1]:80":                  false,
		"[fe80::1%eth0]:80":             false,
		"[2606:4700::1%eth0]:443":       false,
		"[ff02::1]:80":                  false,
		"[fec0::1]:80":                  false,
		"[::ffff:127.0.0.1]:80":         false,
		"[::ffff:10.0.0.1]:443":         false,
		"[64:ff9b::10.0.0.1]:443":       false,
		"[64:ff9b::169.254.169.254]:80": false,
		"[64:ff9b:1::1]:80":             false,
		"[2002:7f00:1::]:80":            false,
	} {
		ap := netip.MustParseAddrPort(addr)
		if d := p.Decide(policy.Question{Addr: ap.Addr(), Port: ap.Port()}); d.Allowed != want {
			t.Errorf("Decide(%s) = %+v, want allowed: %t", addr, d, want)
		}
	}
	if p.Decide(policy.Question{}).Allowed {
		t.Error("Decide of the zero address = allowed, want denied")
	}
}

func TestTighten(t *testing.T) {
	user := allowlist(t, "github.com\n*.npmjs.org\n*.deep.golang.org\n")
	user.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080")}
	open := policy.Default()
	open.Mode = policy.Open
	open.Names = []policy.Rule{{Pattern: "known.org"}}
	for name, c := range map[string]struct {
		user, repo *policy.Policy
		mode       policy.Mode
		names      string
	}{
		"no file":         {user, nil, policy.Allowlist, "github.com *.npmjs.org *.deep.golang.org"},
		"says nothing":    {user, &policy.Policy{}, policy.Allowlist, "github.com *.npmjs.org *.deep.golang.org"},
		"tries to open":   {user, &policy.Policy{Mode: policy.Open}, policy.Allowlist, "github.com *.npmjs.org *.deep.golang.org"},
		"intersection":    {user, allowlist(t, "evil.example\npkg.npmjs.org\n*.golang.org\ngithub.com"), policy.Allowlist, "github.com *.deep.golang.org pkg.npmjs.org"},
		"empty list":      {user, allowlist(t, ""), policy.Allowlist, ""},
		"isolates":        {user, &policy.Policy{Mode: policy.Isolated}, policy.Isolated, "github.com *.npmjs.org *.deep.golang.org"},
		"unknown mode":    {user, &policy.Policy{Mode: "x"}, policy.Isolated, "github.com *.npmjs.org *.deep.golang.org"},
		"open user":       {open, allowlist(t, "github.com"), policy.Allowlist, "github.com"},
		"open, mode only": {open, &policy.Policy{Mode: policy.Allowlist}, policy.Allowlist, "known.org"},
		"no user":         {nil, open, policy.Isolated, ""},
	} {
		got := policy.Tighten(c.user, c.repo)
		if got.Mode != c.mode || patterns(got) != c.names {
			t.Errorf("Tighten for %s = %s [%s], want %s [%s]", name, got.Mode, patterns(got), c.mode, c.names)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("Validate of the tightened policy for %s = %v, want nil", name, err)
		}
	}
	narrow := policy.Tighten(user, &policy.Policy{Ports: []uint16{443, 8443}, HostServices: []netip.AddrPort{}})
	if len(narrow.Ports) != 1 || narrow.Ports[0] != 443 || len(narrow.HostServices) != 0 {
		t.Errorf("Tighten = ports %v, host services %v, want [443], none", narrow.Ports, narrow.HostServices)
	}
	if len(user.Ports) != 3 || user.Ports[0] != 22 {
		t.Errorf("ports of the user's policy = %v, want them unchanged", user.Ports)
	}
}

func TestMarshal(t *testing.T) {
	p := allowlist(t, "github.com\n*.npmjs.org\n")
	p.HostServices = []netip.AddrPort{netip.MustParseAddrPort("192.168.5.2:8080")}
	p.Names[0].Ports = []uint16{443}
	p.Denied = []policy.Rule{{Pattern: "bad.npmjs.org", Ports: []uint16{80}, Source: "net deny"}}
	p.Enforced = true
	data, err := policy.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	back, err := policy.Unmarshal(data)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := policy.Marshal(back); err != nil || string(again) != string(data) || !back.Enforced || back.Names[0].String() != "github.com:443" || back.Denied[0].String() != "bad.npmjs.org:80" {
		t.Errorf("Marshal of the decoded policy = %s, %v, want %s", again, err, data)
	}
	for _, bad := range []string{
		``, `null`, `{}`, `[]`, string(data) + "{}",
		`{"version":1,"mode":"open","names":[],"ports":[]}`,
		`{"version":2,"mode":"wide","names":[],"ports":[]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"extra":1}`,
		`{"version":2,"mode":"open","names":[{"pattern":"*"}],"ports":[]}`,
		`{"version":2,"mode":"open","names":[{"pattern":"GitHub.com"}],"ports":[]}`,
		`{"version":2,"mode":"open","names":[],"ports":[0]}`,
		`{"version":2,"mode":"open","names":[],"ports":[70000]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"host_services":["0.0.0.0:80"]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"host_services":["[::ffff:127.0.0.1]:80"]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"host_services":["224.0.0.1:80"]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"host_services":["127.0.0.1:0"]}`,
		`{"version":2,"mode":"open","names":[{"pattern":"a.org","ports":[]}],"ports":[]}`,
		`{"version":2,"mode":"open","names":[{"pattern":"a.org","ports":[0]}],"ports":[]}`,
		`{"version":2,"mode":"open","names":[],"denied":[{"pattern":"*.com"}],"ports":[]}`,
		`{"version":2,"mode":"open","names":[],"ports":[],"host_services":["[fe80::1%eth0]:80"]}`,
	} {
		if _, err := policy.Unmarshal([]byte(bad)); err == nil {
			t.Errorf("Unmarshal(%s) = nil, want an error", bad)
		}
	}
}

func TestConcurrentFirstUse(t *testing.T) {
	p := allowlist(t, "github.com\n")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if !p.Decide(policy.Question{Name: "github.com"}).Allowed {
				t.Error("Decide(github.com) = denied, want allowed")
			}
		})
	}
	wg.Wait()
}

func TestShippedAllowlist(t *testing.T) {
	f, err := os.Open("../../config/network-allowlist.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rules, err := policy.Parse(f, "network-allowlist.txt", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := policy.Default()
	p.Names = rules
	for _, name := range []string{
		"github.com", "api.github.com", "raw.githubusercontent.com", "objects.githubusercontent.com", "pkg.npmjs.org",
		"hub.docker.com", "registry-1.docker.io", "auth.docker.io", "production.cloudflare.docker.com", "api.anthropic.com", "claude.ai",
		"archive.ubuntu.com", "security.ubuntu.com", "nodejs.org", "any.nodesource.com", "any.debian.org", "any.golang.org",
	} {
		if d := p.Decide(policy.Question{Name: name}); !d.Allowed {
			t.Errorf("Decide(%s) = denied: %s, want allowed", name, d.Reason)
		}
	}
	for _, name := range []string{"statsig.anthropic.com", "gist.github.com", "example.com", "github.io"} {
		if p.Decide(policy.Question{Name: name}).Allowed {
			t.Errorf("Decide(%s) = allowed, want denied", name)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("github.com\n*.npmjs.org # x\n")
	f.Add("1.2.3.4\nhttps://x\n*.com\n\xff")
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := policy.Parse(strings.NewReader(text), "f", nil)
		if err != nil {
			if rules != nil || !strings.HasPrefix(err.Error(), "f:") {
				t.Fatalf("Parse = %v, %v, want no rules with an error that begins with f:", rules, err)
			}
			return
		}
		p := policy.Default()
		p.Names = rules
		if err := p.Validate(); err != nil {
			t.Fatalf("Validate of the parsed policy = %v, want nil", err)
		}
		for _, r := range rules {
			name := strings.Replace(r.Pattern, "*", "x", 1)
			if len(name) <= 253 && !p.Decide(policy.Question{Name: name}).Allowed {
				t.Fatalf("Decide(%q) with pattern %q = denied, want allowed", name, r.Pattern)
			}
		}
	})
}

func FuzzName(f *testing.F) {
	f.Add("github.com", "GitHub.com.")
	f.Add("*.npmjs.org", "a.b.npmjs.org")
	f.Fuzz(func(t *testing.T, pattern, name string) {
		canonical, err := policy.ParsePattern(pattern)
		if err != nil {
			return
		}
		p := policy.Default()
		p.Names = []policy.Rule{{Pattern: canonical}}
		if !p.Decide(policy.Question{Name: name}).Allowed {
			return
		}
		// Interpret the pattern independently.
		n := strings.ToLower(strings.TrimSuffix(name, "."))
		zone, wildcard := strings.CutPrefix(canonical, "*")
		if wildcard && (!strings.HasSuffix(n, zone) || len(n) == len(zone)) || !wildcard && n != canonical {
			t.Fatalf("Decide(%q) with pattern %q = allowed, want denied", name, canonical)
		}
	})
}

func TestWholeZone(t *testing.T) {
	rules, err := policy.Parse(strings.NewReader(".example.org:8080\n"), "list", nil)
	if err != nil {
		t.Fatal(err)
	}
	p := policy.Default()
	p.Names = rules
	for name, want := range map[string]bool{"example.org": true, "a.b.example.org": true, "notexample.org": false, "org": false} {
		if d := p.Decide(policy.Question{Name: name, Port: 8080}); d.Allowed != want || want && d.Source != "list:1" {
			t.Errorf("Decide(%s) = %+v, want allowed: %t", name, d, want)
		}
	}
	if d := p.Decide(policy.Question{Name: "example.org", Port: 443}); d.Allowed {
		t.Errorf("Decide(example.org) for another port = %+v, want denied", d)
	}
	for _, bad := range []string{".com", ".", "..", ".*.example.org"} {
		if _, err := (policy.Groups{}).Expand(bad, ""); err == nil {
			t.Errorf("Expand(%q) = nil, want an error", bad)
		}
	}
}

// TestDenialsBeatAllowances checks that a denial overrides every allowance of the name,
// wherever either comes from and however specific it is, and that a denial does not
// reach beyond its own name and ports.
func TestDenialsBeatAllowances(t *testing.T) {
	rule := func(s string) policy.Rule {
		r, err := policy.ParseRule(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, c := range []struct{ allow, deny, name string }{
		{"api.example.org", "api.example.org", "api.example.org"},
		{"api.example.org", "*.example.org", "api.example.org"},
		{"*.example.org", "api.example.org", "api.example.org"},
		{"*.example.org", "*.api.example.org", "v1.api.example.org"},
		{"*.api.example.org", "*.example.org", "v1.api.example.org"},
		{"v1.api.example.org", "*.example.org", "v1.api.example.org"},
		{"*.example.org", "*.example.org", "a.b.c.example.org"},
		{"api.example.org:443", "api.example.org", "api.example.org"},
		{"api.example.org", "api.example.org:443", "api.example.org"},
		{"*.example.org:443", "api.example.org:443", "api.example.org"},
	} {
		for _, mode := range []policy.Mode{policy.Allowlist, policy.Open} {
			for _, from := range []string{"user", "repository"} {
				user := policy.Default()
				user.Mode, user.Names = mode, []policy.Rule{rule(c.allow), rule("other.example.com")}
				var repo *policy.Policy
				if from == "user" {
					user.Denied = []policy.Rule{rule(c.deny)}
				} else {
					repo = &policy.Policy{Denied: []policy.Rule{rule(c.deny)}}
				}
				p := policy.Tighten(user, repo)
				d := p.Decide(policy.Question{Name: c.name, Port: 443})
				if d.Allowed || d.Rule != c.deny {
					t.Errorf("mode %s, %s allowed, %s denied by the %s: Decide(%s) = %+v, want denied by %s", mode, c.allow, c.deny, from, c.name, d, c.deny)
				}
				if !p.Decide(policy.Question{Name: "other.example.com", Port: 443}).Allowed {
					t.Errorf("mode %s, %s denied by the %s: Decide(other.example.com) = denied, want allowed", mode, c.deny, from)
				}
				if only := rule(c.deny).Ports; only != nil && rule(c.allow).Ports == nil && !p.Decide(policy.Question{Name: c.name, Port: 80}).Allowed {
					t.Errorf("mode %s, %s denied: Decide(%s) for port 80 = denied, want allowed", mode, c.deny, c.name)
				}
			}
		}
	}
}

// TestBlockedReasonOfOtherForms checks addresses without the rest of a policy: any form
// of a blocked address is blocked.
func TestBlockedReasonOfOtherForms(t *testing.T) {
	for addr, want := range map[string]string{
		"fe80::1%eth0": "link-local", "fd00::1%0": "private network", "::ffff:10.0.0.1": "private network",
		"::ffff:203.0.113.1": "", "203.0.113.1": "", "2001:db8::1%eth0": "",
	} {
		if got := policy.BlockedReason(netip.MustParseAddr(addr)); !strings.Contains(got, want) || (want == "") != (got == "") {
			t.Errorf("BlockedReason(%s) = %q, want %q", addr, got, want)
		}
	}
	if policy.BlockedReason(netip.Addr{}) == "" {
		t.Error("BlockedReason of no address = \"\", want a reason")
	}
}

// TestValidateSays checks that Validate reports all errors of an invalid policy.
func TestValidateSays(t *testing.T) {
	valid := func(change func(*policy.Policy)) *policy.Policy {
		p := policy.Default()
		change(p)
		return p
	}
	rule := func(r policy.Rule) func(*policy.Policy) {
		return func(p *policy.Policy) { p.Names = []policy.Rule{r} }
	}
	service := func(s netip.AddrPort) func(*policy.Policy) {
		return func(p *policy.Policy) { p.HostServices = []netip.AddrPort{s} }
	}
	for _, c := range []struct {
		change func(*policy.Policy)
		want   string // "" if the policy is valid
	}{
		{func(*policy.Policy) {}, ""},
		{func(p *policy.Policy) { p.Version = 7 }, "policy version must be 2, got 7"},
		{func(p *policy.Policy) { p.Mode = "wide" }, `network mode must be isolated, allowlist or open, got "wide"`},
		{func(p *policy.Policy) { p.Ports = []uint16{443, 0} }, "port must not be 0"},
		{func(p *policy.Policy) { p.Ports = make([]uint16, policy.MaxPorts+1) }, "65 ports; at most 64 are allowed"},
		{rule(policy.Rule{Pattern: "A.org"}), `name "A.org": not in its canonical form; write "a.org"`},
		{rule(policy.Rule{Pattern: "a"}), `name "a": "a" is a single label`},
		{rule(policy.Rule{Pattern: "a.org", Ports: []uint16{}}), "empty list of ports"},
		{rule(policy.Rule{Pattern: "a.org", Ports: []uint16{80, 0}}), "port must not be 0"},
		{rule(policy.Rule{Pattern: "a.org", Ports: make([]uint16, policy.MaxPorts+1)}), "65 ports; at most 64 are allowed"},
		{rule(policy.Rule{Pattern: "a.org", Source: strings.Repeat("x", 1024)}), ""},
		{rule(policy.Rule{Pattern: "a.org", Source: strings.Repeat("x", 1025)}), "source is longer than 1024 bytes"},
		{func(p *policy.Policy) { p.Denied = []policy.Rule{{Pattern: "*"}} }, "allows every name"},
		{service(netip.MustParseAddrPort("[::1]:80")), ""},
		{service(netip.AddrPortFrom(netip.Addr{}, 80)), "host service must be ADDRESS:PORT"},
		{service(netip.MustParseAddrPort("10.0.0.1:0")), "host service must be ADDRESS:PORT"},
		{service(netip.MustParseAddrPort("[fe80::1%eth0]:80")), "host service must be ADDRESS:PORT"},
		{service(netip.MustParseAddrPort("[::ffff:10.0.0.1]:80")), "host service must be ADDRESS:PORT"},
		{service(netip.MustParseAddrPort("[::]:80")), "host service must be ADDRESS:PORT"},
		{service(netip.MustParseAddrPort("[ff02::1]:80")), "host service must be ADDRESS:PORT"},
	} {
		err := valid(c.change).Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("Validate = %v, want %q", err, c.want)
		}
		if _, err := policy.Marshal(valid(c.change)); (err == nil) != (c.want == "") {
			t.Errorf("want %q: encoded with %v", c.want, err)
		}
	}
	many := valid(func(p *policy.Policy) {
		p.Version, p.Mode, p.Ports, p.HostServices = 7, "wide", []uint16{0}, []netip.AddrPort{{}}
		p.Names = []policy.Rule{{Pattern: "*"}, {Pattern: "ok.org"}, {Pattern: "A.org"}}
	})
	if err := many.Validate(); err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Errorf("Validate of a policy with six errors = %v, want 6 lines", err)
	}
	worse := valid(func(p *policy.Policy) { p.Names = make([]policy.Rule, 1000) })
	if err := worse.Validate(); err == nil || strings.Count(err.Error(), "\n") != 99 {
		t.Errorf("Validate of a policy with a thousand errors = %d lines, want 100", strings.Count(fmt.Sprint(err), "\n")+1)
	}
	if _, err := policy.Marshal(nil); err == nil {
		t.Error("Marshal(nil) = nil, want an error")
	}
	large := valid(func(p *policy.Policy) {
		for i := range 17_000 {
			p.Names = append(p.Names, policy.Rule{Pattern: fmt.Sprintf("n%d.org", i), Source: strings.Repeat("x", 1000)})
		}
	})
	if _, err := policy.Marshal(large); err == nil || !strings.Contains(err.Error(), "encode policy: larger than") {
		t.Errorf("Marshal of a policy over the bound = %v, want \"encode policy: larger than\"", err)
	}
}

// TestNamesAtTheirBounds checks names and lists whose lengths are at their bounds.
func TestNamesAtTheirBounds(t *testing.T) {
	label := strings.Repeat("a", 63)
	name := strings.Repeat(label+".", 3) + strings.Repeat("b", 57) + ".org" // 253 bytes
	for pattern, ok := range map[string]bool{
		label + ".org": true, label + "a.org": false, name: true, "a" + name: false, "*.a.b": true, "*.xy.com": true, "*.co.com": true, "*.xx.uk": true,
		"a-b.org": true, "a.b-": false, "9.org": true, "a.9b": true, "a.99": false, "*.com.au": false, "*.net.au": false, "*.org.uk": false, "*.gov.uk": false,
		"*.edu.au": false, "*.ac.uk": false, "*.or.jp": false, "*.ne.jp": false, "*.go.jp": false, "*.co.jp": false, "*.a.co.jp": true,
	} {
		if got, err := policy.ParsePattern(pattern); (err == nil) != ok || ok && got != pattern {
			t.Errorf("ParsePattern(%q) = %q, %v, want it accepted: %t", pattern, got, err, ok)
		}
	}
	for asked, ok := range map[string]bool{
		label + ".org": true, label + "a.org": false, name: true, name + ".": true, "a" + name: false, "Az09-_.ORG": true, "a.9": false, "a.b9": true, "a..b": false, ".a": false,
	} {
		got, err := policy.Canonical(asked)
		if want := strings.ToLower(strings.TrimSuffix(asked, ".")); (err == nil) != ok || ok && got != want {
			t.Errorf("Canonical(%q) = %q, %v, want %q, accepted: %t", asked, got, err, want, ok)
		}
	}
	for n, ok := range map[int]bool{63: true, 64: false} {
		if policy.GroupName(strings.Repeat("a", n)) != ok {
			t.Errorf("GroupName of %d letters = %t, want %t", n, !ok, ok)
		}
	}
	for n, ok := range map[int]bool{64: true, 65: false} {
		entry := "a.org:1"
		for port := range n - 1 {
			entry += fmt.Sprintf(",%d", port+2)
		}
		if r, err := policy.ParseRule(entry + ",1"); (err == nil) != ok || ok && len(r.Ports) != n {
			t.Errorf("ParseRule with %d ports = %v, want it accepted: %t", n, err, ok)
		}
	}
	if _, err := policy.ParseRule(strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), `"`+strings.Repeat("x", 80)+`…"`) {
		t.Errorf("ParseRule of 200 bytes = %v, want the first 80 and …", err)
	}
	if _, err := policy.ParseRule(strings.Repeat("x", 80)); err == nil || strings.Contains(err.Error(), "…") {
		t.Errorf("ParseRule of 80 bytes = %v, want an error without …", err)
	}
	comment := strings.Repeat("#", 1<<20)
	if _, err := policy.Parse(strings.NewReader(comment), "f", nil); err != nil {
		t.Error(err)
	}
	if _, err := policy.Parse(strings.NewReader(comment+"#"), "f", nil); err == nil {
		t.Error("Parse of a file over the bound = nil, want an error")
	}
	if rules, err := policy.Parse(io.MultiReader(strings.NewReader("a.org\n"), iotest.ErrReader(io.ErrUnexpectedEOF)), "f", nil); rules != nil || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("Parse of half a file = %v, %v, want nil, %v", rules, err, io.ErrUnexpectedEOF)
	}
}

// TestBounds checks that the bounds of a policy also apply to its files.
func TestBounds(t *testing.T) {
	ports := func(n int) (all []uint16) {
		for i := range n {
			all = append(all, uint16(1000+i))
		}
		return all
	}
	for name, c := range map[string]struct {
		change func(p *policy.Policy, n int)
		most   int
	}{
		"ports":        {func(p *policy.Policy, n int) { p.Ports = ports(n) }, policy.MaxPorts},
		"ports of one": {func(p *policy.Policy, n int) { p.Names = []policy.Rule{{Pattern: "a.org", Ports: ports(n)}} }, policy.MaxPorts},
		"host services": {func(p *policy.Policy, n int) {
			for _, port := range ports(n) {
				p.HostServices = append(p.HostServices, netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), port))
			}
		}, policy.MaxHostServices},
		"ports in all": {func(p *policy.Policy, n int) {
			p.Ports = nil
			for i, port := range ports(n) {
				p.Names = append(p.Names, policy.Rule{Pattern: fmt.Sprintf("n%d.org", i), Ports: []uint16{port}})
			}
		}, policy.MaxPortsOut},
		"names": {func(p *policy.Policy, n int) {
			for i := range n {
				p.Names = append(p.Names, policy.Rule{Pattern: fmt.Sprintf("n%d.org", i)})
			}
		}, policy.MaxRules},
		"denied names": {func(p *policy.Policy, n int) {
			for i := range n {
				p.Denied = append(p.Denied, policy.Rule{Pattern: fmt.Sprintf("n%d.org", i)})
			}
		}, policy.MaxRules},
	} {
		for extra, ok := range []bool{true, false} {
			p := policy.Default()
			c.change(p, c.most+extra)
			if err := p.Validate(); (err == nil) != ok {
				t.Errorf("Validate with %d %s = %v, want it valid: %t", c.most+extra, name, err, ok)
			}
			if data, err := policy.Marshal(p); (err == nil) != ok || (len(data) > 0) != ok {
				t.Errorf("Marshal with %d %s = %d bytes, %v, want it encoded: %t", c.most+extra, name, len(data), err, ok)
			}
		}
	}
	whole := []byte(`{"version":2,"mode":"open","names":[],"ports":[]}`)
	if _, err := policy.Unmarshal(append(whole, bytes.Repeat([]byte(" "), policy.MaxBytes-len(whole))...)); err != nil {
		t.Error(err)
	}
	if _, err := policy.Unmarshal(append(whole, bytes.Repeat([]byte(" "), policy.MaxBytes)...)); err == nil {
		t.Error("Unmarshal of a policy over the bound = nil, want an error")
	}
}

func TestAsked(t *testing.T) {
	rule := func(pattern string, ports ...uint16) policy.Rule {
		return policy.Rule{Pattern: pattern, Ports: ports, Source: "network.ask"}
	}
	p := policy.Default()
	p.Names, p.Denied = []policy.Rule{{Pattern: "allowed.example.org"}}, []policy.Rule{{Pattern: "denied.example.org"}}
	p.Asked = []policy.Rule{rule("*.example.org"), rule("db.example.net", 5432)}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	if ports := p.PortsOut(); !slices.Contains(ports, 5432) {
		t.Errorf("ports = %v, want the one of a rule that asks, too", ports)
	}
	for _, c := range []struct {
		q             policy.Question
		allowed, asks bool
	}{
		{policy.Question{Name: "new.example.org"}, false, true},
		{policy.Question{Name: "new.example.org", Port: 443}, false, true},
		{policy.Question{Name: "new.example.org", Port: 25}, false, false},
		{policy.Question{Name: "db.example.net", Port: 5432}, false, true},
		{policy.Question{Name: "db.example.net", Port: 443}, false, false},
		{policy.Question{Name: "allowed.example.org", Port: 443}, true, false},
		{policy.Question{Name: "denied.example.org", Port: 443}, false, false},
		{policy.Question{Name: "example.net", Port: 443}, false, false},
		{policy.Question{Name: "new.example.org", Port: 443, Addr: netip.MustParseAddr("10.0.0.1")}, false, false},
		{policy.Question{Name: "new.example.org", Port: 443, Addr: netip.MustParseAddr("203.0.113.1")}, false, true},
	} {
		if d := p.Decide(c.q); d.Allowed != c.allowed || d.Asks != c.asks || d.Reason == "" || d.Asks && d.Source == "" {
			t.Errorf("Decide(%+v) = %+v, want allowed %v, asks %v", c.q, d, c.allowed, c.asks)
		}
	}
	for _, mode := range []policy.Mode{policy.Isolated, policy.Open} {
		other := policy.Tighten(p, nil)
		other.Mode = mode
		if d := other.Decide(policy.Question{Name: "new.example.org", Port: 443}); d.Asks {
			t.Errorf("mode %s: decision = %+v, want that it does not ask", mode, d)
		}
	}
	// A repository's file narrows what is asked about.
	names := policy.Tighten(p, &policy.Policy{Version: policy.Version, Names: []policy.Rule{{Pattern: "one.example.org"}, {Pattern: "other.example.net"}}})
	ports := policy.Tighten(p, &policy.Policy{Version: policy.Version, Ports: []uint16{22}})
	denied := policy.Tighten(p, &policy.Policy{Version: policy.Version, Denied: []policy.Rule{{Pattern: "one.example.org"}}})
	for _, c := range []struct {
		p    *policy.Policy
		name string
		port uint16
		want bool
	}{
		{names, "one.example.org", 443, true},
		{names, "two.example.org", 443, false},
		{names, "other.example.net", 443, false},
		{ports, "one.example.org", 22, true},
		{ports, "one.example.org", 443, false},
		{ports, "db.example.net", 5432, false},
		{denied, "one.example.org", 443, false},
	} {
		if d := c.p.Decide(policy.Question{Name: c.name, Port: c.port}); d.Asks != c.want || d.Allowed {
			t.Errorf("Decide(%s:%d) of a narrowed policy = %+v, want asks %v", c.name, c.port, d, c.want)
		}
	}
}
