package keeper_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"testing/fstest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/keeper"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const id = "aaaa11112222"

// TestMain makes this test binary a keeper. The environment names its state directory
// and says whether its driver hangs in Delete.
func TestMain(m *testing.M) {
	dir := os.Getenv("KEEPER_TEST_DIR")
	if dir == "" {
		os.Exit(testenv.Run(m))
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() { // leaves no orphans: the parent holds our stdin
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	w, err := newWorker(ctx, dir)
	if err == nil {
		w.Driver = &driver{remove: func(ctx context.Context) error {
			fmt.Println("removing")
			if os.Getenv("KEEPER_TEST_HANG") != "" {
				select {} // until kill -9
			}
			return nil
		}}
		fmt.Println("up")
		err = run(ctx, w)
	}
	fmt.Println("end", err)
	os.Exit(0)
}

func run(ctx context.Context, w *session.Worker) error {
	return keeper.Run(ctx, w.Log, &keeper.Session{Worker: w, ID: id})
}

// driver has no VM; its calls do what the test defines.
type driver struct {
	inspect      func(context.Context) (vm.Machine, error)
	stop, remove func(context.Context) error
}

func (d *driver) Inspect(ctx context.Context, _ string) (vm.Machine, error) { return d.inspect(ctx) }

func (d *driver) Stop(ctx context.Context, _ string, _ func(context.Context) error, _ time.Duration) error {
	return d.stop(ctx)
}
func (d *driver) Delete(ctx context.Context, _ string) error { return d.remove(ctx) }
func (*driver) Create(context.Context, vm.Spec) error        { return errors.New("no VM") }
func (*driver) Start(context.Context, string, vm.Progress) (vm.Endpoint, error) {
	return vm.Endpoint{}, errors.New("no VM")
}
func (*driver) Export(context.Context, string, string, vm.Progress) error { return nil }

func (*driver) List(context.Context) ([]vm.Machine, error)      { return nil, nil }
func (*driver) Accel(context.Context, string) (vm.Accel, error) { return vm.Accel{Name: "none"}, nil }
func (*driver) Check(context.Context, string) []error           { return nil }
func (*driver) NetSockets(string) (vm.NetSockets, error)        { return vm.NetSockets{}, errors.New("no VM") }

func newWorker(ctx context.Context, dir string) (*session.Worker, error) {
	c, err := config.Load(config.Paths{System: dir + "/etc", Config: dir + "/conf", State: dir + "/state", LimaHome: dir + "/vms"}, fstest.MapFS{
		"config.yaml":           {Data: []byte("limits: {running: 10, memory_reserve: 1MiB, disk_reserve: 1MiB}\nnetwork: {mode: allowlist}\n")},
		"resources.yaml":        {Data: []byte("defaults: {cpus: 1, memory: 512MiB, disk: 4GiB}\n")},
		"network-allowlist.txt": {},
		"prices.yaml":           {},
	})
	if err != nil {
		return nil, err
	}
	st, err := store.Open(ctx, c.Paths.Store())
	if err != nil {
		return nil, err
	}
	return &session.Worker{
		Sessions: &session.Manager{Store: st, Config: c, Self: "true"}, // the test starts the keepers itself
		Log:      slog.New(slog.DiscardHandler), KillLocal: func(context.Context, session.Session) error { return nil },
	}, nil
}

// world is a worker with a state directory and one session.
type world struct {
	*session.Worker
	dir string
	drv *driver
}

func newWorld(t *testing.T, phase, desired session.Phase, status session.Status) *world {
	t.Helper()
	dir := t.TempDir()
	w, err := newWorker(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Sessions.Store.Close() })
	drv := &driver{}
	w.Driver = drv
	raw, err := json.Marshal(status)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = w.Sessions.Store.Create(t.Context(), store.Session{
		ID: id, Name: "agent-o-r-aaaa11", RepoKey: "k", Repo: "o/r", Phase: string(phase), Desired: string(desired), Spec: json.RawMessage("{}"),
	}, store.Event{Kind: "made"}, func([]store.Session) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Sessions.Store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Status = raw
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	return &world{Worker: w, dir: dir, drv: drv}
}

func (w *world) is(t *testing.T, phase session.Phase) session.Session {
	t.Helper()
	s, err := w.Sessions.Get(t.Context(), id)
	if err != nil || s.Phase != phase {
		t.Fatalf("session = phase %s (%s), %v, want %s", s.Phase, s.ErrorMessage, err, phase)
	}
	return s
}

func (w *world) setDesired(t *testing.T, phase session.Phase) {
	t.Helper()
	s, err := w.Sessions.Get(t.Context(), id)
	if err == nil {
		_, err = w.Sessions.SetDesired(t.Context(), s, phase)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// run starts a keeper in this process and returns a channel with its result.
func (w *world) run(ctx context.Context) <-chan error {
	end := make(chan error, 1)
	go func() { end <- run(ctx, w.Worker) }()
	return end
}

func ended(t *testing.T, end <-chan error) error {
	t.Helper()
	select {
	case err := <-end:
		return err
	case <-time.After(2 * time.Minute):
		t.Fatal("keeper runs after 2 minutes, want it ended")
		return nil
	}
}

func TestNothingToDo(t *testing.T) {
	for _, c := range []struct{ phase, desired session.Phase }{
		{session.Stopped, session.Stopped},
		{session.Broken, session.Ready},
		{session.Broken, session.Stopped},
		{session.Gone, session.Gone},
	} {
		w := newWorld(t, c.phase, c.desired, session.Status{})
		before := lastSeq(t, w.Sessions.Store, id)
		if err := run(t.Context(), w.Worker); err != nil {
			t.Errorf("%s, desired %s: run = %v, want nil", c.phase, c.desired, err)
		}
		if after := lastSeq(t, w.Sessions.Store, id); after != before {
			t.Errorf("%s, desired %s: last event = %d, want %d as before", c.phase, c.desired, after, before)
		}
		if lockfile.Held(w.Sessions.Config.Paths.SessionLock(id)) {
			t.Errorf("%s, desired %s: lock held = true, want false", c.phase, c.desired)
		}
	}
	if err := keeper.Run(t.Context(), slog.New(slog.DiscardHandler), &keeper.Session{Worker: newWorld(t, session.Ready, session.Ready, session.Status{}).Worker, ID: "nobody"}); err == nil {
		t.Error("Run for an unknown session = nil, want an error")
	}
}

// TestFailedStopIsNotRepeated checks that a failed stop ends in a phase at rest, not in
// a loop that fills the store and the log.
func TestFailedStopIsNotRepeated(t *testing.T) {
	w := newWorld(t, session.Ready, session.Stopped, session.Status{WasReady: true})
	n := 0
	w.drv.stop = func(context.Context) error { n++; return errors.New("it will not") }
	if err := ended(t, w.run(t.Context())); err != nil || n != 1 {
		t.Fatalf("keeper = %v after %d stops, want nil, 1", err, n)
	}
	if s := w.is(t, session.Broken); s.ErrorMessage == "" || s.ErrorHint == "" {
		t.Errorf("error of the broken session = %q (hint %q), want both", s.ErrorMessage, s.ErrorHint)
	}
	w.drv.stop = func(context.Context) error { n++; return nil }
	w.setDesired(t, session.Stopped) // once more, because a user asks
	if err := ended(t, w.run(t.Context())); err != nil || n != 2 {
		t.Fatalf("keeper = %v after %d stops, want nil, 2", err, n)
	}
	w.is(t, session.Stopped)
}

func TestTriesAgainWhatCannotBeRecordedAsBroken(t *testing.T) {
	w := newWorld(t, session.Stopped, session.Gone, session.Status{})
	n := 0
	w.drv.remove = func(context.Context) error {
		if n++; n == 1 {
			return errors.New("busy")
		}
		return nil
	}
	if err := ended(t, w.run(t.Context())); err != nil || n != 2 {
		t.Fatalf("keeper = %v after %d removals, want nil, 2", err, n)
	}
	if s := w.is(t, session.Gone); s.ErrorMessage != "" {
		t.Errorf("error of the removed session = %q, want none", s.ErrorMessage)
	}
}

func TestChangedWantCallsWorkOff(t *testing.T) {
	w := newWorld(t, session.Starting, session.Ready, session.Status{WasReady: true})
	working := make(chan struct{})
	w.drv.inspect = func(ctx context.Context) (vm.Machine, error) { // the first call when a session is brought up
		close(working)
		<-ctx.Done()
		return vm.Machine{}, ctx.Err()
	}
	w.drv.remove = func(ctx context.Context) error { return ctx.Err() } // its own context must not be cancelled
	end := w.run(t.Context())
	<-working
	w.setDesired(t, session.Gone)
	if err := ended(t, end); err != nil {
		t.Fatal(err)
	}
	w.is(t, session.Gone)
}

// TestEndsWithItsContext checks that a keeper whose context is cancelled does not mark the
// session as failed.
func TestEndsWithItsContext(t *testing.T) {
	w := newWorld(t, session.Ready, session.Ready, session.Status{})
	ctx, cancel := context.WithCancel(t.Context())
	w.drv.inspect = func(context.Context) (vm.Machine, error) {
		cancel()
		return vm.Machine{State: vm.Running}, nil
	}
	if err := ended(t, w.run(ctx)); !errors.Is(err, context.Canceled) {
		t.Fatalf("keeper = %v, want %v", err, context.Canceled)
	}
	w.is(t, session.Ready)
	if lockfile.Held(w.Sessions.Config.Paths.SessionLock(id)) {
		t.Error("lock held after the end = true, want false")
	}
}

// TestSecondKeeperOfReadySessionEnds checks that a second keeper of a ready session
// does not wait.
func TestSecondKeeperOfReadySessionEnds(t *testing.T) {
	w := newWorld(t, session.Ready, session.Ready, session.Status{})
	ctx, cancel := context.WithCancel(t.Context())
	watching := make(chan struct{}, 100)
	w.drv.inspect = func(context.Context) (vm.Machine, error) {
		watching <- struct{}{}
		return vm.Machine{State: vm.Running}, nil
	}
	first := w.run(ctx)
	<-watching
	if err := ended(t, w.run(t.Context())); err != nil {
		t.Fatal(err)
	}
	if !lockfile.Held(w.Sessions.Config.Paths.SessionLock(id)) {
		t.Fatal("lock held by the first keeper = false, want true")
	}
	cancel()
	if err := ended(t, first); !errors.Is(err, context.Canceled) {
		t.Fatalf("first keeper = %v, want %v", err, context.Canceled)
	}
}

// TestAskingIsNoKeeper covers a command that asks whether a keeper lives, which holds
// the lock for a moment. A starting keeper must not take the command for another
// keeper.
func TestAskingIsNoKeeper(t *testing.T) {
	w := newWorld(t, session.Ready, session.Ready, session.Status{})
	lock, ok, err := lockfile.Try(w.Sessions.Config.Paths.SessionLock(id))
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w.drv.inspect = func(context.Context) (vm.Machine, error) {
		cancel()
		return vm.Machine{State: vm.Running}, nil
	}
	w.Log = slog.New(asker{slog.DiscardHandler, lock})
	if err := ended(t, w.run(ctx)); !errors.Is(err, context.Canceled) {
		t.Fatalf("keeper beside a test of the lock = %v, want %v: it must not take the test for a keeper", err, context.Canceled)
	}
}

// asker releases its lock once a keeper has found it held.
type asker struct {
	slog.Handler
	lock *lockfile.Lock
}

func (asker) Enabled(context.Context, slog.Level) bool { return true }

func (a asker) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "waiting for the active keeper" {
		return a.lock.Unlock()
	}
	return nil
}

type child struct {
	*exec.Cmd
	out *bufio.Scanner
}

func (w *world) spawn(t *testing.T, env ...string) child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := child{Cmd: exec.Command(exe)}
	c.Env = append(append(os.Environ(), "KEEPER_TEST_DIR="+w.dir), env...)
	c.Stderr = os.Stderr
	if _, err := c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewScanner(out)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	c.expect(t, "up")
	return c
}

func (c child) expect(t *testing.T, line string) {
	t.Helper()
	if !c.out.Scan() || c.out.Text() != line {
		t.Fatalf("line of the keeper = %q, want %q", c.out.Text(), line)
	}
}

// TestStandByTakesOver checks that only one keeper works at a time, and that a waiting
// keeper finishes the work when that one is killed.
func TestStandByTakesOver(t *testing.T) {
	w := newWorld(t, session.Ready, session.Gone, session.Status{})
	if err := os.MkdirAll(w.Sessions.Config.Paths.SessionDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	first := w.spawn(t, "KEEPER_TEST_HANG=1")
	first.expect(t, "removing")
	second := w.spawn(t)
	if _, ok, err := lockfile.Try(w.Sessions.Config.Paths.SessionLock(id)); ok || err != nil {
		t.Fatalf("Try = %t, %v, want false, nil: a keeper holds it", ok, err)
	}
	w.is(t, session.Destroying) // the second keeper, which would remove it at once, waits
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	second.expect(t, "removing")
	second.expect(t, "end <nil>")
	w.is(t, session.Gone)
}

// TestLateKeeperLeavesNothing covers the late keeper of a second destroy. The process
// that started it had created the directory for its log again.
func TestLateKeeperLeavesNothing(t *testing.T) {
	w := newWorld(t, session.Gone, session.Gone, session.Status{})
	log := filepath.Join(w.Sessions.Config.Paths.SessionDir(id), "keeper.log")
	if err := os.MkdirAll(filepath.Dir(log), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), w.Worker); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(log)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("session directory: %v, want it removed", err)
	}
}

// lastSeq returns the sequence number of a session's newest event, or 0 if it has none.
func lastSeq(t *testing.T, s *store.Store, id string) int64 {
	t.Helper()
	_, last, err := s.EventRange(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return last
}
