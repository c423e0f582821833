package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain makes this test binary also act as a fake VM's process.
func TestMain(m *testing.M) { testenv.Main(m, testenv.Commands{"fake-vm": fake.Main}) }

// deadline bounds waits for events that must happen, even on a slow machine.
const deadline = 2 * time.Minute

const manifestYAML = `version: "1"
kind: Task
metadata: {name: try, labels: {team: platform}}
repository: {url: acme/app}
agent: {kind: command, command: [make, test]}
`

// newManager returns a manager with its own store, and with keepers that end immediately:
// only the test changes a task.
func newManager(t testing.TB) *task.Manager {
	t.Helper()
	dir := testenv.ShortDir(t)
	c, err := config.Load(config.Paths{
		System: filepath.Join(dir, "etc"), Config: filepath.Join(dir, "conf"), State: filepath.Join(dir, "state"),
		Data: filepath.Join(dir, "data"), Cache: filepath.Join(dir, "cache"), LimaHome: filepath.Join(dir, "vms"),
	}, fstest.MapFS{
		"config.yaml":           {Data: []byte("image: ubuntu\nprepare: none\nlimits: {running: 10, memory_reserve: 1MiB, disk_reserve: 1MiB}\ntasks: {slots: 4, cleanup_ttl: 360h}\nnetwork: {mode: allowlist, ports: [443]}\n")},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 512MiB, disk: 4GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Paths.Make(); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), c.Paths.Store())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return &task.Manager{
		Sessions:    &session.Manager{Store: st, Config: c, Self: "true"},
		CheckPublic: func(context.Context, repo.Ref) error { return nil }, // names need not resolve here
	}
}

// rig is a server with both endpoints, and a token of each scope.
type rig struct {
	*Server
	t      testing.TB
	addr   string // of the endpoint for tokens
	socket string
	token  map[ops.Scope]string
	log    *safeBuffer
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func newRig(t testing.TB, limits Limits) *rig {
	t.Helper()
	log := &safeBuffer{}
	m := newManager(t)
	s, err := New(Options{Engine: ops.Engine{Tasks: m}, Log: slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})), Version: "test", Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Server: s, t: t, token: map[ops.Scope]string{}, socket: Socket(m.Sessions.Config.Paths.State), log: log}
	for _, scope := range ops.Scopes() {
		if r.token[scope], err = s.tokens.Add(string(scope), scope, task.Permission{Repositories: []string{"github.com/acme/app"}}); err != nil {
			t.Fatal(err)
		}
	}
	tcp, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = tcp.Addr().String()
	own, err := listenUnix(t.Context(), r.socket, s.log)
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(r.addr)
	r.logins.base = "http://" + r.addr
	for l, d := range map[net.Listener]endpoint{tcp: {ip: at.Addr(), port: fmt.Sprint(at.Port())}, own: {own: true}} {
		srv := s.server(context.Background(), d)
		go func() { _ = srv.Serve(l) }() // ends with Close
		t.Cleanup(func() { _ = srv.Close() })
	}
	t.Cleanup(func() {
		r.shutdown()
		ctx, cancel := context.WithTimeout(context.Background(), deadline)
		defer cancel()
		s.execs.wait(ctx)
		waitFor(ctx, &s.open)
	})
	return r
}

// submit creates a task without the API.
func (r *rig) submit() task.Task {
	r.t.Helper()
	asked, _, err := manifest.Parse("test", []byte(manifestYAML), "")
	if err != nil {
		r.t.Fatal(err)
	}
	t, _, err := r.tasks.Submit(r.t.Context(), asked, task.Submission{Text: []byte(manifestYAML), Actor: "test"})
	if err != nil {
		r.t.Fatal(err)
	}
	outbox := filepath.Join(string(r.tasks.Dir(t.ID)), "outbox") // as its keeper creates it
	if err := errors.Join(os.MkdirAll(filepath.Join(outbox, "progress"), 0o700), os.MkdirAll(filepath.Join(outbox, "artifacts"), 0o700)); err != nil {
		r.t.Fatal(err)
	}
	return t
}

