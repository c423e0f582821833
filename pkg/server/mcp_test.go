package server

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
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
	if want := []string{"answer_question", "cancel_task", "destroy_session"}; !slices.Equal(slices.Sorted(slices.Values(destroys)), want) {
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
