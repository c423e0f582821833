package store_test

import (
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestPruneEvents(t *testing.T) {
	s, _ := withSession(t)
	two := row("two")
	two.RepoKey = "github.com/o/two"
	if _, created, err := s.Create(t.Context(), two, event("made", 0), admitAll); err != nil || !created {
		t.Fatal(created, err)
	}
	gone, err := s.Update(t.Context(), "two", func(r *store.Session) (store.Event, error) {
		r.Phase = "gone"
		return event("gone", 1), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(time.Hour)
	for _, c := range []struct {
		what   string
		before time.Time
		dry    bool
		events int
	}{
		{"gone since then", gone.StateChangedAt, false, 0},
		{"a dry run", later, true, 2},
		{"gone before", later, false, 2},
		{"again", later, false, 0},
	} {
		n, bytes, err := s.PruneEvents(t.Context(), c.before, c.dry)
		if err != nil || n != c.events || (bytes > 0) != (n > 0) {
			t.Errorf("%s: %d events, %d bytes, %v", c.what, n, bytes, err)
		}
	}
	if evs, err := s.Events(t.Context(), "one", 0, 10); err != nil || len(evs) != 1 {
		t.Errorf("of the session that exists: %v, %v", evs, err)
	}
	if r, err := s.Session(t.Context(), "two"); err != nil || r.Name == "" {
		t.Errorf("the row, whose name is never used again: %v", err)
	}
}
