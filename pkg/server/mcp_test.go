package server

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// withToken sends a token with each request.
type withToken struct{ token string }

func (w withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+w.token)
	return http.DefaultTransport.RoundTrip(r)
}

// mcpClient connects a client of the protocol, with the token of a scope.
func (r *rig) mcpClient(scope ops.Scope) *mcp.ClientSession {
	r.t.Helper()
	c := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil)
	s, err := c.Connect(r.t.Context(), &mcp.StreamableClientTransport{
		Endpoint: "http://" + r.addr + mcpPath, HTTPClient: &http.Client{Transport: withToken{r.token[scope]}}, MaxRetries: -1,
	}, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = s.Close() })
	return s
}

// useTool calls a tool, and returns its text and whether it is an error.
func useTool(t *testing.T, s *mcp.ClientSession, tool string, args map[string]any) (string, bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	result, err := s.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		t.Fatalf("tool %s = %v, want a result", tool, err)
	}
	var text strings.Builder
	for _, c := range result.Content {
		if c, ok := c.(*mcp.TextContent); ok {
			text.WriteString(c.Text)
		}
	}
	return text.String(), result.IsError
}

func TestMCP(t *testing.T) {
	r := newRig(t, Limits{})
	const id = "aaaa11112222"
	r.session(id)
	admin, reader := r.mcpClient(ops.Admin), r.mcpClient(ops.Read)
	list, err := admin.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var names, reads, destroys []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
		if tool.Description == "" || tool.Annotations == nil || tool.Annotations.DestructiveHint == nil {
			t.Errorf("tool %+v, want a description and what it does to the host", tool)
			continue
		}
		if tool.Annotations.ReadOnlyHint {
			reads = append(reads, tool.Name)
		}
		if *tool.Annotations.DestructiveHint {
			destroys = append(destroys, tool.Name)
		}
	}
	for _, want := range []string{"list_sessions", "open_session", "exec", "read_screen", "send_prompt", "fetch", "diff", "submit_task", "watch_task", "task_artifacts", "answer_question"} {
		if !slices.Contains(names, want) {
			t.Errorf("tools = %v, want %s among them", names, want)
		}
	}
	if want := []string{"answer_question", "cancel_task", "destroy_session", "exec"}; !slices.Equal(slices.Sorted(slices.Values(destroys)), want) {
		t.Errorf("destructive tools = %v, want %v", destroys, want)
	}
	if slices.Contains(reads, "exec") || !slices.Contains(reads, "diff") {
		t.Errorf("read-only tools = %v, want diff and not exec among them", reads)
	}

	r.ask(id, store.Question{ID: "0123456789ab", GuestID: "1", Kind: "permission", Agent: "claude", Text: "Bash: ls"})
	answer := map[string]any{"question": "0123", "answer": "allow"}
	for _, c := range []struct {
		who   *mcp.ClientSession
		tool  string
		args  map[string]any
		want  string
		fails bool
	}{
		{reader, "list_sessions", nil, "agent-acme-app-aaaa11", false},
		{reader, "list_questions", nil, "Bash: ls", false},
		{reader, "answer_question", answer, "needs the scope admin", true},
		{reader, "send_prompt", map[string]any{"session": id, "text": "x"}, "needs the scope admin", true},
		{reader, "exec", map[string]any{"session": id, "command": "ls"}, "needs the scope admin", true},
		{reader, "destroy_session", map[string]any{"session": id}, "needs the scope admin", true},
		{reader, "submit_task", map[string]any{"manifest": "x"}, "needs the scope submit", true},
		{admin, "answer_question", answer, `"state": "answered"`, false},
		{admin, "answer_question", answer, "already answered by token:admin", true},
		{admin, "read_screen", map[string]any{"session": "nothing"}, "NOT_FOUND", true},
		{admin, "submit_task", map[string]any{"manifest": "x"}, "USAGE", true},
		{admin, "exec", map[string]any{"session": id}, "command", true},
	} {
		text, isError := useTool(t, c.who, c.tool, c.args)
		if isError != c.fails || !strings.Contains(text, c.want) {
			t.Errorf("%s %v = %s (error %v), want %q (error %v)", c.tool, c.args, text, isError, c.want, c.fails)
		}
	}
}

