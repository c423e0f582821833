package guestapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const (
	mine   = "aaaaaaaaaaaa"
	others = "bbbbbbbbbbbb"
	token  = "the token of the session"
)

// newServer returns a server for session mine, beside which there is session others.
func newServer(t testing.TB) (*Server, *task.Manager) {
	t.Helper()
	return newServerOf(t, "")
}

// newServerOf works like newServer, for a session of a local clone.
func newServerOf(t testing.TB, clone string) (*Server, *task.Manager) {
	t.Helper()
	dir := t.TempDir()
	c, err := config.Load(config.Paths{
		System: filepath.Join(dir, "etc"), Config: filepath.Join(dir, "conf"), State: filepath.Join(dir, "state"),
		Data: filepath.Join(dir, "data"), Cache: filepath.Join(dir, "cache"), LimaHome: "/tmp/v",
	}, fstest.MapFS{
		"config.yaml": {Data: []byte("image: ubuntu\nprepare: none\nlimits: {running: 9, memory_reserve: 1MiB, disk_reserve: 1MiB}\ntasks: {slots: 1}\n" +
			"network: {mode: allowlist, ports: [443]}\nsubtasks: {count: 9, depth: 3, running: 2}\n")},
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
	for _, id := range []string{mine, others} {
		spec, err1 := json.Marshal(session.Spec{
			Repo: repo.Ref{URL: "https://github.com/acme/app" + id[:1], Key: "github.com/acme/app" + id[:1], Slug: "acme/app" + id[:1], Path: clone}, Enforced: true,
			Resources: config.Resources{CPUs: 1, Memory: 512 << 20, Disk: 4 << 30},
		})
		status, err2 := json.Marshal(session.Status{Base: &repo.Base{Commit: strings.Repeat("a", 40)}})
		_, _, err3 := st.Create(t.Context(), store.Session{
			ID: id, Name: "agent-" + id, RepoKey: "github.com/acme/app" + id[:1], Repo: "acme/app", Phase: "ready", Desired: "ready", Spec: spec, Status: status,
		}, store.Event{Kind: "made"}, func([]store.Session) error { return nil })
		sum := sha256.Sum256([]byte(token + id[:1]))
		_, err4 := st.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
			row.TokenSHA256 = hex.EncodeToString(sum[:])
			return store.Event{}, nil
		})
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			t.Fatal(err)
		}
	}
	m := &task.Manager{Sessions: &session.Manager{Store: st, Config: c, Self: "true"}}
	log := slog.New(slog.DiscardHandler)
	return &Server{
		Session: mine, Version: "test", Log: log,
		Engine: func(context.Context) (ops.Engine, error) {
			return ops.Engine{Tasks: m, Log: log, Scheduled: func() {}}, nil
		},
		Fetch: func(context.Context) error { return nil },
	}, m
}

const manifest = `{version: "1", kind: Task, agent: {kind: command, command: [a]}}`

func request(s *Server, token, method, path, body string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+token)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.handler().ServeHTTP(w, r)
	return w
}

