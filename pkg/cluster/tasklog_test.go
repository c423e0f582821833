package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// taskLog opens the log of tasks of a cluster as a host.
func taskLog(t *testing.T, c *testcluster.Cluster, host string, replicas int) *cluster.TaskLog {
	t.Helper()
	js := c.JetStream()
	return testcluster.Open(t, func() (*cluster.TaskLog, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		return cluster.OpenTaskLog(ctx, js, host, replicas, 1<<26)
	})
}

type (
	appendInput  struct{ after uint64 }
	appendOutput struct {
		seq  uint64
		lost bool // another entry was first
	}
)

// appends is the specification of a task's log: an entry is added exactly if it continues from
// the latest one.
var appends = porcupine.Model{
	Init: func() any { return uint64(0) },
	Step: func(state, input, output any) (bool, any) {
		last, after, out := state.(uint64), input.(appendInput).after, output.(appendOutput)
		if out.lost {
			return last != after, state
		}
		return last == after && out.seq > last, out.seq
	},
	Equal: func(a, b any) bool { return a == b },
	DescribeOperation: func(input, output any) string {
		return fmt.Sprintf("append after %d → %+v", input.(appendInput).after, output.(appendOutput))
	},
}

// TestTaskLogIsLinearizable appends to a few tasks from several hosts at once while the cores
// are restarted, and checks each task's history.
func TestTaskLogIsLinearizable(t *testing.T) {
	t.Parallel()
	c := testcluster.Three(t)
	taskLog(t, c, "test", 3)
	tasks := []string{"000000000001", "000000000002", "000000000003"}
	const hosts, each = 4, 60
	type call struct {
		id, task string
		op       porcupine.Operation
		unknown  bool
	}
	var mu sync.Mutex
	var calls []call
	began := time.Now()
	var writing sync.WaitGroup
	for host := range hosts {
		l := taskLog(t, c, "test", 3)
		writing.Go(func() {
			last := map[string]uint64{}
			for n := range each {
				id, task := fmt.Sprintf("%d-%d", host, n), tasks[rand.IntN(len(tasks))]
				data, _ := json.Marshal(id)
				k := call{id: id, task: task, op: porcupine.Operation{ClientId: host, Input: appendInput{last[task]}, Call: time.Since(began).Nanoseconds()}}
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
				seq, err := l.Append(ctx, task, cluster.Entry{Kind: cluster.Reported, Data: data}, last[task])
				cancel()
				k.op.Return = time.Since(began).Nanoseconds()
				k.op.Output = appendOutput{seq: seq, lost: errors.Is(err, cluster.ErrConflict)}
				k.unknown = err != nil && !errors.Is(err, cluster.ErrConflict)
				mu.Lock()
				calls = append(calls, k)
				mu.Unlock()
				if err == nil {
					last[task] = seq
				} else if e, err := l.Last(t.Context(), task); err == nil {
					last[task] = e.Seq
				}
			}
		})
	}
	faults := make(chan struct{})
	go func() {
		defer close(faults)
		for _, name := range []string{"a", "b", "c", "a", "c", "b"} {
			if err := c.Restart(name, time.Duration(rand.IntN(500))*time.Millisecond); err != nil {
				t.Error(err)
				return
			}
			testenv.WaitFor(t, "a current core "+name, c.Cores[name].Current)
		}
	}()
	writing.Wait()
	<-faults

	l := taskLog(t, c, "test", 3)
	for _, task := range tasks {
		entries := testcluster.Open(t, func() (all []cluster.Entry, err error) {
			for e, err := range l.Entries(t.Context(), task, 0) {
				if err != nil {
					return nil, err
				}
				all = append(all, e)
			}
			return all, nil
		})
		stored := map[string]uint64{}
		for _, e := range entries {
			var id string
			if err := json.Unmarshal(e.Data, &id); err != nil {
				t.Fatal(err)
			}
			if stored[id] != 0 {
				t.Errorf("entry %s of task %s is stored twice, as %d and %d", id, task, stored[id], e.Seq)
			}
			stored[id] = e.Seq
		}
		var history []porcupine.Operation
		won, conflicts, unknown := 0, 0, 0
		for _, k := range calls {
			if k.task != task {
				continue
			}
			out := k.op.Output.(appendOutput)
			switch {
			case k.unknown && stored[k.id] == 0:
				unknown++
				continue // it did nothing
			case k.unknown: // it may have been stored at any time since
				unknown++
				k.op.Output, k.op.Return = appendOutput{seq: stored[k.id]}, time.Since(began).Nanoseconds()
			case out.lost:
				conflicts++
			default:
				won++
			}
			if !k.unknown && !out.lost && stored[k.id] != out.seq {
				t.Errorf("entry %s of task %s is stored as %d, want %d", k.id, task, stored[k.id], out.seq)
			}
			if out.lost && stored[k.id] != 0 {
				t.Errorf("entry %s of task %s is stored as %d, want it absent: Append returned a conflict", k.id, task, stored[k.id])
			}
			history = append(history, k.op)
		}
		t.Logf("task %s: %d appended, %d conflicts, %d unknown, %d stored", task, won, conflicts, unknown, len(stored))
		if won == 0 || conflicts == 0 {
			t.Errorf("history of task %s has %d appended entries and %d conflicts, want some of both", task, won, conflicts)
		}
		if !porcupine.CheckOperations(appends, history) {
			t.Errorf("history of task %s is not linearizable", task)
		}
	}
}
