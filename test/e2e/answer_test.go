//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// question waits for the only question, which must be of a kind and contain a text.
func (b *box) question(kind guestproto.QuestionKind, text string) ops.Question {
	b.t.Helper()
	var list []ops.Question
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) { // the guest needs the processor
		list = b.questions()
		if len(list) == 1 && list[0].State == store.QuestionOpen && list[0].Kind == string(kind) && strings.Contains(list[0].Text, text) {
			return list[0]
		}
	}
	b.t.Fatalf("questions after five minutes = %+v, want one of the kind %s with the text %q", list, kind, text)
	return ops.Question{}
}

func (b *box) questions(args ...string) (list []ops.Question) {
	b.t.Helper()
	if err := json.Unmarshal([]byte(b.Asz(append([]string{"answer", "--json"}, args...)...)), &list); err != nil {
		b.t.Fatal(err)
	}
	return list
}

// answered checks that a question was answered with a text and delivered.
func (b *box) answered(id, answer string, state store.QuestionState) {
	b.t.Helper()
	var q ops.Question
	testenv.WaitFor(b.t, "the question's end", func() bool {
		if err := json.Unmarshal([]byte(b.Asz("answer", "--json", id)), &q); err != nil {
			b.t.Fatal(err)
		}
		return !q.State.Waits()
	})
	if q.State != state || q.Answer != answer {
		b.t.Errorf("question %s = %s with the answer %q, want %s and %q", id, q.State, q.Answer, state, answer)
	}
}

// testAnswers answers questions of Claude Code from the host. It is idle, and asks for
// permissions.
func testAnswers(t *testing.T, b *box, name string, m *model, w *attention, say func(string), typed func(...string), configure func(more string)) {
	asks := func(prompt string, kind guestproto.QuestionKind, text string) ops.Question {
		t.Helper()
		say(prompt)
		w.blocks()
		return b.question(kind, text)
	}
	t.Run("a text", func(t *testing.T) {
		long(t)
		b.MustIn(name, "rm -f made-by-the-agent")
		q := asks("RUNBASH four", guestproto.AskPermission, "")
		b.Asz("answer", name, "use", "the", "other", "directory")
		m.hears(t, "use the other directory")
		w.agent(guestproto.AgentDone, "")
		b.MustIn(name, "test ! -e made-by-the-agent")
		b.answered(q.ID, "use the other directory", store.QuestionDelivered)
	})
	t.Run("from the dashboard", func(t *testing.T) { testDashboard(t, b, name, m, w, say, typed) })
	t.Run("no answer", func(t *testing.T) { testExpiry(t, b, name, m, w, say, configure) })
	t.Run("a choice", func(t *testing.T) {
		long(t)
		q := asks("ASKME three", guestproto.AskChoice, "Which DB?")
		if len(q.Choices) != 2 || q.Choices[1] != "SQLite" {
			t.Errorf("choices = %q, want Postgres and SQLite", q.Choices)
		}
		b.Asz("answer", q.ID, "2")
		m.hears(t, "SQLite")
		w.agent(guestproto.AgentDone, "")
		b.answered(q.ID, "SQLite", store.QuestionDelivered)
	})
	t.Run("in the terminal", func(t *testing.T) {
		long(t)
		q := asks("RUNBASH five", guestproto.AskPermission, "")
		typed("Enter")
		w.agent(guestproto.AgentDone, "")
		b.answered(q.ID, "", store.QuestionClosed)
		b.Fails(4, "has ended", "answer", q.ID, "allow")
	})
	t.Run("a keeper killed before the delivery", func(t *testing.T) {
		b.MustIn(name, "rm -f made-by-the-agent")
		q := asks("RUNBASH six", guestproto.AskPermission, "")
		b.signal("keeper", syscall.SIGSTOP)
		if out := b.Run("agent-sessionizer", "answer", q.ID, "allow"); out.Code != 0 || !strings.Contains(out.Stderr, "saved") {
			t.Errorf("answer without a keeper = exit %d, %q, want that it is saved", out.Code, out.Stderr)
		}
		b.kill("keeper")
		b.answered(q.ID, "allow", store.QuestionDelivered) // by the next keeper
		w.agent(guestproto.AgentDone, "")
		b.MustIn(name, "test -e made-by-the-agent")
	})
	t.Run("a plan", func(t *testing.T) {
		long(t)
		typed("BTab")
		typed("BTab")
		w.until("plan mode", func(g guestproto.Observation) bool {
			return strings.Contains(strings.Join(g.Screen, "\n"), "plan mode on")
		})
		q := asks("PLANME", guestproto.AskPlan, "First the tests, then the code.")
		b.Asz("answer", q.ID, "allow")
		m.hears(t, "approved")
		w.agent(guestproto.AgentDone, "")
		b.answered(q.ID, "allow", store.QuestionDelivered)
	})
	t.Run("a script", func(t *testing.T) {
		b.MustIn(name, `tmux new-window -d -n script 'agent-guest ask --choice blue --choice red "Which colour?" >/tmp/colour'`)
		q := b.question(guestproto.AskChoice, "Which colour?")
		b.Fails(2, "must be one of blue, red", "answer", q.ID, "green")
		b.Asz("answer", q.ID, "red")
		b.answered(q.ID, "red", store.QuestionDelivered)
		testenv.WaitFor(t, "the answer in the script", func() bool { return b.In(name, "cat /tmp/colour").Stdout == "red\n" })
	})
}

