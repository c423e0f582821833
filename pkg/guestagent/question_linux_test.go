package guestagent_test

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// question waits for the only question.
func (w *watched) question() guestproto.Question {
	w.Helper()
	return w.until("a question", func(g guestproto.Observation) bool { return len(g.Questions) == 1 }).Questions[0]
}

// questionEnds waits until no question is left, and returns what was taken.
func (w *watched) questionEnds() []string {
	w.Helper()
	return w.until("the end of the question", func(g guestproto.Observation) bool { return len(g.Questions) == 0 }).Taken
}

// answer sends an answer as the host does.
func (w *watched) answer(id, text string) {
	w.Helper()
	if err := (guestproto.Answer{ID: id, Text: text}).Encode(w.stdin); err != nil {
		w.Fatal(err)
	}
}

// TestQuestions answers questions of Claude Code, and checks what its hook prints.
func TestQuestions(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	p := g.pretend("claude")
	const one = `{"question":"Which DB?","options":[{"label":"Postgres"},{"label":"SQLite"}]}`
	const two = `{"question":"Which port?","options":[{"label":"80"}]}`
	for _, c := range []struct {
		tool, input, answer string
		asks                guestproto.Question
		decision            string
	}{
		{
			"Bash", `{"command":"touch x"}`, "allow",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			`{"behavior":"allow"}`,
		},
		{
			"Bash", `{"command":"touch x"}`, "deny",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Bash", Text: "Bash: touch x"},
			`{"behavior":"deny","message":"The user denied this."}`,
		},
		{
			"Write", `{"file_path":"/a"}`, "use /b\ninstead",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "Write", Text: "Write: /a"},
			`{"behavior":"deny","message":"use /b\ninstead"}`,
		},
		{
			"mcp__db__drop", `{"table":"users"}`, "deny",
			guestproto.Question{Kind: guestproto.AskPermission, Tool: "mcp__db__drop", Text: `mcp__db__drop: {"table":"users"}`},
			`{"behavior":"deny","message":"The user denied this."}`,
		},
		{
			"ExitPlanMode", `{"plan":"First.\nThen."}`, "allow",
			guestproto.Question{Kind: guestproto.AskPlan, Tool: "ExitPlanMode", Text: "First.\nThen."},
			`{"behavior":"allow","updatedInput":{"plan":"First.\nThen."}}`,
		},
		{
			"AskUserQuestion", `{"questions":[` + one + `]}`, "SQLite",
			guestproto.Question{Kind: guestproto.AskChoice, Tool: "AskUserQuestion", Text: "Which DB?", Choices: []string{"Postgres", "SQLite"}},
			`{"behavior":"allow","updatedInput":{"answers":{"Which DB?":"SQLite"},"questions":[` + one + `]}}`,
		},
		{
			"AskUserQuestion", `{"questions":[` + one + `,` + two + `]}`, "MySQL\n80",
			guestproto.Question{Kind: guestproto.AskChoice, Tool: "AskUserQuestion", Text: "1. Which DB?\n   - Postgres\n   - SQLite\n2. Which port?\n   - 80", Parts: 2},
			`{"behavior":"allow","updatedInput":{"answers":{"Which DB?":"MySQL","Which port?":"80"},"questions":[` + one + `,` + two + `]}}`,
		},
	} {
		p.hook("claude", "PermissionRequest", `"tool_name":"`+c.tool+`","tool_input":`+c.input)
		q := w.question()
		c.asks.ID, c.asks.Agent = q.ID, "claude"
		if diff := cmp.Diff(c.asks, q); diff != "" {
			t.Errorf("question of %s %s (-want +got):\n%s", c.tool, c.input, diff)
		}
		for range 3 { // the host repeats an answer whose delivery it does not know
			w.answer(q.ID, c.answer)
		}
		if taken := w.questionEnds(); len(taken) == 0 || taken[0] != q.ID {
			t.Errorf("taken = %v, want %s first", taken, q.ID)
		}
		var printed []byte
		testenv.WaitFor(t, "the hook's decision", func() bool {
			printed, _ = os.ReadFile(filepath.Join(p.dir, "decision"))
			return strings.HasSuffix(string(printed), "\n")
		})
		var got struct {
			Output struct {
				Event    string          `json:"hookEventName"`
				Decision json.RawMessage `json:"decision"`
			} `json:"hookSpecificOutput"`
		}
		if err := json.Unmarshal(printed, &got); err != nil || got.Output.Event != "PermissionRequest" || string(got.Output.Decision) != c.decision {
			t.Errorf("decision of %q = %s, %v, want %s", c.answer, printed, err, c.decision)
		}
	}
}

