package fleet_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestLogIsReadOnce checks that a host which lost touch with its cluster for a moment does not read the
// log of all tasks again: after an outage of the core, all hosts would do it at the same time.
func TestLogIsReadOnce(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	nc := c.Login(c.Options["a"].Keys)
	var reads atomic.Int64
	if _, err := nc.Subscribe("$JS.API.CONSUMER.CREATE.TASKS.>", func(*nats.Msg) { reads.Add(1) }); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	h := newHost(t, c, "one", &starts{all: map[string]int{}, seen: map[string]bool{}})
	submit(t, h, "000000000001", "never")
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	var beats atomic.Int64
	host := fleet.Host{
		Tasks: h.Tasks, Log: slog.New(slog.DiscardHandler),
		Hosts: testcluster.Open(t, func() (*cluster.Hosts, error) { return cluster.OpenHosts(t.Context(), js, "one", 1) }),
		Describe: func(context.Context) (cluster.Host, error) {
			return cluster.Host{Name: "one", Drained: true}, nil
		},
		Leased: func(store.Lease) error {
			if beats.Add(1)%2 == 0 {
				return errors.New("as if the answer were lost")
			}
			return nil
		},
		Wake:    func(context.Context) error { return nil },
		Abandon: func(context.Context, []string) error { return nil },
	}
	ctx, stop := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	serving.Go(func() { host.Serve(ctx) })
	testenv.WaitFor(t, "some heartbeats", func() bool { return beats.Load() >= 4 })
	stop()
	serving.Wait()
	if n := reads.Load(); n > 2 {
		t.Errorf("reads of the log = %d, want 2: to follow it, and for claims of an earlier incarnation", n)
	}
}
