package server

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// A thousand tasks submitted concurrently by many clients are all accepted and all
// listed exactly once. The figures are logged but not checked, because they depend
// on the machine.
func TestManySubmitAtOnce(t *testing.T) {
	const tasks, clients = 1000, 20
	r := newRig(t, Limits{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*deadline)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
	}}}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	ids, took := map[string]bool{}, []time.Duration{}
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for range tasks / clients {
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+ops.TasksPath, strings.NewReader(manifestYAML))
				if err != nil {
					t.Error(err)
					return
				}
				req.Header.Set("Content-Type", "application/yaml")
				began := time.Now()
				resp, err := client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				var made ops.TaskAnswer
				err = json.NewDecoder(resp.Body).Decode(&made)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusAccepted {
					t.Errorf("submit = %s, %v, want %d, nil", resp.Status, err, http.StatusAccepted)
					return
				}
				mu.Lock()
				ids[made.ID], took = true, append(took, time.Since(began))
				mu.Unlock()
			}
		})
	}
	all.Wait()
	rows, err := r.store.Tasks(ctx, store.TaskFilter{})
	if err != nil || len(rows) != tasks || len(ids) != tasks {
		t.Fatalf("tasks = %d, answered %d, %v, want %d", len(rows), len(ids), err, tasks)
	}
	for _, row := range rows {
		if !ids[row.ID] {
			t.Errorf("task %s is in no answer, want it reported", row.ID)
		}
		if _, newest, err := r.store.EventRange(ctx, row.ID); err != nil || newest != 1 {
			t.Errorf("newest event of task %s = %d, %v, want 1", row.ID, newest, err)
		}
	}
	var after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&after)
	slices.Sort(took)
	t.Logf("%d clients, %d tasks: p50 %v, p95 %v; the heap grew by %d kB", clients, tasks, took[len(took)/2], took[len(took)*95/100], (int64(after.HeapAlloc)-int64(before.HeapAlloc))>>10)
}
