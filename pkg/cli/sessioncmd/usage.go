package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type usageOptions struct {
	by, since, repo, task string
	json                  bool
}

func NewUsageCmd(a *app.App) *cobra.Command {
	o := usageOptions{by: "session"}
	cmd := &cobra.Command{
		Use: "usage [SESSION]", Short: "Show what models were used for, in tokens and money",
		Long: `Show what the requests to Anthropic and OpenAI used, as their answers report it.

The gateway counts the requests that it reads: with a secret that stays on the host, or
with a budget. The cost is by list prices, in prices.yaml; a subscription does not charge
it. An answer that was cut counts with the most that it may have used.`,
		Example: `  agent-sessionizer usage
  agent-sessionizer usage --by day --since 7d
  agent-sessionizer usage --by model repo`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runUsage(cmd.Context(), a, o, args) },
	}
	cmd.Flags().StringVar(&o.by, "by", o.by, "`WHAT` to add up: session, repo, task, model or day")
	cmd.Flags().StringVar(&o.since, "since", "", "only the last `DURATION`, such as 12h or 30d (default all)")
	cmd.Flags().StringVar(&o.repo, "repo", "", "only of this `REPO`")
	cmd.Flags().StringVar(&o.task, "task", "", "only of the task with this `ID`")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	return cmd
}

func runUsage(ctx context.Context, a *app.App, o usageOptions, args []string) error {
	r := ops.UsageRequest{By: o.by, Repo: o.repo, Task: o.task}
	if o.since != "" {
		d, err := measure.ParseDuration(o.since)
		if err != nil {
			return fail.New(fail.Usage, "--since %w, got %q", err, o.since)
		}
		r.Since = time.Now().Add(-time.Duration(d))
	}
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	if len(args) > 0 {
		var s session.View
		if h, s, err = app.Named(ctx, a, args[0]); err != nil {
			return err
		}
		r.Session = s.ID
	}
	u, err := ops.GetUsage.On(ctx, h, r)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(u)
	}
	if len(u.Uses) == 0 {
		a.Con.Say("%s", "nothing was counted")
		return nil
	}
	header := map[string]string{"session": "SESSION", "repo": "REPO", "task": "TASK", "model": "MODEL", "day": "DAY"}[o.by]
	var rows [][]string
	add := func(name string, u lifecycle.Usage) {
		rows = append(rows, []string{name, strconv.FormatInt(u.Requests, 10), lifecycle.Tokens(u.Tokens), u.Money()})
	}
	unknown := 0
	for _, use := range u.Uses {
		name := cmp.Or(use.Name, use.Of, "none")
		if use.Unknown {
			name, unknown = name+" *", unknown+1
		}
		add(name, use.Usage)
	}
	if len(u.Uses) > 1 {
		add("all", *u.Total)
	}
	a.Con.Table([]string{header, "REQUESTS", "TOKENS", "COST"}, rows)
	if unknown > 0 {
		a.Con.Say("%s", "* has no price in prices.yaml, and counts as the most expensive model")
	}
	return nil
}

type budgetOptions struct {
	money, tokens string
	json          bool
}

func NewBudgetCmd(a *app.App) *cobra.Command {
	var o budgetOptions
	cmd := &cobra.Command{
		Use: "budget SESSION", Short: "Show or change what a session may use of models",
		Long: `Show or change what a session may use of models.

When a budget is used up, the gateway refuses the session's requests to Anthropic and
OpenAI, and the agent stops. A new limit takes effect at once, and only for this session.
The defaults, and the limit of a day for all sessions, are in the settings under budget.`,
		Example: `  agent-sessionizer budget repo
  agent-sessionizer budget repo --money "10 USD"
  agent-sessionizer budget repo --tokens none`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runBudget(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().StringVar(&o.money, "money", "", "`AMOUNT` that the session may cost, such as \"5 USD\", or none")
	cmd.Flags().StringVar(&o.tokens, "tokens", "", "`NUMBER` of tokens that it may use, such as 2M, or none")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON")
	return cmd
}

func runBudget(ctx context.Context, a *app.App, o budgetOptions, what string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	at := ops.SessionPath{ID: s.ID}
	if o.money != "" || o.tokens != "" {
		r := ops.BudgetRequest{SessionPath: at}
		r.Body.Session, r.Body.Tokens = o.money, o.tokens
		if s, err = ops.SetBudget.On(ctx, h, r); err != nil {
			return err
		}
		if s.State != session.Ready {
			a.Con.Say("%s", "saved; it takes effect when the session runs again")
		}
	}
	b, err := ops.GetBudget.On(ctx, h, at)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(b)
	}
	used, today := lifecycle.Usage{}, lifecycle.Usage{}
	if b.Used != nil {
		used = *b.Used
	}
	if b.Today != nil {
		today = *b.Today
	}
	of := func(limit bool, text string) string {
		if !limit {
			return "no limit"
		}
		return "of " + text
	}
	a.Pairs([][2]string{
		{"session", fmt.Sprintf("%s  %s", used.Money(), of(b.Budget.Session > 0, b.Budget.Session.String()))},
		{"tokens", fmt.Sprintf("%s  %s", lifecycle.Tokens(used.Tokens), of(b.Budget.Tokens > 0, b.Budget.Tokens.String()))},
		{"all sessions today", fmt.Sprintf("%s  %s", today.Money(), of(b.Budget.Day > 0, b.Budget.Day.String()))},
	})
	return nil
}
