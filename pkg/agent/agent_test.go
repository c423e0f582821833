package agent_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
)

func TestCommand(t *testing.T) {
	for _, c := range []struct {
		name string
		a    manifest.Agent
		want []string
	}{
		{
			"claude",
			manifest.Agent{Kind: manifest.Claude, Prompt: "Fix it.", MaxTurns: 100},
			[]string{"claude", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose", "--max-turns", "100", "--print", "--", "Fix it."},
		},
		{
			"claude with everything",
			manifest.Agent{Kind: manifest.Claude, Prompt: "- one\n- two", Model: "sonnet", MaxTurns: 3, AllowedTools: []string{"Read", "Edit"}},
			[]string{"claude", "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose", "--model", "sonnet", "--max-turns", "3", "--tools", "Read,Edit", "--print", "--", "- one\n- two"},
		},
		{
			"claude that asks",
			manifest.Agent{Kind: manifest.Claude, Prompt: "Fix it.", Permissions: manifest.AskPermissions, MaxTurns: 3, AllowedTools: []string{"Read", "Edit"}},
			[]string{"agent-guest", "claude", "--max-turns", "3", "--tools", "Read,Edit", "--", "Fix it."},
		},
		{
			"codex",
			manifest.Agent{Kind: manifest.Codex, Prompt: "resume"},
			[]string{"codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--", "resume"},
		},
		{
			"codex with a model",
			manifest.Agent{Kind: manifest.Codex, Prompt: "--help", Model: "gpt-5"},
			[]string{"codex", "exec", "--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--model", "gpt-5", "--", "--help"},
		},
		{
			"codex that asks",
			manifest.Agent{Kind: manifest.Codex, Prompt: "--help", Model: "gpt-5", Permissions: manifest.AskPermissions},
			[]string{"agent-guest", "codex", "--model", "gpt-5", "--", "--help"},
		},
		{
			"command",
			manifest.Agent{Kind: manifest.Command, Prompt: "not an argument", Command: []string{"make", "-j2", ""}},
			[]string{"make", "-j2", ""},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, agent.Command(c.a)); diff != "" {
				t.Errorf("Command(%+v) mismatch (-want +got):\n%s", c.a, diff)
			}
		})
	}
}

