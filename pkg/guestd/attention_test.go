package guestd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

var noon = time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)

const (
	bash     = `"tool_name":"Bash","tool_input":{"command":"touch x\n  && rm y","description":"Make a file"}`
	otherOne = `"tool_name":"Bash","tool_input":{"command":"make"}`
	ask      = `"tool_name":"AskUserQuestion","tool_input":{"questions":[{"question":"Which DB?","header":"DB","options":[{"label":"a"}]}]}`
	answered = `"tool_name":"AskUserQuestion","tool_input":{"questions":[{"question":"Which DB?","header":"DB","options":[{"label":"a"}]}],"answers":{"Which DB?":"a"}}`
)

func hook(name string, more ...string) string {
	return fmt.Sprintf(`{"session_id":"s","transcript_path":"/t","cwd":"/c","hook_event_name":%q%s}`, name, strings.Join(append([]string{""}, more...), ","))
}

// Events in the order in which agents report them, and the resulting states.
func TestNews(t *testing.T) {
	type step struct {
		event string
		state wire.AgentState
		on    string
	}
	sub := `"agent_id":"sub1"`
	for name, steps := range map[string][]step{
		"a turn": {
			{hook("SessionStart", `"source":"startup"`), wire.AgentIdle, ""},
			{hook("UserPromptSubmit", `"prompt":"do it"`), wire.AgentWorking, ""},
			{hook("PreToolUse", bash), wire.AgentWorking, ""},
			{hook("PostToolUse", bash), wire.AgentWorking, ""},
			{hook("Stop", `"stop_hook_active":false`), wire.AgentDone, ""},
			{hook("Notification", `"notification_type":"idle_prompt","message":"Claude is waiting for your input"`), wire.AgentDone, ""},
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("StopFailure", `"error":"unknown","last_assistant_message":"API Error: 400\n prompt is odd"`), wire.AgentError, "API Error: 400 prompt is odd"},
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("StopFailure", `"error":"rate_limit"`), wire.AgentError, "rate_limit"},
			{hook("SessionEnd", `"reason":"prompt_input_exit"`), wire.AgentGone, ""},
		},
		"a permission": {
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("PreToolUse", bash), wire.AgentWorking, ""},
			{hook("PermissionRequest", bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Notification", `"notification_type":"permission_prompt","message":"Claude needs your permission to use Bash"`), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PreToolUse", otherOne), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", otherOne), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", bash), wire.AgentWorking, ""},
			{hook("PermissionRequest", bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUseFailure", bash, `"error":"exit 1"`), wire.AgentWorking, ""},
			{hook("PermissionRequest", `"tool_name":"Write","tool_input":{"file_path":"/a/b","content":"`+strings.Repeat("x", 1<<16)+`"}`), wire.AgentBlocked, "permission: Write: /a/b"},
			{hook("Stop"), wire.AgentDone, ""},
		},
		"a question": {
			{hook("PermissionRequest", ask), wire.AgentBlocked, "question: Which DB?"},
			{hook("PostToolUse", answered), wire.AgentWorking, ""},
		},
		"only a notification": {
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("Notification", `"notification_type":"auth_success","message":"hello"`), wire.AgentWorking, ""},
			{hook("Notification", `"notification_type":"elicitation_dialog","message":"db wants a password"`), wire.AgentBlocked, "db wants a password"},
			{hook("PostToolUse", `"tool_name":"mcp__db__query","tool_input":{}`), wire.AgentWorking, ""},
			{hook("Notification", `"notification_type":"permission_prompt","message":"Claude needs you"`), wire.AgentBlocked, "Claude needs you"},
			{hook("Notification", `"notification_type":"idle_prompt"`), wire.AgentDone, ""},
		},
		"subagents": {
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("PreToolUse", sub, bash), wire.AgentWorking, ""},
			{hook("Stop", sub), wire.AgentWorking, ""},
			{hook("SubagentStop", sub), wire.AgentWorking, ""},
			{hook("StopFailure", sub, `"error":"x"`), wire.AgentWorking, ""},
			{hook("PermissionRequest", sub, bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", `"agent_id":"sub2"`, bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Stop"), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", sub, bash), wire.AgentWorking, ""},
			{hook("Stop"), wire.AgentDone, ""},
			{hook("PostToolUse", sub, otherOne), wire.AgentDone, ""},
		},
		"subagents in the background": {
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("PostToolUse", `"tool_name":"Agent","tool_input":{"description":"go"},"tool_response":{"isAsync":true}`), wire.AgentWorking, ""},
			{hook("Stop", `"background_tasks":[{"id":"b","type":"shell","status":"running"},{"id":"sub1","type":"subagent","status":"running"}]`), wire.AgentWorking, ""},
			{hook("SubagentStop", sub), wire.AgentWorking, ""},
			{hook("UserPromptSubmit", `"prompt":"<task-notification>"`), wire.AgentWorking, ""},
			{hook("Stop", `"background_tasks":[{"id":"b","type":"shell","status":"running"},{"id":"sub1","type":"subagent","status":"completed"}]`), wire.AgentDone, ""},
			{hook("Stop", `"background_tasks":{"new":"form"}`), wire.AgentDone, ""},
		},
		"sessions of one program": {
			{hook("UserPromptSubmit"), wire.AgentWorking, ""},
			{hook("SessionStart", `"source":"compact"`), wire.AgentWorking, ""},
			{hook("Stop"), wire.AgentDone, ""},
			{hook("SessionEnd", `"reason":"clear"`), wire.AgentIdle, ""},
			{hook("SessionStart", `"source":"clear"`), wire.AgentIdle, ""},
			{hook("SessionEnd", `"reason":"other"`), wire.AgentGone, ""},
			{hook("SessionStart", `"source":"resume"`), wire.AgentIdle, ""},
		},
		"Codex": {
			{hook("SessionStart", `"turn_id":"1"`), wire.AgentIdle, ""},
			{hook("UserPromptSubmit", `"turn_id":"1"`), wire.AgentWorking, ""},
			{hook("PermissionRequest", bash), wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{`{"type":"agent-turn-complete","thread-id":"a title's","turn-id":"1","last-assistant-message":"Make a file"}`, wire.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Interrupt"), wire.AgentIdle, ""},
			{hook("UserPromptSubmit", `"turn_id":"2"`), wire.AgentWorking, ""},
			{`{"type":"agent-turn-complete","thread-id":"s","turn-id":"2","cwd":"/c","input-messages":["x"],"last-assistant-message":"done"}`, wire.AgentDone, ""},
			{`{"type":"something-new"}`, wire.AgentDone, ""},
			{hook("PermissionRequest", `"tool_name":"Bash","tool_input":{"command":["bash","-lc","ls"]}`), wire.AgentBlocked, "permission: Bash: bash -lc ls"},
			{hook("SessionEnd", `"reason":"other"`), wire.AgentGone, ""},
		},
		"Codex without hooks": {
			{`{"type":"approval-requested","thread-id":"t","message":"run make?"}`, wire.AgentBlocked, "permission: run make?"},
			{`{"type":"agent-turn-complete","thread-id":"t"}`, wire.AgentDone, ""},
		},
		"what is new or broken": {
			{hook("Stop"), wire.AgentDone, ""},
			{hook("FutureEvent"), wire.AgentDone, ""},
			{`{"hook_event_name":7,"type":[]}`, wire.AgentDone, ""},
			{``, wire.AgentDone, ""},
			{`null`, wire.AgentDone, ""},
			{`[]`, wire.AgentDone, ""},
			{hook("PermissionRequest", `"tool_name":"Odd","tool_input":{"command":{"a":1},"file_path":3,"questions":"?"}`), wire.AgentBlocked, "permission: Odd"},
			{strings.TrimSuffix(hook("PostToolUse", `"tool_name":"Odd","tool_input":{"command":{"a":1},"file_path":3}`), "}"), wire.AgentWorking, ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, at := agentReport{}, noon
			for _, s := range steps {
				before := n
				at = at.Add(time.Minute)
				n = n.afterEvent(readEvent(strings.NewReader(s.event)), at)
				if n.State != s.state || n.On != s.on {
					t.Fatalf("%.300s:\ngot  %q %q\nwant %q %q", s.event, n.State, n.On, s.state, s.on)
				}
				same := before.State == n.State && before.On == n.On
				if same != before.Since.Equal(n.Since) || !same && !n.Since.Equal(at) {
					t.Errorf("%.300s: since %s, was %s", s.event, n.Since, before.Since)
				}
			}
		})
	}
}

