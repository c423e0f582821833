package session

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// The guest's report of unsaved work is valid from the clean stop that recorded it
// until the VM may run again, and no longer, because destroy relies on it.
func TestAccountOfWorkIsOfTheLastCleanStop(t *testing.T) {
	off := driver{inspect: func(context.Context) (vm.Machine, error) { return vm.Machine{State: vm.Stopped}, nil }}
	old := Status{WasReady: true, Base: &repo.Base{}, Work: &repo.WorkState{}}
	for name, c := range map[string]struct {
		from, desired Phase
		driver        driver
		to            Phase
	}{
		"it starts again":                       {Stopped, Ready, driver{}, Starting},
		"its VM ended":                          {Ready, Ready, off, Stopped},
		"its guest does not answer at the stop": {Ready, Stopped, driver{}, Stopped},
		"it is stopped while it starts":         {Starting, Stopped, driver{}, Stopped},
		"it is being stopped":                   {Stopping, Stopped, driver{}, Stopped},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, c.driver)
			s := put(t, w.Sessions, "aaaa11112222", "o/r", c.from, c.desired, old)
			got, err := w.Next(t.Context(), s)
			if err != nil || got.Phase != c.to || got.Status.Work != nil {
				t.Fatalf("Next = phase %s, work %+v, %v, want %s, no work", got.Phase, got.Status.Work, err, c.to)
			}
		})
	}
	t.Run("reported at the stop", func(t *testing.T) {
		w := newWorker(t, driver{})
		s := put(t, w.Sessions, "aaaa11112222", "o/r", Stopping, Stopped, Status{})
		got, err := w.move(t.Context(), s, Stopped, &repo.WorkState{Dirty: 3}, nil)
		if err != nil || got.Status.Work == nil || got.Status.Work.Dirty != 3 {
			t.Fatalf("move to %s = work %+v, %v, want 3 changed files", Stopped, got.Status.Work, err)
		}
		if got, err = w.advance(t.Context(), got, Destroying, nil); err != nil || got.Status.Work == nil {
			t.Fatalf("advance to %s = work %+v, %v, want the work of the stop", Destroying, got.Status.Work, err)
		}
	})
}

