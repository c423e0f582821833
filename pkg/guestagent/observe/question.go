package observe

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// A question is a file in the agent user's directory in memory. Watch reports it to the host,
// and puts the host's answer into a file beside it. To take the answer is to rename that file, so
// an answer is taken once, however often the host sends it. A question whose file is gone has
// ended.
const (
	questionDir  = sys.SecretDir + "/questions"
	questionFile = ".json"
	answerFile   = ".answer"
	takenFile    = ".taken"

	maxQuestionFile = 128 << 10
	maxQuestionDir  = 256 // files read
	answerEvery     = 100 * time.Millisecond
)

// question is what a question's file holds.
type question struct {
	guestproto.Question
	At time.Time `json:"at"`
	// The process that waits for the answer, or the agent if the answer is typed. The question
	// ends with it.
	PID   int    `json:"pid"`
	Start string `json:"start"`
	// Process id of the agent that asks; 0 for a script.
	AgentPID int `json:"agent_pid,omitempty"`
	// For an answer that is typed: the agent's tmux pane, and what its screen shows of the question.
	Pane  string `json:"pane,omitempty"`
	Shows string `json:"shows,omitempty"`
}

func questionPath(g sys.Guest, id, suffix string) string {
	return filepath.Join(g.Path(questionDir), id+suffix)
}

// raise makes a question known to the watcher, until p ends or the question is withdrawn. A long
// text is cut, because the watcher reads no large files.
func (q question) raise(g sys.Guest, p sys.Process) (question, error) {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	q.Question = q.Sanitized()
	q.ID, q.At, q.PID, q.Start = hex.EncodeToString(id[:]), time.Now().UTC(), p.PID, p.Start
	if err := os.MkdirAll(g.Path(questionDir), 0o700); err != nil {
		return q, err
	}
	data, err := json.Marshal(q)
	if err != nil {
		return q, err
	}
	return q, sys.WriteFile(questionPath(g, q.ID, questionFile), data, 0o600)
}

// withdraw ends a question. An answer that was not taken is dropped.
func withdraw(g sys.Guest, id string) {
	_ = os.Remove(questionPath(g, id, questionFile)) // the watcher removes what stays when its process has ended
	_ = os.Remove(questionPath(g, id, answerFile))
}

// takeAnswer returns the answer to a question if the host has sent one. Of several callers
// only one gets it.
func takeAnswer(g sys.Guest, id string) (answer string, ok bool) {
	taken := questionPath(g, id, takenFile)
	if os.Rename(questionPath(g, id, answerFile), taken) != nil {
		return "", false
	}
	data, err := sys.ReadFile(taken, maxQuestionFile)
	if err != nil {
		return "", false
	}
	// The file only shows from now on that the answer was taken.
	_ = os.WriteFile(taken, nil, 0o600)
	_ = os.Remove(questionPath(g, id, questionFile))
	return string(data), true
}

// await waits for the answer to a question. It returns false if the question, or the process
// that asks it, ends without one.
func (q question) await(ctx context.Context, g sys.Guest, asker sys.Process) (answer string, ok bool) {
	defer withdraw(g, q.ID)
	tick := time.NewTicker(answerEvery)
	defer tick.Stop()
	for {
		if answer, ok := takeAnswer(g, q.ID); ok {
			return answer, true
		}
		if _, err := os.Stat(questionPath(g, q.ID, questionFile)); errors.Is(err, fs.ErrNotExist) || !isRunning(asker.PID, asker.Start) {
			return "", false
		}
		select {
		case <-ctx.Done():
			return "", false
		case <-tick.C:
		}
	}
}

// Await asks the host's user a question for this process, and waits for the answer. ok is false
// if the question ends without one.
func Await(ctx context.Context, g sys.Guest, q guestproto.Question) (answer string, ok bool, err error) {
	self, ok := sys.ProcessAt(os.Getpid())
	if !ok {
		return "", false, errors.New("cannot read /proc")
	}
	raised, err := question{Question: q}.raise(g, self)
	if err != nil {
		return "", false, err
	}
	answer, ok = raised.await(ctx, g, self)
	return answer, ok, nil
}

// AskOptions describe a script's question.
type AskOptions struct{ Choices []string }

// Ask asks the host's user a question, and prints the answer.
func Ask(ctx context.Context, g sys.Guest, text string, o AskOptions, out io.Writer) error {
	if strings.TrimSpace(text) == "" {
		return fail.New(fail.Usage, "ask: the question must not be empty")
	}
	if !g.Fake && os.Geteuid() == 0 {
		return fail.New(fail.Usage, "ask: must not run as root, whose files the agent's user cannot read")
	}
	q := guestproto.Question{Kind: guestproto.AskText, Text: text, Choices: o.Choices, Only: len(o.Choices) > 0}
	if q.Only {
		q.Kind = guestproto.AskChoice
	}
	answer, ok, err := Await(ctx, g, q)
	if err != nil {
		return fail.New(fail.Host, "ask: %w", err)
	}
	if !ok {
		return fail.New(fail.Interrupted, "ask: the question ended without an answer")
	}
	_, err = fmt.Fprintln(out, answer)
	return err
}

