package policy

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestDecideRequest(t *testing.T) {
	p := Default()
	p.Requests = [][]RequestRules{
		{
			{
				Host:   "api.github.com",
				Allow:  []string{"GET /**", "POST,PATCH /repos/acme/app/**", "POST /upload?name=a b"},
				Deny:   []string{"* /repos/*/*/keys/**", "GET /secret*/x", "* /q?service=evil"},
				Source: "config.yaml:1",
			},
			{Host: "*.example.org", Deny: []string{"DELETE /**"}},
		},
		{{Host: "api.github.com", Deny: []string{"* /repos/acme/app/pulls"}}},
	}
	if err := p.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		method, host, target string
		want                 bool
		reason               string
	}{
		{"GET", "api.github.com", "/", true, ""},
		{"HEAD", "api.github.com", "/user", true, ""},
		{"GET", "api.github.com", "/repos/other/repo", true, ""},
		{"POST", "api.github.com", "/repos/acme/app/issues", true, ""},
		{"POST", "api.github.com", "/repos/Acme/App/issues", true, ""},
		{"POST", "api.github.com", "/repos/acme/app/git/refs/heads/a%2Fb", true, ""},
		{"POST", "api.github.com", "/repos/acme/app", true, ""}, // ** is also nothing
		{"POST", "api.github.com", "/repos/acme/app2/issues", false, "no request rule allows it"},
		{"POST", "api.github.com", "/repos/acme%2Fapp/issues", false, "no request rule allows it"},
		{"POST", "api.github.com", "/user/repos", false, "no request rule allows it"},
		{"PUT", "api.github.com", "/repos/acme/app/issues", false, "no request rule allows it"},
		{"POST", "api.github.com", "/repos/acme/app/keys", false, "denied by a request rule"},
		{"POST", "api.github.com", "/repos/acme/app/KEYS/1", false, "denied by a request rule"},
		{"POST", "api.github.com", "/repos/acme/app/%6beys", false, "denied by a request rule"},
		{"POST", "api.github.com", "/repos/acme/app%2Fkeys", false, "denied by a request rule"},
		{"HEAD", "api.github.com", "/secrets/x", false, "denied by a request rule"},
		{"GET", "api.github.com", "/secrets/y/x", true, ""},
		{"POST", "api.github.com", "/repos/acme/app/pulls", false, "denied by a request rule"},
		{"POST", "api.github.com", "/repos/acme/app/pulls/", false, "denied by a request rule"}, // the same to many servers
		{"GET", "api.github.com", "/repos/acme/app/../x", false, "several ways"},
		{"GET", "api.github.com", "/repos/acme/app/%2e%2e/x", false, "several ways"},
		{"GET", "api.github.com", "/repos/acme/app%2F..%2Fx", false, "several ways"},
		{"GET", "api.github.com", "/repos//x", false, "several ways"},
		{"GET", "api.github.com", "/repos\\x", false, "several ways"},
		{"GET", "api.github.com", "/repos/%00", false, "several ways"},
		{"GET", "api.github.com", "/repos/%252e", false, "several ways"},
		{"GET", "api.github.com", "/repos/%zz", false, "several ways"},
		{"GET", "api.github.com", "repos", false, "not a path"},
		{"GET", "api.github.com", "*", false, "not a path"},
		{"GET", "api.github.com", "/" + strings.Repeat("a", maxRequestPath), false, "not a path"},
		{"POST", "api.github.com", "/upload?name=a%20b", true, ""},
		{"POST", "api.github.com", "/upload?name=a+b&x", true, ""},
		{"POST", "api.github.com", "/upload?name=a+b&name=c", false, "no request rule"},
		{"POST", "api.github.com", "/upload?name=a+b;name=c", false, "no request rule"},
		{"POST", "api.github.com", "/upload", false, "no request rule"},
		{"GET", "api.github.com", "/q?service=good", true, ""},
		{"GET", "api.github.com", "/q?service=good&service=evil", false, "denied"},
		{"GET", "api.github.com", "/q?service=good;service=evil", false, "denied"},
		{"GET", "api.github.com", "/q?service=e%76il", false, "denied"},
		{"POST", "a.example.org", "/x", true, ""},
		{"DELETE", "a.example.org", "/x", false, "denied"},
		{"DELETE", "example.org", "/x", true, "no request rule for this host"},
		{"DELETE", "github.com", "/x/../y", true, "no request rule for this host"},
	} {
		path, query, _ := strings.Cut(c.target, "?")
		d := p.DecideRequest(Request{c.host, c.method, path, query})
		if d.Allowed != c.want || d.Reason == "" || !strings.Contains(d.Reason, c.reason) {
			t.Errorf("%s %s%s = %+v, want %t, %q", c.method, c.host, c.target, d, c.want, c.reason)
		}
	}
	if d := p.DecideRequest(Request{"api.github.com", "POST", "/repos/acme/app/keys", ""}); d.Rule != "* /repos/*/*/keys/**" || d.Source != "config.yaml:1" {
		t.Errorf("rule = %q from %q, want the one that denies", d.Rule, d.Source)
	}
	if got := strings.Join(p.RequestHosts(), " "); got != "*.example.org api.github.com" {
		t.Errorf("RequestHosts() = %q", got)
	}
	if (*Policy)(nil).DecideRequest(Request{}).Allowed {
		t.Error("a nil policy allows a request, want a denial")
	}
}

