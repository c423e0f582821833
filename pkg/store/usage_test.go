package store_test

import (
	"errors"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func TestUsage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store.db")
	s := reopen(t, path)
	day := time.Date(2026, 1, 2, 12, 0, 0, 0, time.Local)
	use := func(session, request string, at time.Time, cost int64) store.Usage {
		return store.Usage{Session: session, Request: request, At: at, RepoKey: "github.com/o/" + session, Model: "m", Output: 10, Cost: cost}
	}
	reserve := func(u store.Usage, limits ...store.UsageLimit) error {
		t.Helper()
		return s.ReserveUsage(t.Context(), u, limits)
	}
	for range 2 { // the second time, nothing is added
		for _, u := range []store.Usage{use("a", "1", day, 100), use("a", "2", day.AddDate(0, 0, 1), 50), use("b", "1", day, 7)} {
			if err := reserve(u); err != nil {
				t.Fatal(err)
			}
		}
	}
	settled := use("a", "1", day, 30)
	settled.Model, settled.Input, settled.Output = "n", 4, 1
	later := settled
	later.Cost = 1
	for _, u := range []store.Usage{settled, later, use("a", "unknown", day, 1)} {
		if err := s.SettleUsage(t.Context(), u, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	s = reopen(t, path)
	for by, want := range map[string][]store.UsageSum{
		"session": {{"a", 2, 15, 80}, {"b", 1, 10, 7}},
		"repo":    {{"github.com/o/a", 2, 15, 80}, {"github.com/o/b", 1, 10, 7}},
		"model":   {{"m", 2, 20, 57}, {"n", 1, 5, 30}},
		"day":     {{"2026-01-03", 1, 10, 50}, {"2026-01-02", 2, 15, 37}},
		"task":    {{"", 3, 25, 87}},
	} {
		got, err := s.UsageSums(t.Context(), by, store.UsageQuery{})
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("UsageSums by %s = %v (-want +got):\n%s", by, err, diff)
		}
	}
	if got, err := s.UsageSums(t.Context(), "model", store.UsageQuery{Session: "b", Repo: "github.com/o/b"}); err != nil || len(got) != 1 || got[0].Cost != 7 {
		t.Errorf("UsageSums of session b = %v, %v, want 7", got, err)
	}
	if got, err := s.UsageSums(t.Context(), "session", store.UsageQuery{Since: day.AddDate(0, 0, 1)}); err != nil || len(got) != 1 || got[0].Cost != 50 {
		t.Errorf("UsageSums of the second day = %v, %v, want 50", got, err)
	}
	if _, err := s.UsageSums(t.Context(), "x; DROP TABLE usage", store.UsageQuery{}); err == nil {
		t.Error("UsageSums by an unknown word = nil, want an error")
	}
	for _, c := range []struct {
		limit store.UsageLimit
		cost  int64
		over  bool
	}{
		{store.UsageLimit{Session: "a", Cost: 81}, 20, false},
		{store.UsageLimit{Session: "a", Cost: 100}, 1, true},
		{store.UsageLimit{Session: "b", Cost: 8}, 1, false},
		{store.UsageLimit{Session: "b", Cost: 8}, 1, true},
		{store.UsageLimit{Cost: 109}, 2, false},
		{store.UsageLimit{Cost: 110}, 1, true},
		{store.UsageLimit{Tokens: 55}, 0, true},
		{store.UsageLimit{Since: day.AddDate(0, 0, 1), Cost: 51}, 0, false},
		{store.UsageLimit{}, 1000, false},
	} {
		u := use("c", time.Now().Format(time.RFC3339Nano), day, c.cost)
		u.Session = map[bool]string{true: c.limit.Session, false: "c"}[c.limit.Session != ""]
		err := reserve(u, store.UsageLimit{}, c.limit)
		over, is := errors.AsType[*store.OverLimitError](err)
		if is != c.over || !is && err != nil || is && over.Limit != c.limit {
			t.Errorf("reserve %d with %+v = %v, want over the limit: %t", c.cost, c.limit, err, c.over)
		}
	}
}

// TestUsageOfATree checks that a limit counts what is below a task or session, and nothing beside it.
func TestUsageOfATree(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	for i, tree := range []string{"a/", "a/b/", "a/b/c/", "a/d/", "ab/", "b/"} {
		if err := s.ReserveUsage(t.Context(), store.Usage{Session: "s", Request: string(rune('A' + i)), At: time.Now(), Tree: tree, Cost: 10}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for tree, want := range map[string]int64{"a/": 40, "a/b/": 20, "a/b/c/": 10, "ab/": 10, "x/": 0} {
		for cost, over := range map[int64]bool{want: want > 0, want + 1: false} {
			err := s.ReserveUsage(t.Context(), store.Usage{Session: "s", Request: tree + time.Now().Format(time.RFC3339Nano), At: time.Now(), Tree: "other/"}, []store.UsageLimit{{Tree: tree, Cost: cost}})
			if _, is := errors.AsType[*store.OverLimitError](err); is != over {
				t.Errorf("limit %d of %s = %v, want over the limit: %t", cost, tree, err, over)
			}
		}
	}
}

// Many requests at once cannot pass a limit together.
func TestUsageRace(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	var passed atomic.Int64
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			u := store.Usage{Session: "a", Request: string(rune('A' + i)), At: time.Now(), Cost: 10}
			switch err := s.ReserveUsage(t.Context(), u, []store.UsageLimit{{Session: "a", Cost: 105}}); {
			case err == nil:
				passed.Add(1)
			case !errors.As(err, new(*store.OverLimitError)):
				t.Error(err)
			}
		})
	}
	wait.Wait()
	if n := passed.Load(); n != 11 {
		t.Errorf("requests of 10 until a limit of 105 is reached = %d, want 11", n)
	}
}

