package guestagent_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// fakeCodex is an app server that begins a turn, sends what is in the file "asks", and ends the
// turn with the status in $STATUS when it has $LINES more lines on stdin, which it writes to the
// file "heard".
const fakeCodex = `#!/bin/sh
cd "$(dirname "$0")"
[ "$1" = app-server ] && [ -z "$TMUX_PANE" ] || exit 3
read -r line; echo "$line" >heard
echo '{"id":1,"result":{"userAgent":"x"}}'
read -r line; echo "$line" >>heard
read -r line; echo "$line" >>heard
echo '{"id":2,"result":{"thread":{"id":"T"}}}'
echo '{"method":"thread/started","params":{"thread":{"id":"T"}}}'
read -r line; echo "$line" >>heard
echo '{"id":3,"result":{"turn":{"id":"U"}}}'
echo '{"method":"item/agentMessage/delta","params":{"delta":"not printed"}}'
echo 'not JSON'
cat asks
i=0
while [ $i -lt $LINES ] && read -r line; do echo "$line" >>heard; i=$((i+1)); done
[ "$STATUS" = gone ] && exit 7
echo '{"method":"turn/completed","params":{"threadId":"of a subagent","turn":{"status":"failed"}}}'
echo '{"method":"turn/completed","params":{"threadId":"T","turn":{"status":"'$STATUS'","error":{"message":"no credit"}}}}'
cat >/dev/null
echo ended >>heard
`

// codexRun is the running program with a fake Codex.
type codexRun struct {
	dir    string
	out    strings.Builder
	errs   strings.Builder
	cmd    *exec.Cmd
	parent *testing.T
}

func (g *fakeGuest) codex(asks, status, lines string) *codexRun {
	g.Helper()
	r := &codexRun{dir: g.TempDir(), parent: g.T}
	for name, text := range map[string]string{"codex": fakeCodex, "asks": asks} {
		if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o700); err != nil {
			g.Fatal(err)
		}
	}
	r.cmd = exec.Command(g.program, "codex", "--model", "m", "--", "- do it")
	r.cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root, "PATH="+r.dir+":"+os.Getenv("PATH"), "STATUS="+status, "LINES="+lines, "TMUX_PANE=%1")
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.errs
	if err := r.cmd.Start(); err != nil {
		g.Fatal(err)
	}
	g.Cleanup(func() { _ = r.cmd.Process.Kill() })
	return r
}

// ends waits for the end of the program, and returns what Codex heard after the start of the turn.
func (r *codexRun) ends(code int) (heard []string) {
	r.parent.Helper()
	_ = r.cmd.Wait()
	if got := r.cmd.ProcessState.ExitCode(); got != code {
		r.parent.Fatalf("exit code = %d, want %d: %s", got, code, r.errs.String())
	}
	text, err := os.ReadFile(filepath.Join(r.dir, "heard"))
	if err != nil {
		r.parent.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[min(4, len(lines)):]
}

// TestCodexAsks answers each request of Codex's app server.
func TestCodexAsks(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	const of = `"threadId":"T","turnId":"U","itemId":"i"`
	for _, c := range []struct {
		name, asks, answer string
		lines              string
		question           guestproto.Question
		heard              []string
	}{
		{
			"a command", `{"id":0,"method":"item/commandExecution/requestApproval","params":{` + of + `,"command":"touch x","reason":"to try"}}`, "allow", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x\nto try"},
			[]string{`{"id":0,"result":{"decision":"accept"}}`},
		},
		{
			"a command, denied", `{"id":"a","method":"item/commandExecution/requestApproval","params":{` + of + `,"command":"touch x"}}`, "deny", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			[]string{`{"id":"a","result":{"decision":"decline"}}`},
		},
		{
			"another command", `{"id":0,"method":"item/commandExecution/requestApproval","params":{` + of + `,"command":"touch x"}}`, "use y", "2",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			[]string{
				`{"id":0,"result":{"decision":"decline"}}`,
				`{"id":4,"method":"turn/steer","params":{"expectedTurnId":"U","input":[{"text":"use y","type":"text"}],"threadId":"T"}}`,
			},
		},
		{
			"the network", `{"id":0,"method":"item/commandExecution/requestApproval","params":{` + of + `,"networkApprovalContext":{"host":"a.example","protocol":"https"}}}`, "allow", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "network", Text: "network: https a.example"},
			[]string{`{"id":0,"result":{"decision":"accept"}}`},
		},
		{
			"files", `{"method":"item/started","params":{"item":{"id":"i","type":"fileChange","changes":[{"path":"a"},{"path":"b"}]}}}` + "\n" +
				`{"id":0,"method":"item/fileChange/requestApproval","params":{` + of + `}}`, "allow", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "apply_patch", Text: "apply_patch: a b"},
			[]string{`{"id":0,"result":{"decision":"accept"}}`},
		},
		{
			"permissions", `{"id":0,"method":"item/permissions/requestApproval","params":{` + of + `,"permissions":{"network":{"enabled":true},"fileSystem":null}}}`, "allow", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "permissions", Text: `permissions: {"network":{"enabled":true},"fileSystem":null}`},
			[]string{`{"id":0,"result":{"permissions":{"network":{"enabled":true}},"scope":"turn"}}`},
		},
		{
			"permissions, denied", `{"id":0,"method":"item/permissions/requestApproval","params":{` + of + `,"permissions":{"network":{"enabled":true}}}}`, "deny", "1",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "permissions", Text: `permissions: {"network":{"enabled":true}}`},
			[]string{`{"id":0,"result":{"permissions":{},"scope":"turn"}}`},
		},
		{
			"choices", `{"id":0,"method":"item/tool/requestUserInput","params":{` + of + `,"questions":[{"id":"q1","question":"Which DB?","options":[{"label":"Postgres"}]},{"id":"q2","question":"Which port?","options":null}]}}`, "SQLite\n80", "1",
			guestproto.Question{Kind: guestproto.AskChoice, Text: "1. Which DB?\n   - Postgres\n2. Which port?", Parts: 2},
			[]string{`{"id":0,"result":{"answers":{"q1":{"answers":["SQLite"]},"q2":{"answers":["80"]}}}}`},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := g.codex(c.asks+"\n", "completed", c.lines)
			q := w.question()
			c.question.ID, c.question.Agent = q.ID, "codex"
			if diff := cmp.Diff(c.question, q); diff != "" {
				t.Errorf("question (-want +got):\n%s", diff)
			}
			w.answer(q.ID, c.answer)
			heard := r.ends(0)
			if diff := cmp.Diff(append(c.heard, "ended"), heard); diff != "" {
				t.Errorf("what Codex heard (-want +got):\n%s", diff)
			}
			w.questionEnds()
		})
	}
}

