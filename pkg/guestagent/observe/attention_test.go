package observe

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
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
		state guestproto.AgentState
		on    string
	}
	sub := `"agent_id":"sub1"`
	for name, steps := range map[string][]step{
		"a turn": {
			{hook("SessionStart", `"source":"startup"`), guestproto.AgentIdle, ""},
			{hook("UserPromptSubmit", `"prompt":"do it"`), guestproto.AgentWorking, ""},
			{hook("PreToolUse", bash), guestproto.AgentWorking, ""},
			{hook("PostToolUse", bash), guestproto.AgentWorking, ""},
			{hook("Stop", `"stop_hook_active":false`), guestproto.AgentDone, ""},
			{hook("Notification", `"notification_type":"idle_prompt","message":"Claude is waiting for your input"`), guestproto.AgentDone, ""},
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("StopFailure", `"error":"unknown","last_assistant_message":"API Error: 400\n prompt is odd"`), guestproto.AgentError, "API Error: 400 prompt is odd"},
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("StopFailure", `"error":"rate_limit"`), guestproto.AgentError, "rate_limit"},
			{hook("SessionEnd", `"reason":"prompt_input_exit"`), guestproto.AgentGone, ""},
		},
		"a permission": {
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("PreToolUse", bash), guestproto.AgentWorking, ""},
			{hook("PermissionRequest", bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Notification", `"notification_type":"permission_prompt","message":"Claude needs your permission to use Bash"`), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PreToolUse", otherOne), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", otherOne), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", bash), guestproto.AgentWorking, ""},
			{hook("PermissionRequest", bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUseFailure", bash, `"error":"exit 1"`), guestproto.AgentWorking, ""},
			{hook("PermissionRequest", `"tool_name":"Write","tool_input":{"file_path":"/a/b","content":"`+strings.Repeat("x", 1<<16)+`"}`), guestproto.AgentBlocked, "permission: Write: /a/b"},
			{hook("Stop"), guestproto.AgentDone, ""},
		},
		"a question": {
			{hook("PermissionRequest", ask), guestproto.AgentBlocked, "question: Which DB?"},
			{hook("PostToolUse", answered), guestproto.AgentWorking, ""},
		},
		"only a notification": {
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("Notification", `"notification_type":"auth_success","message":"hello"`), guestproto.AgentWorking, ""},
			{hook("Notification", `"notification_type":"elicitation_dialog","message":"db wants a password"`), guestproto.AgentBlocked, "db wants a password"},
			{hook("PostToolUse", `"tool_name":"mcp__db__query","tool_input":{}`), guestproto.AgentWorking, ""},
			{hook("Notification", `"notification_type":"permission_prompt","message":"Claude needs you"`), guestproto.AgentBlocked, "Claude needs you"},
			{hook("Notification", `"notification_type":"idle_prompt"`), guestproto.AgentDone, ""},
		},
		"subagents": {
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("PreToolUse", sub, bash), guestproto.AgentWorking, ""},
			{hook("Stop", sub), guestproto.AgentWorking, ""},
			{hook("SubagentStop", sub), guestproto.AgentWorking, ""},
			{hook("StopFailure", sub, `"error":"x"`), guestproto.AgentWorking, ""},
			{hook("PermissionRequest", sub, bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", `"agent_id":"sub2"`, bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Stop"), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("PostToolUse", sub, bash), guestproto.AgentWorking, ""},
			{hook("Stop"), guestproto.AgentDone, ""},
			{hook("PostToolUse", sub, otherOne), guestproto.AgentDone, ""},
		},
		"subagents in the background": {
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("PostToolUse", `"tool_name":"Agent","tool_input":{"description":"go"},"tool_response":{"isAsync":true}`), guestproto.AgentWorking, ""},
			{hook("Stop", `"background_tasks":[{"id":"b","type":"shell","status":"running"},{"id":"sub1","type":"subagent","status":"running"}]`), guestproto.AgentWorking, ""},
			{hook("SubagentStop", sub), guestproto.AgentWorking, ""},
			{hook("UserPromptSubmit", `"prompt":"<task-notification>"`), guestproto.AgentWorking, ""},
			{hook("Stop", `"background_tasks":[{"id":"b","type":"shell","status":"running"},{"id":"sub1","type":"subagent","status":"completed"}]`), guestproto.AgentDone, ""},
			{hook("Stop", `"background_tasks":{"new":"form"}`), guestproto.AgentDone, ""},
		},
		"sessions of one program": {
			{hook("UserPromptSubmit"), guestproto.AgentWorking, ""},
			{hook("SessionStart", `"source":"compact"`), guestproto.AgentWorking, ""},
			{hook("Stop"), guestproto.AgentDone, ""},
			{hook("SessionEnd", `"reason":"clear"`), guestproto.AgentIdle, ""},
			{hook("SessionStart", `"source":"clear"`), guestproto.AgentIdle, ""},
			{hook("SessionEnd", `"reason":"other"`), guestproto.AgentGone, ""},
			{hook("SessionStart", `"source":"resume"`), guestproto.AgentIdle, ""},
		},
		"Codex": {
			{hook("SessionStart", `"turn_id":"1"`), guestproto.AgentIdle, ""},
			{hook("UserPromptSubmit", `"turn_id":"1"`), guestproto.AgentWorking, ""},
			{hook("PermissionRequest", bash), guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{`{"type":"agent-turn-complete","thread-id":"a title's","turn-id":"1","last-assistant-message":"Make a file"}`, guestproto.AgentBlocked, "permission: Bash: touch x && rm y"},
			{hook("Interrupt"), guestproto.AgentIdle, ""},
			{hook("UserPromptSubmit", `"turn_id":"2"`), guestproto.AgentWorking, ""},
			{`{"type":"agent-turn-complete","thread-id":"s","turn-id":"2","cwd":"/c","input-messages":["x"],"last-assistant-message":"done"}`, guestproto.AgentDone, ""},
			{`{"type":"something-new"}`, guestproto.AgentDone, ""},
			{hook("PermissionRequest", `"tool_name":"Bash","tool_input":{"command":["bash","-lc","ls"]}`), guestproto.AgentBlocked, "permission: Bash: bash -lc ls"},
			{hook("SessionEnd", `"reason":"other"`), guestproto.AgentGone, ""},
		},
		"Codex without hooks": {
			{`{"type":"approval-requested","thread-id":"t","message":"run make?"}`, guestproto.AgentBlocked, "permission: run make?"},
			{`{"type":"agent-turn-complete","thread-id":"t"}`, guestproto.AgentDone, ""},
		},
		"what is new or broken": {
			{hook("Stop"), guestproto.AgentDone, ""},
			{hook("FutureEvent"), guestproto.AgentDone, ""},
			{`{"hook_event_name":7,"type":[]}`, guestproto.AgentDone, ""},
			{``, guestproto.AgentDone, ""},
			{`null`, guestproto.AgentDone, ""},
			{`[]`, guestproto.AgentDone, ""},
			{hook("PermissionRequest", `"tool_name":"Odd","tool_input":{"command":{"a":1},"file_path":3,"questions":"?"}`), guestproto.AgentBlocked, "permission: Odd"},
			{strings.TrimSuffix(hook("PostToolUse", `"tool_name":"Odd","tool_input":{"command":{"a":1},"file_path":3}`), "}"), guestproto.AgentWorking, ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n, at := agentReport{}, noon
			for _, s := range steps {
				before := n
				at = at.Add(time.Minute)
				n = n.afterEvent(readEvent(strings.NewReader(s.event)), at)
				if n.State != s.state || n.On != s.on {
					t.Fatalf("state after %.300s = %q %q, want %q %q", s.event, n.State, n.On, s.state, s.on)
				}
				same := before.State == n.State && before.On == n.On
				if same != before.Since.Equal(n.Since) || !same && !n.Since.Equal(at) {
					t.Errorf("Since after %.300s at %s = %s, was %s, want a change: %t", s.event, at, n.Since, before.Since, !same)
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
		state   guestproto.AgentState // as reported by the hooks at noon
		file    claude
		later   time.Duration
		want    guestproto.AgentState
		on      string
		changed bool
	}{
		{"no such file", guestproto.AgentBlocked, claude{}, time.Hour, guestproto.AgentBlocked, "hook", false},
		{"of a version without a status", guestproto.AgentBlocked, claude{PID: 1, UpdatedMS: at(9)}, time.Hour, guestproto.AgentBlocked, "hook", false},
		{"the dialog of the request", guestproto.AgentBlocked, claude{Status: "waiting", WaitingFor: "x", ChangedMS: at(0.3)}, time.Hour, guestproto.AgentBlocked, "hook", false},
		{"the same, reported later", guestproto.AgentBlocked, claude{Status: "waiting", ChangedMS: at(-0.3)}, time.Hour, guestproto.AgentBlocked, "hook", false},
		{"not yet a dialog", guestproto.AgentBlocked, claude{Status: "busy", ChangedMS: at(-9)}, time.Second, guestproto.AgentBlocked, "hook", false},
		{"never a dialog", guestproto.AgentBlocked, claude{Status: "busy", ChangedMS: at(-9)}, 6 * time.Second, guestproto.AgentWorking, "", true},
		{"it was allowed", guestproto.AgentBlocked, claude{Status: "busy", ChangedMS: at(2)}, 2 * time.Second, guestproto.AgentWorking, "", true},
		{"Esc", guestproto.AgentBlocked, claude{Status: "idle", ChangedMS: at(2)}, 2 * time.Second, guestproto.AgentIdle, "", true},
		{"Esc, and something runs on", guestproto.AgentBlocked, claude{Status: "shell", ChangedMS: at(2)}, 2 * time.Second, guestproto.AgentIdle, "", true},
		{"another dialog much later", guestproto.AgentBlocked, claude{Status: "waiting", WaitingFor: "approve plan", ChangedMS: at(60)}, time.Hour, guestproto.AgentBlocked, "approve plan", true},
		{"a dialog without a hook", guestproto.AgentWorking, claude{Status: "waiting", WaitingFor: "dialog\x1b[2J open", ChangedMS: at(2)}, 3 * time.Second, guestproto.AgentBlocked, "dialog\ufffd[2J open", true},
		{"a dialog whose hook is on its way", guestproto.AgentWorking, claude{Status: "waiting", ChangedMS: at(2)}, 2500 * time.Millisecond, guestproto.AgentWorking, "hook", false},
		{"a dialog, though a tool has ended", guestproto.AgentWorking, claude{Status: "waiting", ChangedMS: at(-2)}, time.Second, guestproto.AgentBlocked, "", true},
		{"a prompt that was just given", guestproto.AgentWorking, claude{Status: "idle", ChangedMS: at(-60)}, time.Second, guestproto.AgentWorking, "hook", false},
		{"Esc while it works", guestproto.AgentWorking, claude{Status: "idle", ChangedMS: at(2)}, 2 * time.Second, guestproto.AgentIdle, "", true},
		{"Esc just before a tool's end", guestproto.AgentWorking, claude{Status: "idle", ChangedMS: at(-0.1)}, 6 * time.Second, guestproto.AgentIdle, "", true},
		{"done", guestproto.AgentDone, claude{Status: "idle", ChangedMS: at(0.2)}, time.Hour, guestproto.AgentDone, "hook", false},
		{"done, and other hooks run", guestproto.AgentDone, claude{Status: "busy", ChangedMS: at(-60)}, time.Second, guestproto.AgentDone, "hook", false},
		{"it continues without a prompt", guestproto.AgentDone, claude{Status: "busy", ChangedMS: at(60)}, time.Hour, guestproto.AgentWorking, "", true},
		{"an error", guestproto.AgentError, claude{Status: "idle", ChangedMS: at(0.2)}, time.Hour, guestproto.AgentError, "hook", false},
		{"gone", guestproto.AgentGone, claude{Status: "busy", ChangedMS: at(60)}, time.Hour, guestproto.AgentGone, "hook", false},
		{"only the older field", guestproto.AgentBlocked, claude{Status: "idle", UpdatedMS: at(2)}, 2 * time.Second, guestproto.AgentIdle, "", true},
		{"a word of the future", guestproto.AgentBlocked, claude{Status: "dreaming", ChangedMS: at(2)}, time.Hour, guestproto.AgentBlocked, "hook", false},
	} {
		n := agentReport{State: c.state, On: "hook", Since: noon, At: noon}
		got := n.mergeClaude(c.file, noon.Add(c.later))
		if got.State != c.want || got.On != c.on || got.Since.Equal(noon) == c.changed {
			t.Errorf("%s: mergeClaude(%+v) = %q %q since %s, want %q %q, Since changed: %t", c.name, c.file, got.State, got.On, got.Since, c.want, c.on, c.changed)
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
			t.Errorf("summarize(%q) = %q, want %q", c.in, got, c.want)
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
		if data, err := sys.ReadFile(path, 10); err == nil {
			t.Errorf("readUpTo(%s, 10) = %d bytes, want an error", path, len(data))
		}
	}
	if data, err := sys.ReadFile(large, 11); err != nil || len(data) != 11 {
		t.Errorf("readUpTo of a file of 11 bytes with limit 11 = %d bytes, %v, want 11 bytes", len(data), err)
	}
}

func FuzzEvent(f *testing.F) {
	f.Add(hook("PermissionRequest", bash))
	f.Add(hook("PermissionRequest", ask)[:120])
	f.Add(hook("StopFailure", `"error":"\u001b[2J"`))
	f.Fuzz(func(t *testing.T, text string) {
		n := agentReport{State: guestproto.AgentWorking}.afterEvent(readEvent(strings.NewReader(text)), noon)
		if n.State.Urgency() > guestproto.AgentGone.Urgency() || strings.ContainsAny(n.On+n.Tool, "\x1b\n\x00") || len([]rune(n.On)) > maxSummary {
			t.Fatalf("report after %q = %+v, want a known state and an On of at most %d characters without control characters", text, n, maxSummary)
		}
		if _, err := json.Marshal(n); err != nil {
			t.Fatalf("Marshal(%+v): %v", n, err)
		}
	})
}
