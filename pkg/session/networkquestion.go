package session

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// heldEvery is how often a keeper asks the gateway which connections wait, if the settings
// list names to ask about.
const heldEvery = time.Second

// watchHeld turns the connections that the gateway holds into questions, and applies the
// answers, until ctx ends. settings returns the settings as they are now.
func (w *Worker) watchHeld(ctx context.Context, s Session, settings func() *config.Config) {
	if !s.Spec.Enforced {
		return
	}
	tick := time.NewTicker(heldEvery)
	defer tick.Stop()
	waits := true // a question of the keeper before may wait
	for {
		var err error
		if waits, err = w.askAboutNetwork(ctx, s.ID, settings(), waits); err != nil && ctx.Err() == nil {
			w.Log.WarnContext(ctx, "failed to ask about the network", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// askAboutNetwork makes the rows match what the gateway holds, and applies the answers. It
// reports whether a question waits.
func (w *Worker) askAboutNetwork(ctx context.Context, id string, c *config.Config, waits bool) (bool, error) {
	sessions := *w.Sessions
	sessions.Config = c
	net := Net{Sessions: &sessions}
	s, err := sessions.Get(ctx, id)
	if err != nil {
		return waits, err
	}
	set, err := net.settings(s)
	if err != nil || len(set.Network.Ask) == 0 && !waits {
		return waits, err
	}
	applied, err := net.applyAnswers(ctx, s)
	if err != nil {
		return waits, err
	}
	st, err := sessions.Gateway(s).Status(ctx)
	if err != nil {
		return waits, err
	}
	var asked []store.Question
	for _, h := range st.Held {
		asked = append(asked, store.Question{
			ID: ids.New(), GuestID: heldID(h), Kind: store.QuestionNetwork, Agent: "network", Deadline: h.Until,
			Text: w.text(guestproto.Clean(fmt.Sprintf("%s:%d", h.Name, h.Port))),
		})
	}
	waiting, err := sessions.Store.SyncQuestions(ctx, id, asked, applied, func(q store.Question) bool { return !isOfGuest(q) }, admitQuestions)
	if err != nil {
		return waits, err
	}
	return len(waiting) > 0, w.markHeld(ctx, s, waiting)
}

func heldID(h gateway.Held) string {
	return fmt.Sprintf("%s:%d@%d", h.Name, h.Port, h.Since.UnixNano())
}

// applyAnswers changes what the session may reach by the answers that were given, and returns
// the gateway's ids of their questions. Applying an answer twice has no further effect.
func (net Net) applyAnswers(ctx context.Context, s Session) (applied []string, err error) {
	list, err := net.Sessions.Store.Questions(ctx, s.ID, false)
	if err != nil {
		return nil, err
	}
	for _, q := range list {
		if isOfGuest(q) || q.State != store.QuestionAnswered {
			continue
		}
		do := net.Allow
		if q.Answer == guestproto.Deny {
			do = net.Deny
		}
		if s, err = do(ctx, s, []string{q.Text}); err != nil {
			return applied, err
		}
		applied = append(applied, q.GuestID)
	}
	return applied, nil
}

// markHeld records in the row that connections wait for the user.
func (w *Worker) markHeld(ctx context.Context, s Session, waiting []store.Question) error {
	var now *Attention
	if i := slices.IndexFunc(waiting, func(q store.Question) bool { return q.State == store.QuestionOpen }); i >= 0 {
		now = &Attention{State: guestproto.AgentBlocked, Agent: "network", On: "permission: connect to " + waiting[i].Text, Since: waiting[i].AskedAt}
	}
	if now.same(s.Status.Held) {
		return nil
	}
	s, err := w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Held = now })
	if err == nil && w.Attention != nil {
		w.Attention(ctx, s)
	}
	return err
}
