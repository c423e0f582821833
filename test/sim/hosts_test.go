//go:build sim

package sim

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Properties of the simulated hosts.
const (
	slots     = 16                     // so many that hosts, rather than slots, limit how many tasks are claimed
	longest   = 200 * time.Millisecond // that a VM needs for a task, in all
	joiners   = 8                      // hosts that join at the same time
	retryWait = 2 * time.Second        // before a task goes on after an error
	patience  = 4 * time.Hour          // a bound for machines of all speeds
)

// machine is a simulated host.
type machine struct {
	name  string
	dir   string
	fleet *simFleet
	store *store.Store
	node  *cluster.Node
	ctx   context.Context // while the host runs

	mu      sync.Mutex
	running map[string]bool // VMs, by task
}

// simFleet are all hosts but the cores.
type simFleet struct {
	machines []*machine
	open     atomic.Bool // hosts take tasks
	ended    atomic.Int64
	submits  atomic.Int64
	manifest []byte
	text     []byte
	stop     func()
}

// newFleet lets hosts join.
func newFleet(t *testing.T, c *cores, s size) *simFleet {
	t.Helper()
	dir, err := os.MkdirTemp(memoryDir(), "asz-sim")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &simFleet{machines: make([]*machine, s.hosts)}
	f.text = []byte("version: '1'\nkind: Task\nrepository: {url: owner/repo}\nagent: {kind: command, command: ['true']}\n")
	m, _, err := manifest.Parse("sim", f.text, "/")
	if err == nil {
		f.manifest, err = m.Encode()
	}
	if err != nil {
		t.Fatal(err)
	}
	var all errgroup.Group
	all.SetLimit(joiners)
	for i := range f.machines {
		all.Go(func() error {
			h := &machine{name: fmt.Sprintf("h%d", i), dir: filepath.Join(dir, fmt.Sprint(i)), fleet: f, running: map[string]bool{}}
			f.machines[i] = h
			if err := c.join(h.dir, cluster.Member, cluster.Applicant{Name: h.name}); err != nil {
				return err
			}
			return h.openStore(t, i < s.followers)
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
	return f
}

// memoryDir returns where the hosts' stores are: they share this machine's disk with the core, and
// real ones do not.
func memoryDir() string {
	if dir := os.Getenv(dirVariable); dir != "" {
		return dir
	}
	if _, err := os.Stat("/dev/shm"); err == nil {
		return "/dev/shm"
	}
	return ""
}

// farAhead is a position that no log reaches: a host that has read that far reads nothing more.
const farAhead = 1 << 60

// noFiles says that a task has neither logs nor artifacts: only the scheduling is measured.
func noFiles(context.Context, string) ([]task.Output, error) { return nil, nil }

func (h *machine) openStore(t *testing.T, follows bool) (err error) {
	if h.store, err = store.Open(t.Context(), filepath.Join(h.dir, "store.db")); err != nil {
		return err
	}
	t.Cleanup(func() { h.store.Close() })
	if _, err := h.store.Incarnation(t.Context()); err != nil || follows {
		return err
	}
	return h.store.Replicate(t.Context(), nil, farAhead)
}

// start starts the cluster's part of serve on all hosts, until stop.
func (f *simFleet) start(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	f.stop = sync.OnceFunc(func() { cancel(); serving.Wait() })
	t.Cleanup(f.stop)
	var all errgroup.Group
	all.SetLimit(joiners)
	for _, h := range f.machines {
		all.Go(func() (err error) {
			if h.node, err = cluster.Start(ctx, h.dir, slog.New(slog.DiscardHandler)); err != nil {
				return err
			}
			serving.Go(func() { h.serve(ctx) })
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
}

// serve does what fleet.Part does.
func (h *machine) serve(ctx context.Context) {
	defer h.node.Close()
	h.ctx = ctx
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("host", h.name)
	host := fleet.Host{
		Tasks: &fleet.Tasks{Name: h.name, Tasks: h.node.Tasks, Entries: h.node.Entries, Queue: h.node.Queue, Store: h.store, Log: log, Outputs: noFiles}, Hosts: h.node.Hosts, Log: log,
		Describe: h.describe, Wake: h.wake, Abandon: func(context.Context, []string) error { return nil },
	}
	var all sync.WaitGroup
	all.Go(func() {
		if err := h.node.Serve(ctx); err != nil {
			log.Error("failed to follow the cluster", "error", err)
		}
	})
	all.Go(func() { host.Serve(ctx) })
	all.Wait()
}

func (h *machine) describe(ctx context.Context) (cluster.Host, error) {
	is := cluster.Host{
		Name: h.name, Drained: h.node.Drained() || !h.fleet.open.Load(), Arch: runtime.GOARCH, Accel: "kvm", Slots: slots, FreeSlots: slots,
		FreeMemory: 16 << 30, FreeDisk: 1 << 40, Labels: map[string]string{"host": h.name},
	}
	counts, err := h.store.TaskCounts(ctx)
	for phase, n := range counts {
		if !task.Phase(phase).Over() {
			is.FreeSlots -= n
		}
	}
	return is, err
}

// wake starts the VMs of tasks that this host has claimed.
func (h *machine) wake(ctx context.Context) error {
	claims, err := h.store.Unsettled(ctx)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range claims {
		if c.Fence != 0 && !h.running[c.Task] {
			h.running[c.Task] = true
			go h.vm(h.ctx, c.Task)
		}
	}
	return nil
}

// phases are those of a task that succeeds.
var phases = []task.Phase{task.Pending, task.Staging, task.Provisioning, task.Ready, task.Running, task.Completing, task.Completed}

// vm runs a task until it has ended or belongs to another host. After an error, it goes on a little later, as a
// keeper does.
func (h *machine) vm(ctx context.Context, id string) {
	for {
		mine, err := h.run(ctx, id)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && mine:
			h.fleet.ended.Add(1)
			return
		case err == nil:
			h.mu.Lock()
			delete(h.running, id)
			h.mu.Unlock()
			return
		}
		fmt.Fprintf(os.Stderr, "task %s on %s: %v\n", id, h.name, err)
		time.Sleep(retryWait) // a keeper waits, too
	}
}

// run writes the events of a task, and waits for those for which a keeper waits. It reports whether the task still
// belongs to this host.
func (h *machine) run(ctx context.Context, id string) (mine bool, err error) {
	row, err := h.store.Task(ctx, id)
	if err != nil {
		return false, err
	}
	for i := slices.Index(phases, task.Phase(row.Phase)); i < len(phases)-1; i++ {
		if c, _, err := h.store.Claim(ctx, id); err != nil || c.Fence == 0 {
			return false, err
		}
		if i < 0 {
			return false, fmt.Errorf("it is %s", row.Phase)
		}
		from, to := phases[i], phases[i+1]
		err := h.store.AppendAll(ctx, id, []store.Event{
			store.NewEvent(task.EventStep, lifecycle.Step{Name: "a step of the phase " + string(from), State: "start"}),
			store.NewEvent(task.EventStep, lifecycle.Step{Name: "a step of the phase " + string(from), State: "done"}),
		})
		if err == nil {
			time.Sleep(rand.N(longest / time.Duration(len(phases)-1))) // that is what a VM does
		}
		if err == nil && (to == task.Running || to.Over()) {
			err = h.store.WaitShipped(ctx, id)
		}
		if err == nil {
			_, err = h.store.AdvanceTask(ctx, id, string(from), string(to), store.NewEvent(task.EventPhase, task.PhaseChange{From: from, To: to}), func(*store.Task) {})
		}
		if err != nil {
			return false, err
		}
	}
	return true, nil
}

func id(i int64) string { return fmt.Sprintf("%012x", i) }

// ids returns the tasks that were submitted, in order.
func (f *simFleet) ids() (all []string) {
	for i := range f.submits.Load() {
		all = append(all, id(i+1))
	}
	return all
}

// submit accepts a task on the next host.
func (f *simFleet) submit(t *testing.T) {
	n := f.submits.Add(1)
	ev := store.NewEvent(task.EventPhase, task.PhaseChange{To: task.Pending, Desired: task.Run})
	h := f.machines[int(n)%len(f.machines)]
	if _, err := h.store.CreateTask(t.Context(), store.Task{
		ID: id(n), Name: "task", Phase: string(task.Pending), Desired: string(task.Run), Manifest: f.manifest, Host: store.Waiting,
	}, f.text, ev); err != nil {
		t.Error(err)
	}
}

// submitAll accepts n tasks, several at a time.
func (f *simFleet) submitAll(t *testing.T, n, most int) {
	var all errgroup.Group
	all.SetLimit(most)
	for range n {
		all.Go(func() error { f.submit(t); return nil })
	}
	_ = all.Wait() // submit reports errors
}

// waitSent waits until the log has all tasks that were accepted.
func (f *simFleet) waitSent(t *testing.T) {
	t.Helper()
	f.until(t, "the log has all tasks", func() bool {
		for _, h := range f.machines {
			if all, err := h.store.Unsettled(t.Context()); err != nil || len(all) > 0 {
				return false
			}
		}
		return true
	})
}

// wait waits for the end of n tasks, also in the log.
func (f *simFleet) wait(t *testing.T, n int) {
	t.Helper()
	f.until(t, fmt.Sprintf("%d tasks have ended", n), func() bool { return f.ended.Load() >= int64(n) })
	f.waitSent(t)
}

// until polls f until it is true, and logs what was reached in each minute.
func (f *simFleet) until(t *testing.T, what string, done func() bool) {
	t.Helper()
	began := time.Now()
	for next := began.Add(time.Minute); !done(); time.Sleep(50 * time.Millisecond) {
		if now := time.Now(); now.After(next) {
			next = now.Add(time.Minute)
			t.Logf("%d tasks have ended", f.ended.Load())
			if now.Sub(began) > patience {
				t.Fatalf("%s: not within %v", what, patience)
			}
		}
	}
}
