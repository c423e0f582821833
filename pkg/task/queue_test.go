package task

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// newManager returns a Manager with its own store and keepers that end immediately,
// so only the test changes a task. The settings allow this many slots and VMs.
func newManager(t *testing.T, slots, vms int) *Manager {
	t.Helper()
	dir := testenv.ShortDir(t)
	c, err := config.Load(config.Paths{
		System: filepath.Join(dir, "etc"), Config: filepath.Join(dir, "conf"), State: filepath.Join(dir, "state"),
		Data: filepath.Join(dir, "data"), Cache: filepath.Join(dir, "cache"), LimaHome: filepath.Join(dir, "vms"),
	}, fstest.MapFS{
		"config.yaml": {Data: fmt.Appendf(nil, "image: ubuntu\nprepare: none\nlimits: {running: %d, memory_reserve: 1MiB, disk_reserve: 1MiB}\ntasks: {slots: %d}\n"+
			"network: {mode: allowlist, ports: [443]}\nprofiles: {small: {resources: {cpus: 1, memory: 512MiB, disk: 4GiB}}}\n", vms, slots)},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 512MiB, disk: 4GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Paths.Make(); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), c.Paths.Store())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return &Manager{Sessions: &session.Manager{Store: st, Config: c, Self: "true"}}
}

func submit(t *testing.T, m *Manager, name, profile string, priority int) Task {
	t.Helper()
	asked, _, err := manifest.Parse("m", fmt.Appendf(nil, `{"version": "1", "kind": "Task", "metadata": {"name": %q, "priority": %d},
		"repository": {"url": "acme/app"}, "agent": {"kind": "command", "command": ["true"]}, "vm": {"profile": %q}}`, name, priority, profile), "")
	if err != nil {
		t.Fatal(err)
	}
	task, _, err := m.Submit(t.Context(), asked, Submission{})
	if err != nil {
		t.Fatal(err)
	}
	return task
}

// started returns the names of the tasks that have left the queue, in the order of
// their creation.
func started(t *testing.T, m *Manager) (names []string) {
	t.Helper()
	if err := m.Schedule(t.Context()); err != nil {
		t.Fatal(err)
	}
	all, err := m.List(t.Context(), store.TaskFilter{OldestFirst: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range all {
		if task.Phase == Staging {
			names = append(names, task.Name)
		}
	}
	return names
}

func TestSlotsGoToTheHighestPriority(t *testing.T) {
	m := newManager(t, 3, 100)
	for i, priority := range []int{0, -5, 10, 0, 10, 0} {
		submit(t, m, fmt.Sprint(i), "small", priority)
	}
	if got := started(t, m); !slices.Equal(got, []string{"0", "2", "4"}) {
		t.Errorf("tasks started = %q, want 0, 2, 4", got)
	}
	if got := started(t, m); len(got) != 3 {
		t.Errorf("tasks started then = %q, want 3", got)
	}
}

// VMs that do not exist yet count, too.
func TestNoMoreThanThereIsRoomFor(t *testing.T) {
	m := newManager(t, 10, 2)
	for i := range 4 {
		submit(t, m, fmt.Sprint(i), "small", 0)
	}
	for range 2 {
		if got := started(t, m); !slices.Equal(got, []string{"0", "1"}) {
			t.Errorf("tasks started = %q, want 0, 1", got)
		}
	}
}

// A missing profile fails its task, and does not block those behind it.
func TestWhatCannotBeHoldsUpNobody(t *testing.T) {
	m := newManager(t, 2, 100)
	submit(t, m, "gone", "small", 50)
	submit(t, m, "next", "small", 0)
	other := newManager(t, 2, 100) // with the later settings
	other.Sessions.Store = m.Sessions.Store
	without, err := config.Load(m.paths(), fstest.MapFS{
		"config.yaml":           {Data: []byte("image: ubuntu\nprepare: none\nlimits: {running: 100, memory_reserve: 1MiB, disk_reserve: 1MiB}\nnetwork: {mode: allowlist, ports: [443]}\n")},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 512MiB, disk: 4GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
	if err != nil {
		t.Fatal(err)
	}
	other.Sessions.Config = without
	if got := started(t, other); !slices.Equal(got, []string{"gone", "next"}) {
		t.Errorf("tasks started = %q, want gone, next", got)
	}
}

// A task without a keeper is cancelled immediately, and its directory shows it.
func TestCancelOfWhatWaits(t *testing.T) {
	m := newManager(t, 1, 100)
	task := submit(t, m, "one", "small", 0)
	task, err := m.SetDesired(t.Context(), task, Cancel, Client{})
	if err != nil || task.Phase != Cancelled || task.Status.Outcome == nil || task.Status.Outcome.Result != CancelledByUser {
		t.Fatalf("SetDesired(%s) = %+v, %v, want %s with outcome %s", Cancel, task.View(), err, Cancelled, CancelledByUser)
	}
	if again, err := m.SetDesired(t.Context(), task, Destroyed, Client{}); err != nil || again.Phase != Cancelled {
		t.Errorf("SetDesired(%s) of a cancelled task = %+v, %v, want %s", Destroyed, again.View(), err, Cancelled)
	}
	evs, err := m.store().Events(t.Context(), task.ID, 0, 10)
	if err != nil || len(evs) != 2 {
		t.Errorf("events = %d, %v, want 2", len(evs), err)
	}
	if got := started(t, m); len(got) != 0 {
		t.Errorf("tasks started = %q, want none", got)
	}
}

func TestFind(t *testing.T) {
	m := newManager(t, 1, 100)
	one, two := submit(t, m, "same", "small", 0), submit(t, m, "other", "small", 0)
	submit(t, m, "same", "small", 0)
	for what, want := range map[string]string{one.ID: one.ID, two.ID[:6]: two.ID, "other": two.ID} {
		if got, err := m.Find(t.Context(), what); err != nil || got.ID != want {
			t.Errorf("Find(%q) = %s, %v, want %s", what, got.ID, err, want)
		}
	}
	for _, what := range []string{"same", "nobody", two.ID[:3], "ffffffffffff", "", "../../x"} {
		if got, err := m.Find(t.Context(), what); err == nil {
			t.Errorf("Find(%q) = %s, nil, want an error", what, got.ID)
		}
	}
}