// readQuestions returns the questions that wait for an answer, the oldest first, and the ids
// of those whose answer was taken, the newest first. It removes what has ended.
func readQuestions(g sys.Guest) (open []question, taken []string) {
	dir := g.Path(questionDir)
	type ended struct {
		id string
		at time.Time
	}
	var ends []ended
	// A file that is renamed meanwhile may be missing from one list, under both names.
	names := slices.Concat(sys.Names(dir, maxQuestionDir), sys.Names(dir, maxQuestionDir))
	slices.Sort(names)
	names = slices.Compact(names)
	end := func(id string) {
		if s, ok := stampOf(questionPath(g, id, takenFile)); ok {
			ends = append(ends, ended{id, s.changed})
		}
	}
	for _, name := range names {
		id, suffix, _ := strings.Cut(name, ".")
		if !guestproto.ValidQuestionID(id) {
			continue
		}
		switch "." + suffix {
		case questionFile:
			if slices.Contains(names, id+takenFile) { // its taker was killed before it removed the file
				withdraw(g, id)
				continue
			}
			var q question
			data, err := sys.ReadFile(filepath.Join(dir, name), maxQuestionFile)
			if err == nil {
				err = json.Unmarshal(data, &q)
			}
			if err != nil || q.ID != id {
				end(id) // perhaps its answer was taken since; otherwise, it is not ours
				continue
			}
			if !isRunning(q.PID, q.Start) {
				withdraw(g, id)
				continue
			}
			open = append(open, q)
		case answerFile:
			if !slices.Contains(names, id+questionFile) {
				_ = os.Remove(filepath.Join(dir, name)) // it came after the end of the question
			}
		case takenFile:
			end(id)
		}
	}
	slices.SortFunc(open, func(a, b question) int { return cmp.Or(a.At.Compare(b.At), cmp.Compare(a.ID, b.ID)) })
	slices.SortFunc(ends, func(a, b ended) int { return cmp.Or(b.at.Compare(a.at), cmp.Compare(a.id, b.id)) })
	for i, e := range ends {
		if i >= guestproto.MaxTaken {
			_ = os.Remove(filepath.Join(dir, e.id+takenFile))
			continue
		}
		taken = append(taken, e.id)
	}
	return open[:min(len(open), guestproto.MaxQuestions)], taken
}

// answeredAfter is how long an agent must not be blocked until its question counts as answered
// in its terminal. Of several questions, the agent shows the next one within this time.
const answeredAfter = 1500 * time.Millisecond

// endAnswered ends the questions of agents that are no longer blocked: the agent does not end
// the hook that waits for an answer when its user gives it in the terminal.
func (w *watcher) endAnswered(now time.Time) {
	unblocked := map[string]time.Time{}
	for _, q := range w.questions {
		if q.AgentPID == 0 || q.Pane != "" {
			continue
		}
		for _, a := range w.agents {
			if a.PID != q.AgentPID || a.now.State == guestproto.AgentBlocked || !a.now.Since.After(q.At) {
				continue // a state from before the question means that its dialog is not there yet
			}
			since, known := w.unblocked[q.ID]
			if !known {
				since = now
			}
			if unblocked[q.ID] = since; now.Sub(since) >= answeredAfter {
				withdraw(w.guest, q.ID)
			}
		}
	}
	w.unblocked = unblocked
}

// receiveAnswers stores the answers that the host sends, until in ends.
func receiveAnswers(g sys.Guest, in io.Reader) error {
	for a, err := range guestproto.ReadAnswers(in) {
		if err != nil {
			return err
		}
		if _, err := os.Stat(questionPath(g, a.ID, questionFile)); err != nil {
			continue // the question has ended
		}
		// An answer that cannot be stored is sent again by the host.
		_ = sys.WriteUnflushed(questionPath(g, a.ID, answerFile), []byte(a.Text), 0o600)
	}
	return nil
}

