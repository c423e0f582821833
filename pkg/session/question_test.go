package session

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestCheckAnswer(t *testing.T) {
	permission := store.Question{ID: "1", Kind: string(guestproto.AskPermission)}
	choice := store.Question{ID: "1", Kind: string(guestproto.AskChoice), Choices: []string{"Postgres", "SQLite", "1"}}
	only := choice
	only.Only = true
	parts := store.Question{ID: "1", Kind: string(guestproto.AskChoice), Parts: 2}
	for _, c := range []struct {
		of           store.Question
		answer, want string
	}{
		{permission, "allow", "allow"},
		{permission, " Yes\n", "allow"},
		{permission, "DENY", "deny"},
		{permission, "n", "deny"},
		{permission, "use ls", "use ls"},
		{store.Question{Kind: string(guestproto.AskPlan)}, "y", "allow"},
		{choice, "sqlite", "SQLite"},
		{choice, "2", "SQLite"},
		{choice, "1", "1"}, // the text of a choice
		{choice, "4", "4"},
		{choice, "allow", "allow"},
		{only, "3", "1"},
		{parts, "a\r\nb", "a\nb"},
		{parts, "deny", "deny"},
		{permission, "\ttype\tthis\x1b[0m", "type    this\ufffd[0m"}, // as the guest gets it
		{store.Question{Kind: string(guestproto.AskText)}, "no", "no"},
		{store.Question{Kind: store.QuestionNetwork}, "Y", "allow"},
		{store.Question{Kind: store.QuestionBudget, Tool: gateway.LimitSession}, "10 USD", "10 USD"},
		{store.Question{Kind: store.QuestionBudget, Tool: gateway.LimitTokens}, "none", "none"},
		{store.Question{Kind: store.QuestionBudget, Tool: gateway.LimitTokens}, "No", "deny"},
	} {
		if got, err := CheckAnswer(c.of, c.answer); err != nil || got != c.want {
			t.Errorf("CheckAnswer(%s %q, %q) = %q, %v, want %q", c.of.Kind, c.of.Choices, c.answer, got, err, c.want)
		}
	}
	for _, c := range []struct {
		of           store.Question
		answer, want string
	}{
		{permission, " \n ", "must not be empty"},
		{permission, strings.Repeat("é", 4001), "at most 4000 characters"},
		{permission, strings.Repeat("a\tb", 700), "at most 4000 characters"}, // it would be cut on its way
		{permission, "\xff", "UTF-8"},
		{only, "MySQL", `must be one of Postgres, SQLite, 1, got "MySQL"`},
		{only, "4", "must be one of"},
		{parts, "a", "has 2 parts and needs an answer to each, got 1"},
		{store.Question{Kind: store.QuestionNetwork}, "perhaps", `must be allow or deny, got "perhaps"`},
		{store.Question{Kind: store.QuestionBudget, Tool: gateway.LimitSession}, "2M", "must be the new limit, or deny"},
		{store.Question{Kind: store.QuestionBudget, Tool: gateway.LimitTokens}, "allow", "must be the new limit, or deny"},
	} {
		if got, err := CheckAnswer(c.of, c.answer); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), c.want) || fail.HintOf(err) == "" {
			t.Errorf("CheckAnswer(%s, %.20q) = %q, %v, want %q and a hint", c.of.Kind, c.answer, got, err, c.want)
		}
	}
}