// transcript reads a recorded output of an agent from testdata.
func transcript(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// told formats changes one per line, for comparison.
func told(changes []agent.Change) string {
	var b strings.Builder
	for _, c := range changes {
		fmt.Fprintf(&b, "%s|%s|%s\n", c.Kind, c.Name, c.Text)
	}
	return b.String()
}

func TestClaude(t *testing.T) {
	text := transcript(t, "claude.jsonl")
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	changes := r.Feed(text)
	want := `message||I'll look at the test first.
tool|Bash|go test ./...
tool|Read|/home/agent/repo/sum.go
tool|Edit|/home/agent/repo/sum.go
tool|Agent|Find callers of Sum
tool|Grep|Sum\(
message||Fixed.
result||Fixed: the loop began at 1.

Both tests pass.
`
	if diff := cmp.Diff(want, told(changes)); diff != "" {
		t.Errorf("changes reported for claude.jsonl mismatch (-want +got):\n%s", diff)
	}
	p := r.Progress()
	if p.Offset != int64(len(text)) || p.Skipped != 1 { // one line is not JSON
		t.Errorf("Progress() after claude.jsonl: Offset %d, Skipped %d, want %d, 1", p.Offset, p.Skipped, len(text))
	}
	got := agent.Progress{
		Usage: p.Usage, ToolCalls: p.ToolCalls, CurrentTool: p.CurrentTool, Model: p.Model, Thread: p.Thread, Result: p.Result, Error: p.Error,
	}
	wantProgress := agent.Progress{
		Usage:     agent.Usage{Turns: 6, InputTokens: 31, OutputTokens: 640, CacheReadTokens: 60100, CacheWriteTokens: 15200, CostUSD: 0.0841},
		ToolCalls: 5, Model: "claude-sonnet-4-5-20250929", Thread: "6d5c1a52-53b4-4f0c-9a1e-0c8f6f9f0a11",
		Result: "Fixed: the loop began at 1.\n\nBoth tests pass.",
	}
	if diff := cmp.Diff(wantProgress, got); diff != "" {
		t.Errorf("Progress() after claude.jsonl mismatch (-want +got):\n%s", diff)
	}
}

// TestReal parses what the agents installed in guests really wrote during a made-up
// conversation.
func TestReal(t *testing.T) {
	for _, c := range []struct {
		file string
		kind manifest.Kind
		told string
		want agent.Progress
	}{
		{
			"claude-2.1.329.jsonl", manifest.Claude,
			"message||I run two things.\ntool|Bash|echo hi > made.txt\ntool|Bash|ls\nmessage||All done.\n\nTwo lines.\nresult||All done.\n\nTwo lines.\n",
			agent.Progress{
				Usage:     agent.Usage{Turns: 3, InputTokens: 20, OutputTokens: 84, CacheReadTokens: 6, CacheWriteTokens: 14, CostUSD: 0.0013742999999999997},
				ToolCalls: 2, Model: "claude-sonnet-4-5", Thread: "1ef1ff52-368d-4659-8fc7-84b48717d375", Result: "All done.\n\nTwo lines.",
			},
		},
		{
			"claude-2.1.329-turns.jsonl", manifest.Claude,
			"error|error_max_turns|Reached maximum number of turns (1)\n",
			agent.Progress{
				Usage: agent.Usage{Turns: 2, InputTokens: 10, OutputTokens: 42, CacheReadTokens: 3, CacheWriteTokens: 7, CostUSD: 0.0006871499999999999},
				Error: "Reached maximum number of turns (1)",
			},
		},
		{
			"claude-2.1.329-retry.jsonl", manifest.Claude,
			"error|api|authentication_failed (401), attempt 1 of 10\n",
			agent.Progress{},
		},
		{
			"codex-0.169.0.jsonl", manifest.Codex,
			"error||Model metadata for `gpt-5` not found. Defaulting to fallback metadata; this can degrade performance and cause issues.\n" +
				"tool|shell|/bin/bash -lc 'echo hi > made.txt; ls'\nmessage||All done.\n\nTwo lines.\nresult||All done.\n\nTwo lines.\n",
			agent.Progress{
				Usage:     agent.Usage{Turns: 1, InputTokens: 80, OutputTokens: 40, CacheReadTokens: 120},
				ToolCalls: 1, Thread: "01a20002-c1d0-7e91-879e-4974f8238e13", Result: "All done.\n\nTwo lines.",
			},
		},
		{
			"codex-0.169.0-failed.jsonl", manifest.Codex,
			"error||Model metadata for `gpt-5` not found. Defaulting to fallback metadata; this can degrade performance and cause issues.\n" +
				"error||{\"error\": {\"message\": \"no such model\", \"type\": \"invalid_request_error\", \"code\": \"x\"}}\n",
			agent.Progress{
				Usage: agent.Usage{Turns: 1}, Thread: "01a20003-316c-7ba1-8760-b7f5844f508c",
				Error: "{\"error\": {\"message\": \"no such model\", \"type\": \"invalid_request_error\", \"code\": \"x\"}}",
			},
		},
		{
			"codex-0.169.0-asked.jsonl", manifest.Codex,
			"error||Model metadata for `gpt-5.1-codex` not found. Defaulting to fallback metadata; this can degrade performance and cause issues.\n" +
				"tool|shell|/bin/bash -lc 'touch made'\nmessage||All done.\nresult||All done.\n",
			agent.Progress{
				Usage:     agent.Usage{Turns: 1, InputTokens: 80, OutputTokens: 40, CacheReadTokens: 120},
				ToolCalls: 1, Thread: "01a21090-bfd4-7e71-96c3-4a594b626984", Result: "All done.",
			},
		},
	} {
		t.Run(c.file, func(t *testing.T) {
			r := agent.NewParser(c.kind, agent.Progress{})
			if diff := cmp.Diff(c.told, told(r.Feed(transcript(t, c.file)))); diff != "" {
				t.Errorf("changes reported for %s mismatch (-want +got):\n%s", c.file, diff)
			}
			got := r.Progress()
			c.want.Run, c.want.Offset, c.want.Seen = c.want.Usage, got.Offset, got.Seen
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("Progress() after %s mismatch (-want +got):\n%s", c.file, diff)
			}
		})
	}
}