func TestGuestAPI(t *testing.T) {
	s, m := newServer(t)
	e, _ := s.Engine(t.Context())
	foreign, err := ops.SubmitTask.On(t.Context(), e.As(ops.Guest(others)), ops.SubmitRequest{ContentType: "application/yaml", RawBody: []byte(manifest)})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		token, method, path, body string
		status                    int
		text                      string
	}{
		{"", "GET", "/tasks", "", 401, "token"},
		{token, "GET", "/tasks", "", 401, "token"},
		{token + "b", "GET", "/tasks", "", 401, "token"}, // of another session
		{token + "a", "GET", "/tasks", "", 200, `"tasks":[]`},
		{token + "a", "GET", "/tasks/" + foreign.ID, "", 404, "no task"},
		{token + "a", "DELETE", "/tasks/" + foreign.ID, "", 404, "no task"},
		{token + "a", "GET", "/tasks/" + foreign.ID + "/artifacts", "", 404, "no task"},
		{token + "a", "GET", "/tasks/" + foreign.ID + "/artifacts/x", "", 404, "no task"},
		{token + "a", "GET", "/tasks/" + foreign.ID + "/commits", "", 404, "no task"},
		{token + "a", "GET", "/tasks/..%2f" + foreign.ID, "", 404, "no task"},
		{token + "a", "POST", "/tasks", "{", 400, "manifest:2:1"},
		{token + "a", "POST", "/tasks", strings.Repeat("#", maxManifest+1), 400, "too large"},
		{token + "a", "POST", "/tasks", strings.Replace(manifest, "kind: Task", "kind: Task, vm: {cpus: 64}", 1), 403, "vm.cpus is refused"},
		{token + "a", "POST", "/tasks", manifest, 200, `"depth":1`},
		{token + "a", "GET", "/sessions", "", 404, ""},
	} {
		w := request(s, c.token, c.method, c.path, c.body)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.text) {
			t.Errorf("%s %s = %d %s, want %d with %q", c.method, c.path, w.Code, w.Body, c.status, c.text)
		}
	}
	// A repeated request makes one subtask; another body under the key is refused.
	first, second := request(s, token+"a", "POST", "/tasks", manifest, "Idempotency-Key", "k"), request(s, token+"a", "POST", "/tasks", manifest, "Idempotency-Key", "k")
	if first.Code != 200 || first.Body.String() != second.Body.String() {
		t.Errorf("the repeated request = %s, want %s", second.Body, first.Body)
	}
	if w := request(s, token+"a", "POST", "/tasks", strings.Replace(manifest, "[a]", "[b]", 1), "Idempotency-Key", "k"); w.Code != 409 {
		t.Errorf("another request under the key = %d, want 409", w.Code)
	}
	// What the engine does for others, it refuses for a guest.
	guest := e.As(ops.Guest(mine))
	if _, err := ops.ListSessions.On(t.Context(), guest, struct{}{}); !errors.Is(err, ops.ErrScope) {
		t.Errorf("ListSessions for a guest = %v, want %v", err, ops.ErrScope)
	}
	if _, err := ops.RetryTask.On(t.Context(), guest, ops.RetryRequest{}); !errors.Is(err, ops.ErrScope) {
		t.Errorf("RetryTask for a guest = %v, want %v", err, ops.ErrScope)
	}
	if _, err := guest.Dial(t.Context(), mine, true); !errors.Is(err, ops.ErrScope) {
		t.Errorf("Dial for a guest = %v, want %v", err, ops.ErrScope)
	}
	// The token of a destroyed session is invalid.
	if _, err := m.Sessions.Store.Update(t.Context(), mine, func(row *store.Session) (store.Event, error) {
		row.TokenSHA256 = ""
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{token + "a", ""} {
		if w := request(s, token, "GET", "/tasks", ""); w.Code != 401 {
			t.Errorf("with token %q after the session's end = %d, want 401", token, w.Code)
		}
	}
}

func TestRequestsAreLimited(t *testing.T) {
	s, _ := newServer(t)
	codes := map[int]int{}
	for range atOnce + 20 {
		codes[request(s, "wrong", "GET", "/tasks", "").Code]++
	}
	if codes[401] < atOnce || codes[429] < 10 {
		t.Errorf("statuses of %d requests = %v, want about %d of 401, and 429", atOnce+20, codes, atOnce)
	}
	if w := request(s, token+"a", "GET", "/tasks", ""); w.Code != 429 {
		t.Errorf("a request with the token, after these = %d, want 429", w.Code)
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	s, _ := newServer(t)
	path := filepath.Join(testenv.ShortDir(t), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	var idle []net.Conn
	for range maxConns {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	ask := func() error {
		c, err := net.Dial("unix", path)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Second))
		fmt.Fprintf(c, "GET /tasks HTTP/1.0\r\nAuthorization: Bearer %sa\r\n\r\n", token)
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			_, err = io.Copy(io.Discard, r.Body)
		}
		return err
	}
	for range 3 * maxConns { // each is accepted and closed at once, so none blocks those behind it
		if err := ask(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d = %v, want it closed", maxConns+1, err)
		}
	}
	for _, c := range idle {
		_ = c.Close()
	}
	testenv.WaitFor(t, "a free connection", func() bool { return ask() == nil })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Serve = %v, want %v", err, context.Canceled)
	}
}

// FuzzRequest checks that nothing but the token lets a request in, and that every answer is short.
func FuzzRequest(f *testing.F) {
	for _, seed := range []string{
		"POST /tasks HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n{", "GET /tasks/x?wait=99999999999 HTTP/1.0\r\nAuthorization: Bearer x\r\n\r\n",
		"GET /mcp HTTP/1.1\r\nHost: a\r\nUpgrade: mcp\r\n\r\n", "GET //tasks/../tasks HTTP/1.0\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	s, _ := newServer(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(text)))
		if err != nil {
			return
		}
		s.limiter().SetBurst(1 << 30)
		s.limiter().SetLimit(1 << 30)
		w := httptest.NewRecorder()
		s.handler().ServeHTTP(w, r)
		if w.Code < 300 || w.Body.Len() > 4096 {
			t.Errorf("%q = %d with %d bytes, want a short refusal", text, w.Code, w.Body.Len())
		}
	})
}
