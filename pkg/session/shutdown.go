package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
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
	var saved *Saved
	if err := w.checkpointer().settle(ctx, s); err != nil {
		w.Log.WarnContext(ctx, "failed to complete an interrupted checkpoint", "error", err)
	}
	resumes := ""
	if s.Status.Suspend != "" {
		s, resumes = w.checkpointer().suspend(ctx, s)
	}
	err := w.step(ctx, s.ID, "stop the VM", func(ctx context.Context, p vm.Progress) error {
		var poweroff func(context.Context) error
		if resumes == "" {
			work, saved, poweroff = w.prepareShutdown(ctx, s)
		}
		err := w.Driver.Stop(ctx, s.VM(), poweroff, stopGrace)
		if errors.Is(err, vm.ErrNotFound) && !s.Status.WasReady {
			err = nil // cancelled before the VM existed
		}
		return errors.Join(err, w.Sessions.Gateway(s).Stop(ctx))
	})
	if err != nil {
		return w.markBroken(ctx, s, err)
	}
	if resumes == "" && s.Status.Resumes != "" { // it was suspended, and has perhaps not resumed
		m, err := w.Driver.Inspect(ctx, s.VM())
		if err != nil && !errors.Is(err, vm.ErrNotFound) {
			return s, err
		}
		if m.Resumes {
			resumes = s.Status.Resumes
		}
	}
	var statusErr error
	s, err = w.move(ctx, s, Stopped, work, func(row *store.Session) {
		row.SetError("", "", "")
		if resumes != "" {
			row.TokenSHA256 = ""
		}
		statusErr = change(row, func(f *Status) {
			f.Endpoint, f.Saved = vm.Endpoint{}, saved
			if resumes == "" {
				f.hasResumed()
				f.removeUnlisted(f.Suspend)
			}
			f.Resumes, f.Suspend = resumes, ""
			f.failPending("the session was stopped")
		})
	})
	if err == nil {
		w.checkpointer().removeHidden(ctx, s)
	}
	return s, errors.Join(err, statusErr)
}

// shutdownRounds is how often a shutdown records the work at most: again each time that programs had
// run in the guest meanwhile.
const shutdownRounds = 3

// prepareShutdown prepares the guest for its shutdown, within the time that a working guest
// needs. First the agents end, so that nothing changes any more. It returns the work that would
// be lost with the guest, nil when that is unknown, the commits that it fetched, nil if it fetched
// none, and a function that powers the guest off. If the guest cannot be reached, that function
// returns the error; the driver then presses the power button, so that the guest can still write
// its data to disk.
func (w *Worker) prepareShutdown(ctx context.Context, s Session) (work *repo.WorkState, saved *Saved, poweroff func(context.Context) error) {
	dial, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := Connections{Paths: w.Sessions.Config.Paths}.DialOwn(dial, s)
	if err != nil {
		w.Log.WarnContext(ctx, "failed to prepare guest for shutdown", "error", err)
		return nil, nil, func(context.Context) error { return err }
	}
	g := s.Guest(conn)
	if _, err := w.quiesce(ctx, g); err != nil {
		w.Log.WarnContext(ctx, "failed to end the agents before the shutdown", "error", err)
	}
	var saving sync.WaitGroup
	saving.Go(func() { w.homeFiles().saveHome(ctx, s, g) })
	for range shutdownRounds {
		work, saved = w.recordWork(ctx, s, conn)
		saving.Wait() // saving asks the guest for its secrets and may take long
		// A service of a guest that had just booted may have started, or the user may have logged in.
		// Then the work may have changed since it was recorded.
		ended, err := w.quiesce(ctx, g)
		if err == nil && len(ended) == 0 {
			break
		}
		w.Log.WarnContext(ctx, "programs ran in the guest during its shutdown",
			"count", len(ended), "names", ended[:min(len(ended), 10)], "error", err)
		work, saved = nil, nil
		if err != nil {
			break
		}
	}
	ctx, cancelWipe := context.WithTimeout(ctx, 20*time.Second)
	defer cancelWipe()
	if err := g.WipeSecrets(ctx); err != nil {
		w.Log.WarnContext(ctx, "failed to wipe secrets", "error", err) // they are only in memory, which ends with the VM
	}
	return work, saved, func(ctx context.Context) error {
		defer conn.Close()
		return g.Poweroff(ctx)
	}
}

