package guestagent_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// fakeClaude is a Claude Code that runs its hook for the file "hook" if there is one, sends what is
// in the file "asks", and its result when it has $LINES more lines on stdin, which it writes to the
// file "heard". It ends with the status $STATUS when its stdin ends.
const fakeClaude = `#!/bin/sh
cd "$(dirname "$0")"
echo $$ >pid
printf '%s\n' "$*" >heard
read -r line; printf '%s\n' "$line" >>heard
echo '{"type":"system","subtype":"init"}'
echo 'not JSON'
[ ! -e hook ] || "$GUEST" hook claude <hook >decision
cat asks
i=0
while [ $i -lt $LINES ] && read -r line; do printf '%s\n' "$line" >>heard; i=$((i+1)); done
echo '{"type":"result","subtype":"success","result":"All done."}'
cat >/dev/null
echo ended >>heard
exit $STATUS
`

// claudeRun is the running program with a fake Claude Code.
type claudeRun struct {
	dir       string
	out, errs strings.Builder
	cmd       *exec.Cmd
	parent    *testing.T
}

func (g *fakeGuest) claude(asks, hook, status, lines string) *claudeRun {
	g.Helper()
	r := &claudeRun{dir: g.TempDir(), parent: g.T}
	files := map[string]string{"claude": fakeClaude, "asks": asks}
	if hook != "" {
		files["hook"] = hook
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o700); err != nil {
			g.Fatal(err)
		}
	}
	r.cmd = exec.Command(g.program, "claude", "--model", "m", "--max-turns", "3", "--tools", "Bash,Read", "--", "- do it")
	r.cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root, "GUEST="+g.program, "PATH="+r.dir+":"+os.Getenv("PATH"), "STATUS="+status, "LINES="+lines)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.errs
	if err := r.cmd.Start(); err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { _ = r.cmd.Process.Kill() })
	return r
}

