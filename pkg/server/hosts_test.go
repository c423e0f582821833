package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/client"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// clusterRig is a server that is a host of a cluster.
type clusterRig struct {
	*rig
	node *cluster.Node
}

// newCluster starts servers in one cluster: the core "one", and a host of each role.
func newCluster(t *testing.T, roles map[string]cluster.Role) map[string]clusterRig {
	t.Helper()
	all := map[string]clusterRig{}
	first := newRig(t, Limits{})
	dir := func(r *rig) string { return r.tasks.Sessions.Config.Paths.Cluster() }
	if _, err := cluster.Found(dir(first), "team", "one", testcluster.FreeAddr(t), testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	one := first.join()
	all["one"] = one
	for name, role := range roles {
		r := newRig(t, Limits{})
		token, err := one.node.Invite(t.Context(), role, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		testenv.WaitFor(t, "the admission of "+name, func() bool { // the core hears of the token a moment later
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := cluster.Join(ctx, dir(r), token, cluster.Applicant{Name: name}, nil)
			return err == nil
		})
		all[name] = r.join()
	}
	for _, r := range all {
		testenv.WaitFor(t, "that every host knows all", func() bool {
			known := 0
			for name := range all {
				if _, ok := r.node.Member(name); ok {
					known++
				}
			}
			return known == len(all)
		})
	}
	return all
}

// join does the host's part in its cluster.
func (r *rig) join() clusterRig {
	r.t.Helper()
	dir := r.tasks.Sessions.Config.Paths.Cluster()
	state, err := cluster.LoadState(dir)
	if err != nil {
		r.t.Fatal(err)
	}
	p := fleet.NewPart(dir, state)
	p.Tasks, p.Log, p.Version, p.Images = r.tasks, slog.New(slog.DiscardHandler), "test", func() []string { return nil }
	r.engine.Cluster = p
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.t.Context()))
	var all sync.WaitGroup
	all.Go(func() { p.Serve(ctx) })
	all.Go(func() { r.servePeers(ctx, ctx) })
	r.t.Cleanup(func() { cancel(); all.Wait() })
	select {
	case <-p.Ready():
	case <-time.After(deadline):
		r.t.Fatal("the cluster does not answer")
	}
	n, err := p.Node(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return clusterRig{r, n}
}

// at returns the API of another host, as the user of this one reaches it.
func (r clusterRig) at(host string) ops.Host {
	r.t.Helper()
	h, err := client.New(client.Target{URL: "unix://" + r.socket, Host: host})
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

// TestMemberUsesOtherHost lists the sessions of another host, follows one, and runs commands in it.
func TestMemberUsesOtherHost(t *testing.T) {
	const id = "aaaa11112222"
	all := newCluster(t, map[string]cluster.Role{"two": cluster.Member})
	one, two := all["one"], all["two"]
	one.session(id)
	checkout := one.vm(id)
	h := two.at("one")
	list, err := ops.ListSessions.On(t.Context(), h, struct{}{})
	if err != nil || len(list.Sessions) != 1 || list.Sessions[0].ID != id {
		t.Fatalf("sessions of the other host = %+v, %v, want %s", list, err, id)
	}
	if own, err := ops.ListSessions.On(t.Context(), one.at("two"), struct{}{}); err != nil || len(own.Sessions) != 0 {
		t.Errorf("sessions of the member = %+v, %v, want none", own, err)
	}

	// through the WebSocket in the tunnel
	conn, err := h.Dial(t.Context(), id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const size = 3 << 20
	var out bytes.Buffer
	err = conn.Run(t.Context(), "cd "+ssh.Quote(checkout)+" && pwd >&2 && cat", ssh.IO{Stdin: io.LimitReader(zeros{}, size), Stdout: &out, Stderr: io.Discard})
	if err != nil || out.Len() != size {
		t.Errorf("a command in the other host's session = %d bytes, %v, want %d", out.Len(), err, size)
	}

	// a stream arrives while it is open
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	seen := 0
	for _, err := range h.Events(ctx, ops.Session(id), store.Oldest, true) {
		if err != nil {
			t.Fatal(err)
		}
		if seen++; seen == 1 {
			one.append(id, 1)
		}
		if seen == 2 {
			break
		}
	}

	// what happens is recorded under the name of the host that asked, whatever it claims
	if log := one.log.String(); !strings.Contains(log, `"actor":"host:two"`) {
		t.Errorf("log of the other host = %s, want the actor host:two", log)
	}
}

// zeros is an endless stream.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestPeerIsLimited asks for what other hosts must not have.
func TestPeerIsLimited(t *testing.T) {
	const id = "aaaa11112222"
	all := newCluster(t, map[string]cluster.Role{"two": cluster.Member})
	one, two := all["one"], all["two"]
	one.session(id)
	h := two.at("one")
	create := func(change func(*ops.NewSession)) func() error {
		return func() error {
			r := ops.CreateRequest{Body: ops.NewSession{Repo: "acme/app"}}
			change(&r.Body)
			_, err := ops.CheckSession.On(t.Context(), h, r)
			return err
		}
	}
	submit := func(manifest string) func() error {
		return func() error {
			_, err := ops.SubmitTask.On(t.Context(), h, ops.SubmitRequest{ContentType: "application/yaml", RawBody: []byte(manifest)})
			return err
		}
	}
	const ended = "aaaa11112223"
	if _, err := one.store.CreateTask(t.Context(), store.Task{
		ID: ended, Name: "task", Phase: string(task.Completed), Desired: string(task.Run), Status: []byte(`{"actor":"user"}`),
		Manifest: []byte(`{"version":"1","kind":"Task","repository":{"url":"acme/app"},"agent":{"kind":"command","command":["true"]}}`),
	}, []byte(manifestYAML), store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Completed})); err != nil {
		t.Fatal(err)
	}
	for name, ask := range map[string]func() error{
		"a token of the cluster": func() error {
			var r ops.InviteRequest
			r.Body.Role = cluster.CoreOf
			_, err := ops.InviteHost.On(t.Context(), h, r)
			return err
		},
		"the removal of a host": func() error {
			_, err := ops.RemoveHost.On(t.Context(), h, ops.ClusterHostPath{Name: "two"})
			return err
		},
		"the list of secrets": func() error {
			_, err := ops.ListSecrets.On(t.Context(), h, ops.SecretQuery{})
			return err
		},
		"another retry of a task of the host's user": func() error {
			_, err := ops.RetryTask.On(t.Context(), h, ops.RetryRequest{TaskPath: ops.TaskPath{ID: ended}})
			return err
		},
		"a profile of the host":    create(func(n *ops.NewSession) { n.Profile = "work" }),
		"a directory of the host":  create(func(n *ops.NewSession) { n.Repo = "/etc" }),
		"a directory as a URL":     create(func(n *ops.NewSession) { n.Repo = "file:///etc" }),
		"a workspace of the host":  create(func(n *ops.NewSession) { n.Workspace = "data" }),
		"an image file":            create(func(n *ops.NewSession) { n.Image = "/etc/passwd" }),
		"a directory for a task":   submit(strings.Replace(manifestYAML, "acme/app", "/etc", 1)),
		"a command for a secret":   submit(manifestYAML + "secrets: [{name: A, source: cmd, key: id}]\n"),
		"a session of the host":    submit(strings.Replace(manifestYAML, "repository: {url: acme/app}", "vm: {session: "+id+"}", 1)),
		"the hosts of its cluster": func() error { _, err := ops.ListClusterHosts.On(t.Context(), h, struct{}{}); return err },
	} {
		err := ask()
		if err == nil || fail.CodeOf(err) != fail.Policy && !strings.Contains(err.Error(), "not permitted") {
			t.Errorf("%s = %v, want it refused", name, err)
		}
	}

	// The paths that are not operations, and another host behind that one.
	for _, path := range []string{"/metrics", "/mcp", "/", "/dashboard", "/openapi.json", "/hosts/two/api/v1/sessions", healthPath} {
		if resp := two.raw("one", path); resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s of the other host = %s, want %d", path, resp.Status, http.StatusForbidden)
		}
	}
}

