//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/browser/driver"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// toSocket connects to the box's serve.
func (b *box) toSocket() *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(b.Home, ".local/state/agent-sessionizer/serve.sock"))
	}}}
}

// testPlaces answers a question of Claude Code from five places at once: a command, the API, a tool
// of MCP, the picker and the dashboard. One of them wins, and the others get an error.
func testPlaces(t *testing.T, b *box, name string, m *model, w *attention, say func(string), p *driver.Page) {
	b.MustIn(name, "rm -f made-by-the-agent")
	tools, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(),
		&mcp.StreamableClientTransport{Endpoint: "http://localhost/mcp", HTTPClient: b.toSocket(), MaxRetries: -1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tools.Close()
	u := newTerminal(t, b)
	u.typed("agent-sessionizer", "Enter")
	u.sees("project")

	say("RUNBASH nine")
	w.blocks()
	q := b.question(guestproto.AskPermission, "touch made-by-the-agent")
	u.picks("to leave it open:", "C-r")
	u.typed("-l", "text from the picker")
	p.Sees("Bash: touch made-by-the-agent")
	p.Eval(`(() => {
		window.allow = [...document.querySelectorAll("button")].find((e) => e.innerText.trim() === "Allow" && e.checkVisibility());
		const fetch = window.fetch;
		window.fetch = async (...args) => { const r = await fetch(...args); if (String(args[0]?.url ?? args[0]).includes("/respond")) window.answered = r.status; return r };
	})()`, nil)

	places := []struct {
		answer string
		send   func() (won bool, why string)
	}{
		{"text from the command", func() (bool, string) {
			r := b.Run("agent-sessionizer", "answer", q.ID, "text from the command")
			return r.Code == 0, fmt.Sprintf("exit %d: %s", r.Code, r.Stderr)
		}},
		{"text from the API", func() (bool, string) {
			r, err := b.toSocket().Post("http://localhost"+ops.QuestionsPath+"/"+q.ID+"/respond", "application/json", strings.NewReader(`{"answer":"text from the API"}`))
			if err != nil {
				return false, err.Error()
			}
			defer r.Body.Close()
			var body bytes.Buffer
			_, _ = body.ReadFrom(r.Body)
			return r.StatusCode == http.StatusOK, fmt.Sprintf("status %d: %s", r.StatusCode, body.String())
		}},
		{"text from MCP", func() (bool, string) {
			r, err := tools.CallTool(t.Context(), &mcp.CallToolParams{Name: "answer_question", Arguments: map[string]any{"question": q.ID, "answer": "text from MCP"}})
			if err != nil {
				return false, err.Error()
			}
			text, _ := json.Marshal(r.Content)
			return !r.IsError, string(text)
		}},
		{"text from the picker", func() (bool, string) {
			u.typed("Enter")
			u.until("the picker after the answer", func(screen string) bool {
				return strings.Contains(screen, "already answered") || !strings.Contains(screen, "to leave it open:")
			})
			screen := u.screen()
			return !strings.Contains(screen, "already answered"), screen
		}},
		{"allow", func() (bool, string) {
			p.Eval(`window.allow.click()`, nil)
			p.Until("the status of the answer", `window.answered`)
			var status int
			p.Eval(`window.answered`, &status)
			return status == http.StatusOK, map[bool]string{true: "already answered", false: "another error"}[status == http.StatusConflict]
		}},
	}
	var won [5]bool
	var why [5]string
	var wait sync.WaitGroup
	for i, place := range places {
		wait.Go(func() { won[i], why[i] = place.send() })
	}
	wait.Wait()
	winner := slices.Index(won[:], true)
	if winner < 0 {
		t.Fatalf("answers from five places: none was accepted: %q", why)
	}
	for i, reason := range why {
		if i != winner && (won[i] || !strings.Contains(reason, "already answered")) {
			t.Errorf("%q lost against %q: accepted %t, %s, want that it was already answered", places[i].answer, places[winner].answer, won[i], reason)
		}
	}
	t.Logf("winner: %s", places[winner].answer)
	w.agent(guestproto.AgentDone, "")
	b.answered(q.ID, places[winner].answer, store.QuestionDelivered)
	if places[winner].answer == guestproto.Allow {
		b.MustIn(name, "test -e made-by-the-agent")
	} else {
		m.hears(t, places[winner].answer)
		b.MustIn(name, "test ! -e made-by-the-agent")
	}
	if list := b.questions(); len(list) != 0 {
		t.Errorf("questions after the answer = %+v, want none", list)
	}
	u.typed("Enter", "Escape")
}

// testExpiry lets a question wait longer than the settings allow. The agent goes on without it.
func testExpiry(t *testing.T, b *box, name string, m *model, w *attention, say func(string), configure func(more string)) {
	b.MustIn(name, "rm -f made-by-the-agent")
	configure("questions: {deny_after: 10s}\n")
	defer configure("")
	say("RUNBASH ten")
	w.blocks()
	q := b.question(guestproto.AskPermission, "touch made-by-the-agent")
	if left := time.Until(q.Deadline); q.Deadline.IsZero() || left > 10*time.Second {
		t.Errorf("deadline of the question = %v, want it within 10 s", q.Deadline)
	}
	b.answered(q.ID, guestproto.Deny, store.QuestionDelivered)
	m.hears(t, "The user denied this.")
	w.agent(guestproto.AgentDone, "")
	b.MustIn(name, "test ! -e made-by-the-agent")
	var end ops.Question
	testenv.WaitFor(t, "the question's end", func() bool {
		return json.Unmarshal([]byte(b.Asz("answer", "--json", q.ID)), &end) == nil && !end.State.Waits()
	})
	if end.By != "settings" {
		t.Errorf("the question was answered by %q, want the settings", end.By)
	}
}
