package guestapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/subtask"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// serveGuest serves s on the socket of a guest, and returns the guest.
func serveGuest(t *testing.T, s *Server) sys.Guest {
	t.Helper()
	g := sys.Guest{Root: testenv.ShortDir(t)}
	if err := os.MkdirAll(g.Path(sys.SecretDir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(g.Path(sys.SecretDir+"/token"), []byte(token+"a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", g.Path(guestproto.HostSocket)) //nolint:noctx // it returns at once
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); <-done })
	return g
}

// completed puts a subtask into the phase COMPLETED, with one artifact, as its keeper does.
func completed(t *testing.T, m *task.Manager, id, name, content string) {
	t.Helper()
	path := filepath.Join(string(m.Dir(id)), "outbox", "artifacts", filepath.FromSlash(name))
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Sessions.Store.UpdateTask(t.Context(), id, func(row *store.Task) (_ []store.Event, err error) {
		row.Phase = string(task.Completed)
		row.Status, err = json.Marshal(task.Status{Artifacts: []task.Artifact{{Name: name, Size: int64(len(content))}}})
		return nil, err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestCommandsForSubtasks runs the guest's commands against the host's answers.
func TestCommandsForSubtasks(t *testing.T) {
	s, m := newServer(t)
	g := serveGuest(t, s)
	type command = func(context.Context, sys.Guest, []string, subtask.IO) error
	run := func(f command, stdin string, args ...string) (string, error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var out bytes.Buffer
		err := f(ctx, g, args, subtask.IO{In: strings.NewReader(stdin), Out: &out, Errs: io.Discard})
		return out.String(), err
	}
	ok := func(f command, stdin string, args ...string) string {
		t.Helper()
		out, err := run(f, stdin, args...)
		if err != nil {
			t.Fatalf("%q = %v, want success", args, err)
		}
		return out
	}
	refused := func(code fail.Code, text string, f command, args ...string) {
		t.Helper()
		if out, err := run(f, "", args...); fail.CodeOf(err) != code || !strings.Contains(err.Error(), text) {
			t.Errorf("%q = %q, %v, want code %s with %q", args, out, err, code, text)
		}
	}

	first := strings.TrimSpace(ok(subtask.Submit, "", "--name", "one", "--key", "k", "--", "true"))
	if again := strings.TrimSpace(ok(subtask.Submit, "", "--name", "one", "--key", "k", "--", "true")); again != first {
		t.Errorf("a repeated submission = %s, want %s", again, first)
	}
	second := strings.TrimSpace(ok(subtask.Submit, manifest, "-f", "-"))
	if list := ok(subtask.List, ""); strings.Count(list, "\n") != 2 || !strings.Contains(list, first) || !strings.Contains(list, second) || !strings.Contains(list, "one") {
		t.Errorf("list = %s, want %s and %s", list, first, second)
	}

	// An unknown subtask, and one of another session, are the same to it.
	e, err := s.Engine(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := ops.SubmitTask.On(t.Context(), e.As(ops.Guest(others)), ops.SubmitRequest{ContentType: "application/yaml", RawBody: []byte(manifest)})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []command{subtask.Show, subtask.Cancel, subtask.Artifacts, subtask.Wait, subtask.Fetch} {
		refused(fail.NotFound, "no task", f, foreign.ID)
		refused(fail.NotFound, "no task", f, "0123456789ab")
		refused(fail.NotFound, "no task", f, "..")
		refused(fail.Usage, "takes", f)
	}
	refused(fail.Usage, "takes the id of one subtask", subtask.Cancel, first, second)
	if v, err := m.Get(t.Context(), foreign.ID); err != nil || v.Desired != task.Run {
		t.Errorf("another session's task = %+v, %v, want it to run", v, err)
	}

	// cancel, and what wait says then
	if out := ok(subtask.Cancel, "", second); !strings.HasPrefix(out, second+"  CANCELLED") {
		t.Errorf("cancel = %s, want %s  CANCELLED", out, second)
	}
	if out := ok(subtask.Cancel, "", second); !strings.HasPrefix(out, second+"  CANCELLED") {
		t.Errorf("a repeated cancel = %s, want the same", out)
	}
	if out, err := run(subtask.Wait, "", second); fail.CodeOf(err) != fail.Failure || !strings.HasPrefix(out, second+"  CANCELLED") {
		t.Errorf("wait for a cancelled subtask = %s, %v, want CANCELLED, and failure", out, err)
	}
	refused(fail.Timeout, "has not ended within", subtask.Wait, "--timeout", "10ms", first)

	completed(t, m, first, "files/a b.txt", "text\n")
	if out := ok(subtask.Wait, "", first); !strings.HasPrefix(out, first+"  COMPLETED") {
		t.Errorf("wait = %s, want COMPLETED", out)
	}
	if out := ok(subtask.Artifacts, "", first); out != "         5  files/a b.txt\n" {
		t.Errorf("artifacts = %q, want files/a b.txt of 5 bytes", out)
	}
	if out := ok(subtask.Artifacts, "", first, "--get", "files/a b.txt"); out != "text\n" {
		t.Errorf("artifact = %q, want text", out)
	}
	refused(fail.NotFound, "no artifact", subtask.Artifacts, first, "--get", "nothing")
	refused(fail.NotFound, "no artifact", subtask.Artifacts, first, "--get", "../../task.db")
	var shown task.View
	if err := json.Unmarshal([]byte(ok(subtask.Show, "", first)), &shown); err != nil || shown.ID != first || shown.Artifacts != 1 {
		t.Errorf("show = %+v, %v, want %s with an artifact", shown, err, first)
	}
}

// TestToolsForSubtasks has each tool of the guest succeed, through agent-guest mcp.
func TestToolsForSubtasks(t *testing.T) {
	s, m := newServer(t)
	g := serveGuest(t, s)
	fromClient, toHost := io.Pipe()
	fromHost, toClient := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- subtask.MCP(t.Context(), g, subtask.IO{In: fromClient, Out: toClient}) }()
	c, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), &mcp.IOTransport{Reader: fromHost, Writer: toHost}, nil)
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	call := func(tool string, args map[string]any) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := c.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
		if err != nil || r.IsError || len(r.Content) != 1 {
			t.Fatalf("%s %v = %+v, %v, want success", tool, args, r, err)
		}
		used[tool] = true
		return r.Content[0].(*mcp.TextContent).Text
	}
	get := func(into any, tool string, args map[string]any) {
		t.Helper()
		if text := call(tool, args); json.Unmarshal([]byte(text), into) != nil {
			t.Fatalf("%s %v = %s, want JSON", tool, args, text)
		}
	}
	var first, second, v task.View
	get(&first, "submit_task", map[string]any{"manifest": manifest})
	get(&second, "submit_task", map[string]any{"manifest": manifest})
	if first.Depth != 1 || first.ID == second.ID {
		t.Errorf("subtasks = %+v and %+v, want two of depth 1", first, second)
	}
	var page ops.TaskPage
	if get(&page, "list_tasks", nil); len(page.Tasks) != 2 || page.Tasks[0].ID != second.ID {
		t.Errorf("subtasks = %+v, want %s before %s", page, second.ID, first.ID)
	}
	var cancelled ops.CancelAnswer
	if get(&cancelled, "cancel_task", map[string]any{"task": second.ID}); !cancelled.Success || cancelled.State != task.Cancelled {
		t.Errorf("cancelled subtask = %+v, want CANCELLED", cancelled)
	}
	completed(t, m, first.ID, "files/a.txt", "text\n")
	if get(&v, "watch_task", map[string]any{"task": first.ID, "seconds": 60}); v.State != task.Completed {
		t.Errorf("watched subtask = %+v, want COMPLETED", v)
	}
	var list ops.ArtifactList
	if get(&list, "task_artifacts", map[string]any{"task": first.ID}); len(list.Artifacts) != 1 || list.Artifacts[0].Name != "files/a.txt" {
		t.Errorf("artifacts = %+v, want files/a.txt", list)
	}
	if text := call("task_artifacts", map[string]any{"task": first.ID, "name": "files/a.txt"}); text != "text\n" {
		t.Errorf("artifact = %q, want text", text)
	}
	tools, err := c.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range tools.Tools {
		if destroys := tool.Annotations.DestructiveHint; !used[tool.Name] || destroys == nil || *destroys != (tool.Name == "cancel_task") {
			t.Errorf("tool %s: called %t, annotations %+v, want a call, and that only cancel_task destroys", tool.Name, used[tool.Name], tool.Annotations)
		}
	}
	_ = toHost.Close() // the client is done
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("agent-guest mcp = %v, want nil", err)
		}
	case <-time.After(time.Minute):
		t.Error("agent-guest mcp runs after the end of its input")
	}
}

