package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/fstest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain lets this test binary act as a process that holds a lock until it is killed.
func TestMain(m *testing.M) {
	testenv.Main(m, testenv.Commands{"hold": func(ctx context.Context, args []string) error {
		if _, err := lockfile.Wait(ctx, args[0], nil); err != nil {
			return err
		}
		fmt.Println("locked")
		_, err := io.Copy(io.Discard, os.Stdin)
		return err
	}})
}

// newManager returns a Manager with its own store, ample capacity, and a keeper that
// ends immediately. The store shows what the Manager does.
func newManager(t *testing.T) *Manager {
	t.Helper()
	for _, name := range []string{"IMAGE", "PREPARE", "PROFILE", "LIMA_HOME", "LIMITS_RUNNING", "LIMITS_MEMORY_RESERVE", "LIMITS_DISK_RESERVE"} {
		t.Setenv("AGENT_SESSIONIZER_"+name, "")
	}
	dir := testenv.ShortDir(t) // the length of lima_home matters
	c, err := config.Load(config.Paths{
		System: filepath.Join(dir, "etc"), Config: filepath.Join(dir, "conf"), State: filepath.Join(dir, "state"), Cache: dir, LimaHome: filepath.Join(dir, "vms"),
	}, fstest.MapFS{
		"config.yaml":           {Data: []byte("image: ubuntu\nprepare: none\nlimits: {running: 10, memory_reserve: 1MiB, disk_reserve: 1MiB}\nnetwork: {mode: allowlist, ports: [443]}\n")},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 512MiB, disk: 4GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
	if err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(t.Context(), c.Paths.Store())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	return &Manager{Store: st, Config: c, Self: "true"}
}

// put creates a session in phase p with that desired phase.
func put(t *testing.T, m *Manager, id, slug string, p, desired Phase, status Status) Session {
	t.Helper()
	spec, err := json.Marshal(Spec{
		Repo: repo.Ref{Key: "github.com/" + slug, Slug: slug}, Image: image.Ubuntu,
		Resources: config.Resources{CPUs: 1, Memory: 512 << 20, Disk: 4 << 30},
	})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = m.Store.Create(t.Context(), store.Session{
		ID: id, Name: Name(slug, "", id[:6], 58), RepoKey: "github.com/" + slug, Repo: slug, Phase: string(Creating), Desired: string(Ready), Spec: spec,
	}, phaseEvent("", Creating, Ready), func([]store.Session) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	row, err := m.Store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Phase, row.Desired, row.Status = string(p), string(desired), raw
		if p == Broken {
			row.SetError("HOST", "it broke", "mend it")
		}
		return store.Event{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	s, err := read(row, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// changes returns the phase changes in the session's events after seq.
func changes(t *testing.T, m *Manager, id string, seq int64) []PhaseChange {
	t.Helper()
	evs, err := m.Store.Events(t.Context(), id, seq, 1000)
	if err != nil {
		t.Fatal(err)
	}
	var out []PhaseChange
	for _, ev := range evs {
		if ev.Kind == EventPhase {
			var p PhaseChange
			if err := json.Unmarshal(ev.Data, &p); err != nil {
				t.Fatal(err)
			}
			out = append(out, p)
		}
	}
	return out
}

// driver has no VM; each call does what the test specifies, or succeeds.
type driver struct {
	inspect      func(context.Context) (vm.Machine, error)
	stop, remove func(context.Context) error
}

var errBoom = errors.New("boom")

func (d driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	if d.inspect == nil {
		return vm.Machine{}, fmt.Errorf("%s: %w", name, vm.ErrNotFound)
	}
	return d.inspect(ctx)
}

func (d driver) Stop(ctx context.Context, _ string, _ func(context.Context) error, _ time.Duration) error {
	if d.stop == nil {
		return nil
	}
	return d.stop(ctx)
}

func (d driver) Delete(ctx context.Context, _ string) error {
	if d.remove == nil {
		return nil
	}
	return d.remove(ctx)
}

func (driver) Create(context.Context, vm.Spec) error { return errBoom }
func (driver) Start(context.Context, string, vm.Progress) (vm.Endpoint, error) {
	return vm.Endpoint{}, errBoom
}
func (driver) Export(context.Context, string, string, vm.Progress) error { return errBoom }

func (driver) List(context.Context) ([]vm.Machine, error)      { return nil, nil }
func (driver) Accel(context.Context, string) (vm.Accel, error) { return vm.Accel{Name: "none"}, nil }
func (driver) Check(context.Context, string) []error           { return nil }
func (driver) NetSockets(string) (vm.NetSockets, error)        { return vm.NetSockets{}, errBoom }

func newWorker(t *testing.T, d driver) *Worker {
	t.Helper()
	m := newManager(t)
	return &Worker{
		Sessions: m, Driver: d,
		Golden: &golden.Maker{VMs: golden.VMs{Driver: d}, Images: &image.Store{Dir: filepath.Join(m.Config.Paths.State, "images")}, Scripts: fstest.MapFS{}},
		Log:    slog.New(slog.DiscardHandler), KillLocal: func(context.Context, Session) error { return nil },
	}
}

// lastSeq returns the sequence number of a session's newest event, or 0 when it has
// none.
func lastSeq(t *testing.T, s *store.Store, id string) int64 {
	t.Helper()
	_, last, err := s.EventRange(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return last
}