// raw asks another host without this one's checks.
func (r clusterRig) raw(host, path string) *http.Response {
	r.t.Helper()
	c := &http.Client{Transport: &http.Transport{DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return r.node.Dial(ctx, host) }, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, "https://"+host+path, http.NoBody)
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	resp.Body.Close()
	return resp
}

// TestWorkerMayNotUseOtherHosts asks as a worker, with and without the checks of its own serve.
func TestWorkerMayNotUseOtherHosts(t *testing.T) {
	all := newCluster(t, map[string]cluster.Role{"two": cluster.Worker})
	if _, err := ops.ListSessions.On(t.Context(), all["two"].at("one"), struct{}{}); fail.CodeOf(err) != fail.Policy {
		t.Errorf("a worker's request = %v, want it refused", err)
	}
	// NATS itself does not let a worker open a tunnel.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if c, err := all["two"].node.Tunnels.Dial(ctx, "one"); err == nil {
		c.Close()
		t.Error("a worker opened a tunnel, want it refused")
	}
	// The other direction works: a member may use sessions on a worker.
	if _, err := ops.ListSessions.On(t.Context(), all["one"].at("two"), struct{}{}); err != nil {
		t.Errorf("sessions of a worker = %v, want a list", err)
	}
}

// TestRemovedHostIsCutOff removes a host while it uses another one.
func TestRemovedHostIsCutOff(t *testing.T) {
	const id = "aaaa11112222"
	all := newCluster(t, map[string]cluster.Role{"two": cluster.Member, "three": cluster.Member})
	one, two, three := all["one"], all["two"], all["three"]
	three.session(id)
	three.vm(id)
	dir := t.TempDir()
	conn, err := two.at("three").Dial(t.Context(), id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stdin, out := io.Pipe()
	defer out.Close()
	go func() {
		// The removed host may not hear that its connection ended, as the core does not let it in any more.
		_ = conn.Run(t.Context(), "cd "+ssh.Quote(dir)+"; touch started; cat; touch ended", ssh.IO{Stdin: stdin, Stdout: io.Discard, Stderr: io.Discard})
	}()
	exists := func(name string) func() bool {
		return func() bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err == nil
		}
	}
	testenv.WaitFor(t, "that the command runs", exists("started"))
	if err := one.node.Members.Remove(t.Context(), "two", time.Now()); err != nil {
		t.Fatal(err)
	}
	removed := time.Now()
	testenv.WaitFor(t, "that the session's host closes the connection of the removed host", exists("ended"))
	if after := time.Since(removed); after > 30*time.Second { // after 35 s, it would take the silent host for lost
		t.Errorf("the connection was closed after %v, want it at once", after)
	}
	testenv.WaitFor(t, "that the core knows the removal, too", func() bool {
		_, err := ops.ListSessions.On(t.Context(), one.at("two"), struct{}{})
		return fail.CodeOf(err) == fail.Host && strings.Contains(err.Error(), "host two was removed")
	})
	if _, err := ops.ListSessions.On(t.Context(), one.at("three"), struct{}{}); err != nil {
		t.Errorf("sessions of a host that was not removed = %v, want a list", err)
	}
}

