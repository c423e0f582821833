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

// place is where a user answers questions.
type place struct {
	name string
	// prepare does what a user does before the answer is sent; nil means nothing.
	prepare func(q ops.Question, answer string)
	// send returns whether the answer was accepted, and otherwise the reason that the user sees.
	send func(q ops.Question, answer string) (accepted bool, why string)
}

// places returns the command, the API, a tool of MCP, the picker and the dashboard.
func places(t *testing.T, b *box, p *driver.Page) []place {
	t.Helper()
	tools, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(),
		&mcp.StreamableClientTransport{Endpoint: "http://localhost/mcp", HTTPClient: b.toSocket(), MaxRetries: -1}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tools.Close() })
	u := newTerminal(t, b)
	u.typed("agent-sessionizer", "Enter")
	u.sees("project")
	return []place{
		{"the command", nil, func(q ops.Question, answer string) (bool, string) {
			r := b.Run("agent-sessionizer", "answer", q.ID, answer)
			return r.Code == 0, fmt.Sprintf("exit %d: %s", r.Code, r.Stderr)
		}},
		{"the API", nil, func(q ops.Question, answer string) (bool, string) {
			body, _ := json.Marshal(map[string]string{"answer": answer})
			r, err := b.toSocket().Post("http://localhost"+ops.QuestionsPath+"/"+q.ID+"/respond", "application/json", bytes.NewReader(body))
			if err != nil {
				return false, err.Error()
			}
			defer r.Body.Close()
			var got bytes.Buffer
			_, _ = got.ReadFrom(r.Body)
			return r.StatusCode == http.StatusOK, fmt.Sprintf("status %d: %s", r.StatusCode, got.String())
		}},
		{"MCP", nil, func(q ops.Question, answer string) (bool, string) {
			r, err := tools.CallTool(t.Context(), &mcp.CallToolParams{Name: "answer_question", Arguments: map[string]any{"question": q.ID, "answer": answer}})
			if err != nil {
				return false, err.Error()
			}
			text, _ := json.Marshal(r.Content)
			return !r.IsError, string(text)
		}},
		{"the picker", func(_ ops.Question, answer string) {
			u.picks("to leave it open:", "C-r")
			u.typed("-l", answer)
		}, func(ops.Question, string) (bool, string) {
			u.typed("Enter")
			var refused string
			u.until("the picker after the answer", func(screen string) bool {
				last := strings.LastIndex(screen, "to leave it open:") // above it are earlier answers
				if last >= 0 && strings.Contains(screen[last:], "already answered") {
					refused = screen[last:]
				}
				return last < 0 || refused != ""
			})
			if refused != "" {
				u.typed("Enter")
			}
			return refused == "", refused
		}},
		{"the dashboard", func(q ops.Question, answer string) {
			p.Sees(q.Text)
			time.Sleep(time.Second) // a question that just moved takes no click
			p.Eval(fmt.Sprintf(`(() => {
				const card = document.querySelector("[data-question='%s']"), field = card.querySelector("input, textarea"), button = (name) => [...card.querySelectorAll("button")].find((e) => e.innerText.trim().toLowerCase() === name);
				window.answer = button(%q) ?? button("send");
				if (window.answer === button("send")) field.value = %q;
				const fetch = window.fetch;
				window.answered = 0;
				window.fetch = async (...args) => { const r = await fetch(...args); if (String(args[0]?.url ?? args[0]).includes("/respond")) window.answered = r.status; return r };
			})()`, q.ID, answer, answer), nil)
		}, func(ops.Question, string) (bool, string) {
			p.Eval(`window.answer.click()`, nil)
			p.Until("the status of the answer", `window.answered`)
			var status int
			p.Eval(`window.answered`, &status)
			return status == http.StatusOK, map[bool]string{true: "already answered", false: "another error"}[status == http.StatusConflict]
		}},
	}
}

