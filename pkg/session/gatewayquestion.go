package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// The gateway has questions too: whether a connection that it holds may go on, and whether a
// budget that is used up may grow.

// gatewayAskedEvery is how often a keeper reads what the gateway wants to know, if the
// settings let it ask.
const gatewayAskedEvery = time.Second

// gatewayQuestions carries the gateway's questions into the store, and applies the answers.
type gatewayQuestions struct {
	w        *Worker
	settings func() *config.Config // as they are now
	waits    bool                  // a question may wait
}

// watchGateway asks the user what the gateway wants to know, until ctx ends. settings returns
// the settings as they are now.
func (w *Worker) watchGateway(ctx context.Context, s Session, settings func() *config.Config) {
	if !s.Spec.Enforced {
		return
	}
	// A question that an earlier keeper asked may wait.
	q := gatewayQuestions{w: w, settings: settings, waits: true}
	tick := time.NewTicker(gatewayAskedEvery)
	defer tick.Stop()
	logged := ""
	for {
		err := q.sync(ctx, s.ID)
		if err != nil && ctx.Err() == nil && err.Error() != logged {
			w.Log.WarnContext(ctx, "failed to ask for the gateway", "error", err)
			logged = err.Error()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sync makes the rows match what the gateway wants to know, and applies the answers.
func (q *gatewayQuestions) sync(ctx context.Context, id string) error {
	sessions := *q.w.Sessions
	sessions.Config = q.settings()
	net := Net{Sessions: &sessions}
	s, err := sessions.Get(ctx, id)
	if err != nil {
		return err
	}
	set, err := net.settings(s)
	if err != nil {
		return err
	}
	budget, err := net.Budget(s)
	if err != nil || len(set.Network.Ask) == 0 && budget.Session == 0 && budget.Tokens == 0 && !q.waits {
		return err
	}
	applied, unapplied, failed := net.applyAnswers(ctx, s)
	st, err := sessions.Gateway(s).Status(ctx)
	if err != nil {
		return errors.Join(failed, err)
	}
	asked := unapplied // these are known, and stay as they are
	for _, h := range st.Held {
		asked = append(asked, store.Question{
			ID: ids.New(), GuestID: heldID(h), Kind: store.QuestionNetwork, Agent: "network", Deadline: h.Until,
			Text: q.w.text(guestproto.Clean(fmt.Sprintf("%s:%d", h.Name, h.Port))),
		})
	}
	if n := st.Exhausted; n != nil {
		asked = append(asked, askForBudget(*n))
	}
	waiting, err := sessions.Store.SyncQuestions(ctx, id, asked, applied, store.Question.OfGateway, admitQuestions)
	if err == nil {
		q.waits = len(waiting) > 0
		err = q.record(ctx, s, waiting)
	}
	return errors.Join(failed, err)
}

func heldID(h gateway.Held) string {
	return fmt.Sprintf("%s:%d@%d", h.Name, h.Port, h.Since.UnixNano())
}

// askForBudget returns the question about a limit that is used up. Each limit is asked about
// once.
func askForBudget(n gateway.BudgetNote) store.Question {
	most, limit, used := n.Budget.Session, measure.USD(n.Budget.Session).String(), measure.USD(n.Used.Cost).String()
	if n.Limit == gateway.LimitTokens {
		most, limit, used = n.Budget.Tokens, lifecycle.Tokens(n.Budget.Tokens)+" tokens", lifecycle.Tokens(n.Used.Tokens)
	}
	return store.Question{
		ID: ids.New(), GuestID: fmt.Sprintf("budget:%s:%d", n.Limit, most), Kind: store.QuestionBudget, Agent: "budget", Tool: n.Limit,
		Text: fmt.Sprintf("The session's budget of %s is used up (%s). Which limit should it have?", limit, used),
	}
}

// budgetAnswer returns the budget that an answer to a question grants.
func budgetAnswer(limit, answer string) (b config.Budget, err error) {
	if limit == gateway.LimitTokens {
		err = b.Tokens.Set(answer)
	} else {
		err = b.Session.Set(answer)
	}
	return b, err
}

// applyAnswers applies the answers to the gateway's questions, and returns the gateway's ids
// of those that it applied, and the others. Applying an answer twice has no further effect.
func (net Net) applyAnswers(ctx context.Context, s Session) (applied []string, unapplied []store.Question, failed error) {
	list, err := net.Sessions.Store.Questions(ctx, s.ID, false)
	if err != nil {
		return nil, nil, err
	}
	for _, q := range list {
		if !q.OfGateway() || q.State != store.QuestionAnswered {
			continue
		}
		changed, err := net.applyAnswer(ctx, s, q)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("apply answer to %s: %w", q.ID, err))
			if fail.CodeOf(err) == fail.Usage { // no rule can have that name, now or later
				applied = append(applied, q.GuestID)
			} else {
				unapplied = append(unapplied, q)
			}
			continue
		}
		s, applied = changed, append(applied, q.GuestID)
	}
	return applied, unapplied, failed
}

func (net Net) applyAnswer(ctx context.Context, s Session, q store.Question) (Session, error) {
	denied := q.Answer == guestproto.Deny
	if q.Kind == store.QuestionBudget {
		b, err := budgetAnswer(q.Tool, q.Answer)
		if denied || err != nil {
			return s, nil //nolint:nilerr // the answer was checked when it was given
		}
		return net.SetBudget(ctx, s, b)
	}
	target, _, _ := strings.Cut(q.GuestID, "@") // the text may be redacted
	if denied {
		return net.Deny(ctx, s, []string{target})
	}
	return net.Allow(ctx, s, []string{target})
}

// record notes in the row that the gateway waits for the user, and notifies the user.
func (q *gatewayQuestions) record(ctx context.Context, s Session, waiting []store.Question) error {
	var now *Attention
	if i := slices.IndexFunc(waiting, func(w store.Question) bool { return w.State == store.QuestionOpen }); i >= 0 {
		first := waiting[i]
		on := cmp.Or(map[string]string{store.QuestionNetwork: "permission: connect to "}[first.Kind], "question: ") + first.Text
		now = &Attention{State: guestproto.AgentBlocked, Agent: first.Agent, On: on, Since: first.AskedAt}
	}
	if now.same(s.Status.Held) {
		return nil
	}
	s, err := q.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Held = now })
	if err == nil && q.w.Attention != nil {
		q.w.Attention(ctx, s)
	}
	return err
}
