package session

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// TestVMStopsWithoutLease checks that the keeper of a session of a cluster's task stops its VM once the host
// may no longer have the task, and not before.
func TestVMStopsWithoutLease(t *testing.T) {
	const id, taskID = "aaaa11112222", "bbbb11112222"
	for name, c := range map[string]struct {
		left   time.Duration // of the lease
		disown bool
		want   string // part of the reason, "" if it goes on
	}{
		"a lease":              {left: time.Hour},
		"a lease just ended":   {left: -store.StopAfter / 2},
		"a lease ended before": {left: -store.StopAfter - time.Second, want: "lost touch with its cluster"},
		"another host":         {left: time.Hour, disown: true, want: "gave task " + taskID + " to another host"},
	} {
		t.Run(name, func(t *testing.T) {
			stopped := false
			w := newWorker(t, driver{
				inspect: func(context.Context) (vm.Machine, error) { return vm.Machine{State: vm.Running}, nil },
				stop:    func(context.Context) error { stopped = true; return nil },
			})
			s := put(t, w.Sessions, id, "o/r", Ready, Ready, Status{WasReady: true})
			s.Task = taskID
			st := w.Sessions.Store
			incarnation, err := st.Incarnation(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := st.Replicate(t.Context(), []store.Replica{{
				Task: store.Task{ID: taskID, Phase: "RUNNING", Desired: "run", Host: store.Waiting, Manifest: json.RawMessage(`{}`)}, Newest: 0, Revision: 3, Fence: 3,
			}}, 3); err != nil {
				t.Fatal(err)
			}
			if err := st.SetLease(t.Context(), incarnation, bootclock.Now()+c.left); err != nil {
				t.Fatal(err)
			}
			if c.disown {
				if err := st.Disown(t.Context(), store.Claim{Task: taskID, Fence: 3}); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			got, err := w.watch(ctx, s, nil)
			if err != nil {
				t.Fatal(err)
			}
			if stopped != (c.want != "") || !strings.Contains(got.ErrorMessage, c.want) {
				t.Errorf("watch = phase %s (%s), stopped %t, want stopped with %q", got.Phase, got.ErrorMessage, stopped, c.want)
			}
			if c.want != "" && got.Phase != Stopped {
				t.Errorf("phase = %s, want %s", got.Phase, Stopped)
			}
		})
	}
}
