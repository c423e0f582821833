package config_test

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func TestRequests(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `
network:
  http:
    api.example.org: {allow: ["GET /**"]}
repos:
  acme/app:
    network:
      http:
        api.example.org: {allow: ["POST /v1/**"], deny: ["* /v1/admin/**"]}
    secrets: {TOKEN: {from: "env:A", to: [api.github.com], rules: [forge]}}
  other/one:
    secrets: {TOKEN: {from: "env:A", guest: true, rules: [forge]}}
  third/one:
    secrets: {TOKEN: {from: "env:A", to: [api.github.com], rules: [forger]}}
request_rules:
  forge:
    api.github.com:
      allow: [GET /**, "POST /repos/{owner}/{repo}/**"]
    elsewhere.example:
      allow: ["POST /{owner}/{repo}"]
`)
	c := f.load()
	decide := func(repo config.RepoKey, more config.Additions, project *config.Project, request string) policy.Decision {
		t.Helper()
		p, err := c.Policy(settings(t, c, repo, ""), more, project)
		if err != nil {
			t.Fatal(err)
		}
		method, url, _ := strings.Cut(request, " ")
		host, path, _ := strings.Cut(url, "/")
		return p.DecideRequest(policy.Request{Host: host, Method: method, Path: "/" + path})
	}
	project, err := config.ParseProject(config.ProjectFile, []byte("network: {http: {api.github.com: {deny: [\"* /gists/**\"]}}}"))
	if err != nil {
		t.Fatal(err)
	}
	session := config.Additions{Requests: []policy.RequestRules{
		{Host: "api.github.com", Except: []string{"POST /user/repos", "GET /gists/1"}, Source: "net allow"},
		{Host: "api.github.com", Deny: []string{"GET /user"}, Source: "net deny"},
	}}
	for _, x := range []struct {
		repo    config.RepoKey
		more    config.Additions
		project *config.Project
		request string
		want    bool
	}{
		{"github.com/acme/app", config.Additions{}, nil, "GET api.example.org/x", true},
		{"github.com/acme/app", config.Additions{}, nil, "POST api.example.org/v1/x", true},
		{"github.com/acme/app", config.Additions{}, nil, "POST api.example.org/v1/admin/x", false},
		{"github.com/acme/app", config.Additions{}, nil, "POST api.example.org/v2", false},
		{"github.com/else/app", config.Additions{}, nil, "POST api.example.org/v1/x", false},
		{"github.com/acme/app", config.Additions{}, nil, "POST api.github.com/repos/acme/app/pulls", true},
		{"github.com/acme/app", config.Additions{}, nil, "POST api.github.com/repos/acme/other/pulls", false},
		{"github.com/acme/app", config.Additions{}, nil, "POST elsewhere.example/acme/app", false},
		{"github.com/else/app", config.Additions{}, nil, "POST api.github.com/repos/acme/other/pulls", true}, // no secret is bound
		{"github.com/other/one", config.Additions{}, nil, "POST api.github.com/user/repos", true},            // the guest has it
		{"github.com/acme/app", config.Additions{}, &project, "GET api.github.com/gists/1", false},
		{"github.com/acme/app", session, &project, "GET api.github.com/gists/1", true},
		{"github.com/acme/app", session, nil, "POST api.github.com/user/repos", true},
		{"github.com/acme/app", session, nil, "POST api.github.com/user/keys", false},
		{"github.com/acme/app", session, nil, "GET api.github.com/user", false},
	} {
		if d := decide(x.repo, x.more, x.project, x.request); d.Allowed != x.want {
			t.Errorf("%s in %s = %+v, want %t", x.request, x.repo, d, x.want)
		}
	}
	if _, err := c.Policy(settings(t, c, "github.com/third/one", ""), config.Additions{}, nil); err == nil || !strings.Contains(err.Error(), `"forger"`) || !strings.Contains(err.Error(), "defined: forge") {
		t.Errorf("policy with unknown rules = %v, want their name and those that exist", err)
	}
}

func TestRequestsRefused(t *testing.T) {
	for text, want := range map[string]string{
		`network: {http: {a.example: {allow: [GET]}}}`:      "network.http.a.example.allow[0] must be METHODS PATH",
		`network: {http: {a.example: {allowed: []}}}`:       "unknown key",
		`network: {http: {a.example: [GET /]}}`:             "network.http.a.example",
		`request_rules: {x: {a.example: {deny: ["x /y"]}}}`: "must begin with methods",
	} {
		f := newFiles(t)
		f.user("config.yaml", text+"\n")
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s = %v, want %q", text, err, want)
		}
	}
}