// question returns the question that an event of a tool asks the user of an agent.
func (e event) question(name string, agent sys.Process) question {
	tool := e.text("tool_name")
	q := guestproto.Question{Kind: guestproto.AskPermission, Agent: name, Tool: tool, Text: tool}
	var input struct {
		Plan      string   `json:"plan"`
		Questions []Choice `json:"questions"`
	}
	_ = json.Unmarshal(e["tool_input"], &input) // what has another type is not a question
	switch {
	case tool == "ExitPlanMode":
		q.Kind, q.Text = guestproto.AskPlan, cmp.Or(input.Plan, "the plan")
	case len(input.Questions) > 0:
		q = AskChoices(q, input.Questions)
	default:
		if _, what := e.toolUse(); what != "" {
			q.Text = tool + ": " + what
		} else if input := string(e["tool_input"]); input != "" && input != "{}" { // of a tool that is not known here
			q.Text = tool + ": " + input
		}
	}
	return question{Question: q, AgentPID: agent.PID}
}

// Choice is one question that an agent asks with choices.
type Choice struct {
	Question string `json:"question"`
	Options  []struct {
		Label string `json:"label"`
	} `json:"options"`
}

func (c Choice) labels() (labels []string) {
	for _, o := range c.Options {
		labels = append(labels, o.Label)
	}
	return labels
}

// AskChoices makes q ask one or several questions with choices.
func AskChoices(q guestproto.Question, ask []Choice) guestproto.Question {
	q.Kind = guestproto.AskChoice
	if len(ask) == 1 {
		q.Text, q.Choices = ask[0].Question, ask[0].labels()
		return q
	}
	q.Parts = len(ask)
	var text strings.Builder
	for i, one := range ask {
		fmt.Fprintf(&text, "%d. %s\n", i+1, one.Question)
		for _, label := range one.labels() {
			fmt.Fprintf(&text, "   - %s\n", label)
		}
	}
	q.Text = text.String()
	return q
}

// SplitAnswer returns the answers to the first of so many questions.
func SplitAnswer(answer string, questions int) []string {
	if questions < 2 {
		return []string{answer}[:questions]
	}
	lines := strings.Split(answer, "\n")
	return lines[:min(len(lines), questions)]
}

// ToolUse is what an agent asks its user to permit.
type ToolUse struct {
	Tool     string
	Input    json.RawMessage
	Subagent string // its id; "" for the agent itself
}

// DecideTool asks the host's user what a Claude Code without a terminal asks its client, and returns
// the decision. While it waits, the agent counts as blocked.
func DecideTool(ctx context.Context, g sys.Guest, agent sys.Process, use ToolUse) (decision map[string]any, err error) {
	e := event{"tool_input": use.Input}
	for field, text := range map[string]string{"hook_event_name": "PermissionRequest", "tool_name": use.Tool, "agent_id": use.Subagent} {
		if e[field], err = json.Marshal(text); err != nil {
			return nil, err
		}
	}
	if err := recordEvent(g, "claude", agent, e, time.Now().UTC()); err != nil {
		return nil, err
	}
	q := e.question("claude", agent)
	answer, ok, err := Await(ctx, g, q.Question)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errors.New("the question ended without an answer")
	}
	decision, err = e.decision(q, answer)
	if _, changed := decision["updatedInput"]; decision["behavior"] == guestproto.Allow && !changed {
		decision["updatedInput"] = use.Input // a client must repeat it
	}
	return decision, err
}

// decideForClaude writes the answer to a question in the form in which Claude Code takes the
// decision of a PermissionRequest hook, see https://code.claude.com/docs/en/hooks.
func (e event) decideForClaude(q question, answer string, out io.Writer) error {
	decision, err := e.decision(q, answer)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(map[string]any{
		"hookSpecificOutput": map[string]any{"hookEventName": "PermissionRequest", "decision": decision},
	})
}

// decision returns what an answer to a question means to Claude Code. Its hooks and its clients
// use the same form.
func (e event) decision(q question, answer string) (map[string]any, error) {
	decision := map[string]any{"behavior": guestproto.Allow}
	switch {
	case answer == guestproto.Deny:
		decision = map[string]any{"behavior": guestproto.Deny, "message": "The user denied this."}
	case q.Kind == guestproto.AskChoice:
		input, err := e.answered(answer)
		if err != nil {
			return nil, err
		}
		decision["updatedInput"] = input
	case answer != guestproto.Allow:
		decision = map[string]any{"behavior": guestproto.Deny, "message": answer}
	case q.Kind == guestproto.AskPlan: // without its input, Claude Code asks its user nevertheless
		decision["updatedInput"] = e["tool_input"]
	}
	return decision, nil
}

// answered returns the input of the tool AskUserQuestion with the answers, one per line.
func (e event) answered(answer string) (map[string]json.RawMessage, error) {
	var input map[string]json.RawMessage
	var questions []Choice
	if err := json.Unmarshal(e["tool_input"], &input); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(input["questions"], &questions); err != nil {
		return nil, err
	}
	answers := map[string]string{}
	for i, text := range SplitAnswer(answer, len(questions)) {
		answers[questions[i].Question] = text
	}
	text, err := json.Marshal(answers)
	input["answers"] = text
	return input, err
}
