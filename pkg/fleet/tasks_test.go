package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/bootclock"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// host is a simulated host: its store and its connection are real, and its agents are counters.
type host struct {
	*fleet.Tasks
	t      *testing.T
	starts *starts
	keys   *cluster.Keys
	is     cluster.Membership
}

// starts counts in how many VMs the agent of each task was started, outside of the cluster. In one
// VM, an agent starts once.
type starts struct {
	mu   sync.Mutex
	all  map[string]int
	seen map[string]bool
}

func (s *starts) add(id, vm string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.seen[id+vm] {
		s.seen[id+vm] = true
		s.all[id]++
	}
}

func (s *starts) of(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[id]
}

func newHost(t *testing.T, c *testcluster.Cluster, name string, st *starts) *host {
	t.Helper()
	return newHostAs(t, c, name, cluster.Member, st)
}

func newHostAs(t *testing.T, c *testcluster.Cluster, name string, role cluster.Role, st *starts) *host {
	t.Helper()
	keys, is := c.Add(name, role)
	js, err := jetstream.New(c.Login(keys))
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, starts: st, keys: keys, is: is}
	h.Tasks = &fleet.Tasks{Name: name, Log: slog.New(slog.DiscardHandler)}
	h.Tasks.Tasks = testcluster.Open(t, func() (*cluster.TaskLog, error) { return cluster.OpenTaskLog(t.Context(), js, name, 1, 1<<28) })
	h.Entries = testcluster.Open(t, func() (*cluster.Files, error) { return cluster.OpenEntries(t.Context(), js, 1, 1<<28) })
	h.Queue = testcluster.Open(t, func() (*cluster.Queue, error) { return cluster.OpenQueue(t.Context(), js, 1) })
	if h.Store, err = store.Open(t.Context(), filepath.Join(t.TempDir(), "store.db")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Store.Close() })
	h.lease()
	h.Want = func(ctx context.Context, id string, desired task.DesiredPhase) error {
		_, err := h.Store.UpdateTask(ctx, id, func(row *store.Task) ([]store.Event, error) {
			row.Desired = string(desired)
			return []store.Event{store.NewEvent(task.EventPhase, task.PhaseChange{From: task.Phase(row.Phase), To: task.Phase(row.Phase), Desired: desired})}, nil
		})
		return err
	}
	return h
}

// opened makes the streams, as the first core does.
func opened(t *testing.T, c *testcluster.Cluster) {
	t.Helper()
	js := c.JetStream()
	testcluster.Open(t, func() (*cluster.TaskLog, error) { return cluster.OpenTaskLog(t.Context(), js, "a", 1, 1<<28) })
	testcluster.Open(t, func() (*cluster.Files, error) { return cluster.OpenEntries(t.Context(), js, 1, 1<<28) })
	testcluster.Open(t, func() (*cluster.Queue, error) { return cluster.OpenQueue(t.Context(), js, 1) })
}

