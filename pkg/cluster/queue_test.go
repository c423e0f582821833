package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// queue returns the queue of a cluster with one core, and its log of tasks.
func queue(t *testing.T) (*cluster.Queue, *cluster.TaskLog) {
	t.Helper()
	c := testcluster.Alone(t)
	js := c.JetStream()
	var q *cluster.Queue
	testenv.WaitFor(t, "the queue", func() (ok bool) {
		var err error
		q, err = cluster.OpenQueue(t.Context(), js, 1)
		return err == nil
	})
	return q, taskLog(t, c, "test", 1)
}

var amd64 = cluster.Host{Name: "one", Arch: "amd64", Slots: 1, FreeSlots: 1, FreeMemory: 16 << 30, FreeDisk: 1 << 40}

func TestQueueOrder(t *testing.T) {
	t.Parallel()
	q, _ := queue(t)
	small := cluster.Need{Arch: "amd64", Memory: 2 << 30}
	for _, o := range []struct {
		task string
		need cluster.Need
		band cluster.Band
	}{
		{"low", small, cluster.Low},
		{"normal", small, cluster.Normal},
		{"other arch", cluster.Need{Arch: "arm64"}, cluster.High},
		{"too large", cluster.Need{Memory: 64 << 30}, cluster.High},
		{"gpu", cluster.Need{Labels: map[string]string{"gpu": "yes"}}, cluster.High},
		{"high", small, cluster.High},
	} {
		if err := q.Offer(t.Context(), o.task, 0, cluster.NewLine(o.need, o.band)); err != nil {
			t.Fatal(err)
		}
	}
	take := func(h cluster.Host) (cluster.Offer, bool) {
		t.Helper()
		o, ok, err := q.Take(t.Context(), h, 200*time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		return o, ok
	}
	for _, want := range []string{"high", "normal", "low"} {
		o, ok := take(amd64)
		if !ok || o.Task != want {
			t.Fatalf("Take = %q, %t, want %s", o.Task, ok, want)
		}
		if want == "normal" { // it is for another host then
			if err := o.Return(); err != nil {
				t.Fatal(err)
			}
			if o, ok = take(amd64); !ok || o.Task != want {
				t.Fatalf("Take after Return = %q, %t, want %s", o.Task, ok, want)
			}
		}
		if err := o.Done(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if o, ok := take(amd64); ok {
		t.Errorf("Take of a host that meets no need = %q, want nothing", o.Task)
	}
	gpu := amd64
	gpu.Labels = map[string]string{"gpu": "yes", "room": "2"}
	if o, ok := take(gpu); !ok || o.Task != "gpu" {
		t.Errorf("Take of a host with the label = %q, %t, want gpu", o.Task, ok)
	}
	// A host that waits gets a task that is offered later.
	late := make(chan error, 1)
	go func() {
		late <- q.Offer(context.WithoutCancel(t.Context()), "late", 0, cluster.NewLine(small, cluster.Normal))
	}()
	if o, ok, err := q.Take(t.Context(), amd64, 10*time.Second); err != nil || !ok || o.Task != "late" {
		t.Errorf("Take while a task is offered = %q, %t, %v, want late", o.Task, ok, err)
	}
	if err := <-late; err != nil {
		t.Fatal(err)
	}
}

// TestQueueOnce checks that hosts that take from one queue claim each task exactly once, also if
// an offer is made twice.
func TestQueueOnce(t *testing.T) {
	t.Parallel()
	q, l := queue(t)
	const tasks, hosts = 60, 5
	submitted := map[string]uint64{}
	for i := range tasks {
		id := fmt.Sprintf("%012x", i)
		seq, err := l.Append(t.Context(), id, cluster.Entry{Kind: cluster.Submitted}, 0)
		if err != nil {
			t.Fatal(err)
		}
		submitted[id] = seq
		for range 1 + i%2 {
			if err := q.Offer(t.Context(), id, 0, cluster.NewLine(cluster.Need{}, cluster.Normal)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var claimed [hosts][]string
	var left atomic.Int64
	left.Store(tasks + tasks/2)
	var taking sync.WaitGroup
	for i := range hosts {
		taking.Go(func() {
			for left.Load() > 0 {
				o, ok, err := q.Take(t.Context(), amd64, 100*time.Millisecond)
				if err != nil {
					t.Error(err)
					return
				}
				if !ok {
					continue
				}
				_, err = l.Append(t.Context(), o.Task, cluster.Entry{Kind: cluster.Claimed}, submitted[o.Task])
				switch {
				case err == nil:
					claimed[i] = append(claimed[i], o.Task)
				case !errors.Is(err, cluster.ErrConflict):
					t.Error(err)
				}
				if err := o.Done(t.Context()); err != nil {
					t.Error(err)
				}
				left.Add(-1)
			}
		})
	}
	taking.Wait()
	once := map[string]bool{}
	for i, all := range claimed {
		t.Logf("host %d claimed %d tasks", i, len(all))
		for _, id := range all {
			if once[id] {
				t.Errorf("task %s was claimed twice", id)
			}
			once[id] = true
		}
	}
	if len(once) != tasks {
		t.Errorf("claimed tasks = %d, want %d", len(once), tasks)
	}
}

// TestQueueOfALargeFleet checks that many hosts can wait for the offers of one need, and that a host asks
// for the list of lines once for many tasks.
func TestQueueOfALargeFleet(t *testing.T) {
	const hosts, tasks = 600, 50
	c := testcluster.Alone(t)
	js := c.JetStream()
	q := testcluster.Open(t, func() (*cluster.Queue, error) { return cluster.OpenQueue(t.Context(), js, 1) })
	line := cluster.NewLine(cluster.Need{}, cluster.Normal)
	asked := make(chan *nats.Msg, 10*tasks)
	nc := c.Login(c.Options["a"].Keys)
	for _, subject := range []string{"$JS.API.CONSUMER.LIST.QUEUE", "$JS.API.CONSUMER.INFO.QUEUE.*"} {
		if _, err := nc.ChanSubscribe(subject, asked); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := q.Open(t.Context(), line); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for i := range tasks {
		if err := q.Offer(t.Context(), fmt.Sprintf("%012x", i), 0, line); err != nil {
			t.Fatal(err)
		}
		o, ok, err := q.Take(t.Context(), amd64, 10*time.Second)
		if err != nil || !ok {
			t.Fatalf("Take of task %d = %t, %v, want it", i, ok, err)
		}
		if err := o.Done(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n, most := len(asked), 1+1+int(time.Since(began)/(5*time.Second)); n > most {
		t.Errorf("requests about lines, for %d tasks = %d, want at most %d", tasks, n, most)
	}

	ctx, stop := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer stop()
	for range hosts {
		waiting.Go(func() {
			for ctx.Err() == nil {
				_, _, _ = q.Take(ctx, amd64, time.Minute) // until stop
			}
		})
	}
	testenv.WaitFor(t, "all hosts to wait", func() bool {
		s, err := js.Stream(t.Context(), "QUEUE")
		if err != nil {
			return false
		}
		for info := range s.ListConsumers(t.Context()).Info() {
			if info.NumWaiting == hosts {
				return true
			}
		}
		return false
	})
}

// TestQueueEarly checks that an offer which arrives before its entry is made again soon, and then less
// and less often.
func TestQueueEarly(t *testing.T) {
	c := testcluster.Alone(t)
	js := c.JetStream()
	q := testcluster.Open(t, func() (*cluster.Queue, error) { return cluster.OpenQueue(t.Context(), js, 1) })
	nc := c.Login(c.Options["a"].Keys)
	answers, err := nc.SubscribeSync("$JS.ACK.QUEUE.>")
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := q.Offer(t.Context(), "000000000001", 0, cluster.NewLine(cluster.Need{}, cluster.Normal)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []time.Duration{20 * time.Millisecond, 40 * time.Millisecond, 80 * time.Millisecond} {
		o, ok, err := q.Take(t.Context(), amd64, 10*time.Second)
		if err != nil || !ok {
			t.Fatalf("Take = %t, %v, want the offer again", ok, err)
		}
		if err := o.Early(t.Context()); err != nil {
			t.Fatal(err)
		}
		m, err := answers.NextMsg(10 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("-NAK {\"delay\": %d}", want); string(m.Data) != got {
			t.Errorf("answer = %s, want %s", m.Data, got)
		}
	}
}