// A repository's own rules only narrow those of the user.
func TestTightenRequests(t *testing.T) {
	user, own := Default(), Default()
	user.Requests = [][]RequestRules{{{Host: "a.example", Allow: []string{"GET /**"}}}}
	own.Requests = [][]RequestRules{{{Host: "a.example", Allow: []string{"* /**"}}, {Host: "b.example", Allow: []string{"GET /x"}}}}
	p := Tighten(user, own)
	if again := Tighten(p, p); len(again.Requests) != len(p.Requests) { // as for a subtask
		t.Errorf("layers = %d, want %d, each once", len(again.Requests), len(p.Requests))
	}
	for target, want := range map[string]bool{"GET a.example": true, "POST a.example": false, "GET b.example": false} {
		method, host, _ := strings.Cut(target, " ")
		if d := p.DecideRequest(Request{host, method, "/y", ""}); d.Allowed != want {
			t.Errorf("%s = %+v, want %t", target, d, want)
		}
	}
}

func TestRequestRulesRefused(t *testing.T) {
	for _, text := range []string{
		"", "GET", "GET ", "/x", "GET x", "get /x", " /x", "GET, /x", "GET /%2f", "GET /\\", "GET /\x00", "GET /x?y", "GET /x?=y",
		"GET /" + strings.Repeat("x", maxRequestRule),
	} {
		if err := ParseRequestRule(text); err == nil {
			t.Errorf("ParseRequestRule(%q) = nil, want an error", text)
		}
		p := Default()
		p.Requests = [][]RequestRules{{{Host: "a.example", Deny: []string{text}}}}
		if p.Validate() == nil {
			t.Errorf("Validate with the rule %q = nil, want an error", text)
		}
		if p.DecideRequest(Request{"a.example", "GET", "/y", ""}).Allowed {
			t.Errorf("a request despite the rule %q that cannot be read was allowed", text)
		}
	}
	many := make([]string, MaxRequestRules+1)
	for i := range many {
		many[i] = "GET /x"
	}
	for what, requests := range map[string][][]RequestRules{
		"no host":   {{{Host: ""}}},
		"a URL":     {{{Host: "https://a.example"}}},
		"not lower": {{{Host: "A.example"}}},
		"too many":  {{{Host: "a.example", Allow: many}}},
		"layers":    make([][]RequestRules, maxRequestLayers+1),
		"a source":  {{{Host: "a.example", Source: strings.Repeat("x", maxSource+1)}}},
	} {
		p := Default()
		p.Requests = requests
		if p.Validate() == nil {
			t.Errorf("Validate with %s = nil, want an error", what)
		}
	}
}