// TestMCPScopes checks that each tool is in the table of docs/mcp.md, and refuses a client with less
// than the scope that the table names.
func TestMCPScopes(t *testing.T) {
	text, err := os.ReadFile("../../docs/mcp.md")
	if err != nil {
		t.Fatal(err)
	}
	needs := map[string]ops.Scope{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`[a-z_`, ]+`) \\| .* \\| ([a-z, ]+) \\|$").FindAllStringSubmatch(string(text), -1) {
		scopes := strings.Split(row[2], ", ")
		for i, name := range strings.Split(row[1], ", ") {
			needs[strings.Trim(name, "`")] = ops.Scope(scopes[min(i, len(scopes)-1)])
		}
	}
	r := newRig(t, Limits{})
	const id = "aaaa11112222"
	r.session(id)
	r.ask(id, store.Question{ID: "0123456789ab", GuestID: "1", Kind: "permission", Agent: "claude", Text: "Bash: ls"})
	arguments := map[string]any{
		"session": id, "repo": "acme/app", "command": "ls", "text": "go on", "manifest": manifestYAML, "task": r.submit().ID,
		"question": "0123", "answer": "allow", "seconds": 1,
	}
	clients := map[ops.Scope]*mcp.ClientSession{}
	for _, scope := range ops.Scopes() {
		clients[scope] = r.mcpClient(scope)
	}
	list, err := clients[ops.Admin].ListTools(t.Context(), nil)
	if err != nil || len(list.Tools) != len(needs) {
		t.Fatalf("tools = %d, %v, want the %d of docs/mcp.md", len(list.Tools), err, len(needs))
	}
	before := r.counts(t)
	for _, tool := range list.Tools {
		need, ok := needs[tool.Name]
		if !ok {
			t.Errorf("tool %s is not in docs/mcp.md", tool.Name)
		}
		schema := tool.InputSchema.(map[string]any)
		args := map[string]any{}
		required, _ := schema["required"].([]any)
		properties, _ := schema["properties"].(map[string]any) // some have none
		for name := range properties {
			value, known := arguments[name]
			if !known && slices.Contains(required, any(name)) {
				t.Errorf("argument %s of %s is unknown, want a value for it in this test", name, tool.Name)
			}
			if known {
				args[name] = value
			}
		}
		for _, scope := range ops.Scopes() {
			if scope == need {
				break
			}
			if text, isError := useTool(t, clients[scope], tool.Name, args); !isError || !strings.Contains(text, "needs the scope "+string(need)) {
				t.Errorf("%s with scope %s = %s (error %t), want that it needs %s", tool.Name, scope, text, isError, need)
			}
		}
		if need == ops.Read {
			if text, _ := useTool(t, clients[ops.Read], tool.Name, args); strings.Contains(text, "needs the scope") {
				t.Errorf("%s with scope read = %s, want no refusal", tool.Name, text)
			}
		}
		if tool.Annotations.ReadOnlyHint != (need == ops.Read) {
			t.Errorf("%s is read-only: %t, and needs %s", tool.Name, tool.Annotations.ReadOnlyHint, need)
		}
	}
	if after := r.counts(t); after != before {
		t.Errorf("refused calls changed sessions, tasks and questions from %v to %v", before, after)
	}
}

// TestMCPPanic checks that a tool that panics does not end serve.
func TestMCPPanic(t *testing.T) {
	r := newRig(t, Limits{})
	r.engine.Preflight = func(context.Context, string) error { panic("no host") }
	if text, isError := useTool(t, r.mcpClient(ops.Admin), "open_session", map[string]any{"repo": "acme/app"}); !isError || !strings.Contains(text, "INTERNAL") {
		t.Errorf("open_session that panics = %s (error %v), want an internal error", text, isError)
	}
}