// TestClaudeLive checks the progress while the agent runs. The current tool is the latest
// without a result, and a message of several lines is counted once.
func TestClaudeLive(t *testing.T) {
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	message := func(id, block string) string {
		return fmt.Sprintf(`{"type":"assistant","message":{"id":%q,"content":[%s],"usage":{"input_tokens":3,"output_tokens":5,"cache_read_input_tokens":7,"cache_creation_input_tokens":11}},"parent_tool_use_id":null}`, id, block)
	}
	result := func(call string) string {
		return fmt.Sprintf(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":%q}]}}`, call)
	}
	for _, step := range []struct {
		line    string
		current string
		calls   int
		turns   int64
	}{
		{message("m1", `{"type":"thinking","thinking":"hm"}`), "", 0, 1},
		{message("m1", `{"type":"tool_use","id":"t1","name":"Bash","input":{"command":"ls"}}`), "Bash", 1, 1},
		{message("m1", `{"type":"tool_use","id":"t2","name":"Read","input":{"file_path":"/x"}}`), "Read", 2, 1},
		{result("t1"), "Read", 2, 1},
		{result("t1"), "Read", 2, 1},
		{result("unknown"), "Read", 2, 1},
		{result("t2"), "", 2, 1},
		{`{"type":"user","message":{"content":"only text"}}`, "", 2, 1},
		{message("m2", `{"type":"server_tool_use","id":"t3","name":"web_search","input":{"query":"q"}}`), "web_search", 3, 2},
		{message("m2", `{"type":"web_search_tool_result","tool_use_id":"t3","content":[]}`), "", 3, 2},
	} {
		r.Line([]byte(step.line))
		if p := r.Progress(); p.CurrentTool != step.current || p.ToolCalls != step.calls || p.Turns != step.turns || p.Skipped != 0 {
			t.Fatalf("Progress() after %s: CurrentTool %q, ToolCalls %d, Turns %d, Skipped %d, want %q, %d, %d, 0", step.line, p.CurrentTool, p.ToolCalls, p.Turns, p.Skipped, step.current, step.calls, step.turns)
		}
	}
	want := agent.Usage{Turns: 2, InputTokens: 6, OutputTokens: 10, CacheReadTokens: 14, CacheWriteTokens: 22}
	if diff := cmp.Diff(want, r.Progress().Usage); diff != "" {
		t.Errorf("Progress().Usage mismatch (-want +got):\n%s", diff)
	}
}

func TestClaudeFails(t *testing.T) {
	for _, c := range []struct{ name, line, why string }{
		{"turns", `{"type":"result","subtype":"error_max_turns","is_error":false,"num_turns":101,"total_cost_usd":1.5}`, "error_max_turns"},
		{"reasons", `{"type":"result","subtype":"error_during_execution","is_error":true,"errors":["one","two"]}`, "one\ntwo"},
		{"login", `{"type":"result","subtype":"success","is_error":true,"result":"Invalid API key · Please run /login"}`, "Invalid API key · Please run /login"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := agent.NewParser(manifest.Claude, agent.Progress{Result: "of before"})
			changes := r.Line([]byte(c.line))
			p := r.Progress()
			if p.Error != c.why || p.Result != "of before" {
				t.Errorf("Progress() after %s: Error %q, Result %q, want %q, %q", c.line, p.Error, p.Result, c.why, "of before")
			}
			if len(changes) != 1 || changes[0].Kind != agent.Failure || changes[0].Text != c.why {
				t.Errorf("Line(%s) = %+v, want one change of kind %q with text %q", c.line, changes, agent.Failure, c.why)
			}
		})
	}
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	line := `{"type":"assistant","error":"rate_limit","message":{"id":"m","content":[{"type":"text","text":"Limit reached"}]}}`
	if got, want := told(r.Line([]byte(line))), "message||Limit reached\nerror||rate_limit\n"; got != want {
		t.Errorf("changes reported for %s = %q, want %q", line, got, want)
	}
}