// TestQuestionRelay follows a question from the guest to its answer, over a keeper that is
// replaced before the delivery.
func TestQuestionRelay(t *testing.T) {
	l, s, _ := newLookout(t)
	relay := func() *questionRelay {
		return &questionRelay{w: l.w, id: s.ID, settings: func() *config.Config { return l.w.Sessions.Config }}
	}
	const first, second = "00000000000000a1", "00000000000000a2"
	asks := guestproto.Observation{Questions: []guestproto.Question{
		{ID: first, Kind: guestproto.AskPermission, Agent: "claude", Tool: "Bash", Text: "Bash: echo sw0rdfish-0123456789"},
		{ID: second, Kind: guestproto.AskText, Text: "line\nsw0rdfish-\n0123456789"},
	}}
	r := relay()
	if err := r.sync(t.Context(), s, asks); err != nil {
		t.Fatal(err)
	}
	list, err := l.w.Sessions.Store.Questions(t.Context(), "", false)
	if err != nil || len(list) != 2 || list[0].Text != "Bash: echo [redacted]" || list[1].Text != "[redacted]" {
		t.Fatalf("questions = %+v, %v, want two without secrets", list, err)
	}
	l.w.Sessions.Actor = "user:me"
	qs := Questions{Sessions: l.w.Sessions}
	if _, err := qs.Answer(t.Context(), list[0].ID, "allow"); err != nil {
		t.Fatal(err)
	}
	r = relay() // another keeper
	if err := r.sync(t.Context(), s, asks); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		answers := make(chan guestproto.Answer)
		done := make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		go func() { done <- r.deliver(ctx, answers) }()
		began := time.Now()
		for i, after := range []time.Duration{answerEvery, resendAfter} {
			a := <-answers
			if a.ID != first || a.Text != "allow" {
				t.Errorf("delivery %d = %+v, want allow to %s", i, a, first)
			}
			if took := time.Since(began); took > after+answerEvery {
				t.Errorf("delivery %d after %v, want at most %v", i, took, after+answerEvery)
			}
			began = time.Now()
		}
		stop()
		<-done
	})
	if err := r.sync(t.Context(), s, guestproto.Observation{Questions: asks.Questions[1:], Taken: []string{first}}); err != nil {
		t.Fatal(err)
	}
	if err := r.sync(t.Context(), s, guestproto.Observation{}); err != nil {
		t.Fatal(err)
	}
	evs, err := l.w.Sessions.Store.Events(t.Context(), s.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, ev := range evs {
		if ev.Kind == EventQuestion {
			got = append(got, string(ev.Data))
		}
	}
	claude := `{"id":"` + list[0].ID + `","state":"STATE","kind":"permission","agent":"claude","text":"Bash: echo [redacted]"`
	script := `{"id":"` + list[1].ID + `","state":"STATE","kind":"text","text":"[redacted]"`
	at := func(text, state, rest string) string { return strings.Replace(text, "STATE", state, 1) + rest }
	const answer = `,"answer":"allow","by":"user:me"}`
	want := []string{
		at(claude, "open", "}"), at(script, "open", "}"), at(claude, "answered", answer), at(claude, "delivered", answer), at(script, "closed", "}"),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestUnappliedAnswer checks that an answer that cannot be applied now is tried again, without
// another event each time, and does not hold up other answers.
func TestUnappliedAnswer(t *testing.T) {
	l, s, _ := newLookout(t)
	sessions := l.w.Sessions
	held := gateway.Held{Name: "asked.example", Port: 443, Since: time.Now()}
	asked := []store.Question{
		{ID: "00000000000a", GuestID: heldID(held), Kind: store.QuestionNetwork, Text: "[redacted]:443"},
		{ID: "00000000000b", GuestID: "budget:tokens:1", Kind: store.QuestionBudget, Tool: gateway.LimitTokens},
		{ID: "00000000000c", GuestID: heldID(gateway.Held{Name: "a_b.example", Port: 443, Since: time.Now()}), Kind: store.QuestionNetwork}, // a name that no rule can have
	}
	if _, err := sessions.Store.SyncQuestions(t.Context(), s.ID, asked, nil, store.Question.OfGateway, admitQuestions); err != nil {
		t.Fatal(err)
	}
	for id, answer := range map[string]string{"00000000000a": "allow", "00000000000b": "deny", "00000000000c": "allow"} {
		if _, err := (Questions{Sessions: sessions}).Answer(t.Context(), id, answer); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 { // nothing answers at the guest's address
		var err error
		if s, err = sessions.Get(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		applied, unapplied, failed := Net{Sessions: sessions}.applyAnswers(t.Context(), s)
		if failed == nil || len(unapplied) != 1 || unapplied[0].ID != "00000000000a" || !slices.Equal(applied, []string{asked[1].GuestID, asked[2].GuestID}) {
			t.Fatalf("applyAnswers = %v, %+v, %v, want only the first left to apply", applied, unapplied, failed)
		}
	}
	evs, err := sessions.Store.Events(t.Context(), s.ID, 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	changes := 0
	for _, ev := range evs {
		if ev.Kind == EventNet {
			changes++
		}
	}
	if changes != 1 || len(s.Status.Net.Allow) != 1 || s.Status.Net.Allow[0].Pattern != held.Name {
		t.Errorf("changes = %d, allowed %+v, want one change that allows %s", changes, s.Status.Net.Allow, held.Name)
	}
}