// lease extends the lease of the host's incarnation, which lease returns.
func (h *host) lease() string {
	h.t.Helper()
	is, err := h.Store.Incarnation(h.t.Context())
	if err == nil {
		err = h.Store.SetLease(h.t.Context(), is, bootclock.Now()+time.Hour)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	return is
}

// submit accepts a task on a host, and sends it to the cluster.
func submit(t *testing.T, h *host, id string, rerun task.Rerun) {
	t.Helper()
	submitText(t, h, id, manifestOf(rerun))
}

func manifestOf(rerun task.Rerun) []byte {
	return fmt.Appendf(nil, "version: '1'\nkind: Task\nrepository: {url: owner/repo}\nagent: {kind: command, command: ['true']}\nlifecycle: {rerun: %s}\n", rerun)
}

func submitText(t *testing.T, h *host, id string, manifestText []byte) {
	t.Helper()
	accept(t, h, id, manifestText)
	if _, err := h.Ship(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

// accept accepts a task on a host, and does not send it to the cluster.
func accept(t *testing.T, h *host, id string, manifestText []byte) {
	t.Helper()
	m, _, err := manifest.Parse("test", manifestText, "/")
	if err != nil {
		t.Fatal(err)
	}
	text, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	ev := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Pending, Desired: task.Run})
	if _, err := h.Store.CreateTask(t.Context(), store.Task{ID: id, Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Manifest: text, Host: store.Waiting}, manifestText, ev); err != nil {
		t.Fatal(err)
	}
}

// step does what the keeper of a task does in its next phase.
func (h *host) step(ctx context.Context, row store.Task, incarnation string) error {
	id := row.ID
	to := func(p task.Phase, attempt int) error {
		if p.Over() || p == task.Running {
			if err := h.Store.WaitShipped(ctx, id); err != nil {
				return err
			}
		}
		if p == task.Running {
			h.starts.add(id, h.Name+incarnation)
		}
		_, err := h.Store.UpdateTask(ctx, id, func(now *store.Task) ([]store.Event, error) {
			if now.Phase != row.Phase {
				return nil, store.ErrStale
			}
			var status task.Status
			if err := json.Unmarshal(now.Status, &status); err != nil {
				return nil, err
			}
			status.Attempt = max(status.Attempt, attempt)
			now.Phase = string(p)
			var err error
			now.Status, err = json.Marshal(status)
			return []store.Event{store.NewEvent(task.EventPhase, task.PhaseChange{From: task.Phase(row.Phase), To: p})}, err
		})
		return err
	}
	if row.Desired != string(task.Run) && !task.Phase(row.Phase).Over() {
		return to(task.Cancelled, 0)
	}
	switch task.Phase(row.Phase) {
	case task.Pending:
		return to(task.Provisioning, 0)
	case task.Provisioning:
		return to(task.Ready, 1)
	case task.Ready:
		return to(task.Running, 1)
	case task.Running:
		return to(task.Completed, 1)
	}
	return nil
}

// run works until ctx ends, which is like kill -9: nothing is tidied up.
func (h *host) run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	is := cluster.Host{Name: h.Name, FreeSlots: 1, FreeMemory: 1 << 40}
	incarnation := h.lease()
	all.Go(func() {
		for ctx.Err() == nil {
			_ = h.Follow(ctx) // it is tried again
		}
	})
	all.Go(func() {
		for ctx.Err() == nil {
			o, ok, err := h.Queue.Take(ctx, is, 100*time.Millisecond)
			if err == nil && ok {
				_, err = h.Take(ctx, o)
			}
			if err != nil {
				time.Sleep(20 * time.Millisecond)
			}
		}
	})
	all.Go(func() { // a claim may arrive in the log after the host was revoked
		host := fleet.Host{Tasks: h.Tasks, Log: h.Log}
		for ctx.Err() == nil {
			_ = host.Sweep(ctx, cluster.Host{Name: h.Name, Incarnation: incarnation}, nil) // it is tried again
			time.Sleep(100 * time.Millisecond)
		}
	})
	loop := func(f func(store.Claim) error) {
		all.Go(func() {
			for ctx.Err() == nil {
				claims, err := h.Store.Unsettled(ctx)
				if err != nil {
					continue
				}
				for _, c := range claims {
					_ = f(c) // it is tried again
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	loop(func(c store.Claim) error { _, err := h.Ship(ctx, c.Task); return err })
	loop(func(c store.Claim) error {
		row, err := h.Store.Task(ctx, c.Task)
		if err != nil {
			return err
		}
		short, cancel := context.WithTimeout(ctx, 200*time.Millisecond) // each task has a keeper of its own
		defer cancel()
		return h.step(short, row, incarnation)
	})
}

func TestTasksOfACluster(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	one, two := newHost(t, c, "one", st), newHost(t, c, "two", st)
	submit(t, one, "000000000001", task.RerunIfNotStarted)
	submit(t, one, "000000000002", task.RerunIfNotStarted)
	if _, err := two.Request(t.Context(), "000000000002", task.Cancel); err != nil {
		t.Fatal(err)
	}
	s, err := one.Get(t.Context(), "000000000002")
	if err != nil || s.Row.Phase != string(task.Cancelled) {
		t.Errorf("task that was cancelled while it waited = %s, %v, want CANCELLED", s.Row.Phase, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { two.run(ctx) })
	defer func() { stop(); running.Wait() }()
	testenv.WaitFor(t, "the end of the task", func() bool {
		s, err := one.Get(t.Context(), "000000000001")
		return err == nil && s.Row.Phase == string(task.Completed)
	})
	if s, err = one.Get(t.Context(), "000000000001"); err != nil || s.Host != "two" {
		t.Errorf("host of the task = %s, %v, want two", s.Host, err)
	}
	if one, two := st.of("000000000001"), st.of("000000000002"); one != 1 || two != 0 {
		t.Errorf("starts = %d and %d, want one of the first task", one, two)
	}
	if _, err := one.Get(t.Context(), "00000000000f"); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("unknown task = %v, want not found", err)
	}
}

// TestHostsAreLost runs tasks on hosts that end at any moment. Some come back, others are revoked.
// No task is lost, none starts twice unless it may, and the events in the log have no gap.
func TestHostsAreLost(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	hosts := []*host{newHost(t, c, "one", st), newHost(t, c, "two", st), newHost(t, c, "three", st)}
	core := newHost(t, c, "core", st)
	tasks := 21
	if testing.Short() {
		tasks = 15
	}
	rerun := map[string]task.Rerun{}
	for i := range tasks {
		id := fmt.Sprintf("%012x", i+1)
		rerun[id] = []task.Rerun{task.RerunIfNotStarted, task.RerunNever, task.RerunAlways}[i%3]
		submit(t, core, id, rerun[id])
	}
	revoked := 0
	over := func() bool {
		for id := range rerun {
			s, err := core.Get(t.Context(), id)
			if err != nil || !task.Phase(s.Row.Phase).Over() {
				return false
			}
		}
		return true
	}
	done := make(chan struct{})
	began := time.Now()
	var lives sync.WaitGroup
	var mu sync.Mutex
	for _, h := range hosts {
		lives.Go(func() {
			for {
				ctx, kill := context.WithCancel(t.Context())
				var living sync.WaitGroup
				living.Go(func() { h.run(ctx) })
				select {
				// On a slow machine, a short life may be too short for any progress, so lives become longer.
				case <-time.After(100*time.Millisecond + time.Duration(rand.Int64N(int64(600*time.Millisecond+time.Since(began)/20)))):
				case <-done:
					kill()
					living.Wait()
					return
				}
				kill()
				living.Wait()
				mu.Lock()
				late := revoked == 0 || rand.IntN(3) == 0 // it does not come back in time
				if late {
					revoked++
				}
				mu.Unlock()
				if late {
					if _, err := core.Lost(t.Context(), h.Name, ""); err != nil {
						t.Errorf("Lost(%s) = %v, want nil", h.Name, err)
					}
					if _, err := h.Store.Reincarnate(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	testenv.WaitFor(t, "the end of all tasks", over)
	close(done)
	lives.Wait()
	sameEverywhere(t, append(hosts, core), slices.Collect(maps.Keys(rerun)))
	ends := map[string]int{}
	for id, policy := range rerun {
		var seq int64
		for e, err := range core.Tasks.Tasks.Entries(t.Context(), id, 0) {
			if err != nil {
				t.Fatal(err)
			}
			var data struct{ Events []store.Event }
			if err := json.Unmarshal(e.Data, &data); err != nil {
				t.Fatal(err)
			}
			for _, ev := range data.Events {
				if seq++; ev.Seq != seq {
					t.Errorf("task %s: event %d of the log has the sequence %d", id, seq, ev.Seq)
				}
			}
		}
		s, err := core.Get(t.Context(), id)
		if err != nil || s.Newest != seq {
			t.Errorf("task %s: newest event = %d, %v, want %d", id, s.Newest, err, seq)
		}
		ends[s.Row.Phase]++
		if n := st.of(id); n > 1 && policy != task.RerunAlways || n == 0 && s.Row.Phase == string(task.Completed) {
			t.Errorf("task %s with rerun %s started %d times and is %s", id, policy, n, s.Row.Phase)
		}
	}
	t.Logf("%d hosts revoked; ends of %d tasks: %v", revoked, tasks, ends)
	if revoked == 0 || ends[string(task.Completed)] == 0 {
		t.Errorf("revoked hosts = %d, ends = %v, want some of both", revoked, ends)
	}
}

// sameEverywhere checks that every host has the same events of each task, without a gap.
func sameEverywhere(t *testing.T, hosts []*host, ids []string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var following sync.WaitGroup
	for _, h := range hosts {
		following.Go(func() {
			for ctx.Err() == nil {
				_ = h.Follow(ctx) // until stop
			}
		})
	}
	defer func() { stop(); following.Wait() }()
	for _, id := range ids {
		s, err := hosts[0].Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		var first []store.Event
		for _, h := range hosts {
			var evs []store.Event
			testenv.WaitFor(t, "the events of task "+id+" on "+h.Name, func() bool {
				evs, err = h.Store.Events(t.Context(), id, 0, 1000)
				return err == nil && int64(len(evs)) >= s.Newest
			})
			if first == nil {
				first = evs
			}
			for i, ev := range evs {
				if ev.Seq != int64(i)+1 || i >= len(first) || ev.Kind != first[i].Kind || string(ev.Data) != string(first[i].Data) {
					t.Errorf("task %s: event %d on %s = %+v, want that of %s", id, i+1, h.Name, ev, hosts[0].Name)
				}
			}
			if row, err := h.Store.Task(t.Context(), id); err != nil || row.Phase != s.Row.Phase {
				t.Errorf("task %s on %s is %s, %v, want %s", id, h.Name, row.Phase, err, s.Row.Phase)
			}
		}
	}
}

// TestLostOffers removes the offers of waiting tasks, and the line of others. All of them run.
func TestLostOffers(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	core, worker := newHost(t, c, "core", st), newHost(t, c, "worker", st)
	ids := []string{"000000000001", "000000000002", "000000000003"}
	for _, id := range ids {
		submit(t, core, id, task.RerunIfNotStarted)
	}
	js := c.JetStream()
	queue := testcluster.Open(t, func() (jetstream.Stream, error) { return js.Stream(t.Context(), "QUEUE") })
	for _, seq := range []uint64{1, 3} {
		if err := queue.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := core.Reoffer(t.Context()); err != nil || n != 2 {
		t.Errorf("Reoffer after two offers were lost = %d, %v, want 2", n, err)
	}
	if n, err := core.Reoffer(t.Context()); err != nil || n != 0 {
		t.Errorf("Reoffer with all offers = %d, %v, want 0", n, err)
	}
	for name := range queue.ConsumerNames(t.Context()).Name() {
		if err := queue.DeleteConsumer(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := core.Reoffer(t.Context()); err != nil || n != len(ids) {
		t.Errorf("Reoffer without a consumer = %d, %v, want %d", n, err, len(ids))
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { worker.run(ctx) })
	defer func() { stop(); running.Wait() }()
	for _, id := range ids {
		testenv.WaitFor(t, "the end of task "+id, func() bool {
			s, err := core.Get(t.Context(), id)
			return err == nil && s.Row.Phase == string(task.Completed)
		})
		if n := st.of(id); n != 1 {
			t.Errorf("starts of task %s = %d, want 1", id, n)
		}
	}
}

// TestDamagedEntries writes to the log what no host can read: at the end of a task's entries, and as the
// only entry of another. The task runs, and all hosts follow the log.
func TestDamagedEntries(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	one, two := newHost(t, c, "one", st), newHost(t, c, "two", st)
	keys, _ := c.Add("hostile", cluster.Member)
	hostile, err := jetstream.New(c.Login(keys))
	if err != nil {
		t.Fatal(err)
	}
	const id = "000000000001"
	submit(t, one, id, task.RerunIfNotStarted)
	for _, text := range []string{"{", `{"format":2}`, `{"format":1,"id":"x","host":"one","body":[]}`, `{"format":1,"id":"y","host":"one","body":{"kind":"events","data":{"row":{"ID":"000000000009"}}}}`} {
		for _, subject := range []string{"task." + id, "task.000000000002", "host.hostile"} {
			if _, err := hostile.Publish(t.Context(), subject, []byte(text)); err != nil && subject != "host.hostile" {
				t.Fatal(err)
			}
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { two.run(ctx) })
	defer func() { stop(); running.Wait() }()
	testenv.WaitFor(t, "the end of the task", func() bool {
		s, err := one.Get(t.Context(), id)
		return err == nil && s.Row.Phase == string(task.Completed)
	})
	sameEverywhere(t, []*host{one, two}, []string{id})
	if released, err := one.Lost(t.Context(), "two", ""); err != nil || len(released) != 0 {
		t.Errorf("Lost with damaged entries = %q, %v, want nothing released", released, err)
	}
}

// TestLostAnswer gives a task to another host after a host wrote events to the log, and did not learn
// that they are there. They stay on that host, too.
func TestLostAnswer(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	core, one := newHost(t, c, "core", st), newHost(t, c, "one", st)
	const id = "000000000001"
	submit(t, core, id, task.RerunIfNotStarted)
	o, ok, err := one.Queue.Take(t.Context(), cluster.Host{Name: "one", FreeSlots: 1, FreeMemory: 1 << 40}, 10*time.Second)
	if err != nil || !ok {
		t.Fatalf("Take of the queue = %t, %v, want an offer", ok, err)
	}
	if took, err := one.Take(t.Context(), o); err != nil || !took {
		t.Fatalf("Take = %t, %v, want the task", took, err)
	}
	row, err := one.Store.Task(t.Context(), id)
	if err == nil {
		err = one.step(t.Context(), row, "vm")
	}
	if err != nil {
		t.Fatal(err)
	}
	claim, row, evs, err := one.Store.Unshipped(t.Context(), id, 1<<20)
	if err != nil || len(evs) == 0 {
		t.Fatalf("events to send = %v, %v, want some", evs, err)
	}
	s, err := one.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	s.Row, s.Newest = row, evs[len(evs)-1].Seq
	data, err := json.Marshal(struct {
		fleet.State
		Events []store.Event `json:"events"`
	}{s, evs})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.Tasks.Tasks.Append(t.Context(), id, cluster.Entry{Kind: cluster.Reported, Fence: claim.Fence, Data: data}, claim.Revision); err != nil {
		t.Fatal(err)
	}
	if released, err := core.Lost(t.Context(), "one", ""); err != nil || len(released) != 1 {
		t.Fatalf("Lost = %q, %v, want the task", released, err)
	}
	sameEverywhere(t, []*host{core, one}, []string{id})
}

// TestLargeTasks runs tasks whose manifests and rows are too large for an entry of the log, on a worker.
func TestLargeTasks(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	one, two := newHost(t, c, "one", st), newHostAs(t, c, "two", cluster.Worker, st)
	ids := map[string]int{"000000000001": 20 << 10, "000000000002": 1000 << 10}
	for id, size := range ids {
		text := fmt.Appendf(nil, "version: '1'\nkind: Task\nrepository: {url: owner/repo}\nagent: {kind: command, command: ['true'%s]}\n", strings.Repeat(", '"+strings.Repeat("x", 10<<10)+"'", size/(10<<10)))
		submitText(t, one, id, text)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { two.run(ctx) })
	defer func() { stop(); running.Wait() }()
	for id, size := range ids {
		testenv.WaitFor(t, "the end of task "+id, func() bool {
			s, err := one.Get(t.Context(), id)
			return err == nil && s.Row.Phase == string(task.Completed)
		})
		sameEverywhere(t, []*host{one, two}, []string{id})
		row, err := two.Store.Task(t.Context(), id)
		if err != nil || len(row.Manifest) < size {
			t.Errorf("manifest of task %s on its host = %d bytes, %v, want over %d", id, len(row.Manifest), err, size)
		}
		if text, err := two.Store.TaskText(t.Context(), id); err != nil || len(text) < size {
			t.Errorf("text of task %s on its host = %d bytes, %v, want over %d", id, len(text), err, size)
		}
	}
	info, err := c.JetStream().Stream(t.Context(), "ENTRIES")
	if err != nil {
		t.Fatal(err)
	}
	if n := info.CachedInfo().State.Bytes; n > 6<<20 {
		t.Errorf("large entries = %d bytes, want the manifests only once", n)
	}
}

// TestForgedTasks puts tasks into the log that need what only a host's user may use. No host takes them.
func TestForgedTasks(t *testing.T) {
	t.Parallel()
	c := testcluster.Alone(t)
	opened(t, c)
	st := &starts{all: map[string]int{}, seen: map[string]bool{}}
	core := newHost(t, c, "core", st)
	for i, change := range map[int]func(*store.Task){
		1: func(row *store.Task) { row.SessionID = "aaaa11112222" },
		2: func(row *store.Task) { row.Parent = "aaaa11112222" },
		3: func(row *store.Task) { row.Manifest = []byte(`{"repository":{"url":"file:///srv/app"}}`) },
		4: func(row *store.Task) { row.Manifest = []byte(`{"vm":{"session":"app"}}`) },
		5: func(row *store.Task) { row.Manifest = []byte(`{"vm":{"workspace":"data"}}`) },
		6: func(row *store.Task) { row.Manifest = []byte(`[]`) },
		7: func(row *store.Task) { row.Status = []byte(`{"subtask":{}}`) },
		8: func(row *store.Task) { row.Status = []byte(`"x"`) },
	} {
		row := store.Task{ID: fmt.Sprintf("%012x", i), Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Status: []byte("{}"), Manifest: []byte(`{"repository":{"url":"owner/repo"}}`)}
		change(&row)
		data, err := json.Marshal(fleet.State{Row: row})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := core.Tasks.Tasks.Append(t.Context(), row.ID, cluster.Entry{Kind: cluster.Submitted, Data: data}, 0); err != nil {
			t.Fatal(err)
		}
		if s, err := core.Get(t.Context(), row.ID); !errors.Is(err, cluster.ErrDamaged) {
			t.Errorf("forged task %d = %+v, %v, want %v", i, s, err, cluster.ErrDamaged)
		}
	}
}