// TestRunsAddUp checks that a restarted agent is a new conversation, whose usage is added
// to that of the earlier ones. A repeated report of the same conversation is not added.
func TestRunsAddUp(t *testing.T) {
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	run := func(session string, in, turns int64, cost float64) {
		r.Line(fmt.Appendf(nil, `{"type":"system","subtype":"init","session_id":%q,"model":"m"}`, session))
		r.Line(fmt.Appendf(nil, `{"type":"result","subtype":"success","num_turns":%d,"total_cost_usd":%g,"usage":{"input_tokens":%d}}`, turns, cost, in))
	}
	check := func(in, turns int64, cost float64) {
		t.Helper()
		if p := r.Progress(); p.InputTokens != in || p.Turns != turns || p.CostUSD != cost {
			t.Fatalf("Progress().Usage = %+v, want InputTokens %d, Turns %d, CostUSD %g", p.Usage, in, turns, cost)
		}
	}
	run("a", 100, 4, 0.5)
	check(100, 4, 0.5)
	run("a", 150, 6, 0.75) // the same conversation, further on
	check(150, 6, 0.75)
	run("b", 10, 1, 0.25)
	check(160, 7, 1)
	run("b", 5, 1, 0.125) // less than it reported before
	check(160, 7, 1)
}

func TestCodex(t *testing.T) {
	text := transcript(t, "codex.jsonl")
	r := agent.NewParser(manifest.Codex, agent.Progress{})
	changes := r.Feed(text)
	want := `tool|shell|bash -lc 'go test ./...'
tool|file_change|sum.go sum_test.go
tool|docs.search|
tool|web_search|go range loop
error||stream disconnected; retrying 1/5
error||one file was too long
message||The loop began at 1; it begins at 0 now.
result||The loop began at 1; it begins at 0 now.
`
	if diff := cmp.Diff(want, told(changes)); diff != "" {
		t.Errorf("changes reported for codex.jsonl mismatch (-want +got):\n%s", diff)
	}
	wantProgress := agent.Progress{
		Usage:     agent.Usage{Turns: 1, InputTokens: 315, OutputTokens: 122, CacheReadTokens: 24448},
		ToolCalls: 4, Thread: "0199a213-81c0-7800-8aa1-bbab2a035a53", Result: "The loop began at 1; it begins at 0 now.",
		Offset: int64(len(text)),
		Run:    agent.Usage{Turns: 1, InputTokens: 315, OutputTokens: 122, CacheReadTokens: 24448},
	}
	if diff := cmp.Diff(wantProgress, r.Progress()); diff != "" {
		t.Errorf("Progress() after codex.jsonl mismatch (-want +got):\n%s", diff)
	}
}

// TestCodexSubagent checks that a subagent's turn, tokens and messages do not count as the
// agent's, but that its tool calls are shown.
func TestCodexSubagent(t *testing.T) {
	r := agent.NewParser(manifest.Codex, agent.Progress{Thread: "of an earlier run"})
	changes := r.Feed([]byte(`{"method":"thread/started","params":{"thread":{"id":"T","parentThreadId":null}}}
{"method":"turn/started","params":{"threadId":"T"}}
{"method":"thread/started","params":{"thread":{"id":"S","parentThreadId":"T"}}}
{"method":"turn/started","params":{"threadId":"S"}}
{"method":"item/started","params":{"threadId":"S","item":{"id":"i","type":"fileChange","changes":[{"path":"a"}]}}}
{"method":"item/completed","params":{"threadId":"S","item":{"id":"j","type":"agentMessage","text":"for the agent"}}}
{"method":"thread/tokenUsage/updated","params":{"threadId":"S","tokenUsage":{"total":{"inputTokens":9}}}}
{"method":"turn/completed","params":{"threadId":"S","turn":{"status":"completed"}}}
{"method":"thread/tokenUsage/updated","params":{"threadId":"T","tokenUsage":{"total":{"inputTokens":5,"outputTokens":1}}}}
{"method":"error","params":{"threadId":"T","error":{"message":"no connection"},"willRetry":true}}
{"method":"turn/completed","params":{"threadId":"T","turn":{"status":"failed","error":{"message":"no credit"}}}}
`))
	if diff := cmp.Diff("tool|file_change|a\nerror||no connection\nerror||no credit\n", told(changes)); diff != "" {
		t.Errorf("changes reported with a subagent (-want +got):\n%s", diff)
	}
	got := r.Progress()
	want := agent.Progress{Usage: agent.Usage{Turns: 1, InputTokens: 5, OutputTokens: 1}, ToolCalls: 1, Thread: "T", Error: "no credit"}
	want.Run, want.Offset = want.Usage, got.Offset
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Progress() with a subagent (-want +got):\n%s", diff)
	}
}