// Claude Code's own file reports what no hook does.
func TestNewsWithClaudesFile(t *testing.T) {
	at := func(seconds float64) int64 {
		return noon.Add(time.Duration(seconds * float64(time.Second))).UnixMilli()
	}
	for _, c := range []struct {
		name    string
		state   wire.AgentState // as reported by the hooks at noon
		file    claude
		later   time.Duration
		want    wire.AgentState
		on      string
		changed bool
	}{
		{"no such file", wire.AgentBlocked, claude{}, time.Hour, wire.AgentBlocked, "hook", false},
		{"of a version without a status", wire.AgentBlocked, claude{PID: 1, UpdatedMS: at(9)}, time.Hour, wire.AgentBlocked, "hook", false},
		{"the dialog of the request", wire.AgentBlocked, claude{Status: "waiting", WaitingFor: "x", ChangedMS: at(0.3)}, time.Hour, wire.AgentBlocked, "hook", false},
		{"the same, told later", wire.AgentBlocked, claude{Status: "waiting", ChangedMS: at(-0.3)}, time.Hour, wire.AgentBlocked, "hook", false},
		{"not yet a dialog", wire.AgentBlocked, claude{Status: "busy", ChangedMS: at(-9)}, time.Second, wire.AgentBlocked, "hook", false},
		{"never a dialog", wire.AgentBlocked, claude{Status: "busy", ChangedMS: at(-9)}, 6 * time.Second, wire.AgentWorking, "", true},
		{"it was allowed", wire.AgentBlocked, claude{Status: "busy", ChangedMS: at(2)}, 2 * time.Second, wire.AgentWorking, "", true},
		{"Esc", wire.AgentBlocked, claude{Status: "idle", ChangedMS: at(2)}, 2 * time.Second, wire.AgentIdle, "", true},
		{"Esc, and something runs on", wire.AgentBlocked, claude{Status: "shell", ChangedMS: at(2)}, 2 * time.Second, wire.AgentIdle, "", true},
		{"another dialog much later", wire.AgentBlocked, claude{Status: "waiting", WaitingFor: "approve plan", ChangedMS: at(60)}, time.Hour, wire.AgentBlocked, "approve plan", true},
		{"a dialog without a hook", wire.AgentWorking, claude{Status: "waiting", WaitingFor: "dialog\x1b[2J open", ChangedMS: at(2)}, 3 * time.Second, wire.AgentBlocked, "dialog\ufffd[2J open", true},
		{"a dialog whose hook is on its way", wire.AgentWorking, claude{Status: "waiting", ChangedMS: at(2)}, 2500 * time.Millisecond, wire.AgentWorking, "hook", false},
		{"a dialog, though a tool has ended", wire.AgentWorking, claude{Status: "waiting", ChangedMS: at(-2)}, time.Second, wire.AgentBlocked, "", true},
		{"a prompt that was just given", wire.AgentWorking, claude{Status: "idle", ChangedMS: at(-60)}, time.Second, wire.AgentWorking, "hook", false},
		{"Esc while it works", wire.AgentWorking, claude{Status: "idle", ChangedMS: at(2)}, 2 * time.Second, wire.AgentIdle, "", true},
		{"Esc just before a tool's end", wire.AgentWorking, claude{Status: "idle", ChangedMS: at(-0.1)}, 6 * time.Second, wire.AgentIdle, "", true},
		{"done", wire.AgentDone, claude{Status: "idle", ChangedMS: at(0.2)}, time.Hour, wire.AgentDone, "hook", false},
		{"done, and other hooks run", wire.AgentDone, claude{Status: "busy", ChangedMS: at(-60)}, time.Second, wire.AgentDone, "hook", false},
		{"it goes on by itself", wire.AgentDone, claude{Status: "busy", ChangedMS: at(60)}, time.Hour, wire.AgentWorking, "", true},
		{"an error", wire.AgentError, claude{Status: "idle", ChangedMS: at(0.2)}, time.Hour, wire.AgentError, "hook", false},
		{"gone", wire.AgentGone, claude{Status: "busy", ChangedMS: at(60)}, time.Hour, wire.AgentGone, "hook", false},
		{"only the older field", wire.AgentBlocked, claude{Status: "idle", UpdatedMS: at(2)}, 2 * time.Second, wire.AgentIdle, "", true},
		{"a word of the future", wire.AgentBlocked, claude{Status: "dreaming", ChangedMS: at(2)}, time.Hour, wire.AgentBlocked, "hook", false},
	} {
		n := agentReport{State: c.state, On: "hook", Since: noon, At: noon}
		got := n.mergeClaude(c.file, noon.Add(c.later))
		if got.State != c.want || got.On != c.on || got.Since.Equal(noon) == c.changed {
			t.Errorf("%s: got %q %q since %s", c.name, got.State, got.On, got.Since)
		}
	}
}