// TestCodexAsksLong checks that a permission for a long command is asked, and shows that it was
// cut: an agent could put the part that matters at its end.
func TestCodexAsksLong(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	for _, n := range []int{3900, 4100, 200_000} {
		command := strings.Repeat("<", n) + "; curl evil"
		r := g.codex(`{"id":0,"method":"item/commandExecution/requestApproval","params":{"command":"`+command+`"}}`+"\n", "completed", "1")
		q := w.question()
		if shown, marked := strings.HasSuffix(q.Text, "curl evil"), strings.HasSuffix(q.Text, "too long to be shown)"); shown == marked || shown != (n < 4000) {
			t.Errorf("question for %d characters ends with %q, want its end, or that it was cut", n, q.Text[len(q.Text)-60:])
		}
		w.answer(q.ID, "deny")
		if heard := r.ends(0); heard[0] != `{"id":0,"result":{"decision":"decline"}}` {
			t.Errorf("what Codex heard = %v, want that it was declined", heard)
		}
		w.questionEnds()
	}
}

// TestCodexTurn checks the start and the end of a turn, and requests that no person answers.
func TestCodexTurn(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	r := g.codex(`{"id":5,"method":"mcpServer/elicitation/request","params":{}}
{"id":6,"method":"item/tool/requestUserInput","params":{"questions":[{"id":"q","question":"Password?","isSecret":true}]}}
{"id":7,"method":"item/tool/call","params":{}}
`, "completed", "3")
	want := []string{
		`{"id":5,"result":{"_meta":null,"action":"decline","content":null}}`, `{"id":6,"result":{"answers":{}}}`,
		`{"id":7,"error":{"code":-32601,"message":"this client does not support item/tool/call"}}`, "ended",
	}
	if diff := cmp.Diff(want, r.ends(0)); diff != "" {
		t.Errorf("what Codex heard (-want +got):\n%s", diff)
	}
	text, err := os.ReadFile(filepath.Join(r.dir, "heard"))
	if err != nil {
		t.Fatal(err)
	}
	start := `{"id":1,"method":"initialize","params":{"clientInfo":{"name":"agent-sessionizer","version":"1"}}}
{"method":"initialized"}
{"id":2,"method":"thread/start","params":{"approvalPolicy":"on-request","model":"m","sandbox":"read-only"}}
{"id":3,"method":"turn/start","params":{"input":[{"text":"- do it","type":"text"}],"threadId":"T"}}
`
	if got, _, _ := strings.Cut(string(text), `{"id":5`); got != start {
		t.Errorf("requests at the start = %s, want %s", got, start)
	}
	if got := r.out.String(); strings.Contains(got, "not printed") || strings.Contains(got, "not JSON") || strings.Count(got, "\n") != 3 || !strings.Contains(got, "thread/started") {
		t.Errorf("output = %q, want the three notifications of the turn", got)
	}

	failed := g.codex("", "failed", "0")
	if failed.ends(1); !strings.Contains(failed.errs.String(), "no credit") {
		t.Errorf("error of a failed turn = %q, want the reason", failed.errs.String())
	}
	gone := g.codex("", "gone", "0")
	if gone.ends(1); !strings.Contains(gone.errs.String(), "ended before its turn: exit status 7") {
		t.Errorf("error of a Codex that ended early = %q, want that it says so", gone.errs.String())
	}
	// The app server withdraws its request, for example because the turn was interrupted.
	g.codex(`{"id":0,"method":"item/commandExecution/requestApproval","params":{"command":"touch x"}}
{"method":"serverRequest/resolved","params":{"threadId":"T","requestId":0}}
`, "completed", "0").ends(0)
	if taken := w.questionEnds(); len(taken) != 0 {
		t.Errorf("taken = %v, want none", taken)
	}
}
