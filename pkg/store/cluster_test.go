package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const claimed = "0123456789ab"

// imported returns a store with a task that this host claimed in its cluster, and a lease.
func imported(t *testing.T) *store.Store {
	t.Helper()
	s, _ := newStore(t)
	if err := s.SetLease(t.Context(), bootclock.Now()+time.Hour); err != nil {
		t.Fatal(err)
	}
	evs := []store.Event{{Seq: 1, At: time.UnixMilli(1), Kind: "submitted", Data: []byte(`{"a":1}`)}, {Seq: 2, At: time.UnixMilli(2), Kind: "claimed", Data: []byte(`{}`)}}
	for range 2 { // a process may have ended in between
		err := s.ImportTask(t.Context(), store.Task{ID: claimed, Name: "task", Phase: "STAGING", Desired: "run", Labels: map[string]string{"team": "a"}, Manifest: []byte(`{}`)},
			[]byte("text"), evs, store.Claim{Fence: 7, Revision: 9})
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func note(kind string) func(*store.Task) ([]store.Event, error) {
	return func(*store.Task) ([]store.Event, error) { return []store.Event{{Kind: kind}}, nil }
}

// TestClusterEventsAreShownOnceShipped checks that readers and followers see an event of a task of a
// cluster only when it is in the cluster's log.
func TestClusterEventsAreShownOnceShipped(t *testing.T) {
	s := imported(t)
	if _, err := s.UpdateTask(t.Context(), claimed, note("third")); err != nil {
		t.Fatal(err)
	}
	seen := make(chan store.Event, 10)
	ctx, stop := context.WithCancel(t.Context())
	following := make(chan struct{})
	go func() {
		defer close(following)
		for ev, err := range s.Follow(ctx, claimed, 0) {
			if err == nil {
				seen <- ev
			}
		}
	}()
	defer func() { stop(); <-following }()
	for _, want := range []int64{1, 2} {
		if ev := <-seen; ev.Seq != want {
			t.Fatalf("followed event = %d, want %d", ev.Seq, want)
		}
	}
	evs, err := s.Events(t.Context(), claimed, 0, 10)
	if err != nil || len(evs) != 2 {
		t.Errorf("Events before the third is in the log = %v, %v, want 2", evs, err)
	}
	if _, newest, err := s.EventRange(t.Context(), claimed); err != nil || newest != 2 {
		t.Errorf("newest event = %d, %v, want 2", newest, err)
	}

	c, row, evs, err := s.Unshipped(t.Context(), claimed, 1<<20)
	if err != nil || row.ID != claimed || len(evs) != 1 || evs[0].Seq != 3 || c.Fence != 7 || c.Revision != 9 || c.Shipped != 2 {
		t.Fatalf("Unshipped = %+v, %+v, %v, %v, want the third event of the claim", c, row, evs, err)
	}
	if err := s.Ship(t.Context(), c, 12, 3); err != nil {
		t.Fatal(err)
	}
	select {
	case ev := <-seen:
		if ev.Seq != 3 || ev.Kind != "third" {
			t.Errorf("followed event = %+v, want the third", ev)
		}
	case <-time.After(time.Minute):
		t.Error("the follower did not see the third event")
	}
	if err := s.Ship(t.Context(), c, 12, 3); !errors.Is(err, store.ErrStale) {
		t.Errorf("Ship with an outdated claim = %v, want %v", err, store.ErrStale)
	}
	if all, err := s.Claims(t.Context()); err != nil || len(all) != 1 || all[0].Revision != 12 || all[0].Shipped != 3 {
		t.Errorf("Claims = %+v, %v, want one up to the third event", all, err)
	}
}

// TestNothingIsWrittenWithoutALease checks each kind of write for a task of a cluster.
func TestNothingIsWrittenWithoutALease(t *testing.T) {
	s := imported(t)
	other, err := s.CreateTask(t.Context(), store.Task{ID: "fedcba987654", Phase: "PENDING", Desired: "run", Manifest: []byte(`{}`)}, nil, store.Event{Kind: "made"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SetLease(t.Context(), bootclock.Now()); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() error{
		"UpdateTask": func() error { _, err := s.UpdateTask(t.Context(), claimed, note("x")); return err },
		"a change without an event": func() error {
			_, err := s.UpdateTask(t.Context(), claimed, func(row *store.Task) ([]store.Event, error) { row.Desired = "cancel"; return nil, nil })
			return err
		},
		"Append": func() error { return s.Append(t.Context(), claimed, store.Event{Kind: "x"}) },
	} {
		if err := f(); !errors.Is(err, store.ErrFenced) || fail.CodeOf(err) != fail.Host {
			t.Errorf("%s after the end of the lease = %v, want %v", what, err, store.ErrFenced)
		}
	}
	if _, err := s.UpdateTask(t.Context(), other.ID, note("x")); err != nil {
		t.Errorf("change of a task of this host alone = %v, want nil", err)
	}
	if evs, err := s.Events(t.Context(), claimed, 0, 10); err != nil || len(evs) != 2 {
		t.Errorf("events = %v, %v, want those of the log", evs, err)
	}
	if err := s.SetLease(t.Context(), bootclock.Now()+time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("x")); err != nil {
		t.Errorf("change with a new lease = %v, want nil", err)
	}
}

func TestDisownTask(t *testing.T) {
	s := imported(t)
	if err := s.DisownTask(t.Context(), store.Claim{Task: claimed, Fence: 6}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Task(t.Context(), claimed); err != nil {
		t.Errorf("task after another claim of it was given up = %v, want it kept", err)
	}
	for range 2 {
		if err := s.DisownTask(t.Context(), store.Claim{Task: claimed, Fence: 7}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Task(t.Context(), claimed); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("task that was given up = %v, want not found", err)
	}
	if text, err := s.TaskText(t.Context(), claimed); err != nil || text != nil {
		t.Errorf("text of a task that was given up = %q, %v, want none", text, err)
	}
	if list, err := s.Tasks(t.Context(), store.TaskFilter{Label: store.Label{Key: "team", Value: "a"}}); err != nil || len(list) != 0 {
		t.Errorf("tasks with its label = %v, %v, want none", list, err)
	}
	if all, err := s.Claims(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("Claims = %v, %v, want none", all, err)
	}
	// The same host may claim it again later.
	if err := s.ImportTask(t.Context(), store.Task{ID: claimed, Phase: "STAGING", Desired: "run", Manifest: []byte(`{}`)}, nil, nil, store.Claim{Fence: 20, Revision: 20}); err != nil {
		t.Errorf("ImportTask again = %v, want nil", err)
	}
}

func TestWaitShipped(t *testing.T) {
	s := imported(t)
	if err := s.WaitShipped(t.Context(), claimed); err != nil {
		t.Errorf("WaitShipped with everything in the log = %v, want nil", err)
	}
	if err := s.WaitShipped(t.Context(), "fedcba987654"); err != nil {
		t.Errorf("WaitShipped of a task of no cluster = %v, want nil", err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("third")); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := s.WaitShipped(short, claimed); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitShipped with an event that is not in the log = %v, want %v", err, context.DeadlineExceeded)
	}
	waited := make(chan error, 1)
	go func() { waited <- s.WaitShipped(t.Context(), claimed) }()
	c, _, _, err := s.Unshipped(t.Context(), claimed, 1<<20)
	if err == nil {
		err = s.Ship(t.Context(), c, 12, 3)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Errorf("WaitShipped once the event is in the log = %v, want nil", err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("fourth")); err != nil {
		t.Fatal(err)
	}
	go func() { waited <- s.WaitShipped(t.Context(), claimed) }()
	if err := s.SetLease(t.Context(), bootclock.Now()); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; !errors.Is(err, store.ErrFenced) {
		t.Errorf("WaitShipped when the lease ends = %v, want %v", err, store.ErrFenced)
	}
}
