package ops

import (
	"context"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Usage is what models were used for.
type Usage struct {
	Uses   []Use            `json:"uses" nullable:"false" doc:"The most expensive first."`
	Total  *lifecycle.Usage `json:"total,omitempty"`
	Prices string           `json:"prices" doc:"Date of the prices."`
}

// Use is the sum of some requests.
type Use struct {
	Of      string `json:"of" doc:"What the requests have in common: the id of a session or a task, the key of a repository, a model or a date."`
	Name    string `json:"name,omitempty" doc:"Name of the session."`
	Unknown bool   `json:"unknown_price,omitempty" doc:"The model has no price, and counts as the most expensive one."`
	lifecycle.Usage
}

// SessionBudget is what a session may use of models, and what it has used.
type SessionBudget struct {
	Budget config.Budget    `json:"budget" doc:"Absent limits do not restrict."`
	Used   *lifecycle.Usage `json:"used,omitempty"`
	Today  *lifecycle.Usage `json:"today,omitempty" doc:"Of all sessions."`
}

// Requests for operations on usage.
type (
	UsageRequest struct {
		By      string    `query:"by" default:"session" enum:"session,repo,task,model,day"`
		Since   time.Time `query:"since" doc:"Only requests from then on."`
		Session string    `query:"session" maxLength:"12" doc:"Only requests of the session with this id."`
		Repo    string    `query:"repo" maxLength:"4096" doc:"Only requests of the repository, as owner/repo, host/owner/repo or a git URL."`
		Task    string    `query:"task" maxLength:"12" doc:"Only requests of the task with this id."`
	}
	BudgetRequest struct {
		SessionPath
		Body struct {
			Session string `json:"session,omitempty" maxLength:"40" doc:"The money that the session may use, or none." example:"10 USD"`
			Tokens  string `json:"tokens,omitempty" maxLength:"40" doc:"The tokens that the session may use, or none." example:"2M"`
		}
	}
)

// Operations on usage.
var (
	GetUsage = Operation[UsageRequest, Usage]{Spec{
		ID: "getUsage", Method: http.MethodGet, Path: "/api/v1/usage", Tag: "usage", Need: Read,
		Summary: "Get what models were used for, in tokens and US dollars",
	}, func(ctx context.Context, e *Engine, r *UsageRequest) (u Usage, err error) {
		q := store.UsageQuery{Since: r.Since, Session: r.Session, Task: r.Task}
		if r.Repo != "" {
			key, ok := config.ParseRepoKey(r.Repo)
			if !ok {
				return u, fail.New(fail.Usage, "repo must be owner/repo, host/owner/repo or a git URL, got %q", short(r.Repo)).WithHint("agent-sessionizer usage --repo owner/repo")
			}
			q.Repo = string(key)
		}
		return e.usage(ctx, r.By, q)
	}}

	GetBudget = Operation[SessionPath, SessionBudget]{Spec{
		ID: "getBudget", Method: http.MethodGet, Path: SessionsPath + "/{id}/budget", Tag: "usage", Need: Read, Errors: []int{404},
		Summary: "Get what a session may use of models, and what it has used",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (b SessionBudget, err error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return b, err
		}
		if b.Budget, err = (session.Net{Sessions: e.sessions()}).Budget(s); err != nil {
			return b, err
		}
		b.Used = lifecycle.UsageOf(s.Used)
		today, err := e.usage(ctx, "day", store.UsageQuery{Since: Midnight()})
		b.Today = today.Total
		return b, err
	}}

	SetBudget = Operation[BudgetRequest, session.View]{Spec{
		ID: "setBudget", Method: http.MethodPost, Path: SessionsPath + "/{id}/budget", Tag: "usage", Need: Admin, Errors: []int{404, 409},
		Summary: "Change what a session may use of models, immediately",
	}, func(ctx context.Context, e *Engine, r *BudgetRequest) (session.View, error) {
		var b config.Budget
		for _, f := range []struct {
			name, text string
			set        func(string) error
		}{{"session", r.Body.Session, b.Session.Set}, {"tokens", r.Body.Tokens, b.Tokens.Set}} {
			if f.text == "" {
				continue
			}
			if err := f.set(f.text); err != nil {
				return session.View{}, fail.New(fail.Usage, "%s %w", f.name, err)
			}
		}
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Net{Sessions: e.sessions()}.SetBudget(ctx, s, b)
		})
	}}
)

// Midnight returns the start of today on this host.
func Midnight() time.Time {
	y, m, d := time.Now().Date()
	return time.Date(y, m, d, 0, 0, 0, 0, time.Local)
}

func (e *Engine) usage(ctx context.Context, by string, q store.UsageQuery) (u Usage, err error) {
	c := e.sessions().Config
	u = Usage{Uses: []Use{}, Prices: c.Prices.Date}
	sums, err := e.sessions().Store.UsageSums(ctx, by, q)
	if err != nil {
		return u, err
	}
	names := map[string]string{}
	if by == "session" {
		rows, err := e.sessions().Store.Sessions(ctx, true)
		if err != nil {
			return u, err
		}
		for _, s := range rows {
			names[s.ID] = s.Name
		}
	}
	var total store.UsageSum
	for _, sum := range sums {
		total.Requests, total.Tokens, total.Cost = total.Requests+sum.Requests, total.Tokens+sum.Tokens, total.Cost+sum.Cost
		u.Uses = append(u.Uses, Use{sum.Of, names[sum.Of], by == "model" && !c.Prices.Known(sum.Of), *lifecycle.UsageOf(sum)})
	}
	u.Total = lifecycle.UsageOf(total)
	return u, nil
}