// recordWork returns the work that would be lost with the guest, nil when that is unknown, and the
// commits that it fetched, nil if it fetched none.
func (w *Worker) recordWork(ctx context.Context, s Session, g repo.Guest) (work *repo.WorkState, saved *Saved) {
	if s.Status.Base == nil {
		return nil, nil
	}
	saved, err := w.fetchBeforeStop(ctx, s, g)
	if err != nil {
		w.warn(ctx, s.ID, fail.HintOf(err), "its commits were not fetched: %v", err)
	}
	if work, err = w.unsavedAtStop(ctx, s, g); err != nil {
		w.warn(ctx, s.ID, "", "unsaved work cannot be determined: %v", err)
	}
	return work, saved
}

// quiesce ends the programs in the guest, and returns the names of their processes.
func (w *Worker) quiesce(ctx context.Context, g guestclient.Guest) (ended []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return g.Quiesce(ctx)
}

// fetchBeforeStop fetches the commits of a session that is destroyed some time after the stop.
// For any other session it returns nil. All such fetches of a session, and those that its guest
// asks for, are limited in total.
func (w *Worker) fetchBeforeStop(ctx context.Context, s Session, g repo.Guest) (*Saved, error) {
	c, err := w.Sessions.Config.Reload()
	if err != nil {
		c = w.Sessions.Config
	}
	set, err := c.For(config.RepoKey(s.RepoKey), s.Spec.Profile)
	if err != nil || set.Lifetime.CleanupTTL <= 0 || s.Task != "" {
		return nil, nil //nolint:nilerr // without settings there is no cleanup
	}
	var saved *Saved
	return saved, w.step(ctx, s.ID, "fetch the commits", func(ctx context.Context, _ vm.Progress) error {
		limited, cancel := limit(ctx)
		defer cancel()
		if _, err := (Work{Sessions: w.Sessions, ByGuest: true}).Fetch(limited, s, g, "", repo.FetchOptions{}); err != nil {
			return err
		}
		now, err := w.Sessions.Get(ctx, s.ID) // with the target
		if err != nil {
			return err
		}
		commits, err := repo.Known(ctx, s.Name, now.Status.Target)
		if err == nil {
			saved = &Saved{Commits: commits[:min(len(commits), maxSaved+1)]}
		}
		return err
	})
}

// unsavedAtStop returns the work that would be lost with the guest.
func (w *Worker) unsavedAtStop(ctx context.Context, s Session, g repo.Guest) (*repo.WorkState, error) {
	now, err := w.Sessions.Get(ctx, s.ID) // what was fetched a moment ago is saved
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	work, err := Work{Sessions: w.Sessions}.Unsaved(ctx, now, g)
	if err != nil {
		return nil, err
	}
	return &work, nil
}

// destroy removes everything except the row and its events.
func (w *Worker) destroy(ctx context.Context, s Session) (Session, error) {
	if s.Phase != Destroying {
		// From here on the token is invalid, whatever happens next. A user who opened the session
		// in this moment keeps it.
		row, err := w.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
			if Phase(row.Phase) != s.Phase || Phase(row.Desired) != Gone {
				return store.Event{}, fmt.Errorf("session %s is %s and should be %s: %w", row.Name, row.Phase, row.Desired, store.ErrStale)
			}
			row.Phase, row.TokenSHA256 = string(Destroying), ""
			return phaseEvent(s.Phase, Destroying, Gone), nil
		})
		if err != nil {
			return s, err
		}
		w.Log.InfoContext(ctx, "session state transition", "from", s.Phase, "to", Destroying, "desired", s.Desired)
		if s, err = read(row, nil); err != nil {
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
