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
				req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+tasksPath, strings.NewReader(manifestYAML))
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
				var made TaskAnswer
				err = json.NewDecoder(resp.Body).Decode(&made)
				_ = resp.Body.Close()
				if err != nil || resp.StatusCode != http.StatusAccepted {
					t.Error(resp.Status, err)
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
		t.Fatal(len(rows), len(ids), err)
	}
	for _, row := range rows {
		if !ids[row.ID] {
			t.Error("nobody was told of", row.ID)
		}
		if _, newest, err := r.store.EventRange(ctx, row.ID); err != nil || newest != 1 {
			t.Error(row.ID, newest, err)
		}
	}
	var after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&after)
	slices.Sort(took)
	t.Logf("%d clients, %d tasks: p50 %v, p95 %v; the heap grew by %d kB", clients, tasks, took[len(took)/2], took[len(took)*95/100], (int64(after.HeapAlloc)-int64(before.HeapAlloc))>>10)
}