// A use that is not settled makes others wait; once it is, or can no longer be, its cost is used.
func TestUsagePending(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	at := time.Now()
	limits := []store.UsageLimit{{Name: "session", Session: "a", Cost: 100}}
	reserve := func(request string, at time.Time) (pending, over bool) {
		t.Helper()
		err := s.ReserveUsage(t.Context(), store.Usage{Session: "a", Request: request, At: at, Cost: 100}, limits)
		e, over := errors.AsType[*store.OverLimitError](err)
		if err != nil && !over {
			t.Fatal(err)
		}
		return over && e.Pending, over
	}
	if _, over := reserve("1", at); over {
		t.Fatal("the first use is over the limit")
	}
	if pending, over := reserve("2", at); !over || !pending {
		t.Errorf("a use beside one that is not settled: over %t, pending %t, want both", over, pending)
	}
	if pending, over := reserve("2", at.Add(time.Hour)); !over || pending {
		t.Errorf("a use an hour after one that is not settled: over %t, pending %t, want over only", over, pending)
	}
	var noted []int64
	note := func(l store.UsageLimit, used store.UsageSum, percent int64) store.Event {
		noted = append(noted, percent)
		return store.NewEvent("budget", map[string]any{"percent": percent, "of": l.Name, "used": used.Cost})
	}
	settle := func(request string, cost int64) {
		t.Helper()
		if err := s.SettleUsage(t.Context(), store.Usage{Session: "a", Request: request, Cost: cost}, limits, []int64{80, 100}, note); err != nil {
			t.Fatal(err)
		}
	}
	settle("1", 70)
	if _, over := reserve("2", at); over {
		t.Error("a use after one that cost less than the limit is over it")
	}
	settle("2", 15)
	settle("2", 1000) // has no effect
	if _, over := reserve("3", at); over {
		t.Error("a use below the limit is over it")
	}
	settle("3", 40)
	if diff := cmp.Diff([]int64{80, 100}, noted); diff != "" {
		t.Errorf("notes mismatch (-want +got):\n%s", diff)
	}
	events, err := s.Events(t.Context(), "a", 0, 10)
	if err != nil || len(events) != 2 || events[1].Kind != "budget" {
		t.Errorf("events = %v, %v, want two of the budget", events, err)
	}
	if pending, over := reserve("4", at); !over || pending {
		t.Errorf("a use above the limit: over %t, pending %t, want over only", over, pending)
	}
}

// What can no longer be settled counts with its bound.
func TestAbandonUsage(t *testing.T) {
	s := reopen(t, filepath.Join(t.TempDir(), "store.db"))
	u := store.Usage{Session: "a", Request: "1", At: time.Now(), Cost: 100}
	if err := errors.Join(s.ReserveUsage(t.Context(), u, nil), s.AbandonUsage(t.Context(), "a")); err != nil {
		t.Fatal(err)
	}
	u.Cost = 1
	if err := s.SettleUsage(t.Context(), u, nil, nil, nil); err != nil {
		t.Fatal(err)
	}
	got, err := s.UsageSums(t.Context(), "session", store.UsageQuery{})
	if diff := cmp.Diff([]store.UsageSum{{Of: "a", Requests: 1, Cost: 100}}, got); err != nil || diff != "" {
		t.Errorf("UsageSums = %v (-want +got):\n%s", err, diff)
	}
}
