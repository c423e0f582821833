package guestapi

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

var withCommit = strings.Replace(manifest, "kind: Task", "kind: Task, repository: {commit: "+strings.Repeat("b", 40)+"}", 1)

// TestFetchesAreLimited checks that the host fetches commits only for a subtask that it would
// admit, one at a time, and not too often.
func TestFetchesAreLimited(t *testing.T) {
	s, _ := newServer(t)
	fetches := 0
	var during func()
	s.Fetch = func(context.Context) error {
		if fetches++; during != nil {
			during()
		}
		return nil
	}
	submit := func(text string, header ...string) (int, string) {
		w := request(s, token+"a", "POST", "/tasks", text, header...)
		return w.Code, w.Body.String()
	}
	for text, want := range map[string]int{
		"{": 400,
		strings.Replace(withCommit, "kind: Task", "kind: Task, vm: {cpus: 64}", 1): 403,
	} {
		if code, body := submit(text); code != want || fetches != 0 {
			t.Errorf("%s = %d %s, %d fetches, want %d and none", text, code, body, want, fetches)
		}
	}
	during = func() {
		if code, body := submit(withCommit); code != 409 || !strings.Contains(body, "another fetch") {
			t.Errorf("a fetch during another = %d %s, want 409", code, body)
		}
	}
	if code, body := submit(withCommit, "Idempotency-Key", "k"); code != 200 || fetches != 1 {
		t.Errorf("a subtask with a commit = %d %s, %d fetches, want 200 and one", code, body, fetches)
	}
	during = nil
	if code, _ := submit(withCommit, "Idempotency-Key", "k"); code != 200 || fetches != 1 {
		t.Errorf("the repeated request = %d, %d fetches, want 200 and still one", code, fetches)
	}
	for range 8 { // up to subtasks.count
		if w := request(s, token+"a", "POST", "/tasks", manifest); w.Code != 200 {
			t.Fatalf("a subtask = %d %s", w.Code, w.Body)
		}
	}
	if code, body := submit(withCommit); code != 403 || fetches != 1 {
		t.Errorf("beyond the limit of subtasks = %d %s, %d fetches, want 403 and still one", code, body, fetches)
	}
	for range 2 * fetchesAtOnce {
		_ = s.fetch(t.Context())
	}
	if err := s.fetch(t.Context()); fail.CodeOf(err) != fail.Conflict || fetches != fetchesAtOnce {
		t.Errorf("fetch number %d = %v, want %v", fetches+1, err, fail.Conflict)
	}
}

// ended submits a subtask, and returns its id after it has ended in a session of its own.
func ended(t *testing.T, s *Server, m *task.Manager) string {
	t.Helper()
	var v struct{ ID string }
	if err := json.Unmarshal(request(s, token+"a", "POST", "/tasks", manifest).Body.Bytes(), &v); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Sessions.Store.UpdateTask(t.Context(), v.ID, func(row *store.Task) ([]store.Event, error) {
		row.Phase, row.SessionID = string(task.Failed), others
		row.SetError(fail.Host.String(), "start QEMU: /home/alice/x is missing", "ls /home/alice")
		return nil, nil
	}); err != nil {
		t.Fatal(err)
	}
	return v.ID
}

func TestCommitsAreLimited(t *testing.T) {
	s, m := newServer(t)
	path := "/tasks/" + ended(t, s, m) + "/commits"
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "missing")) // the bundle is not made there
	s.packing.Lock()
	if w := request(s, token+"a", "GET", path, ""); w.Code != 409 || !strings.Contains(w.Body.String(), "other commits") {
		t.Errorf("commits while others are sent = %d %s, want 409", w.Code, w.Body)
	}
	s.packing.Unlock()
	e, err := s.engine(t.Context(), "Bearer "+token+"a")
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Split(path, "/")[2]
	if _, err := e.Commits(t.Context(), id); err == nil || strings.Contains(err.Error(), "create a bundle") || strings.Contains(err.Error(), "disk space") {
		t.Errorf("Commits of a session without a mirror = %v, want only that error", err)
	}
	m.Sessions.Config.Limits.DiskReserve = 1 << 60
	if _, err := e.Commits(t.Context(), id); fail.CodeOf(err) != fail.Host || !strings.Contains(err.Error(), "disk space") {
		t.Errorf("Commits on a full disk = %v, want %v", err, fail.Host)
	}
}

// oneConn is a listener for one connection.
type oneConn chan net.Conn

func (l oneConn) Accept() (net.Conn, error) {
	c, ok := <-l
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (l oneConn) Close() error   { return nil }
func (l oneConn) Addr() net.Addr { return &net.UnixAddr{} }

// TestFilesAreSentInTime checks that a guest that does not read cannot hold a file.
func TestFilesAreSentInTime(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		took := make(chan time.Duration, 1)
		h := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			start := time.Now()
			f, err := os.Open(file)
			if err == nil {
				err = sendFile(w, f)
			}
			if err != nil {
				t.Error(err)
			}
			took <- time.Since(start)
		})}
		host, guest := net.Pipe()
		l := make(oneConn, 1)
		l <- host
		go func() { _ = h.Serve(l) }()
		_, _ = guest.Write([]byte("GET / HTTP/1.0\r\n\r\n"))
		if d := <-took; d != maxSend {
			t.Errorf("a file that is not read took %v, want %v", d, maxSend)
		}
		close(l)
		_ = h.Close()
		_ = guest.Close()
	})
}

// TestGuestsSeeNoPathsOfTheHost checks views and errors.
func TestGuestsSeeNoPathsOfTheHost(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "home/alice/app")
	if out, err := exec.Command("git", "init", "--quiet", dir).CombinedOutput(); err != nil {
		t.Fatalf("git init: %v: %s", err, out)
	}
	s, m := newServerOf(t, dir)
	id := ended(t, s, m)
	for _, c := range [][2]string{{"GET", "/tasks/" + id}, {"GET", "/tasks"}, {"DELETE", "/tasks/" + id}} {
		w := request(s, token+"a", c[0], c[1], "")
		if w.Code != 200 || strings.Contains(w.Body.String(), "alice") || !strings.Contains(w.Body.String(), `"repository":"app"`) {
			t.Errorf("%s %s = %d %s, want no path of the host", c[0], c[1], w.Code, w.Body)
		}
	}
	t.Run("MCP", func(t *testing.T) {
		if answer := connectMCP(t, s).ask(t, `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"list_tasks","arguments":{}}}`); strings.Contains(answer, "alice") {
			t.Errorf("list_tasks = %s, want no path of the host", answer)
		}
	})
	for _, c := range []struct {
		err       error
		has, lack string
	}{
		{fail.New(fail.Host, "open /home/alice/x: denied").WithHint("ls /home/alice"), task.Hidden, "alice"},
		{os.ErrPermission, task.Hidden, "permission"},
		{fail.New(fail.NotFound, "no commit b in file:///home/alice/x").WithHint("ls '/home/alice'"), "no commit b in (a path)", "alice"},
		{fail.New(fail.Policy, "see https://example.org/a or acme/app"), "see https://example.org/a or acme/app", "path"},
	} {
		s.Engine = func(context.Context) (ops.Engine, error) { return ops.Engine{}, c.err }
		text := request(s, token+"a", "GET", "/tasks", "").Body.String()
		if !strings.Contains(text, c.has) || strings.Contains(text, c.lack) {
			t.Errorf("error %v = %s, want %q without %q", c.err, text, c.has, c.lack)
		}
	}
}
