package fleet_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
)

// newStarts returns an empty count of starts.
func newStarts() *starts { return &starts{all: map[string]int{}, seen: map[string]bool{}} }

// TestOffersAreCountedByLine removes the offer of a task while another line has more offers than tasks.
func TestOffersAreCountedByLine(t *testing.T) {
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
