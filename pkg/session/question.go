package session

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Questions are what agents and scripts in guests wait for a person to answer. A guest
// reports its questions with every observation, and the keeper makes the rows match. An answer
// is first written to the row, and the keeper sends it to the guest until the guest reports
// that it was taken.
type Questions struct{ Sessions *Manager }

// QuestionChange is the event of a question that was asked or answered, or has ended.
type QuestionChange struct {
	ID     string              `json:"id"`
	State  store.QuestionState `json:"state"`
	Kind   string              `json:"kind"`
	Agent  string              `json:"agent,omitempty"`
	Text   string              `json:"text"` // shortened
	Answer string              `json:"answer,omitempty"`
	By     string              `json:"by,omitempty"`
}

// maxEventText limits the texts in an event, in characters. The row has them whole.
const maxEventText = 200

func questionEvent(q store.Question) store.Event {
	return store.NewEvent(EventQuestion, QuestionChange{
		ID: q.ID, State: q.State, Kind: q.Kind, Agent: q.Agent, By: q.By,
		Text: guestproto.CleanLines(q.Text, maxEventText), Answer: guestproto.CleanLines(q.Answer, maxEventText),
	})
}

// Answer answers a question. Of several answers only the first succeeds; the others get
// fail.Conflict.
func (qs Questions) Answer(ctx context.Context, id, answer string) (store.Question, error) {
	m := qs.Sessions
	q, err := m.Store.AnswerQuestion(ctx, id, m.Actor, func(q store.Question) (string, error) { return CheckAnswer(q, answer) }, questionEvent)
	if err == nil {
		m.audit(ctx, audit.QuestionAnswered, m.Actor, "session:"+q.Session, nil, map[string]any{"question": q.ID, "kind": q.Kind, "tool": q.Tool})
	}
	return q, err
}

// CheckAnswer returns an answer as the program that asked takes it, or an error if the
// question cannot be answered like that.
func CheckAnswer(q store.Question, answer string) (string, error) {
	valid := utf8.ValidString(answer)
	// As it is sent, so that the row shows what the program gets. A tab becomes four spaces.
	answer = guestproto.CleanLines(strings.TrimSpace(answer), 4*len(answer))
	hint := "agent-sessionizer answer " + q.ID
	switch {
	case answer == "":
		return "", fail.New(fail.Usage, "the answer must not be empty").WithHint("%s", hint)
	case !valid || utf8.RuneCountInString(answer) > guestproto.MaxAnswerText:
		return "", fail.New(fail.Usage, "the answer must be at most %d characters of UTF-8", guestproto.MaxAnswerText).WithHint("%s", hint)
	}
	word := strings.ToLower(answer)
	if q.Kind == store.QuestionBudget {
		if word == guestproto.Deny || word == "no" || word == "n" {
			return guestproto.Deny, nil
		}
		if _, err := budgetAnswer(q.Tool, answer); err != nil {
			return "", fail.New(fail.Usage, "the answer must be the new limit, or deny: %w", err).WithHint("%s", hint)
		}
		return answer, nil
	}
	if q.Kind == store.QuestionNetwork || guestproto.QuestionKind(q.Kind).Decides() {
		switch word {
		case guestproto.Allow, "yes", "y":
			return guestproto.Allow, nil
		case guestproto.Deny, "no", "n":
			return guestproto.Deny, nil
		}
		if q.Kind == store.QuestionNetwork {
			return "", fail.New(fail.Usage, "the answer must be allow or deny, got %q", guestproto.CleanLines(answer, maxEventText)).WithHint("%s", hint)
		}
		return answer, nil
	}
	if q.Parts > 1 {
		if n := strings.Count(answer, "\n") + 1; n != q.Parts && word != guestproto.Deny {
			return "", fail.New(fail.Usage, "question %s has %d parts and needs an answer to each, got %d", q.ID, q.Parts, n).WithHint("%s", hint)
		}
		return answer, nil
	}
	if i := slices.IndexFunc(q.Choices, func(c string) bool { return strings.EqualFold(c, answer) }); i >= 0 {
		return q.Choices[i], nil
	}
	if n, err := strconv.Atoi(answer); err == nil && n >= 1 && n <= len(q.Choices) {
		return q.Choices[n-1], nil
	}
	if q.Only {
		return "", fail.New(fail.Usage, "the answer must be one of %s, got %q", strings.Join(q.Choices, ", "), guestproto.CleanLines(answer, maxEventText)).WithHint("%s", hint)
	}
	return answer, nil
}

