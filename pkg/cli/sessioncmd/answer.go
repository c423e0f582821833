package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

type answerOptions struct{ all, json bool }

func NewAnswerCmd(a *app.App) *cobra.Command {
	var o answerOptions
	cmd := &cobra.Command{
		Use:   "answer [QUESTION|SESSION [allow|deny|ANSWER…]]",
		Short: "Answer agents that wait for you, or list their questions",
		Long: `Answer agents that wait for you, or list their questions.

With one argument, show a question and how to answer it. QUESTION is an id, or at least
its first 4 characters. Answer a permission or a plan with allow or deny. Any other text
denies it, and tells the agent what to do instead. Answer other questions of agents and
scripts with a text or the number of a choice. If a question has several parts, give one
argument for each. Questions about the network and budgets need their id: answer those
about a connection with allow or deny, those about a budget with the new total or deny.

A host that belongs to a cluster also lists the questions of the other hosts, while its
serve runs, and finds them by id or by HOST:SESSION.

The first answer counts, wherever it comes from: this command, the picker, the dashboard,
the API, or the agent's own terminal.`,
		Example: `  agent-sessionizer answer                          list the questions
  agent-sessionizer answer repo allow
  agent-sessionizer answer 1f0c "use the staging database instead"`,
		Args: app.Usage(cobra.ArbitraryArgs), ValidArgsFunction: complete.Args(waitingQuestions(a), choicesOf(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runAnswer(cmd.Context(), a, o, args) },
	}
	cmd.Flags().BoolVar(&o.all, "all", false, "also list questions that have ended")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	return cmd
}

func runAnswer(ctx context.Context, a *app.App, o answerOptions, args []string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return listQuestions(ctx, a, h, o)
	}
	h, q, err := a.FindQuestion(ctx, h, args[0], len(args) > 1)
	if err != nil {
		return err
	}
	if len(args) > 1 {
		separator := " "
		if q.Parts > 1 {
			separator = "\n"
		}
		r := ops.AnswerRequest{QuestionPath: ops.QuestionPath{ID: q.ID}}
		r.Body.Answer = strings.Join(args[1:], separator)
		if q, err = ops.AnswerQuestion.On(ctx, h, r); err != nil {
			return err
		}
		if q, err = awaitDelivery(ctx, a, h, q); err != nil {
			return err
		}
	}
	if o.json {
		return a.Con.JSON(q)
	}
	if len(args) > 1 {
		switch q.State {
		case store.QuestionDelivered:
			a.Con.Say("answered %s: %s", asker(q), q.Answer)
		case store.QuestionClosed:
			a.Con.Warn("%s stopped waiting before it took the answer; it was answered in its terminal, or it ended", asker(q))
		default:
			a.Con.Say("answered %s: %s (saved; it is delivered as soon as the VM can be reached)", asker(q), q.Answer)
		}
		return nil
	}
	showQuestion(a, q)
	return nil
}

// deliveryTime is how long answer waits until the program that asked has taken the answer.
const deliveryTime = 10 * time.Second