// ends waits for the end of the program, and returns what Claude Code heard.
func (r *claudeRun) ends(code int) (heard []string) {
	r.parent.Helper()
	_ = r.cmd.Wait()
	if got := r.cmd.ProcessState.ExitCode(); got != code {
		r.parent.Fatalf("exit code = %d, want %d: %s", got, code, r.errs.String())
	}
	text, err := os.ReadFile(filepath.Join(r.dir, "heard"))
	if err != nil {
		r.parent.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// toolRequest returns a request of Claude Code to use a tool.
func toolRequest(id, tool, input string) string {
	return `{"type":"control_request","request_id":"` + id + `","request":{"subtype":"can_use_tool","tool_name":"` + tool + `","input":` + input + `}}` + "\n"
}

// TestClaudeAsks answers each request of a Claude Code without a terminal.
func TestClaudeAsks(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	const choices = `{"questions":[{"question":"Which DB?","options":[{"label":"Postgres"},{"label":"SQLite"}]}]}`
	for _, c := range []struct {
		name, tool, input, answer string
		question                  guestproto.Question
		decision                  string
	}{
		{
			"a permission", "Bash", `{"command":"touch x"}`, "allow",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			`{"behavior":"allow","updatedInput":{"command":"touch x"}}`,
		},
		{
			"a permission, denied", "Bash", `{"command":"touch x"}`, "deny",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			`{"behavior":"deny","message":"The user denied this."}`,
		},
		{
			"another command", "Bash", `{"command":"touch x"}`, "use y",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			`{"behavior":"deny","message":"use y"}`,
		},
		{
			"a plan", "ExitPlanMode", `{"plan":"First.\nThen."}`, "allow",
			guestproto.Question{Kind: guestproto.AskPlan, Tool: "ExitPlanMode", Text: "First.\nThen."},
			`{"behavior":"allow","updatedInput":{"plan":"First.\nThen."}}`,
		},
		{
			"a choice", "AskUserQuestion", choices, "SQLite",
			guestproto.Question{Kind: guestproto.AskChoice, Tool: "AskUserQuestion", Text: "Which DB?", Choices: []string{"Postgres", "SQLite"}},
			`{"behavior":"allow","updatedInput":{"answers":{"Which DB?":"SQLite"},` + choices[1:] + `}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Its hook runs too, and leaves the question to the runner.
			hook := `{"hook_event_name":"PermissionRequest","tool_name":"` + c.tool + `","tool_input":` + c.input + `}`
			r := g.claude(toolRequest("r", c.tool, c.input), hook, "0", "1")
			q := w.until("a question of a blocked agent", func(o guestproto.Observation) bool {
				return len(o.Questions) == 1 && len(o.Agents) > 0 && o.Agents[0].State == guestproto.AgentBlocked
			}).Questions[0]
			c.question.ID, c.question.Agent = q.ID, "claude"
			if diff := cmp.Diff(c.question, q); diff != "" {
				t.Errorf("question (-want +got):\n%s", diff)
			}
			w.answer(q.ID, c.answer)
			heard := r.ends(0)
			want := []string{
				"--permission-mode default --permission-prompt-tool stdio --input-format stream-json --output-format stream-json --verbose --print --model m --max-turns 3 --tools Bash,Read",
				`{"message":{"content":"- do it","role":"user"},"type":"user"}`,
				`{"response":{"request_id":"r","response":` + c.decision + `,"subtype":"success"},"type":"control_response"}`,
				"ended",
			}
			if diff := cmp.Diff(want, heard); diff != "" {
				t.Errorf("what Claude Code heard (-want +got):\n%s", diff)
			}
			if decision, err := os.ReadFile(filepath.Join(r.dir, "decision")); err != nil || len(decision) > 0 {
				t.Errorf("decision of the hook = %q, %v, want none", decision, err)
			}
			if got := r.out.String(); !strings.HasPrefix(got, `{"type":"system"`) || !strings.Contains(got, "\nnot JSON\n") || !strings.HasSuffix(got, `"All done."}`+"\n") {
				t.Errorf("output = %q, want all that Claude Code wrote", got)
			}
			w.questionEnds()
		})
	}
}

// TestClaudeRunEnds checks requests that no person answers or that are withdrawn, lines of any
// length, several questions at once, and how the program ends.
func TestClaudeRunEnds(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	const bash = `{"command":"touch x"}`
	other := g.claude(`{"type":"control_request","request_id":"o","request":{"subtype":"mcp_message"}}`+"\n", "", "0", "1").ends(0)
	if !strings.Contains(other[2], `"subtype":"error"`) || !strings.Contains(other[2], `"request_id":"o"`) {
		t.Errorf("response to an unknown request = %s, want an error", other[2])
	}
	withdrawn := g.claude(toolRequest("r", "Bash", bash)+`{"type":"control_cancel_request","request_id":"r"}`+"\n", "", "0", "0")
	if heard := withdrawn.ends(0); heard[2] != "ended" {
		t.Errorf("Claude Code heard %q after it withdrew a request, want nothing", heard[2:])
	}
	if taken := w.questionEnds(); len(taken) != 0 {
		t.Errorf("taken = %v, want none", taken)
	}
	long := strings.Repeat("x", 17<<20)
	r := g.claude(long+"\n"+toolRequest("1", "Bash", bash)+toolRequest("2", "Bash", bash), "", "0", "2")
	two := w.until("two questions", func(o guestproto.Observation) bool { return len(o.Questions) == 2 }).Questions
	w.answer(two[0].ID, "allow")
	first := w.until("one question", func(o guestproto.Observation) bool { return len(o.Questions) == 1 }).Questions[0]
	if first.ID != two[1].ID {
		t.Errorf("question that is left = %s, want %s", first.ID, two[1].ID)
	}
	w.answer(two[1].ID, "deny")
	heard := r.ends(0)
	behaviors := map[string]int{}
	for _, line := range heard[2:4] {
		var m struct {
			Response struct {
				RequestID string `json:"request_id"`
				Response  struct{ Behavior string }
			}
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Errorf("Claude Code heard %s: %v", line, err)
		}
		behaviors[m.Response.Response.Behavior]++
	}
	if behaviors["allow"] != 1 || behaviors["deny"] != 1 {
		t.Errorf("decisions on two requests with the answers allow and deny = %v, want one of each", behaviors)
	}
	if !strings.Contains(r.out.String(), long) {
		t.Error("output lacks a long line of Claude Code")
	}
	w.questionEnds()

	failed := g.claude("", "", "3", "0")
	if failed.ends(1); !strings.Contains(failed.errs.String(), "exit status 3") {
		t.Errorf("error of a Claude Code that fails = %q, want its status", failed.errs.String())
	}
	// A Claude Code that ends while it asks.
	gone := g.claude(toolRequest("r", "Bash", bash), "", "0", "1")
	w.question()
	pid, err := os.ReadFile(filepath.Join(gone.dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("kill", "-KILL", strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
		t.Fatalf("kill: %v: %s", err, out)
	}
	gone.ends(1)
	w.questionEnds()
}
