package fleet_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// entryOf returns an entry whose change is in a part, and that part.
func entryOf(t *testing.T, kind cluster.Kind, change []byte) cluster.Entry {
	t.Helper()
	sum := sha256.Sum256(change)
	data, err := json.Marshal(map[string]any{"large": []cluster.Part{{SHA256: hex.EncodeToString(sum[:]), Size: int64(len(change))}}})
	if err != nil {
		t.Fatal(err)
	}
	return cluster.Entry{Kind: kind, Data: data}
}

// TestIncompleteEntries writes entries to the log whose large parts are missing. A follower reads on at
// once, and stores the one whose part appears: a claim of its own.
func TestIncompleteEntries(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	one, two := newHost(t, c, "one", newStarts()), newHost(t, c, "two", newStarts())
	const id, last = "000000000001", "000000000002"
	submit(t, one, id, task.RerunNever)
	s, err := one.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	s.Host, s.Incarnation = "two", two.lease()
	claim, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	fence, err := one.Tasks.Tasks.Append(t.Context(), id, entryOf(t, cluster.Claimed, claim), s.Seq)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		if _, err := one.Tasks.Tasks.Append(t.Context(), fmt.Sprintf("%012x", 0x100+i), entryOf(t, cluster.Submitted, []byte{byte(i)}), 0); err != nil {
			t.Fatal(err)
		}
	}
	submit(t, one, last, task.RerunNever)

	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	following.Go(func() {
		for ctx.Err() == nil {
			_ = two.Follow(ctx) // it is tried again
		}
	})
	defer func() { stop(); following.Wait() }()
	began := time.Now()
	testenv.WaitFor(t, "the task after the incomplete entries", func() bool {
		_, err := two.Store.Task(t.Context(), last)
		return err == nil
	})
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("the follower took %v to read on, want no wait for each entry", d)
	}
	if _, err := two.Get(t.Context(), id); err == nil || errors.Is(err, cluster.ErrDamaged) {
		t.Errorf("task whose claim is incomplete = %v, want an error, and not that it is damaged", err)
	}
	if p, err := two.Store.Position(t.Context()); err != nil || p >= fence {
		t.Errorf("position = %d, %v, want it before the claim %d", p, err, fence)
	}
	if _, err := one.Entries.Put(t.Context(), id, bytes.NewReader(claim)); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the claim", func() bool {
		c, _, err := two.Store.Claim(t.Context(), id)
		return err == nil && c.Fence == fence
	})
}

// TestOverdue checks for how long an entry may be incomplete, and how many may be.
func TestOverdue(t *testing.T) {
	t.Parallel()
	f := &fleet.Tasks{Log: slog.New(slog.DiscardHandler)}
	now := time.Now()
	if f.Overdue(1, now) || f.Overdue(1, now.Add(20*time.Second)) || !f.Overdue(1, now.Add(30*time.Second)) {
		t.Error("an entry is overdue at another time than after 30 s")
	}
	for seq := range uint64(2000) {
		f.Overdue(seq, now)
	}
	if !f.Overdue(5000, now) {
		t.Error("an entry beyond the limit is not overdue, want it overdue")
	}
	if f.Overdue(5000, now.Add(2*time.Hour)) {
		t.Error("an entry is overdue after others were forgotten, want it new")
	}
}

// TestCatchUpKeepsPosition stores the entries of one task in several steps. The entries of other tasks before them
// are still to be read.
func TestCatchUpKeepsPosition(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	core, two := newHost(t, c, "core", newStarts()), newHost(t, c, "two", newStarts())
	const first, second = "000000000001", "000000000002"
	submit(t, core, first, task.RerunIfNotStarted)
	submit(t, core, second, task.RerunIfNotStarted)
	if _, err := core.Request(t.Context(), second, task.Cancel); err != nil {
		t.Fatal(err)
	}
	if err := two.CatchUp(t.Context(), second, 1); err != nil {
		t.Fatal(err)
	}
	if row, err := two.Store.Task(t.Context(), second); err != nil || row.Phase != string(task.Cancelled) {
		t.Errorf("task after CatchUp = %s, %v, want it cancelled", row.Phase, err)
	}
	if got, err := two.Store.Position(t.Context()); err != nil || got != 0 {
		t.Errorf("position after CatchUp of one task = %d, %v, want 0", got, err)
	}
}