func TestCodexFails(t *testing.T) {
	r := agent.NewParser(manifest.Codex, agent.Progress{})
	r.Line([]byte(`{"type":"item.started","item":{"id":"i","type":"command_execution","command":"sleep 9"}}`))
	if got := r.Progress().CurrentTool; got != "shell" {
		t.Errorf("Progress().CurrentTool while a command runs = %q, want %q", got, "shell")
	}
	got := told(r.Line([]byte(`{"type":"turn.failed","error":{"message":"no credit\u001b[2J"}}`)))
	if p := r.Progress(); p.Error != "no credit\ufffd[2J" || p.CurrentTool != "" || got != "error||no credit\ufffd[2J\n" {
		t.Errorf("after turn.failed: Error %q, CurrentTool %q, changes %q, want %q, no tool, %q", p.Error, p.CurrentTool, got, "no credit\ufffd[2J", "error||no credit\ufffd[2J\n")
	}
	r.Line([]byte(`{"type":"turn.completed","usage":{}}`))
	if got := r.Progress().Error; got != "" {
		t.Errorf("Progress().Error after a completed turn = %q, want none", got)
	}
}

// TestCommandHasNoStructure checks that the output of any other program is not interpreted.
func TestCommandHasNoStructure(t *testing.T) {
	r := agent.NewParser(manifest.Command, agent.Progress{})
	text := "building\n{\"type\":\"result\"}\n\nhalf a line"
	if changes := r.Feed([]byte(text)); changes != nil {
		t.Errorf("Feed(%q) = %+v, want no changes", text, changes)
	}
	want := agent.Progress{Offset: int64(strings.LastIndex(text, "\n") + 1)}
	if diff := cmp.Diff(want, r.Progress()); diff != "" {
		t.Errorf("Progress() mismatch (-want +got):\n%s", diff)
	}
}

