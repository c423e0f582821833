//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// These are the sessions of a repository with a setup.
const (
	firstSetup = "first session, npm ci"
	laterSetup = "later session, setup saved"
	noSetup    = "session without a setup"
)

// packages is what the repository depends on.
const packages = `{"name": "project", "version": "1.0.0", "dependencies": {"express": "^4.21.0", "typescript": "^5.6.0", "eslint": "^9.12.0", "lodash": "^4.17.21"}}
`

// TestLifecycleSetup opens sessions of a repository whose setup is "npm ci": the first, and one that
// starts from its result.
func TestLifecycleSetup(t *testing.T) {
	_ = realvm.Prepare(t.Context()) // sessions start warm
	b := realvm.NewBox(t)
	b.Repo("plain")
	dir := b.Repo("project")
	registry := serveRegistry(t)
	b.Write("project/package.json", packages)
	b.Write("project/.gitignore", "node_modules\n")
	b.RunIn(dir, "npm", "install", "--package-lock-only", "--no-audit", "--no-fund", "--registry", registry.String())
	b.Write("project/.agent-sessionizer.yaml", `setup:
  run: npm ci --no-audit --no-fund --replace-registry-host=always --registry http://host.lima.internal:`+registry.Port()+`
  files: [package-lock.json]
`)
	b.RunIn(dir, "sh", "-c", "git add . && git commit -qm packages")
	table := results.table(table{title: titleSetup, rows: []row{
		{name: rowReady, unit: "s", comparisons: []comparison{
			{key: "setup_kept", mine: laterSetup, other: firstSetup, aim: aim{atMost, 0.5}},
			{key: "setup_kept_vs_none", mine: laterSetup, other: noSetup},
		}},
	}})
	open := func(contender string, state session.SetupState, repo string) {
		began := time.Now()
		name := strings.TrimSpace(b.Asz(append(openArgs(repo), "--new", "--host-service=localhost:"+registry.Port())...))
		took := time.Since(began).Seconds()
		if repo == "project" {
			var all []session.View
			if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &all); err != nil {
				t.Fatal(err)
			}
			if len(all) != 1 || len(all[0].Setup) != 1 || all[0].Setup[0].State != state {
				t.Fatalf("sessions = %+v, want one with the setup %s", all, state)
			}
			b.MustIn(name, "test -s node_modules/typescript/package.json")
		}
		b.Asz("destroy", "--force", name)
		table.add(contender, sample{rowReady: took})
	}
	for range runs() {
		open(noSetup, "", "plain")
		open(firstSetup, session.SetupDone, "project")
		open(laterSetup, session.SetupReused, "project")
		b.Asz("prune", "--unused-for", "0s")
	}
	table.done(t, runs(), firstSetup, laterSetup, noSetup)
}

// envRegistry names the socket at which relayRegistry serves the registry.
const envRegistry = "BENCH_REGISTRY"

// relayRegistry serves the npm registry that this host uses on a socket, for the namespace of the
// benchmarks, which leads nowhere.
func relayRegistry(ctx context.Context, dir string) ([]string, error) {
	cmd := exec.CommandContext(ctx, "npm", "config", "get", "registry")
	cmd.Dir = dir // outside of any project
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("npm config get registry: %w", err)
	}
	to, err := url.Parse(strings.TrimSpace(string(out)))
	if err != nil || to.Hostname() == "" {
		return nil, fmt.Errorf("npm config get registry = %q, %w, want a URL", out, err)
	}
	socket := filepath.Join(dir, "registry.sock")
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Host = to.Host
	}}}
	context.AfterFunc(ctx, func() { s.Close() })
	go func() { _ = s.Serve(l) }() // until ctx ends
	return []string{envRegistry + "=" + socket}, nil
}

// serveRegistry serves the registry of relayRegistry on loopback.
func serveRegistry(t *testing.T) *url.URL {
	t.Helper()
	relay := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", os.Getenv(envRegistry))
	}}
	s := httptest.NewServer(&httputil.ReverseProxy{Transport: relay, Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host = "http", "registry"
	}})
	t.Cleanup(s.Close)
	here, err := url.Parse(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	return here
}
