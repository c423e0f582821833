package store_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestPruneEvents(t *testing.T) {
	s, path := numbered(t, 5, 0)
	for _, id := range []string{"busy", "over", "new"} {
		mustTask(t, s, task(id))
		if err := s.AppendAll(t.Context(), id, []store.Event{event("x", 1), event("x", 2)}); err != nil {
			t.Fatal(err)
		}
	}
	raw(t, path, `UPDATE events SET at = 1000 WHERE subject <> 'new'`)
	busy := func(id string) bool { return id == "busy" }
	for _, c := range []struct {
		what   string
		before int64
		dry    bool
		events int
	}{
		{"none so old", 1000, false, 0},
		{"a dry run", 1001, true, 6},
		{"old ones, but the newest", 1001, false, 6},
		{"again", 1001, false, 0},
	} {
		n, bytes, err := s.PruneEvents(t.Context(), time.UnixMilli(c.before), busy, c.dry)
		if err != nil || n != c.events || (bytes > 0) != (n > 0) {
			t.Errorf("PruneEvents %s = %d events, %d bytes, %v, want %d events", c.what, n, bytes, err, c.events)
		}
	}
	for id, want := range map[string][2]int64{"one": {5, 5}, "over": {3, 3}, "busy": {1, 3}, "new": {1, 3}} {
		if oldest, newest, err := s.EventRange(t.Context(), id); err != nil || [2]int64{oldest, newest} != want {
			t.Errorf("EventRange(%s) = %d, %d, %v, want %v", id, oldest, newest, err, want)
		}
	}
	// No number is used again.
	if err := s.Append(t.Context(), "over", event("x", 3)); err != nil {
		t.Fatal(err)
	}
	if evs, err := s.Events(t.Context(), "over", 3, 10); err != nil || len(evs) != 1 || evs[0].Seq != 4 {
		t.Errorf("Events(over, 3) = %+v, %v, want event 4 alone", evs, err)
	}
	if r, err := s.Session(t.Context(), "one"); err != nil || r.Name == "" {
		t.Errorf("Session(one) after pruning = %+v, %v, want the row, whose name is never reused", r, err)
	}
}

// If the clock went back, old events follow recent ones. What stays has no gap.
func TestPruneAfterTheClockWentBack(t *testing.T) {
	s, path := numbered(t, 8, 0)
	raw(t, path, `UPDATE events SET at = CASE WHEN seq IN (4, 7) THEN 5000 ELSE 1000 END`)
	if n, _, err := s.PruneEvents(t.Context(), time.UnixMilli(2000), never, false); err != nil || n != 3 {
		t.Fatalf("PruneEvents = %d, %v, want 3, nil", n, err)
	}
	evs, err := s.Events(t.Context(), "one", store.Oldest, 10)
	if err != nil || len(evs) != 5 {
		t.Fatalf("Events(one) = %+v, %v, want 5", evs, err)
	}
	for i, ev := range evs {
		if ev.Seq != int64(4+i) {
			t.Errorf("seq of event %d = %d, want %d", i, ev.Seq, 4+i)
		}
	}
	if !evs[1].At.Before(evs[0].At) {
		t.Errorf("times of the first two events = %v, %v, want the second before the first", evs[0].At, evs[1].At)
	}
}

// Wherever pruning is killed, what is left has no gap, and the next run continues.
func TestKillWhilePruning(t *testing.T) {
	const n = 2500 // of which 2499 are removed, in three transactions
	for _, step := range []int{1, 500, 1000, 1001, 1002, 2001, 2002, 2003, 2502} {
		s, path := numbered(t, n, 0)
		p := spawn(t, fmt.Sprint("prune 0 ", step), path)
		p.shoot(t)
		if out, err := p.finish(); err == nil {
			t.Fatalf("child before step %d = nil, output %q, want it killed", step, out)
		}
		evs, err := s.Events(t.Context(), "one", store.Oldest, n)
		if err != nil || len(evs) == 0 || evs[len(evs)-1].Seq != n || evs[len(evs)-1].Seq-evs[0].Seq != int64(len(evs)-1) {
			t.Fatalf("step %d: Events = %d events, %v, want them without gaps up to %d", step, len(evs), err, n)
		}
		if gone := n - len(evs); gone != (step-1)/1001*1000 {
			t.Errorf("events pruned before step %d = %d, want %d", step, gone, (step-1)/1001*1000)
		}
		if _, _, err := s.PruneEvents(t.Context(), time.Now().Add(time.Hour), never, false); err != nil {
			t.Fatal(err)
		}
		if evs, err := s.Events(t.Context(), "one", store.Oldest, n); err != nil || len(evs) != 1 || evs[0].Seq != n {
			t.Fatalf("Events after the last pruning = %+v, %v, want event %d alone", evs, err, n)
		}
	}
}