// move puts a task into a phase, as its keeper would.
func (r *rig) move(id string, to task.Phase, change func(*task.Status)) {
	r.t.Helper()
	_, err := r.store.UpdateTask(r.t.Context(), id, func(row *store.Task) ([]store.Event, error) {
		var f task.Status
		if err := json.Unmarshal(row.Status, &f); err != nil {
			return nil, err
		}
		if change != nil {
			change(&f)
		}
		var err error
		if row.Status, err = json.Marshal(f); err != nil {
			return nil, err
		}
		data, err := json.Marshal(task.PhaseChange{From: task.Phase(row.Phase), To: to})
		row.Phase = string(to)
		return []store.Event{{Kind: task.EventPhase, Data: data}}, err
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// append adds n events.
func (r *rig) append(subject string, n int) {
	r.t.Helper()
	evs := make([]store.Event, n)
	for i := range evs {
		evs[i] = store.Event{Kind: "message", Data: json.RawMessage(fmt.Sprintf(`{"n":%d}`, i))}
	}
	if err := r.store.AppendAll(r.t.Context(), subject, evs); err != nil {
		r.t.Fatal(err)
	}
}

// call is a request of a client with a token.
type call struct {
	method, path, body string
	header             []string  // names and values
	as                 ops.Scope // "" means Admin; "-" means no token
	socket             bool
}

func (r *rig) request(ctx context.Context, c call) *http.Request {
	r.t.Helper()
	if c.method == "" {
		c.method = http.MethodGet
	}
	var body io.Reader
	if c.body != "" {
		body = strings.NewReader(c.body)
	}
	req, err := http.NewRequestWithContext(ctx, c.method, "http://"+r.addr+c.path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(c.header); i += 2 {
		if c.header[i] == "Host" {
			req.Host = c.header[i+1]
			continue
		}
		req.Header.Add(c.header[i], c.header[i+1])
	}
	if c.as == "" {
		c.as = ops.Admin
	}
	if c.as != "-" && !c.socket {
		req.Header.Set("Authorization", "Bearer "+r.token[c.as])
	}
	return req
}

func (r *rig) client(c call) *http.Client {
	tr := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	if c.socket {
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
		}
	}
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// do makes a call, reads the response, and checks both against the document.
func (r *rig) do(c call) (*http.Response, []byte) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), deadline)
	defer cancel()
	req := r.request(ctx, c)
	resp, err := r.client(c).Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	r.documented(req.Method, req.URL.EscapedPath(), resp, body)
	return resp, body
}

// get does what do does, for a response that must be successful and JSON.
func (r *rig) get(c call, into any) *http.Response {
	r.t.Helper()
	resp, body := r.do(c)
	if resp.StatusCode >= 300 {
		r.t.Fatalf("%s %s = %s: %s, want success", c.method, c.path, resp.Status, body)
	}
	if err := json.Unmarshal(body, into); err != nil {
		r.t.Fatalf("answer to %s %s = %s, want JSON: %v", c.method, c.path, body, err)
	}
	return resp
}

// schemas compiles schemas of the document by their pointers.
type schemas struct {
	compiler *jsonschema.Compiler
	doc      map[string]any
	done     map[string]*jsonschema.Schema
	mu       sync.Mutex // held while the others are used, but for doc
}

// known has the schemas of each document that a server had. Almost all servers have the
// same, and compiling it takes longer than most tests.
var known sync.Map

const docURL = "http://test.invalid/openapi.json"

func (r *rig) schemas() *schemas {
	r.t.Helper()
	text, err := r.doc.json()
	if err != nil {
		r.t.Fatal(err)
	}
	if s, ok := known.Load(string(text)); ok {
		return s.(*schemas)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		r.t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource(docURL, doc); err != nil {
		r.t.Fatal(err)
	}
	s, _ := known.LoadOrStore(string(text), &schemas{compiler: c, doc: doc.(map[string]any), done: map[string]*jsonschema.Schema{}})
	return s.(*schemas)
}

func (s *schemas) compile(pointer string) (*jsonschema.Schema, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sch := s.done[pointer]; sch != nil {
		return sch, nil
	}
	sch, err := s.compiler.Compile(docURL + "#" + pointer)
	if err == nil {
		s.done[pointer] = sch
	}
	return sch, err
}

func (s *schemas) check(t testing.TB, pointer string, body []byte) {
	t.Helper()
	sch, err := s.compile(pointer)
	if err != nil {
		t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		t.Fatalf("answer = %s, want JSON: %v", body, err)
	}
	if err := sch.Validate(v); err != nil {
		t.Errorf("answer = %s, want it as documented: %v", body, err)
	}
}

// documented fails the test if the document does not contain the response.
func (r *rig) documented(method, path string, resp *http.Response, body []byte) {
	r.t.Helper()
	s := r.schemas()
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	if resp.Header.Get("X-Trace-Id") == "" || resp.Header.Get("X-Content-Type-Options") != "nosniff" {
		r.t.Errorf("headers of %s %s = %v, want X-Trace-Id and nosniff", method, path, resp.Header)
	}
	if method == http.MethodHead {
		method = http.MethodGet
		body = nil
	}
	if rest, ok := strings.CutPrefix(path, ops.HostsPath+"/one"); ok && resp.StatusCode < 400 { // another host's
		path = rest
	}
	op, at := s.operation(method, path)
	if op == nil { // an unknown route: the error must have the form of all others
		if resp.StatusCode < 400 || kind != problemType {
			r.t.Errorf("%s %s, not documented, = %s as %s, want an error as %s", method, path, resp.Status, kind, problemType)
			return
		}
		if body != nil {
			s.check(r.t, "/components/schemas/Problem", body)
		}
		return
	}
	responses := op["responses"].(map[string]any)
	answer, ok := responses[fmt.Sprint(resp.StatusCode)].(map[string]any)
	if !ok {
		r.t.Errorf("%s %s = %s %s, want a documented status", method, path, resp.Status, body)
		return
	}
	content, _ := answer["content"].(map[string]any)
	if len(content) == 0 || body == nil {
		if len(body) > 0 {
			r.t.Errorf("%s %s = %s with body %s, want none, as documented", method, path, resp.Status, body)
		}
		return
	}
	if _, ok := content[kind]; !ok {
		if kind != "multipart/byteranges" || resp.StatusCode != http.StatusPartialContent {
			r.t.Errorf("%s %s = %s as %q, want a documented type", method, path, resp.Status, kind)
		}
		return
	}
	if strings.HasSuffix(kind, "json") {
		s.check(r.t, at+"/responses/"+fmt.Sprint(resp.StatusCode)+"/content/"+strings.NewReplacer("/", "~1", "+", "%2B").Replace(kind)+"/schema", body)
	}
}

var parameter = regexp.MustCompile(`\\\{[a-z]+\\\}`)

// operation returns the operation for a path, and the pointer to it.
func (s *schemas) operation(method, path string) (op map[string]any, pointer string) {
	for template, item := range s.doc["paths"].(map[string]any) {
		one := `[^/]+`
		if strings.HasSuffix(template, "/artifacts/{name}") {
			one = `.+`
		}
		re := regexp.MustCompile("^" + parameter.ReplaceAllString(regexp.QuoteMeta(template), one) + "$")
		found, ok := item.(map[string]any)[strings.ToLower(method)].(map[string]any)
		if ok && re.MatchString(path) {
			return found, "/paths/" + strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(template) + "/" + strings.ToLower(method)
		}
	}
	return nil, ""
}

// session creates a session that is ready, without a VM.
func (r *rig) session(id string) string {
	r.t.Helper()
	_, _, err := r.store.Create(r.t.Context(), store.Session{
		ID: id, Name: "agent-acme-app-" + id[:6], RepoKey: "github.com/acme/" + id, Repo: "acme/app", Phase: "ready", Desired: "ready",
		Spec: json.RawMessage(`{"repo":{"key":"github.com/acme/app","slug":"acme/app"},"image":"none","resources":{"cpus":1,"memory":536870912,"disk":4294967296},"enforced":false}`),
	}, store.Event{Kind: "phase"}, func([]store.Session) error { return nil })
	if err != nil {
		r.t.Fatal(err)
	}
	return id
}