// FuzzDecideRequest checks that no spelling of a denied path is allowed.
// Except is what a user allows for one session.
func TestExcept(t *testing.T) {
	p := Default()
	rules := &GraphQLRules{Path: "/graphql", Repository: "acme/app"}
	p.Requests = [][]RequestRules{
		{
			{Host: "api.github.com", Allow: []string{"GET /**", "POST /graphql"}, Deny: []string{"GET /user"}, GraphQL: rules},
			{Host: "api.github.com", Except: []string{"POST /user/repos", "GET /user", "POST /repos/*/a/x"}, Source: "net allow"},
		},
		{{Host: "api.github.com", Deny: []string{"POST /user/repos"}}},
	}
	for _, c := range []struct {
		target string
		want   bool
	}{
		{"GET /user", true},
		{"HEAD /user", true},
		{"POST /user", false},
		{"POST /user/repos", false}, // another layer denies it
		{"POST /repos/b/a/x", true},
		{"POST /repos/b%2Fa/x", false}, // as one segment, it is another path
		{"POST /gists", false},
	} {
		method, path, _ := strings.Cut(c.target, " ")
		if d := p.DecideRequest(Request{Host: "api.github.com", Method: method, Path: path}); d.Allowed != c.want {
			t.Errorf("%s = %+v, want allowed: %v", c.target, d, c.want)
		}
	}
	ask := Request{Host: "api.github.com", Method: "POST", Path: "/graphql"}
	if got := p.GraphQL(ask); len(got) != 1 {
		t.Errorf("GraphQL rules = %v, want one", got)
	}
	p = Default()
	p.Requests = [][]RequestRules{{{Host: "api.github.com", GraphQL: rules}, {Host: "api.github.com", Except: []string{"POST /graphql"}}}}
	if got := p.GraphQL(ask); len(got) != 0 {
		t.Errorf("GraphQL rules of an allowed request = %v, want none", got)
	}
}

func FuzzDecideRequest(f *testing.F) {
	for _, s := range []string{"/repos/a/b/keys", "/repos/a/b/%6beys?x=y", "/x/%2f/%2e", "/**", "/a*b"} {
		f.Add("POST", s)
	}
	p := Default()
	p.Requests = [][]RequestRules{{{Host: "h.example", Allow: []string{"GET,POST /repos/a/b/**"}, Deny: []string{"* /repos/*/*/keys/**"}}}}
	f.Fuzz(func(t *testing.T, method, target string) {
		path, query, _ := strings.Cut(target, "?")
		d := p.DecideRequest(Request{"h.example", method, path, query})
		if !d.Allowed {
			return
		}
		if method != "GET" && method != "POST" && method != "HEAD" {
			t.Errorf("%q %q is allowed", method, target)
		}
		readings, err := readings(path)
		if err != nil {
			t.Fatalf("%q is allowed, but %v", target, err)
		}
		for _, r := range readings {
			if s := strings.Split(r, "/"); len(s) < 4 || s[1] != "repos" || s[2] != "a" || s[3] != "b" || len(s) > 4 && s[4] == "keys" {
				t.Errorf("%q is allowed, and can be read as %q", target, r)
			}
		}
	})
}

func TestRequestsInJSON(t *testing.T) {
	p := Default()
	p.Requests = [][]RequestRules{{{Host: "a.example", Allow: []string{"GET /**"}}}}
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Unmarshal(text); err != nil || len(got.Requests) != 1 || got.Requests[0][0].Allow[0] != "GET /**" {
		t.Errorf("Unmarshal(%s) = %+v, %v", text, got, err)
	}
}