// FuzzGuestTools sends arguments to every tool of a guest. Each call must get a bounded answer that
// does not show a path of the host, and must not change tasks of others.
func FuzzGuestTools(f *testing.F) {
	s, m := newServer(f)
	guest, err := s.engine(f.Context(), "Bearer "+token+"a")
	if err != nil {
		f.Fatal(err)
	}
	foreign, err := ops.SubmitTask.On(f.Context(), guest.As(ops.Guest(others)), ops.SubmitRequest{ContentType: "application/yaml", RawBody: []byte(manifest)})
	if err != nil {
		f.Fatal(err)
	}
	near, far := mcp.NewInMemoryTransports()
	server := mcpserver.NewForGuest("test", time.Millisecond, func(context.Context) (ops.Host, error) { return guest, nil }, s.public)
	if _, err := server.Connect(f.Context(), near, nil); err != nil {
		f.Fatal(err)
	}
	c, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(f.Context(), far, nil)
	if err != nil {
		f.Fatal(err)
	}
	tools, err := c.ListTools(f.Context(), nil)
	if err != nil {
		f.Fatal(err)
	}
	quoted, err := json.Marshal(manifest)
	if err != nil {
		f.Fatal(err)
	}
	for _, args := range []string{
		`{}`, `null`, `[]`, `{"task":"` + foreign.ID + `"}`, `{"task":"` + foreign.ID + `","name":"x","seconds":-1}`, `{"task":"` + foreign.ID[:6] + `"}`, `{"task":"../` + foreign.ID + `"}`,
		`{"task":"%","name":"../../task.db"}`, `{"task":"a","seconds":1e99}`, `{"task":{"a":[]}}`, `{"manifest":` + string(quoted) + `}`, `{"manifest":"` + strings.Repeat("[", 5000) + `"}`,
		`{"manifest":"{version: \"1\", kind: Task, repository: {url: /etc}, agent: {kind: command, command: [a]}}"}`, `{"manifest":"a: &a [*a,*a]"}`, `{"manifest":"\u0000"}`,
	} {
		for tool := range tools.Tools {
			f.Add(uint8(tool), args)
		}
	}
	dir := m.Sessions.Config.Paths.State
	f.Fuzz(func(t *testing.T, tool uint8, args string) {
		if !json.Valid([]byte(args)) {
			return // the protocol refuses it before any tool
		}
		name := tools.Tools[int(tool)%len(tools.Tools)].Name
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := c.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: json.RawMessage(args)})
		if ctx.Err() != nil {
			t.Fatalf("%s %s = no answer within a minute", name, args)
		}
		text, merr := json.Marshal(r)
		if err != nil {
			text = []byte(err.Error())
		}
		if merr != nil || len(text) > 2*100_000+len(args) || strings.Contains(string(text), dir) {
			t.Errorf("%s %s = %d bytes %.500s, %v, want a bounded answer without paths of the host", name, args, len(text), text, merr)
		}
		if v, err := m.Get(t.Context(), foreign.ID); err != nil || v.Desired != task.Run || err == nil && r != nil && !r.IsError && strings.Contains(string(text), foreign.ID) {
			t.Errorf("%s %s = %.500s; another session's task is %+v, %v, want neither shown nor changed", name, args, text, v, err)
		}
	})
}