// failWrites makes every change of a session's row fail from the n-th on, until the
// returned function is called.
func failWrites(t *testing.T, m *Manager, n int) (restore func()) {
	t.Helper()
	db, err := sql.Open("sqlite", m.Config.Paths.Store())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	run := func(q string) {
		t.Helper()
		if _, err := db.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	run("CREATE TABLE writes (left INTEGER)")
	run(fmt.Sprintf("INSERT INTO writes VALUES (%d)", n))
	run(`CREATE TRIGGER fails BEFORE UPDATE ON sessions BEGIN
		UPDATE writes SET left = left - 1;
		SELECT RAISE(ABORT, 'no space left on device') WHERE (SELECT left FROM writes) < 0; END`)
	return func() { t.Helper(); run("DROP TRIGGER fails"); run("DROP TABLE writes") }
}

// When a write of the row fails, the Worker returns an error, leaves a correct phase,
// and touches no VM unless the row says so. The next attempt succeeds.
func TestFailedWritesAreNeverSuccess(t *testing.T) {
	whole := Status{WasReady: true, Base: &repo.Base{}, Endpoint: vm.Endpoint{Addr: "127.0.0.1:1"}}
	for name, c := range map[string]struct {
		from, desired, to Phase
		gone              bool // the VM is gone
	}{
		"destroy":            {Ready, Gone, Gone, false},
		"destroy, continued": {Destroying, Gone, Gone, false},
		"stop":               {Ready, Stopped, Stopped, false},
		"stop, continued":    {Stopping, Stopped, Stopped, false},
		"start":              {Stopped, Ready, Starting, false},
		"the VM ended":       {Ready, Ready, Stopped, false},
		"the VM is gone":     {Ready, Ready, Broken, true},
	} {
		t.Run(name, func(t *testing.T) {
			failed := 0
			for n := 0; ; n++ {
				var stopped, removed bool
				w := newWorker(t, driver{
					inspect: func(context.Context) (vm.Machine, error) {
						if c.gone {
							return vm.Machine{}, vm.ErrNotFound
						}
						return vm.Machine{State: vm.Stopped}, nil
					},
					stop:   func(context.Context) error { stopped = true; return nil },
					remove: func(context.Context) error { removed = true; return nil },
				})
				s := put(t, w.Sessions, "aaaa11112222", "o/r", c.from, c.desired, whole)
				restore := failWrites(t, w.Sessions, n)
				_, err := w.Next(t.Context(), s)
				restore()
				now, gerr := w.Sessions.Get(t.Context(), s.ID)
				if gerr != nil {
					t.Fatal(gerr)
				}
				if stopped && now.Phase != Stopping && now.Phase != Stopped || removed && now.Phase != Destroying && now.Phase != Gone {
					t.Errorf("write %d failed: stopped %t, removed %t, phase = %s, want the phase of that action", n, stopped, removed, now.Phase)
				}
				if err == nil {
					if now.Phase != c.to {
						t.Errorf("phase after write %d, reported as done, = %s, want %s", n, now.Phase, c.to)
					}
					break
				}
				failed++
				if now.Phase == c.to {
					t.Errorf("write %d failed (%v): phase = %s, want another", n, err, now.Phase)
				}
				for now.Phase != c.to {
					if now, err = w.Next(t.Context(), now); err != nil {
						t.Fatalf("Next after write %d failed = %v, want nil", n, err)
					}
				}
			}
			if failed == 0 {
				t.Error("failed writes = 0, want some")
			}
		})
	}
}

// When a part of the removal fails, the error is reported and the session stays.
func TestDestroyReportsWhatIsLeft(t *testing.T) {
	for name, set := range map[string]func(t *testing.T, w *Worker, d *driver, s Session){
		"the local tmux session": func(_ *testing.T, w *Worker, _ *driver, _ Session) {
			w.KillLocal = func(context.Context, Session) error { return errBoom }
		},
		"the VM": func(_ *testing.T, w *Worker, d *driver, _ Session) {
			d.remove = func(context.Context) error { return errBoom }
			w.Driver = *d
		},
		"a VM that was taken": func(t *testing.T, w *Worker, _ *driver, s Session) {
			if err := os.MkdirAll(w.Sessions.Config.Paths.Standby(s.ID), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(w.Sessions.Config.Paths.Standby(s.ID)+"/standby.json", []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := driver{}
			w := newWorker(t, d)
			s := put(t, w.Sessions, "aaaa11112222", "o/r", Stopped, Gone, Status{})
			set(t, w, &d, s)
			if _, err := w.Next(t.Context(), s); err == nil {
				t.Fatal("Next when deleting the VM fails = nil, want an error")
			}
			now, err := w.Sessions.Get(t.Context(), s.ID)
			if err != nil || now.Phase != Destroying || now.ErrorCode == "" {
				t.Fatalf("session = phase %s, error code %q, %v, want %s with an error code", now.Phase, now.ErrorCode, err, Destroying)
			}
		})
	}
}

// A session continues without its events, but not without its row.
func TestEventsThatCannotBeWritten(t *testing.T) {
	w := newWorker(t, driver{})
	s := put(t, w.Sessions, "aaaa11112222", "o/r", Ready, Ready, Status{})
	if err := w.Sessions.Store.Close(); err != nil {
		t.Fatal(err)
	}
	ran := false
	if err := w.step(t.Context(), s.ID, "x", func(context.Context, vm.Progress) error { ran = true; return nil }); err != nil || !ran {
		t.Errorf("step whose events cannot be written = %v, ran %t, want nil, true", err, ran)
	}
	w.warn(t.Context(), s.ID, "", "x")
	if _, err := w.Sessions.updateStatus(t.Context(), s.ID, store.Event{}, func(*Status) {}); err == nil {
		t.Error("updateStatus without a store = nil, want an error")
	}
	if _, err := w.markBroken(t.Context(), s, errBoom); !errors.Is(err, errBoom) {
		t.Errorf("markBroken without a store = %v, want %v among its causes", err, errBoom) // the cause must be reported too
	}
}

// The settings can change while the keeper connects to the guest and reads its observations.
// For the next start they are the new ones.
func TestSettingsChangeWhileWatching(t *testing.T) {
	inspected := make(chan struct{})
	w := newWorker(t, driver{inspect: func(context.Context) (vm.Machine, error) {
		select {
		case inspected <- struct{}{}:
		case <-t.Context().Done():
		}
		return vm.Machine{State: vm.Running}, nil
	}})
	s := put(t, w.Sessions, "aaaa11112222", "o/r", Ready, Ready, Status{WasReady: true, Base: &repo.Base{}, Endpoint: vm.Endpoint{Addr: "127.0.0.1:1"}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { _, err := w.Next(ctx, s); ended <- err }()
	<-inspected
	dir := w.Sessions.Config.Paths.Config
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/config.yaml", []byte("limits: {running: 7}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		<-inspected // after the settings were read again
	}
	cancel()
	select {
	case <-inspected:
	case err := <-ended:
		ended <- err
	}
	if err := <-ended; err != nil || w.Sessions.Config.Limits.Running != 7 {
		t.Errorf("Next = %v, then limits.running = %d, want nil, 7", err, w.Sessions.Config.Limits.Running)
	}
}
