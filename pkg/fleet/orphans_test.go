package fleet_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestLateClaims lets claims of a host arrive in the log after it was revoked and its tasks were released.
func TestLateClaims(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	core, two := newHost(t, c, "core", newStarts()), newHost(t, c, "two", newStarts())
	testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), c.JetStream(), "a", 1) })
	js, err := jetstream.New(c.Login(two.keys))
	if err != nil {
		t.Fatal(err)
	}
	beats, err := cluster.OpenHosts(t.Context(), js, "two", 1)
	if err != nil {
		t.Fatal(err)
	}
	lease := cluster.NewLease(beats, func() time.Duration { return 0 })
	incarnation := two.lease()
	beat := func(incarnation string) uint64 {
		t.Helper()
		if _, err := lease.Renew(t.Context(), cluster.Host{Name: "two", Incarnation: incarnation}); err != nil {
			t.Fatal(err)
		}
		_, seq, err := beats.Get(t.Context(), "two")
		if err != nil {
			t.Fatal(err)
		}
		return seq
	}
	seq := beat(incarnation)

	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	for _, h := range []*host{core, two} {
		following.Go(func() {
			for ctx.Err() == nil {
				_ = h.Follow(ctx) // it is tried again
			}
		})
	}
	defer func() { stop(); following.Wait() }()
	// claimed submits a task, and lets "two" claim it.
	claimed := func(id string, h *host) {
		t.Helper()
		submit(t, core, id, task.RerunIfNotStarted)
		s, err := core.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		s.Host, s.Incarnation = "two", incarnation
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := two.Tasks.Tasks.Append(t.Context(), id, cluster.Entry{Kind: cluster.Claimed, Data: data}, s.Seq); err != nil {
			t.Fatal(err)
		}
		testenv.WaitFor(t, "the claim", func() bool {
			row, err := h.Store.Task(t.Context(), id)
			return err == nil && row.Host == "two"
		})
	}
	sweep := func(h *host, incarnation string, lost map[string]uint64, id, want string) {
		t.Helper()
		host := fleet.Host{Tasks: h.Tasks, Hosts: beats, Log: slog.New(slog.DiscardHandler)}
		if err := host.Sweep(t.Context(), cluster.Host{Name: h.Name, Incarnation: incarnation}, lost); err != nil {
			t.Errorf("Sweep on %s = %v, want nil", h.Name, err)
		}
		if s, err := core.Get(t.Context(), id); err != nil || s.Host != want || s.Row.Phase != string(task.Pending) {
			t.Errorf("host of task %s = %q, %s, %v, want %q and PENDING", id, s.Host, s.Row.Phase, err, want)
		}
	}
	claimed("000000000001", core)
	sweep(core, "x", nil, "000000000001", "two")
	sweep(core, "x", map[string]uint64{"two": seq - 1}, "000000000001", "two") // it is back
	sweep(core, "x", map[string]uint64{"two": seq}, "000000000001", "")

	if _, err := two.Store.Reincarnate(t.Context()); err != nil {
		t.Fatal(err)
	}
	claimed("000000000002", two)
	sweep(two, incarnation, nil, "000000000002", "two")
	sweep(two, two.lease(), nil, "000000000002", "")
}

// TestEarlyReturn lets a host return after a core has revoked it, and before that released its tasks.
func TestEarlyReturn(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	core, two := newHost(t, c, "core", newStarts()), newHost(t, c, "two", newStarts())
	hosts := testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), c.JetStream(), "two", 1) })
	const id = "000000000001"
	submit(t, core, id, task.RerunIfNotStarted)
	is := cluster.Host{Name: "two", FreeSlots: 1, FreeMemory: 1 << 40, Incarnation: two.lease()}
	o, ok, err := two.Queue.Take(t.Context(), is, 10*time.Second)
	if err != nil || !ok {
		t.Fatalf("Take of the queue = %t, %v, want an offer", ok, err)
	}
	if took, err := two.Take(t.Context(), o); err != nil || !took {
		t.Fatalf("Take = %t, %v, want the task", took, err)
	}
	if _, err := cluster.NewLease(hosts, func() time.Duration { return 0 }).Renew(t.Context(), is); err != nil {
		t.Fatal(err)
	}
	found, seq, err := hosts.Get(t.Context(), "two")
	if err == nil {
		err = hosts.Revoke(t.Context(), found, seq, "core")
	}
	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	abandoned := make(chan string, 1)
	host := fleet.Host{
		Tasks: two.Tasks, Hosts: hosts, Log: slog.New(slog.DiscardHandler),
		Describe: func(context.Context) (cluster.Host, error) { return cluster.Host{Name: "two", Drained: true}, nil },
		Abandon: func(_ context.Context, tasks []string) error {
			for _, id := range tasks {
				abandoned <- id
			}
			return nil
		},
	}
	var serving sync.WaitGroup
	serving.Go(func() { host.Serve(ctx) })
	defer func() { stop(); serving.Wait() }()
	if got := <-abandoned; got != id {
		t.Errorf("abandoned task = %s, want %s", got, id)
	}
	testenv.WaitFor(t, "the release of the task", func() bool {
		s, err := core.Get(t.Context(), id)
		return err == nil && s.Host == ""
	})
}
