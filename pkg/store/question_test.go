package store_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// TestQuestionsOfAnEarlierState checks that a guest that returned to an earlier state can ask again what
// was answered since, and that a question that waits stays the same.
func TestQuestionsOfAnEarlierState(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	create(t, s, "a", "ready")
	create(t, s, "b", "ready")
	a, b := &asker{T: t, s: s, session: "a"}, &asker{T: t, s: s, session: "b"}
	before := a.sync(nil, "1", "2")
	b.sync(nil, "1")
	b.sync(nil)
	if _, err := answer(s, t, before[0].ID, "user", "allow"); err != nil {
		t.Fatal(err)
	}
	a.sync([]string{"1"}, "2")
	for range 2 { // a killed keeper repeats it
		if err := s.ReuseQuestionIDs(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	again := a.sync(nil, "1", "2")
	if len(again) != 2 || again[0].ID != before[1].ID || again[1].GuestID != "1" || again[1].ID == before[0].ID {
		t.Errorf("questions in the earlier state = %+v, want that of %+v, and 1 as a new one", again, before[1])
	}
	if q, err := s.Question(t.Context(), before[0].ID); err != nil || q.State != store.QuestionDelivered {
		t.Errorf("the answered question = %+v, %v, want it delivered", q, err)
	}
	if got := b.sync(nil, "1"); len(got) != 0 {
		t.Errorf("questions of another session = %+v, want none", got)
	}
}

// asker makes the questions of a session those with the given ids.
type asker struct {
	*testing.T
	s       *store.Store
	session string
	n       int
	changes []string // "text state" of every change
}

func (a *asker) sync(taken []string, guestIDs ...string) []store.Question {
	a.Helper()
	var asked []store.Question
	for _, id := range guestIDs {
		a.n++
		asked = append(asked, store.Question{ID: fmt.Sprintf("%s-%d", a.session, a.n), GuestID: id, Kind: "permission", Agent: "claude", Text: "text of " + id, Choices: []string{"x"}})
	}
	waiting, err := a.s.SyncQuestions(a.Context(), a.session, asked, taken, func(store.Question) bool { return true }, func(_ *store.Session, changed []store.Question) (evs []store.Event, err error) {
		for _, q := range changed {
			a.changes = append(a.changes, strings.TrimPrefix(q.Text, "text of ")+" "+string(q.State))
			evs = append(evs, store.Event{Kind: "question"})
		}
		return evs, nil
	})
	if err != nil {
		a.Fatal(err)
	}
	return waiting
}

func answer(s *store.Store, t *testing.T, id, by, text string) (store.Question, error) {
	return s.AnswerQuestion(t.Context(), id, by, func(store.Question) (string, error) { return text, nil }, func(q store.Question) store.Event {
		return store.Event{Kind: "answered"}
	})
}

func TestQuestions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	s := reopen(t, path)
	create(t, s, "a", "ready")
	create(t, s, "b", "ready")
	a, b := &asker{T: t, s: s, session: "a"}, &asker{T: t, s: s, session: "b"}
	waiting := a.sync(nil, "1", "2")
	b.sync(nil, "1") // another guest may use the same id
	if got := a.sync(nil, "1", "2"); !cmp.Equal(got, waiting) {
		t.Errorf("waiting the second time = %+v, want %+v", got, waiting)
	}
	if diff := cmp.Diff([]string{"1 open", "2 open"}, a.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}

	// Of several answers, also of other processes, one succeeds.
	other := reopen(t, path)
	var wait sync.WaitGroup
	errs := make([]error, 20)
	for i := range errs {
		wait.Go(func() {
			_, errs[i] = answer([]*store.Store{s, other}[i%2], t, waiting[0].ID, fmt.Sprint("user", i), "allow")
		})
	}
	wait.Wait()
	won := -1
	for i, err := range errs {
		switch {
		case err == nil && won < 0:
			won = i
		case fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "already answered by user"):
			t.Errorf("answer %d = %v, want one success, and conflicts that name who answered", i, err)
		}
	}
	q, err := other.Question(t.Context(), waiting[0].ID)
	want := waiting[0]
	want.State, want.Answer, want.By = store.QuestionAnswered, "allow", fmt.Sprint("user", won)
	if diff := cmp.Diff(want, q, cmpopts.IgnoreFields(store.Question{}, "AnsweredAt")); err != nil || diff != "" || q.AnsweredAt.IsZero() {
		t.Errorf("answered question = %v (-want +got):\n%s", err, diff)
	}
	// What check refuses changes nothing.
	no := errors.New("no")
	if _, err := s.AnswerQuestion(t.Context(), waiting[1].ID, "user", func(store.Question) (string, error) { return "", no }, nil); !errors.Is(err, no) {
		t.Errorf("refused answer = %v, want %v", err, no)
	}

	// 1 was taken, 2 was answered in the terminal, and 3 is new.
	a.changes = nil
	if got := a.sync([]string{"2", "1"}, "3"); len(got) != 1 || got[0].GuestID != "3" {
		t.Errorf("waiting = %+v, want only 3", got)
	}
	if diff := cmp.Diff([]string{"1 delivered", "2 closed", "3 open"}, a.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if _, err := answer(s, t, waiting[1].ID, "user", "allow"); fail.CodeOf(err) != fail.Conflict || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("answer to an ended question = %v, want a conflict", err)
	}
	if _, err := answer(s, t, "none", "user", "allow"); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("answer to no question = %v, want code %s", err, fail.NotFound)
	}
	// A guest does not open a question again.
	a.changes = nil
	if got := a.sync(nil, "2"); len(got) != 0 {
		t.Errorf("waiting = %+v, want no question with a used id", got)
	}

	// A session that does not run asks nothing.
	list := func(session string, all bool) (found []string) {
		t.Helper()
		list, err := s.Questions(t.Context(), session, all)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range list {
			found = append(found, q.Session+q.GuestID+" "+string(q.State))
		}
		return found
	}
	if _, err := s.Advance(t.Context(), "b", "ready", "stopping", store.Event{Kind: "x"}, nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		session string
		all     bool
		want    []string
	}{
		{"", false, nil},
		{"", true, []string{"a1 delivered", "a2 closed", "b1 closed", "a3 closed"}},
		{"b", true, []string{"b1 closed"}},
	} {
		if diff := cmp.Diff(c.want, list(c.session, c.all)); diff != "" {
			t.Errorf("Questions(%q, %v) (-want +got):\n%s", c.session, c.all, diff)
		}
	}
}

// TestQuestionsAreBounded checks that a guest that asks without end does not fill the store.
func TestQuestionsAreBounded(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	create(t, s, "a", "ready")
	a := &asker{T: t, s: s, session: "a"}
	for i := range 300 {
		a.sync(nil, fmt.Sprint(i))
	}
	all, err := s.Questions(t.Context(), "a", true)
	if err != nil || len(all) != 200 || all[199].GuestID != "299" || !slices.IsSortedFunc(all, func(a, b store.Question) int { return a.AskedAt.Compare(b.AskedAt) }) {
		t.Errorf("%d questions are kept, %v, want the last 200", len(all), err)
	}
}

// create adds a session in a phase.
func create(t *testing.T, s *store.Store, id, phase string) {
	t.Helper()
	n := row(id)
	n.Phase, n.RepoKey = phase, id
	if _, created, err := s.Create(t.Context(), n, event("made", 0), admitAll); err != nil || !created {
		t.Fatalf("Create(%s) = %t, %v, want true, nil", id, created, err)
	}
}