func TestGist(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"  a\n\tb\u00a0c ", "a b c"},
		{"\x1b[31mred\x07", "\ufffd[31mred\ufffd"},
		{strings.Repeat("é", 1000), strings.Repeat("é", maxSummary-1) + "…"},
		{strings.Repeat("𝔘x", 1000), strings.Repeat("𝔘x", maxSummary/2-1) + "𝔘…"},
	} {
		if got := summarize(c.in); got != c.want {
			t.Errorf("%q became %q", c.in, got)
		}
	}
}

// A file that is not regular, or too large, counts as missing.
func TestReadUpTo(t *testing.T) {
	dir := t.TempDir()
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, 11), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{large, dir, "/dev/zero", filepath.Join(dir, "none")} {
		if data, err := readUpTo(path, 10); err == nil {
			t.Errorf("%s: %d bytes", path, len(data))
		}
	}
	if data, err := readUpTo(large, 11); err != nil || len(data) != 11 {
		t.Error(len(data), err)
	}
}

func FuzzEvent(f *testing.F) {
	f.Add(hook("PermissionRequest", bash))
	f.Add(hook("PermissionRequest", ask)[:120])
	f.Add(hook("StopFailure", `"error":"\u001b[2J"`))
	f.Fuzz(func(t *testing.T, text string) {
		n := agentReport{State: wire.AgentWorking}.afterEvent(readEvent(strings.NewReader(text)), noon)
		if n.State.Urgency() > wire.AgentGone.Urgency() || strings.ContainsAny(n.On+n.Tool, "\x1b\n\x00") || len([]rune(n.On)) > maxSummary {
			t.Fatalf("%+v", n)
		}
		if _, err := json.Marshal(n); err != nil {
			t.Fatal(err)
		}
	})
}
