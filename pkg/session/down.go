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

// stop shuts the VM down: note what work is in it, wipe the secrets, power
// off, and pull the plug when the guest does not listen.
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
		work, poweroff = w.farewell(ctx, s)
		err := w.Driver.Stop(ctx, s.VM(), poweroff, stopGrace)
		if errors.Is(err, vm.ErrNotFound) && !s.Facts.WasReady {
			err = nil // called off before there was a VM
		}
		return errors.Join(err, w.Gateway(s).Stop(ctx))
	})
	if err != nil {
		return w.broke(ctx, s, err)
	}
	s, err = w.facts(ctx, s.ID, store.Event{}, func(f *Facts) { f.Endpoint = vm.Endpoint{} })
	if err != nil {
		return s, err
	}
	return w.move(ctx, s, Stopped, work, func(row *store.Session) { row.SetError("", "", "") })
}

// farewell talks to the guest one last time, for as long as it takes a living
// one. It returns the work that would be lost with the guest, nil when that is not
// known, and the function that powers it off, which fails when it does not
// answer: what it has not written to its disk is then worth the power button.
func (w *Worker) farewell(ctx context.Context, s Session) (work *repo.WorkState, poweroff func(context.Context) error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := w.DialOwn(ctx, s)
	if err != nil {
		w.Log.WarnContext(ctx, "no farewell", "error", err)
		return nil, func(context.Context) error { return err }
	}
	g := s.Guest(conn)
	var saving sync.WaitGroup
	saving.Go(func() { w.saveHome(whole, s, g) })
	if s.Facts.Base != nil {
		state, err := w.Work(ctx, s, conn)
		if err != nil {
			w.warn(ctx, s.ID, "", "what work is left in the guest is not known: %v", err)
		} else {
			work = &state
		}
	}
	saving.Wait() // it asks for the secrets, and may take long
	ctx, cancelWipe := context.WithTimeout(whole, 20*time.Second)
	defer cancelWipe()
	if err := g.WipeSecrets(ctx); err != nil {
		w.Log.WarnContext(ctx, "wipe secrets", "error", err) // they are in memory, which goes with the VM
	}
	return work, func(ctx context.Context) error {
		defer conn.Close()
		return g.Poweroff(ctx)
	}
}

// destroy removes everything but the row and its events.
func (w *Worker) destroy(ctx context.Context, s Session) (Session, error) {
	if s.Phase != Destroying {
		var err error
		// The token is worth nothing from here on, whatever happens next.
		if s, err = w.advance(ctx, s, Destroying, func(row *store.Session) { row.TokenSHA256 = "" }); err != nil {
			return s, err
		}
	}
	w.lastWords(ctx, s)
	err := w.step(ctx, s.ID, "remove VM, disks and keys", func(ctx context.Context, p vm.Progress) error {
		return errors.Join(
			w.KillLocal(ctx, s),
			w.forsake(ctx, s.ID),
			w.Driver.Delete(ctx, s.VM()),
			w.Gateway(s).Stop(ctx),
		)
	})
	w.auditVM(ctx, audit.VMDestroyed, s, err)
	if err != nil {
		code, hint := fail.CodeOf(err).String(), fail.HintOf(err)
		_, serr := w.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
			row.SetError(code, w.text(err.Error()), hint)
			return store.Event{}, nil
		})
		return s, errors.Join(err, serr)
	}
	// The keeper's log is in there too, and open; that is fine, and the last of it.
	if err := os.RemoveAll(w.Config.Paths.SessionDir(s.ID)); err != nil {
		return s, fmt.Errorf("remove the session's directory: %w", err)
	}
	if s, err = w.facts(ctx, s.ID, store.Event{}, func(f *Facts) { f.Endpoint = vm.Endpoint{} }); err != nil {
		return s, err
	}
	return w.advance(ctx, s, Gone, func(row *store.Session) { row.SetError("", "", "") })
}