// TestMCPBounds checks that a request makes one call, and counts as a stream of its client.
func TestMCPBounds(t *testing.T) {
	r := newRig(t, Limits{Each: 1})
	const list = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"list_tasks","arguments":{}}}`
	free, ok := r.streams.acquire("token:read")
	if !ok {
		t.Fatal("no stream is free, want one")
	}
	for _, c := range []struct {
		name, body string
		want       int
	}{
		{"a call beside as many streams as are allowed", list, http.StatusTooManyRequests},
		{"a batch", " \n[" + list + "," + list + "]", http.StatusBadRequest},
		{"a call", list, http.StatusOK},
		{"the next call", list, http.StatusOK}, // the one before it has freed its stream
	} {
		if status, body, err := r.postMCP(t.Context(), ops.Read, c.body); err != nil || status != c.want {
			t.Errorf("%s = status %d %s, %v, want %d", c.name, status, body, err, c.want)
		}
		free()
		free = func() {}
	}
}

// TestMCPGone checks that a tool that waits ends with its client.
func TestMCPGone(t *testing.T) {
	r := newRig(t, Limits{Each: 1})
	task := r.submit()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, _, err := r.postMCP(ctx, ops.Read, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"watch_task","arguments":{"task":"`+task.ID+`","seconds":600}}}`)
		ended <- err
	}()
	isFree := func() bool {
		free, ok := r.streams.acquire("token:read")
		if ok {
			free()
		}
		return ok
	}
	testenv.WaitFor(t, "the call's stream", func() bool { return !isFree() })
	cancel()
	if err := <-ended; err == nil {
		t.Error("watch_task of a task that waits = nil, want that it waits")
	}
	testenv.WaitFor(t, "the end of the call", isFree)
}

// postMCP sends a message, with the token of a scope.
func (r *rig) postMCP(ctx context.Context, scope ops.Scope, message string) (status int, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr+mcpPath, strings.NewReader(message))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+r.token[scope])
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

// FuzzMCPTools sends arguments to every tool. Each call must get an answer of the protocol that
// is bounded, and a client that may only read must change nothing.
func FuzzMCPTools(f *testing.F) {
	for i, args := range []string{
		`{}`, `{"session":"aaaa11112222"}`, `{"session":"","command":"ls","seconds":-1}`, `{"session":"aaaa11112222","command":"ls","seconds":1e99}`,
		`{"repo":"../../etc"}`, `{"repo":"acme/app"}`, `{"repo":"` + strings.Repeat("a/", 4000) + `"}`, `{"question":"0123","answer":"\u0000"}`,
		`{"manifest":"version: \"1\"\nkind: Task\n"}`, `{"task":"%","name":"../../state.json"}`, `{"session":{"a":[]},"text":null}`, `[`, `null`, `{"session":"a","session":"b"}`,
	} {
		for tool := range 16 {
			f.Add(uint8(tool), uint8(i), args)
		}
	}
	r := newRig(f, Limits{})
	const id = "aaaa11112222"
	r.session(id)
	r.engine.Preflight = func(context.Context, string) error { return nil }
	tools, err := r.mcpClient(ops.Admin).ListTools(f.Context(), nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, tool, scope uint8, args string) {
		name := tools.Tools[int(tool)%len(tools.Tools)].Name
		who := ops.Scopes()[int(scope)%len(ops.Scopes())]
		before := r.counts(t)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond) // some tools wait
		defer cancel()
		status, body, err := r.postMCP(ctx, who, `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"`+name+`","arguments":`+args+`}}`)
		if err == nil && (status >= 500 || len(body) > 4*100_000) {
			t.Errorf("%s %s as %s = status %d with %d bytes, want an answer that is bounded", name, args, who, status, len(body))
		}
		if err != nil && ctx.Err() == nil {
			t.Errorf("%s %s as %s = %v, want an answer", name, args, who, err)
		}
		if after := r.counts(t); who == ops.Read && after != before {
			t.Errorf("%s %s as %s changed sessions, tasks and questions from %v to %v", name, args, who, before, after)
		}
	})
}

// counts returns how many sessions, tasks and answers exist.
func (r *rig) counts(t *testing.T) (n [3]int) {
	t.Helper()
	sessions, err1 := r.store.Sessions(t.Context(), true)
	tasks, err2 := r.store.Tasks(t.Context(), store.TaskFilter{Limit: 500})
	questions, err3 := r.store.Questions(t.Context(), "", true)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	for _, q := range questions {
		if q.State != store.QuestionOpen {
			n[2]++
		}
	}
	n[0], n[1] = len(sessions), len(tasks)
	return n
}