// TestResume cuts the output at every offset and continues with a new Parser. The final
// progress and the reported changes must not depend on the cut.
func TestResume(t *testing.T) {
	for name, kind := range map[string]manifest.Kind{"claude.jsonl": manifest.Claude, "codex.jsonl": manifest.Codex} {
		text := transcript(t, name)
		whole := agent.NewParser(kind, agent.Progress{})
		want := told(whole.Feed(text))
		for cut := range len(text) + 1 {
			first := agent.NewParser(kind, agent.Progress{})
			got := told(first.Feed(text[:cut]))
			stored, err := json.Marshal(first.Progress())
			if err != nil {
				t.Fatal(err)
			}
			var from agent.Progress
			if err := json.Unmarshal(stored, &from); err != nil {
				t.Fatal(err)
			}
			second := agent.NewParser(kind, from)
			got += told(second.Feed(text[from.Offset:]))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("%s cut at %d: changes mismatch (-want +got):\n%s", name, cut, diff)
			}
			if diff := cmp.Diff(whole.Progress(), second.Progress()); diff != "" {
				t.Fatalf("%s cut at %d: Progress() mismatch (-want +got):\n%s", name, cut, diff)
			}
		}
		r := agent.NewParser(kind, agent.Progress{})
		var got string
		random := rand.New(rand.NewPCG(1, 2))
		for rest := text; len(rest) > 0; {
			n := min(1+random.IntN(50), len(rest))
			got += told(r.Feed(rest[:n]))
			rest = rest[n:]
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s in small pieces: changes mismatch (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(whole.Progress(), r.Progress()); diff != "" {
			t.Errorf("%s in small pieces: Progress() mismatch (-want +got):\n%s", name, diff)
		}
	}
}

// TestProgressIsACopy checks that a returned Progress does not change when the parser goes
// on.
func TestProgressIsACopy(t *testing.T) {
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	use := func(id string) {
		r.Line(fmt.Appendf(nil, `{"type":"assistant","message":{"id":%q,"content":[{"type":"tool_use","id":%q,"name":%q}]}}`, id, id, id))
	}
	use("a")
	use("b")
	before := r.Progress()
	other := agent.NewParser(manifest.Claude, before)
	r.Line([]byte(`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"a"}]}}`))
	use("c")
	if diff := cmp.Diff([]agent.Call{{ID: "a", Name: "a"}, {ID: "b", Name: "b"}}, before.Calls); diff != "" {
		t.Errorf("Calls of the earlier Progress mismatch (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a", "b"}, before.Seen); diff != "" {
		t.Errorf("Seen of the earlier Progress mismatch (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(before, other.Progress()); diff != "" {
		t.Errorf("Progress() of a parser that continues from it mismatch (-want +got):\n%s", diff)
	}
}

// TestHostile feeds input that a malicious guest could write.
func TestHostile(t *testing.T) {
	long := strings.Repeat("x", agent.MaxLine+1)
	many := `{"type":"assistant","message":{"id":"m","content":[` + strings.Repeat(`{"type":"tool_use","id":"i","name":"n"},`, 9999) + `{"type":"text","text":"t"}]}}`
	for _, c := range []struct {
		name, text string
		skipped    int64
		check      func(agent.Progress, []agent.Change) bool
	}{
		{"no JSON", "\x1b]0;evil\x07\n\x00\xff\n", 2, nil},
		{"other JSON", "null\n5\n\"x\"\n[]\n{}\n", 5, nil},
		{"too long", long + "\n", 1, nil},
		{"too long, and the next", long + "\n" + `{"type":"system","subtype":"init","model":"m"}` + "\n", 1, func(p agent.Progress, _ []agent.Change) bool { return p.Model == "m" }},
		{"nested", `{"type":"assistant","message":{"content":` + strings.Repeat("[", 100_000) + "\n", 1, nil},
		{"unknown", `{"type":"from_the_future","x":1}` + "\n", 0, nil},
		{"of other types", `{"type":"assistant","message":{"id":7,"content":[{"type":"tool_use","id":"i","name":"Bash","input":[]}],"usage":"much"}}` + "\n", 0, func(p agent.Progress, c []agent.Change) bool {
			return p.ToolCalls == 1 && p.CurrentTool == "Bash"
		}},
		{"many calls", many + "\n", 0, func(p agent.Progress, c []agent.Change) bool {
			return p.ToolCalls == 9999 && len(p.Calls) == 64 && len(c) == 32
		}},
		{"numbers", `{"type":"result","subtype":"success","num_turns":-5,"total_cost_usd":-1,"usage":{"input_tokens":9223372036854775807,"output_tokens":-9223372036854775808}}` + "\n", 0, func(p agent.Progress, _ []agent.Change) bool {
			return p.Usage == agent.Usage{InputTokens: 1 << 53}
		}},
		{"overflow", strings.Repeat(`{"type":"result","subtype":"success","total_cost_usd":1e300,"modelUsage":{"a":{"inputTokens":9223372036854775807},"b":{"inputTokens":9223372036854775807}}}`+"\n", 3), 0, func(p agent.Progress, _ []agent.Change) bool {
			return p.Usage == agent.Usage{InputTokens: 1 << 53, CostUSD: 1e9}
		}},
		{"escapes", `{"type":"assistant","message":{"content":[{"type":"text","text":"a\u001b[2J\u202e\r\n\tb"},{"type":"tool_use","id":"\u0007","name":"B\u001b","input":{"command":"x\u009b\ny"}}]}}` + "\n", 0, func(p agent.Progress, c []agent.Change) bool {
			return told(c) == "message||a\ufffd[2J\ufffd\n    b\ntool|B\ufffd|x\ufffd y\n" && p.Calls[0] == agent.Call{ID: "\ufffd", Name: "B\ufffd"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := agent.NewParser(manifest.Claude, agent.Progress{})
			changes := r.Feed([]byte(c.text))
			p := r.Progress()
			if p.Skipped != c.skipped || p.Offset != int64(len(c.text)) {
				t.Errorf("Progress(): Skipped %d, Offset %d, want %d, %d", p.Skipped, p.Offset, c.skipped, len(c.text))
			}
			if c.check != nil && !c.check(p, changes) {
				t.Errorf("Feed of input %q: progress %+v, changes %+v, want those that the check of this input accepts", c.name, p, changes)
			}
		})
	}
	// An endless line takes no more memory than one of the maximum length.
	r := agent.NewParser(manifest.Claude, agent.Progress{})
	block := []byte(strings.Repeat("y", 64<<10))
	for range 1000 {
		r.Feed(block)
	}
	r.Feed([]byte("\n"))
	if p := r.Progress(); p.Skipped != 1 || p.Offset != 1000*64<<10+1 {
		t.Errorf("Progress() after an endless line: Skipped %d, Offset %d, want 1, %d", p.Skipped, p.Offset, 1000*64<<10+1)
	}
}

func FuzzParser(f *testing.F) {
	f.Add(string(transcript(f, "claude.jsonl")), true, 100)
	f.Add(string(transcript(f, "codex.jsonl")), false, 1000)
	f.Add(`{"type":"result","subtype":"success","usage":{"input_tokens":-1},"modelUsage":{"m":{"outputTokens":1e3}}}`+"\n", true, 3)
	f.Add("{\"type\":\"assistant\",\"message\":{\"content\":[{\"type\":\"text\",\"text\":\"\\ud800\\u202e\xff\"}]}}\n\n\r\n", true, 8)
	f.Fuzz(func(t *testing.T, text string, claude bool, cut int) {
		kind := manifest.Codex
		if claude {
			kind = manifest.Claude
		}
		whole := agent.NewParser(kind, agent.Progress{})
		changes := whole.Feed([]byte(text))
		p := whole.Progress()
		if want := int64(strings.LastIndexByte(text, '\n') + 1); p.Offset != want {
			t.Fatalf("Progress().Offset = %d, want %d", p.Offset, want)
		}
		texts := []string{p.CurrentTool, p.Model, p.Thread, p.Result, p.Error}
		for _, c := range p.Calls {
			texts = append(texts, c.ID, c.Name)
		}
		for _, c := range changes {
			texts = append(texts, c.Kind, c.Name, c.Text)
		}
		for _, text := range append(texts, p.Seen...) {
			shown := func(r rune) bool { return !unicode.IsPrint(r) && r != '\n' }
			if len(text) > 4*4096 || !utf8.ValidString(text) || strings.ContainsFunc(text, shown) {
				t.Fatalf("reported text %q (%d bytes), want at most %d bytes of printable UTF-8", text, len(text), 4*4096)
			}
		}
		if u := p.Usage; min(u.Turns, u.InputTokens, u.OutputTokens, u.CacheReadTokens, u.CacheWriteTokens) < 0 || u.CostUSD < 0 || p.ToolCalls < 0 {
			t.Fatalf("Usage %+v, ToolCalls %d, want no negative count", u, p.ToolCalls)
		}
		if len(p.Calls) > 64 || len(p.Seen) > 64 {
			t.Fatalf("Progress() keeps %d calls and %d message ids, want at most 64 of each", len(p.Calls), len(p.Seen))
		}
		first := agent.NewParser(kind, agent.Progress{})
		got := told(first.Feed([]byte(text)[:max(0, min(cut, len(text)))]))
		stored, err := json.Marshal(first.Progress())
		if err != nil {
			t.Fatal(err)
		}
		var from agent.Progress
		if err := json.Unmarshal(stored, &from); err != nil {
			t.Fatal(err)
		}
		second := agent.NewParser(kind, from)
		got += told(second.Feed([]byte(text)[from.Offset:]))
		if diff := cmp.Diff(told(changes), got); diff != "" {
			t.Fatalf("cut at %d: changes mismatch (-want +got):\n%s", cut, diff)
		}
		if diff := cmp.Diff(p, second.Progress()); diff != "" {
			t.Fatalf("cut at %d: Progress() mismatch (-want +got):\n%s", cut, diff)
		}
	})
}
