package store_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const claimed = "0123456789ab"

// imported returns a store with a task that this host claimed in its cluster, and a lease.
func imported(t *testing.T) *store.Store {
	t.Helper()
	s, _ := newStore(t)
	lease(t, s, time.Hour)
	evs := []store.Event{{Seq: 1, At: time.UnixMilli(1), Kind: "submitted", Data: []byte(`{"a":1}`)}, {Seq: 2, At: time.UnixMilli(2), Kind: "claimed", Data: []byte(`{}`)}}
	row := store.Task{ID: claimed, Name: "task", Phase: "PENDING", Desired: "run", Host: store.Waiting, Labels: map[string]string{"team": "a"}, Manifest: []byte(`{}`)}
	for range 2 { // a process may have ended in between
		if err := s.Replicate(t.Context(), []store.Replica{
			{Task: row, Text: []byte("text"), Events: evs[:1], Newest: 1, Revision: 7},
			{Task: row, Events: evs[1:], Newest: 2, Revision: 9, Fence: 9},
		}, 9); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// lease extends the host's lease to that time from now.
func lease(t *testing.T, s *store.Store, d time.Duration) {
	t.Helper()
	incarnation, err := s.Incarnation(t.Context())
	if err == nil {
		err = s.SetLease(t.Context(), incarnation, bootclock.Now()+d)
	}
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil || row.ID != claimed || len(evs) != 1 || evs[0].Seq != 3 || c.Fence != 9 || c.Revision != 9 || c.Shipped != 2 {
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
	if all, err := s.Unsettled(t.Context()); err != nil || len(all) != 1 || all[0].Revision != 12 || all[0].Shipped != 3 {
		t.Errorf("Unsettled = %+v, %v, want one up to the third event", all, err)
	}
}

// TestNothingIsWrittenWithoutALease checks each kind of write for a task of a cluster.
func TestNothingIsWrittenWithoutALease(t *testing.T) {
	s := imported(t)
	other, err := s.CreateTask(t.Context(), store.Task{ID: "fedcba987654", Phase: "PENDING", Desired: "run", Manifest: []byte(`{}`)}, nil, store.Event{Kind: "made"})
	if err != nil {
		t.Fatal(err)
	}
	lease(t, s, 0)
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
	lease(t, s, time.Hour)
	if _, err := s.UpdateTask(t.Context(), claimed, note("x")); err != nil {
		t.Errorf("change with a new lease = %v, want nil", err)
	}
}

// TestDisown checks that a task which is given up is a replica, as the cluster's log has it.
func TestDisown(t *testing.T) {
	s := imported(t)
	if _, err := s.UpdateTask(t.Context(), claimed, note("third")); err != nil {
		t.Fatal(err)
	}
	if err := s.Disown(t.Context(), store.Claim{Task: claimed, Fence: 6}); err != nil {
		t.Fatal(err)
	}
	if row, err := s.Task(t.Context(), claimed); err != nil || row.Host != "" {
		t.Errorf("task after another claim of it was given up = %+v, %v, want it kept", row, err)
	}
	for range 2 {
		if err := s.Disown(t.Context(), store.Claim{Task: claimed, Fence: 9}); err != nil {
			t.Fatal(err)
		}
	}
	if row, err := s.Task(t.Context(), claimed); err != nil || row.Host != store.Waiting {
		t.Errorf("task that was given up = %+v, %v, want it without a host", row, err)
	}
	if here, err := s.Tasks(t.Context(), store.TaskFilter{Phases: []string{"PENDING"}, Here: true}); err != nil || len(here) != 0 {
		t.Errorf("tasks of this host = %v, %v, want none", here, err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("x")); !errors.Is(err, store.ErrElsewhere) {
		t.Errorf("change of a task that was given up = %v, want %v", err, store.ErrElsewhere)
	}
	if all, err := s.Unsettled(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("Unsettled = %v, %v, want none", all, err)
	}
	// Another host has it, and writes another third event. Then this one claims it again.
	ev := func(seq int64, kind string) []store.Event {
		return []store.Event{{Seq: seq, At: time.UnixMilli(seq), Kind: kind, Data: []byte(`{}`)}}
	}
	row := store.Task{ID: claimed, Name: "task", Phase: "STAGING", Desired: "run", Host: "other", Manifest: []byte(`{}`)}
	if err := s.Replicate(t.Context(), []store.Replica{{Task: row, Events: ev(3, "released"), Newest: 3, Revision: 12}, {Task: row, Events: ev(4, "claimed"), Newest: 4, Revision: 15}}, 15); err != nil {
		t.Fatal(err)
	}
	if row, err := s.Task(t.Context(), claimed); err != nil || row.Host != "other" || row.Phase != "STAGING" {
		t.Errorf("task of another host = %+v, %v, want STAGING there", row, err)
	}
	if err := s.Replicate(t.Context(), []store.Replica{{Task: row, Events: ev(5, "claimed"), Newest: 5, Revision: 20, Fence: 20}}, 20); err != nil {
		t.Fatal(err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("mine")); err != nil {
		t.Errorf("change of a task that was claimed again = %v, want nil", err)
	}
	evs, err := s.Events(t.Context(), claimed, 0, 10)
	if err != nil || len(evs) != 5 || evs[2].Kind != "released" {
		t.Errorf("events = %v, %v, want 5 with the third of the log", evs, err)
	}
	if p, err := s.Position(t.Context()); err != nil || p != 20 {
		t.Errorf("Position = %d, %v, want 20", p, err)
	}
}

// TestIncarnationIsRead checks that reading the incarnation, as each heartbeat and entry of the log does,
// does not wait for writers.
func TestIncarnationIsRead(t *testing.T) {
	s := imported(t)
	want, err := s.Incarnation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Tx(t.Context(), func(*sql.Tx) error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if is, err := s.Incarnation(ctx); err != nil || is != want {
			t.Errorf("Incarnation while another process writes = %q, %v, want %q", is, err, want)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// TestReincarnate checks that a host which was revoked has nothing of its claims left.
func TestReincarnate(t *testing.T) {
	s := imported(t)
	before, err := s.Incarnation(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	lost, err := s.Reincarnate(t.Context())
	if err != nil || len(lost) != 1 || lost[0] != claimed {
		t.Errorf("Reincarnate = %v, %v, want the claimed task", lost, err)
	}
	if after, err := s.Incarnation(t.Context()); err != nil || after == before {
		t.Errorf("Incarnation = %q, %v, want another than %q", after, err, before)
	}
	if err := s.SetLease(t.Context(), before, bootclock.Now()+time.Hour); !errors.Is(err, store.ErrStale) {
		t.Errorf("SetLease for the earlier incarnation = %v, want %v", err, store.ErrStale)
	}
	if row, err := s.Task(t.Context(), claimed); err != nil || row.Host != store.Waiting {
		t.Errorf("task = %+v, %v, want it without a host", row, err)
	}
}

// TestOutgoing covers a task that this host has accepted for its cluster.
func TestOutgoing(t *testing.T) {
	s, _ := newStore(t)
	lease(t, s, time.Hour)
	row, err := s.CreateTask(t.Context(), store.Task{ID: claimed, Phase: "PENDING", Desired: "run", Host: store.Waiting, Manifest: []byte(`{}`)}, []byte("text"), store.Event{Kind: "made"})
	if err != nil {
		t.Fatal(err)
	}
	if evs, err := s.Events(t.Context(), claimed, 0, 10); err != nil || len(evs) != 0 {
		t.Errorf("events before the cluster has the task = %v, %v, want none", evs, err)
	}
	c, _, evs, err := s.Unshipped(t.Context(), claimed, 1<<20)
	if err != nil || c.Fence != 0 || c.Revision != 0 || len(evs) != 1 {
		t.Errorf("Unshipped = %+v, %v, %v, want the first event", c, evs, err)
	}
	row.Host = "other"
	for range 2 {
		if err := s.Replicate(t.Context(), []store.Replica{{Task: row, Text: []byte("text"), Events: evs, Newest: 1, Revision: 3}}, 3); err != nil {
			t.Fatal(err)
		}
	}
	if evs, err := s.Events(t.Context(), claimed, 0, 10); err != nil || len(evs) != 1 {
		t.Errorf("events once the cluster has the task = %v, %v, want one", evs, err)
	}
	w := store.Wish{Task: claimed, Desired: "cancel"}
	if err := s.AddWish(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if all, err := s.Wishes(t.Context()); err != nil || len(all) != 1 || all[0] != w {
		t.Errorf("Wishes = %v, %v, want %v", all, err, w)
	}
	if err := s.Fulfil(t.Context(), store.Wish{Task: claimed, Desired: "destroyed"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Fulfil(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	if all, err := s.Wishes(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("Wishes after they are in the log = %v, %v, want none", all, err)
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
	lease(t, s, 0)
	if err := <-waited; !errors.Is(err, store.ErrFenced) {
		t.Errorf("WaitShipped when the lease ends = %v, want %v", err, store.ErrFenced)
	}
}

// TestClusterStatus counts what a host has to send, and the tasks of its cluster that have not ended.
func TestClusterStatus(t *testing.T) {
	s := imported(t)
	check := func(when string, want store.ClusterStatus) {
		t.Helper()
		got, err := s.ClusterStatus(t.Context(), []string{"PENDING", "RUNNING"})
		if age := time.Since(got.OldestUnsent); want.Unsent > 0 && age < time.Minute {
			want.OldestUnsent = got.OldestUnsent
		}
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("status %s: %v, (-want +got):\n%s", when, err, diff)
		}
	}
	check("of a claimed task", store.ClusterStatus{Position: 9, Unsettled: 1, Phases: map[string]int{"PENDING": 1}})
	for range 2 {
		if _, err := s.UpdateTask(t.Context(), claimed, note("new")); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.AddWish(t.Context(), store.Wish{Task: "00000000000a", Desired: "cancel"}); err != nil {
		t.Fatal(err)
	}
	var others []store.Replica
	for i, row := range []store.Task{
		{ID: "00000000000a", Phase: "RUNNING", Host: "b"},
		{ID: "00000000000b", Phase: "COMPLETED", Host: "b"},
		{ID: "00000000000c", Phase: "PENDING", Host: store.Waiting, StateChangedAt: time.UnixMilli(2000).UTC()},
		{ID: "00000000000d", Phase: "PENDING", Host: store.Waiting, StateChangedAt: time.UnixMilli(1000).UTC()},
	} {
		row.Name, row.Desired, row.Manifest = "task", "run", []byte(`{}`)
		others = append(others, store.Replica{Task: row, Text: []byte("text"), Newest: 1, Revision: uint64(20 + i)})
	}
	if err := s.Replicate(t.Context(), others, 23); err != nil {
		t.Fatal(err)
	}
	if _, err := s.CreateTask(t.Context(), store.Task{ID: "00000000000e", Name: "task", Phase: "RUNNING", Desired: "run", Manifest: []byte(`{}`)}, []byte("text"), store.Event{Kind: "here"}); err != nil {
		t.Fatal(err) // of this host alone
	}
	check("with events to send", store.ClusterStatus{Position: 23, Unsettled: 1, Wishes: 1, Unsent: 2, Phases: map[string]int{"PENDING": 3, "RUNNING": 1}, Waiting: 2, OldestWaiting: time.UnixMilli(1000).UTC()})
	c, _, _, err := s.Unshipped(t.Context(), claimed, 1<<20)
	if err == nil {
		err = s.Ship(t.Context(), c, 30, 4)
	}
	if err == nil {
		c.Revision, c.Shipped = 30, 4
		err = s.Settle(t.Context(), c)
	}
	if err != nil {
		t.Fatal(err)
	}
	check("at the end", store.ClusterStatus{Position: 23, Wishes: 1, Phases: map[string]int{"PENDING": 3, "RUNNING": 1}, Waiting: 2, OldestWaiting: time.UnixMilli(1000).UTC()})
}

// TestSubmitted checks that only a user of this host makes a task one that was submitted here.
func TestSubmitted(t *testing.T) {
	s := imported(t)
	const own = "aaaaaaaaaaaa"
	is := store.Task{ID: own, Name: "task", Phase: "PENDING", Desired: "run", Host: store.Waiting, Manifest: []byte(`{}`)}
	if _, err := s.CreateTask(t.Context(), is, nil, store.Event{Kind: "submitted"}); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		t.Helper()
		for id, want := range map[string]bool{own: true, claimed: false} {
			if c, _, err := s.Claim(t.Context(), id); err != nil || c.Submitted != want {
				t.Errorf("%s: task %s was submitted here = %v, %v, want %v", when, id, c.Submitted, err, want)
			}
		}
	}
	check("at first")
	is.Status = []byte(`{}`)
	if err := s.Replicate(t.Context(), []store.Replica{{Task: is, Newest: 2, Revision: 11, Fence: 11}}, 11); err != nil {
		t.Fatal(err)
	}
	check("after a claim")
	if _, err := s.Reincarnate(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("after its end")
}

// TestLeaveCluster leaves a cluster with an own task, one that was never sent, and replicas.
func TestLeaveCluster(t *testing.T) {
	s := imported(t) // claimed is this host's
	replica := func(id, phase string) store.Replica {
		return store.Replica{
			Task: store.Task{ID: id, Name: "task", Phase: phase, Desired: "run", Host: "other", Labels: map[string]string{"team": "a"}, Manifest: []byte(`{}`)},
			Text: []byte("text"), Events: []store.Event{{Seq: 1, At: time.UnixMilli(1), Kind: "submitted", Data: []byte(`{}`)}}, Newest: 1, Revision: 20,
		}
	}
	const running, ended, unsent = "000000000001", "000000000002", "000000000003"
	if err := s.Replicate(t.Context(), []store.Replica{replica(running, "RUNNING"), replica(ended, "COMPLETED")}, 30); err != nil {
		t.Fatal(err)
	}
	row := store.Task{ID: unsent, Name: "task", Phase: "PENDING", Desired: "run", Host: store.Waiting, Manifest: []byte(`{}`)}
	if _, err := s.CreateTask(t.Context(), row, []byte("text"), store.Event{Kind: "submitted"}); err != nil {
		t.Fatal(err)
	}
	if err := s.LeaveCluster(t.Context(), []string{"COMPLETED"}, false); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("LeaveCluster with a task of the cluster = %v, want a conflict", err)
	}
	if _, err := s.Task(t.Context(), running); err != nil {
		t.Errorf("replica after the refusal = %v, want it", err)
	}
	for range 2 { // it may be repeated
		if err := s.LeaveCluster(t.Context(), []string{"COMPLETED"}, true); err != nil {
			t.Fatal(err)
		}
	}
	for id, host := range map[string]string{claimed: "", unsent: "", ended: "other"} {
		row, err := s.Task(t.Context(), id)
		if err != nil || row.Host != host {
			t.Errorf("host of task %s = %q, %v, want %q", id, row.Host, err, host)
		}
	}
	if _, err := s.Task(t.Context(), running); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("task of another host = %v, want not found", err)
	}
	if tasks, err := s.Tasks(t.Context(), store.TaskFilter{Label: store.Label{Key: "team", Value: "a"}}); err != nil || len(tasks) != 2 {
		t.Errorf("tasks with the label = %d, %v, want 2", len(tasks), err)
	}
	if _, err := s.UpdateTask(t.Context(), claimed, note("own")); err != nil {
		t.Errorf("write for the task after leaving = %v, want nil", err)
	}
	if l, err := s.Lease(t.Context()); err != nil || l.Incarnation != "" {
		t.Errorf("lease = %+v, %v, want none", l, err)
	}
}