// TestQuestionsEnd checks that a question ends with the program that asks it, and that a late
// answer has no effect.
func TestQuestionsEnd(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	p := g.pretend("claude")
	p.hook("claude", "PermissionRequest", `"tool_name":"Bash","tool_input":{"command":"touch x"}`)
	q := w.question()
	p.run("kill -KILL $$")
	if taken := w.questionEnds(); len(taken) != 0 {
		t.Errorf("taken after the agent's end = %v, want none", taken)
	}
	w.answer(q.ID, "allow")
	w.answer(strings.Repeat("0", 16), "allow")
	dir := filepath.Join(g.root, "run/agent/questions")
	// A file of another program, and an answer that came after the end.
	g.write("run/agent/questions/"+q.ID+".answer", "allow")
	g.write("run/agent/questions/x.json", "{")
	testenv.WaitFor(t, "the late answer is removed", func() bool {
		left, err := filepath.Glob(filepath.Join(dir, "*.answer"))
		return err == nil && len(left) == 0
	})
	if decision, err := os.ReadFile(filepath.Join(p.dir, "decision")); err != nil || len(decision) > 0 {
		t.Errorf("decision = %q, %v, want none", decision, err)
	}
	// What the host sends must have the form of an answer; otherwise the watch ends.
	if _, err := io.WriteString(w.stdin, "nonsense\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-w.ended:
		w.ended <- err
	case <-time.After(patience):
		t.Error("watch runs after nonsense on its input, want that it ends")
	}
}

// TestAnsweredInTheTerminal checks that a question ends when its agent goes on.
func TestAnsweredInTheTerminal(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	p := g.pretend("claude")
	p.hook("claude", "PermissionRequest", `"tool_name":"Bash","tool_input":{"command":"touch x"}`)
	w.question()
	p.hook("claude", "PostToolUse", `"tool_name":"Bash","tool_input":{"command":"touch x"}`)
	if taken := w.questionEnds(); len(taken) != 0 {
		t.Errorf("taken = %v, want none", taken)
	}
	done := filepath.Join(p.dir, "done")
	p.run("wait; touch " + done) // for the hook
	testenv.WaitFor(t, "the end of the hook", func() bool {
		_, err := os.Stat(done)
		return err == nil
	})
	if decision, err := os.ReadFile(filepath.Join(p.dir, "decision")); err != nil || len(decision) > 0 {
		t.Errorf("decision = %q, %v, want none", decision, err)
	}
}

func TestAsk(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	p := g.pretend("script")
	out := filepath.Join(p.dir, "out")
	p.run(`"$GUEST" ask --choice blue --choice red "Which colour?" >` + out)
	q := w.question()
	want := guestproto.Question{ID: q.ID, Kind: guestproto.AskChoice, Text: "Which colour?", Choices: []string{"blue", "red"}, Only: true}
	if diff := cmp.Diff(want, q); diff != "" {
		t.Errorf("question (-want +got):\n%s", diff)
	}
	w.answer(q.ID, "red")
	w.questionEnds()
	testenv.WaitFor(t, "the answer", func() bool {
		text, _ := os.ReadFile(out)
		return string(text) == "red\n"
	})
	if _, errs, code := g.run("", "ask", "  "); code != 2 || !strings.Contains(errs, "must not be empty") {
		t.Errorf("ask of nothing: exit %d, %q, want 2 and the reason", code, errs)
	}
}

// TestDialogEnds checks that a question of Codex ends when its user goes on in the terminal.
func TestDialogEnds(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	p := g.pretend("codex")
	p.run("TMUX_PANE=%9; export TMUX_PANE")
	for _, event := range []string{"Interrupt", "UserPromptSubmit"} {
		p.hook("codex", "PermissionRequest", `"tool_name":"Bash","tool_input":{"command":"touch x"}`)
		if q := w.question(); q.Agent != "codex" || q.Text != "Bash: touch x" {
			t.Errorf("question = %+v, want one of codex", q)
		}
		p.hook("codex", event)
		done := filepath.Join(p.dir, event)
		p.run("touch " + done)
		testenv.WaitFor(t, "the end of the hook", func() bool {
			_, err := os.Stat(done)
			return err == nil
		})
		if left, err := filepath.Glob(filepath.Join(g.root, "run/agent/questions/*.json")); err != nil || len(left) > 0 {
			t.Errorf("questions after %s = %v, %v, want none", event, left, err)
		}
		w.questionEnds()
	}
}