// testPlaces answers a question of Claude Code from five places at once. One of them wins, and the
// others get an error.
func testPlaces(t *testing.T, b *box, name string, m *model, w *attention, say func(string), places []place) {
	b.MustIn(name, "rm -f made-by-the-agent")
	say("RUNBASH nine")
	w.blocks()
	q := b.question(guestproto.AskPermission, "touch made-by-the-agent")
	answer := func(i int) string {
		if places[i].name == "the dashboard" { // by its button
			return guestproto.Allow
		}
		return "text from " + places[i].name
	}
	for i, at := range places {
		if at.prepare != nil {
			at.prepare(q, answer(i))
		}
	}
	won, why := make([]bool, len(places)), make([]string, len(places))
	var wait sync.WaitGroup
	for i, at := range places {
		wait.Go(func() { won[i], why[i] = at.send(q, answer(i)) })
	}
	wait.Wait()
	winner := slices.Index(won, true)
	if winner < 0 {
		t.Fatalf("answers from all places at once: none was accepted: %q", why)
	}
	for i, reason := range why {
		if i != winner && (won[i] || !strings.Contains(reason, "already answered")) {
			t.Errorf("%q lost against %q: accepted %t, %s, want that it was already answered", answer(i), answer(winner), won[i], reason)
		}
	}
	t.Logf("winner: %s", answer(winner))
	w.agent(guestproto.AgentDone, "")
	b.answered(q.ID, answer(winner), store.QuestionDelivered)
	if answer(winner) == guestproto.Allow {
		b.MustIn(name, "test -e made-by-the-agent")
	} else {
		m.hears(t, answer(winner))
		b.MustIn(name, "test ! -e made-by-the-agent")
	}
	if list := b.questions(); len(list) != 0 {
		t.Errorf("questions after the answer = %+v, want none", list)
	}
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

// testKinds answers each kind of question from each place. At the end, another Claude Code asks for
// permissions: a plan that was approved leaves one in a mode in which it may not.
func testKinds(t *testing.T, b *box, name string, m *model, w *attention, say func(string), typed func(...string), places []place) {
	long(t)
	script := func(command string) func(string) {
		return func(string) {
			b.MustIn(name, "rm -f /tmp/answer; tmux new-window -d -n script '"+command+" >/tmp/answer'")
		}
	}
	prints := func(want string) func() {
		return func() {
			testenv.WaitFor(t, "the answer in the script", func() bool { return b.In(name, "cat /tmp/answer").Stdout == want+"\n" })
		}
	}
	planMode := func() bool { return strings.Contains(strings.Join(w.last.Screen, "\n"), "plan mode on") }
	for _, c := range []struct {
		kind   guestproto.QuestionKind
		text   string
		answer string
		ask    func(place string)
		check  func()
	}{
		{guestproto.AskText, "Which name?", "the right one", script(`agent-guest ask "Which name?"`), prints("the right one")},
		{guestproto.AskChoice, "Which colour?", "red", script(`agent-guest ask --choice blue --choice red "Which colour?"`), prints("red")},
		{guestproto.AskPermission, "touch made-by-the-agent", guestproto.Allow, func(place string) {
			b.MustIn(name, "rm -f made-by-the-agent")
			say("RUNBASH from " + place)
			w.blocks()
		}, func() {
			w.agent(guestproto.AgentDone, "")
			b.MustIn(name, "test -e made-by-the-agent")
		}},
		{guestproto.AskPlan, "First the tests, then the code.", guestproto.Allow, func(place string) {
			for range 6 {
				if planMode() {
					break
				}
				before := strings.Join(w.last.Screen, "\n")
				typed("BTab")
				w.until("another mode", func(g guestproto.Observation) bool { return strings.Join(g.Screen, "\n") != before })
			}
			say("PLANME from " + place)
			w.blocks()
		}, func() {
			m.hears(t, "approved")
			w.agent(guestproto.AgentDone, "")
			w.until("the end of plan mode", func(guestproto.Observation) bool { return !planMode() })
		}},
	} {
		for _, at := range places {
			answerFrom(t, b, at, c.kind, c.text, c.answer, func() { c.ask(at.name) }, c.check)
		}
	}
	for i, at := range places { // the gateway asks once for each name
		host := fmt.Sprintf("%d.asked.example", i+1)
		ask := script("curl -sS -m 50 http://" + host + "/")
		answerFrom(t, b, at, guestproto.QuestionKind(store.QuestionNetwork), host+":80", guestproto.Allow, func() { ask(at.name) }, prints("this is 203.0.113.20:80"))
	}

	say("/exit")
	w.agent(guestproto.AgentGone, "")
	w.until("the shell's prompt", func(g guestproto.Observation) bool {
		return strings.HasSuffix(strings.TrimSpace(strings.Join(g.Screen, "\n")), "%")
	})
	typed("-l", "clear; claude --permission-mode default")
	typed("Enter")
	w.agent(guestproto.AgentIdle, "")
}

// answerFrom answers one question from a place.
func answerFrom(t *testing.T, b *box, at place, kind guestproto.QuestionKind, text, answer string, ask, check func()) {
	t.Helper()
	ask()
	q := b.question(kind, text)
	if at.prepare != nil {
		at.prepare(q, answer)
	}
	if ok, why := at.send(q, answer); !ok {
		t.Fatalf("%s, answered from %s: %s, want it accepted", kind, at.name, why)
	}
	b.answered(q.ID, answer, store.QuestionDelivered)
	check()
}