// testCodexAnswers answers permissions of Codex from the host: the answers are typed into its
// dialog.
func testCodexAnswers(t *testing.T, b *box, name string, w *attention, say func(string)) {
	for _, c := range []struct {
		answer string
		made   string
	}{{"deny", "test ! -e made-by-the-agent"}, {"allow", "test -e made-by-the-agent"}, {"list the directory first", "test ! -e made-by-the-agent"}} {
		b.MustIn(name, "rm -f made-by-the-agent")
		say("RUNBASH")
		w.blocks()
		q := b.question(guestproto.AskPermission, "touch made-by-the-agent")
		if q.Agent != "codex" {
			t.Errorf("question = %+v, want one of codex", q)
		}
		b.Asz("answer", q.ID, c.answer)
		b.answered(q.ID, c.answer, store.QuestionDelivered)
		w.leaves("the answer " + c.answer)
		if c.answer != "deny" { // after Escape, Codex waits for its user
			w.agent(guestproto.AgentDone, "")
		}
		b.MustIn(name, c.made)
	}
	w.until("the text in Codex", func(g guestproto.Observation) bool {
		return strings.Contains(strings.Join(g.Screen, "\n"), "list the directory first")
	})
}

// blocks waits until the most urgent agent waits for its user.
func (a *attention) blocks() {
	a.t.Helper()
	a.until("a blocked agent", func(g guestproto.Observation) bool {
		return len(g.Agents) > 0 && g.Agents[0].State == guestproto.AgentBlocked
	})
}

// testTaskAsks answers questions of tasks' agents: of Claude Code through its control requests, of
// Codex through its app server.
func testTaskAsks(t *testing.T, b *box, name string, m *model) {
	b.Write("provider", fmt.Sprintf(`model_provider = "pretend"
model_providers.pretend = {name="pretend", base_url="http://host.lima.internal:%d/v1", wire_api="responses", env_key="ANTHROPIC_AUTH_TOKEN"}
`, m.port))
	b.Asz("cp", "provider", name+":/tmp/provider")
	b.MustIn(name, "cd ~/.codex && cat config.toml >>/tmp/provider && cp /tmp/provider config.toml")
	for _, c := range []struct {
		agent, more, prompt, made string
		asks                      []asked
	}{
		{"claude", "", "EVERYKIND", "test -e made-by-the-agent", []asked{
			{guestproto.AskPlan, "First the tests, then the code.", "allow"},
			{guestproto.AskChoice, "Which DB?", "SQLite"},
			{guestproto.AskPermission, "touch made-by-the-agent", "use the other directory"},
			{guestproto.AskPermission, "touch made-by-the-agent", "allow"},
		}},
		{"codex", ", model: gpt-5.1-codex", "RUNBASH", "test -e made-by-the-agent", []asked{{guestproto.AskPermission, "touch made-by-the-agent", "allow"}}},
		{"codex", ", model: gpt-5.1-codex", "RUNBASH", "test ! -e made-by-the-agent", []asked{{guestproto.AskPermission, "touch made-by-the-agent", "list the directory first"}}},
	} {
		if testing.Short() && c.agent == "codex" {
			continue
		}
		b.MustIn(name, "rm -f made-by-the-agent")
		b.Write("asks.yaml", "version: \"1\"\nkind: Task\nmetadata: {name: asks}\nvm: {session: "+name+"}\nagent: {kind: "+c.agent+", prompt: "+c.prompt+", permissions: ask"+c.more+"}\n")
		id := strings.TrimSpace(b.Asz("task", "submit", "-f", "asks.yaml"))
		for _, ask := range c.asks {
			q := b.question(ask.kind, ask.text)
			if q.Agent != c.agent {
				t.Errorf("question = %+v, want one of %s", q, c.agent)
			}
			b.Asz("answer", q.ID, ask.answer)
			b.answered(q.ID, ask.answer, store.QuestionDelivered)
		}
		b.until(id, "COMPLETED")
		b.MustIn(name, c.made)
		if got := b.Asz("task", "show", "--json", id); !strings.Contains(got, `"result": "All done."`) {
			t.Errorf("task show of %s = %s, want the agent's answer", c.agent, got)
		}
	}
}

// asked is a question that a test expects, and its answer.
type asked struct {
	kind         guestproto.QuestionKind
	text, answer string
}

