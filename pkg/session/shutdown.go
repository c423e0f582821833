package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// stop shuts the VM down: it records what work is in the guest, saves its home, wipes
// the secrets and powers the guest off. If the guest does not respond, it cuts the
// power.
func (w *Worker) stop(ctx context.Context, s Session) (Session, error) {
	if s.Phase != Stopping {
		var err error
		if s, err = w.advance(ctx, s, Stopping, nil); err != nil {
			return s, err
		}
	}
	var work *repo.WorkState
	err := w.step(ctx, s.ID, "stop the VM", func(ctx context.Context, p vm.Progress) error {
		var poweroff func(context.Context) error
		work, poweroff = w.prepareShutdown(ctx, s)
		err := w.Driver.Stop(ctx, s.VM(), poweroff, stopGrace)
		if errors.Is(err, vm.ErrNotFound) && !s.Status.WasReady {
			err = nil // cancelled before the VM existed
		}
		return errors.Join(err, w.Sessions.Gateway(s).Stop(ctx))
	})
	if err != nil {
		return w.markBroken(ctx, s, err)
	}
	s, err = w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Endpoint = vm.Endpoint{} })
	if err != nil {
		return s, err
	}
	return w.move(ctx, s, Stopped, work, func(row *store.Session) { row.SetError("", "", "") })
}

// prepareShutdown prepares the guest for its shutdown, within the time that a working guest
// needs. It returns the work that would be lost with the guest, nil when that is
// unknown, and a function that powers the guest off. If the guest cannot be reached,
// that function returns the error; the driver then presses the power button, so that
// the guest can still write its data to disk.
func (w *Worker) prepareShutdown(ctx context.Context, s Session) (work *repo.WorkState, poweroff func(context.Context) error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := Connections{Paths: w.Sessions.Config.Paths}.DialOwn(ctx, s)
	if err != nil {
		w.Log.WarnContext(ctx, "failed to prepare guest for shutdown", "error", err)
		return nil, func(context.Context) error { return err }
	}
	g := s.Guest(conn)
	var saving sync.WaitGroup
	saving.Go(func() { w.homeFiles().saveHome(whole, s, g) })
	if s.Status.Base != nil {
		state, err := Work{Sessions: w.Sessions}.Unsaved(ctx, s, conn)
		if err != nil {
			w.warn(ctx, s.ID, "", "unsaved work cannot be determined: %v", err)
		} else {
			work = &state
		}
	}
	saving.Wait() // saving asks the guest for its secrets and may take long
	ctx, cancelWipe := context.WithTimeout(whole, 20*time.Second)
	defer cancelWipe()
	if err := g.WipeSecrets(ctx); err != nil {
		w.Log.WarnContext(ctx, "failed to wipe secrets", "error", err) // they are only in memory, which ends with the VM
	}
	return work, func(ctx context.Context) error {
		defer conn.Close()
		return g.Poweroff(ctx)
	}
}

// destroy removes everything except the row and its events.
func (w *Worker) destroy(ctx context.Context, s Session) (Session, error) {
	if s.Phase != Destroying {
		var err error
		// From here on the token is invalid, whatever happens next.
		if s, err = w.advance(ctx, s, Destroying, func(row *store.Session) { row.TokenSHA256 = "" }); err != nil {
			return s, err
		}
	}
	w.homeFiles().saveHomeBeforeDestroy(ctx, s)
	err := w.step(ctx, s.ID, "remove VM, disks and keys", func(ctx context.Context, p vm.Progress) error {
		return errors.Join(
			w.KillLocal(ctx, s),
			w.standbys().releaseStandby(ctx, s.ID),
			w.Driver.Delete(ctx, s.VM()),
			w.Sessions.Gateway(s).Stop(ctx),
		)
	})
	w.auditVM(ctx, audit.VMDestroyed, s, err)
	if err != nil {
		code, hint := fail.CodeOf(err).String(), fail.HintOf(err)
		_, serr := w.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
			row.SetError(code, w.text(err.Error()), hint)
			return store.Event{}, nil
		})
		return s, errors.Join(err, serr)
	}
	// The keeper's own log is in this directory, and still open. That is harmless:
	// this removes the log's last name.
	if err := os.RemoveAll(w.Sessions.Config.Paths.SessionDir(s.ID)); err != nil {
		return s, fmt.Errorf("remove session directory: %w", err)
	}
	if s, err = w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Endpoint = vm.Endpoint{} }); err != nil {
		return s, err
	}
	return w.advance(ctx, s, Gone, func(row *store.Session) { row.SetError("", "", "") })
}