func awaitDelivery(ctx context.Context, a *app.App, h ops.Host, q ops.Question) (ops.Question, error) {
	began, silent := time.Now(), true
	for q.State == store.QuestionAnswered && time.Since(began) < deliveryTime {
		if silent && time.Since(began) > time.Second {
			a.Con.Say("saved; waiting until %s takes the answer", asker(q))
			silent = false
		}
		select {
		case <-ctx.Done():
			return q, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
		var err error
		if q, err = ops.GetQuestion.On(ctx, h, ops.QuestionPath{ID: q.ID}); err != nil {
			return q, err
		}
	}
	return q, nil
}

// asker returns what asks a question.
func asker(q ops.Question) string {
	who := cmp.Or(q.Agent, "the script")
	if q.OfGateway() {
		who = "the gateway"
	}
	return who + " in " + cmp.Or(q.Repo, q.Name)
}

// textOf returns what is asked.
func textOf(q ops.Question) string {
	if q.Kind == store.QuestionNetwork {
		return "connect to " + q.Text + "?"
	}
	return q.Text
}

func listQuestions(ctx context.Context, a *app.App, h ops.Host, o answerOptions) error {
	list, clustered, err := a.Questions(ctx, h, o.all)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(list)
	}
	if len(list) == 0 {
		a.Con.Say("%s", "no agent waits for an answer")
		return nil
	}
	header, rows := []string{"QUESTION", "SESSION", "AGENT", "KIND", "FOR", "TEXT"}, [][]string{}
	if o.all {
		header = append(header[:5:5], "STATE", "ANSWER", "TEXT")
	}
	for _, q := range list {
		text, _, more := strings.Cut(textOf(q.Question), "\n")
		if more {
			text += " …"
		}
		row := []string{q.ID, cmp.Or(q.Repo, q.Name), cmp.Or(q.Agent, "script"), q.Kind, console.Ago(q.AskedAt)}
		if o.all {
			answer, _, _ := strings.Cut(q.Answer, "\n")
			row = append(row, string(q.State), answer)
		}
		if clustered {
			row = slices.Insert(row, 1, q.Host)
		}
		rows = append(rows, append(row, text))
	}
	if clustered {
		header = slices.Insert(header, 1, "HOST")
	}
	a.Con.Table(header, rows)
	return nil
}

// showQuestion prints a question, and how to answer it.
func showQuestion(a *app.App, q ops.Question) {
	a.Printf("%s asks (%s, %s ago):\n\n", asker(q), q.Kind, console.Ago(q.AskedAt))
	for line := range strings.Lines(textOf(q)) {
		a.Printf("  %s\n", strings.TrimRight(line, "\n"))
	}
	for i, c := range q.Choices {
		a.Printf("  %d. %s\n", i+1, c)
	}
	a.Printf("\n")
	if !q.Deadline.IsZero() && q.State == store.QuestionOpen {
		a.Printf("without an answer: %s in %s\n", cmp.Or(q.Preset, "refused"), max(time.Until(q.Deadline), 0).Round(time.Second))
	}
	how := "TEXT"
	switch {
	case !q.State.Waits() || q.State == store.QuestionAnswered:
		answer := ""
		if q.Answer != "" {
			answer = fmt.Sprintf(": %s by %s", q.Answer, q.By)
		}
		a.Printf("%s%s\n", q.State, answer)
		return
	case q.Kind == store.QuestionNetwork:
		how = "allow|deny"
	case q.Kind == store.QuestionBudget:
		how = "LIMIT|deny"
	case guestproto.QuestionKind(q.Kind).Decides():
		how = "allow|deny|TEXT"
	case q.Parts > 1:
		how = strings.TrimSpace(strings.Repeat("TEXT ", q.Parts))
	case q.Only:
		how = "CHOICE"
	case len(q.Choices) > 0:
		how = "CHOICE|TEXT"
	}
	a.Printf("answer with: agent-sessionizer answer %s %s\n", q.ID, how)
}

// waitingQuestions offers the questions that wait.
func waitingQuestions(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, _ []string) (offer []string) {
		for _, q := range openQuestions(a, cmd) {
			text, _, _ := strings.Cut(q.Text, "\n")
			offer = append(offer, q.ID+"\t"+text)
		}
		return offer
	}
}

// choicesOf offers the answers to a question.
func choicesOf(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, args []string) []string {
		for _, q := range openQuestions(a, cmd) {
			switch {
			case !strings.HasPrefix(q.ID, args[0]):
			case q.OfGateway() || guestproto.QuestionKind(q.Kind).Decides():
				return []string{guestproto.Allow, guestproto.Deny}
			default:
				return q.Choices
			}
		}
		return nil
	}
}

func openQuestions(a *app.App, cmd *cobra.Command) []store.Question {
	m, _ := complete.ReadStore(a, cmd)
	if m == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(complete.ContextOf(cmd), complete.CompletionTime)
	defer cancel()
	list, err := m.Store.Questions(ctx, "", false)
	if err != nil {
		return nil // a completion reports no error
	}
	return list
}