const (
	answerEvery = 250 * time.Millisecond // between two looks for answers, while a question waits
	resendAfter = 10 * time.Second       // for an answer that was not taken
)

// questionRelay carries the questions of one guest into the store, and their answers back.
type questionRelay struct {
	w        *Worker
	id       string                // of the session
	settings func() *config.Config // as they are now
	once     bool                  // the rows were synchronized

	mu      sync.Mutex
	waiting []store.Question
}

// sync makes the rows match what the guest of s asks.
func (r *questionRelay) sync(ctx context.Context, s Session, g guestproto.Observation) error {
	if r.once && !r.differs(g) {
		return nil
	}
	sessions := *r.w.Sessions
	sessions.Config = r.settings()
	set, err := Net{Sessions: &sessions}.settings(s)
	if err != nil { // such as a profile that was removed
		r.w.Log.WarnContext(ctx, "failed to read the settings; every question waits for a person", "error", err)
	}
	var asked []store.Question
	for _, q := range g.Questions {
		choices := make([]string, len(q.Choices))
		for i, c := range q.Choices {
			choices[i] = r.w.text(c)
		}
		n := store.Question{
			ID: ids.New(), GuestID: q.ID, Kind: string(q.Kind), Agent: r.w.text(q.Agent), Tool: r.w.text(q.Tool),
			Text: strings.Join(redactLines(r.w, strings.Split(q.Text, "\n")), "\n"), Choices: choices, Only: q.Only, Parts: q.Parts,
		}
		switch wait := time.Duration(set.Questions.DenyAfter); {
		case q.Kind == guestproto.AskPermission && set.Questions.Allow.Allows(q.Tool):
			n.Deadline, n.Preset = time.Now(), guestproto.Allow
		case q.Kind.Decides() && wait > 0:
			n.Deadline, n.Preset = time.Now().Add(wait), guestproto.Deny
		}
		asked = append(asked, n)
	}
	waiting, err := r.w.Sessions.Store.SyncQuestions(ctx, r.id, asked, g.Taken, func(q store.Question) bool { return !q.OfGateway() }, admitQuestions)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.once, r.waiting = true, waiting
	return nil
}

// admitQuestions returns the events about questions that changed, within the session's budget
// of events.
func admitQuestions(row *store.Session, changed []store.Question) (evs []store.Event, err error) {
	err = change(row, func(status *Status) {
		for _, q := range changed {
			evs = append(evs, status.Events.Admit(questionEvent(q))...)
		}
	})
	return evs, err
}

// differs reports whether the guest asks other questions than those that wait.
func (r *questionRelay) differs(g guestproto.Observation) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.waiting) != len(g.Questions) || slices.ContainsFunc(r.waiting, func(w store.Question) bool {
		return !slices.ContainsFunc(g.Questions, func(q guestproto.Question) bool { return q.ID == w.GuestID })
	})
}

// bySettings is who answers a question at its deadline.
const bySettings = "settings"

// deliver passes the answers to the guest until ctx ends, and answers what is overdue. The rows still hold them when the
// connection breaks or the keeper is killed; the guest takes an answer only once.
func (r *questionRelay) deliver(ctx context.Context, answers chan<- guestproto.Answer) error {
	sent := map[string]time.Time{} // by the guest's id
	tick := time.NewTicker(answerEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		r.mu.Lock()
		waits := len(r.waiting) > 0
		r.mu.Unlock()
		if !waits {
			continue
		}
		list, err := r.w.Sessions.Store.Questions(ctx, r.id, false)
		if err != nil {
			return err
		}
		for _, q := range list {
			if q.OfGateway() {
				continue
			}
			if q.State == store.QuestionOpen && q.Preset != "" && !time.Now().Before(q.Deadline) {
				_, err := r.w.Sessions.Store.AnswerQuestion(ctx, q.ID, bySettings, func(q store.Question) (string, error) { return q.Preset, nil }, questionEvent)
				if err != nil && fail.CodeOf(err) != fail.Conflict { // a person was faster
					return err
				}
				continue // it is sent at the next look
			}
			if q.State != store.QuestionAnswered || time.Since(sent[q.GuestID]) < resendAfter {
				continue
			}
			select {
			case answers <- guestproto.Answer{ID: q.GuestID, Text: q.Answer}:
				sent[q.GuestID] = time.Now()
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}
