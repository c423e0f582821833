package fleet_test

import (
	"log/slog"
	"maps"
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// newStarts returns an empty count of starts.
func newStarts() *starts { return &starts{all: map[string]int{}, seen: map[string]bool{}} }

// TestOffersAreCountedByLine removes the offer of a task while another line has more offers than tasks.
func TestOffersAreCountedByLine(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	core := newHost(t, c, "core", newStarts())
	submit(t, core, "000000000001", task.RerunNever)
	if missing, err := core.Missing(t.Context()); err != nil || len(missing) != 0 {
		t.Errorf("missing offers = %v, %v, want none", missing, err)
	}
	queue := testcluster.Open(t, func() (jetstream.Stream, error) { return c.JetStream().Stream(t.Context(), "QUEUE") })
	if err := queue.DeleteMsg(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := core.Queue.Offer(t.Context(), "00000000000f", 0, cluster.NewLine(cluster.Need{Arch: "other"}, cluster.High)); err != nil {
			t.Fatal(err)
		}
	}
	if missing, err := core.Missing(t.Context()); err != nil || !slices.Equal(slices.Collect(maps.Values(missing)), []int{1}) {
		t.Errorf("missing offers = %v, %v, want one in one line", missing, err)
	}
}

// TestCancelBeforeSubmission cancels a task that the cluster does not have yet.
func TestCancelBeforeSubmission(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	one := newHost(t, c, "one", newStarts())
	host := fleet.Host{Tasks: one.Tasks, Log: slog.New(slog.DiscardHandler)}
	const id = "000000000001"
	accept(t, one, id, manifestOf(task.RerunNever))
	for _, w := range []string{id, "00000000000f"} {
		if err := one.Store.AddWish(t.Context(), store.Wish{Task: w, Desired: string(task.Cancel)}); err != nil {
			t.Fatal(err)
		}
	}
	wishes := func(want int) {
		t.Helper()
		if err := host.Wishes(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left, err := one.Store.Wishes(t.Context()); err != nil || len(left) != want || want == 1 && left[0].Task != id {
			t.Errorf("requests that were not sent = %v, %v, want %d", left, err, want)
		}
	}
	wishes(1)
	if _, err := one.Ship(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wishes(0)
	if s, err := one.Get(t.Context(), id); err != nil || s.Row.Phase != string(task.Cancelled) {
		t.Errorf("task = %s, %v, want CANCELLED", s.Row.Phase, err)
	}
}