// TestPathsOfOtherHosts tries paths that lead elsewhere, and clients that may not use other hosts.
func TestPathsOfOtherHosts(t *testing.T) {
	all := newCluster(t, map[string]cluster.Role{"two": cluster.Member, "three": cluster.Worker})
	two := all["two"]
	var p Problem
	ask := func(c call) int {
		t.Helper()
		resp, body := two.do(c)
		p = Problem{}
		if err := json.Unmarshal(body, &p); err != nil {
			t.Fatalf("answer to %s = %s, want JSON: %v", c.path, body, err)
		}
		return resp.StatusCode
	}
	const sessions = "/api/v1/sessions"
	if status := ask(call{path: "/hosts/one" + sessions, socket: true}); status != http.StatusOK {
		t.Fatalf("sessions through the socket = %d, want %d", status, http.StatusOK)
	}
	for _, scope := range ops.Scopes() {
		if status := ask(call{path: "/hosts/one" + sessions, as: scope}); status != http.StatusForbidden {
			t.Errorf("with a token of scope %s = %d, want %d", scope, status, http.StatusForbidden)
		}
	}
	if status := ask(call{path: "/hosts/one" + sessions, as: "-"}); status != http.StatusUnauthorized {
		t.Errorf("without a token = %d, want %d", status, http.StatusUnauthorized)
	}
	for path, want := range map[string]int{
		"/hosts/../api/v1/sessions":                  http.StatusNotFound,
		"/hosts/%2e%2e/api/v1/sessions":              http.StatusBadRequest,
		"/hosts/one%2f..%2ftwo/api/v1/sessions":      http.StatusBadRequest,
		"/hosts/one.tunnel/api/v1/sessions":          http.StatusBadRequest,
		"/hosts/*/api/v1/sessions":                   http.StatusBadRequest,
		"/hosts/%6fne/api/v1/sessions":               http.StatusNotFound,
		"/hosts/one/api/v1/../../metrics":            http.StatusNotFound,
		"/hosts/one/api/v1/%2e%2e/%2e%2e/metrics":    http.StatusNotFound,
		"/hosts/one/metrics":                         http.StatusNotFound,
		"/hosts/one/hosts/two/api/v1/sessions":       http.StatusNotFound,
		"/hosts/one/":                                http.StatusNotFound,
		"/hosts/nosuch/api/v1/sessions":              http.StatusNotFound,
		"/hosts/one/api/v1/sessions/nosuch":          http.StatusNotFound,
		"/hosts/one/api/v1/sessions?nosuch=1":        http.StatusUnprocessableEntity,
		"/hosts/one/api/v1/sessions/a%2f..%2f..%2fb": http.StatusNotFound,
	} {
		if status := ask(call{path: path, socket: true}); status != want {
			t.Errorf("%s = %d %q, want %d", path, status, p.Detail, want)
		}
	}
	// a client's own credentials stay here
	resp, _ := two.do(call{path: "/hosts/one" + sessions, socket: true, header: []string{"Authorization", "Bearer secret", "Cookie", "a=b", "Proxy-Authorization", "c"}})
	if resp.StatusCode != http.StatusOK || resp.Header.Values("X-Content-Type-Options")[0] != "nosniff" || len(resp.Header.Values("Content-Security-Policy")) != 1 {
		t.Errorf("answer = %s with headers %v, want success and each header once", resp.Status, resp.Header)
	}

	// a host that is not connected
	var gone error
	all["three"].node.Close()
	testenv.WaitFor(t, "that the other host is gone", func() bool {
		_, gone = ops.ListSessions.On(t.Context(), two.at("three"), struct{}{})
		return gone != nil
	})
	if fail.CodeOf(gone) != fail.Host || fail.HintOf(gone) != "agent-sessionizer cluster show three" {
		t.Errorf("a host that is gone = %v (hint %q), want code HOST and the hint to show it", gone, fail.HintOf(gone))
	}
}