// testMCP runs Claude Code on the host, which uses a session through our tools. The program
// is the guest's, which came from its vendor.
func testMCP(t *testing.T, b *box, name string, m *model) {
	long(t)
	b.Asz("cp", name+":"+b.MustIn(name, "readlink -f $(command -v claude)"), "claude")
	b.Write("mcp.json", fmt.Sprintf(`{"mcpServers": {"asz": {"command": %q, "args": ["mcp"]}}}`, b.Binary))
	claude := func(args ...string) realvm.Result {
		return b.Run(append([]string{
			"env",
			fmt.Sprintf("ANTHROPIC_BASE_URL=http://127.0.0.1:%d", m.port), "ANTHROPIC_AUTH_TOKEN=pretend", "DISABLE_AUTOUPDATER=1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "./claude", "--print",
		}, args...)...)
	}
	r := claude("--mcp-config", "mcp.json", "--strict-mcp-config", "--allowedTools", "mcp__asz__exec", "--", "RUNTOOL")
	if r.Code != 0 || !strings.Contains(r.Stdout, "All done.") {
		t.Fatalf("claude on the host = exit %d, want 0 and its answer\n%s", r.Code, r.All())
	}
	m.hears(t, "from the guest\\nlima-"+name)
	m.hears(t, `"exit_code": 0`)

	// The same by our plugin, which brings a skill.
	plugin, err := filepath.Abs("../../integrations/claude-code")
	if err != nil {
		t.Fatal(err)
	}
	r = claude("--plugin-dir", plugin, "--output-format", "stream-json", "--verbose", "--allowedTools", "mcp__plugin_agent-sessionizer_agent-sessionizer__exec", "--", "RUNPLUGIN")
	for _, want := range []string{"agent-sessionizer:agent-sessions", `"name":"plugin:agent-sessionizer:agent-sessionizer","status":"connected"`, `"result":"All done."`} {
		if !strings.Contains(r.Stdout, want) {
			t.Errorf("output of claude with the plugin lacks %s\n%s", want, r.All())
		}
	}
	m.hears(t, "by the plugin\\nlima-"+name)
}

// hears waits until the model is sent a text as the result of a tool.
func (m *model) hears(t *testing.T, text string) {
	t.Helper()
	var last string
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		m.mu.Lock()
		last = textOf(m.result)
		m.mu.Unlock()
		if strings.Contains(last, text) {
			return
		}
	}
	t.Fatalf("the last result that the model was sent is %s, want it to contain %q", last, text)
}

// textOf returns the texts of a tool's result, which is JSON.
func textOf(result string) string {
	var blocks []struct {
		Content []struct{ Text string }
	}
	if json.Unmarshal([]byte(result), &blocks) != nil {
		return result
	}
	var texts []string
	for _, b := range blocks {
		for _, c := range b.Content {
			texts = append(texts, c.Text)
		}
	}
	return strings.Join(texts, "\n")
}

// askedNames connects to names that the user is asked about.
func askedNames(t *testing.T, b *box, session string) {
	kind := guestproto.QuestionKind(store.QuestionNetwork)
	b.MustIn(session, "nohup curl -sS -m 50 http://asked.example/ >/tmp/asked 2>&1 </dev/null &")
	q := b.question(kind, "asked.example:80")
	if q.Deadline.IsZero() || q.Name != session {
		t.Errorf("question = %+v, want a deadline, and the session %s", q, session)
	}
	if got := b.Asz("list"); !strings.Contains(got, "permission: connect to asked.example:80") {
		t.Errorf("list while a connection waits = %s, want that it says so", got)
	}
	b.Fails(2, "must be allow or deny", "answer", q.ID, "perhaps")
	b.Asz("answer", q.ID, "allow")
	b.answered(q.ID, "allow", store.QuestionDelivered)
	testenv.WaitFor(t, "the answer of the approved server", func() bool {
		return b.In(session, "cat /tmp/asked").Stdout == "this is 203.0.113.20:80\n"
	})
	if got := b.MustIn(session, "curl -sS http://asked.example/"); got != "this is 203.0.113.20:80" {
		t.Errorf("http://asked.example/ the second time = %q, want it without a question", got)
	}

	b.MustIn(session, "nohup curl -sS -m 50 http://refused.example/ >/tmp/refused 2>&1 </dev/null &")
	q = b.question(kind, "refused.example:80")
	b.Asz("answer", q.ID, "deny")
	b.answered(q.ID, "deny", store.QuestionDelivered)
	testenv.WaitFor(t, "the end of the refused connection", func() bool {
		return strings.Contains(b.In(session, "cat /tmp/refused").Stdout, "curl: (7)")
	})
	if r := b.In(session, "curl -sS -m 20 http://refused.example/"); r.Code == 0 {
		t.Errorf("http://refused.example/ the second time = %s, want it denied", r.All())
	}
	if list := b.questions(); len(list) != 0 {
		t.Errorf("questions = %+v, want none", list)
	}
}
