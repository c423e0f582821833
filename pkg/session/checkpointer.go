package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// checkpointer does the keeper's part of the work with checkpoints.
type checkpointer struct{ w *Worker }

func (w *Worker) checkpointer() checkpointer { return checkpointer{w} }

func (k checkpointer) driver() (vm.Checkpointer, error) {
	d, ok := k.w.Driver.(vm.Checkpointer)
	if !ok {
		return nil, fail.New(fail.Host, "the VM driver does not support checkpoints")
	}
	return d, nil
}

// settle resumes a VM that a crashed keeper may have left paused.
func (k checkpointer) settle(ctx context.Context, s Session) error {
	d, err := k.driver()
	if err != nil {
		return nil //nolint:nilerr // then it paused none
	}
	return d.Settle(ctx, s.VM())
}

// process creates and removes the checkpoints that were requested, and reports whether a restore
// was requested.
func (k checkpointer) process(ctx context.Context, id string) (restore bool, err error) {
	s, err := k.w.Sessions.Get(ctx, id)
	if err != nil {
		return false, err
	}
	for _, c := range s.Status.Checkpoints {
		switch {
		case c.Remove, c.Temporary && time.Since(c.CreatedAt) > temporaryTime:
			err = errors.Join(err, k.remove(ctx, s, c))
		case c.State == CheckpointPending:
			err = errors.Join(err, k.create(ctx, s, c))
		}
	}
	return s.Status.Restore != nil, err
}

// removeHidden removes the checkpoints of a stopped session that no user can see.
func (k checkpointer) removeHidden(ctx context.Context, s Session) {
	for _, c := range s.Status.Checkpoints {
		if c.Remove || c.Temporary {
			if err := k.remove(ctx, s, c); err != nil {
				k.w.Log.WarnContext(ctx, "failed to remove a checkpoint", "error", err)
			}
		}
	}
}

func (k checkpointer) remove(ctx context.Context, s Session, c storedCheckpoint) error {
	if needed, err := k.w.Sessions.isNeeded(ctx, s.ID, c.ID); needed || err != nil {
		return err
	}
	d, err := k.driver()
	if err == nil {
		err = d.RemoveCheckpoint(ctx, s.VM(), c.ID)
	}
	if err != nil {
		return err
	}
	_, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.Checkpoints = slices.DeleteFunc(f.Checkpoints, func(is storedCheckpoint) bool { return is.ID == c.ID })
	})
	if c.Name != "" && !c.Temporary {
		k.w.Sessions.audit(ctx, audit.CheckpointRemoved, "keeper", "session:"+s.ID, err, s.details(map[string]any{"checkpoint": c.Name}))
	}
	return err
}

// create creates a pending checkpoint, and records the result.
func (k checkpointer) create(ctx context.Context, s Session, c storedCheckpoint) error {
	var is vm.Checkpoint
	prepared := false
	err := k.w.step(ctx, s.ID, "create a checkpoint", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.checkSpace(s)); err != nil {
			return err
		}
		prepared = k.prepare(ctx, s)
		is, err = d.Checkpoint(ctx, s.VM(), c.ID, p)
		return err
	})
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the session ends, or the next keeper continues
	}
	if !c.Temporary {
		k.w.Sessions.audit(ctx, audit.CheckpointCreated, c.By, "session:"+s.ID, err, s.details(map[string]any{"checkpoint": c.Name}))
	}
	secrets := k.guestHasSecrets(s)
	_, updateErr := k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		switch now := f.checkpointByID(c.ID); {
		case now == nil:
		case err != nil:
			now.State, now.Error = CheckpointFailed, k.viewError(err)
		default:
			now.complete(is, f, secrets)
			now.Prepared = prepared
		}
	})
	return updateErr
}

func (k checkpointer) viewError(err error) *lifecycle.ViewError {
	return lifecycle.LastError(fail.CodeOf(err).String(), k.w.text(err.Error()), fail.HintOf(err))
}

// checkSpace returns an error if the host may lack the space for the memory of s. What the guest
// changes while its memory is being saved is saved twice.
func (k checkpointer) checkSpace(s Session) error {
	h, err := MeasureHost(k.w.Sessions.Config.Paths.LimaHome)
	if err != nil {
		return err
	}
	need, reserve := 2*s.Spec.Resources.Memory, k.w.Sessions.Config.Limits.DiskReserve
	if h.FreeDisk < need+reserve {
		return fail.New(fail.Host, "save the memory of %s: up to %v and a reserve of %v are needed, %s has %v free", s.Name, need, reserve, h.DiskDir, h.FreeDisk).
			WithHint("agent-sessionizer prune")
	}
	return nil
}

// prepare prepares the guest for a checkpoint, as far as possible, and reports whether forks of its
// memory can get an identity of their own.
func (k checkpointer) prepare(ctx context.Context, s Session) (prepared bool) {
	r := s.Spec.Resources
	saver, ok := k.w.Driver.(vm.Saver)
	if ok {
		_, err := saver.StateKey(ctx, s.Arch(), r.CPUs, int64(r.Memory))
		ok = err == nil
	}
	k.inGuest(ctx, s, func(ctx context.Context, g guestclient.Guest) (err error) {
		if ok { // otherwise the checkpoint has no memory
			err = g.PrepareFork(ctx)
			prepared = err == nil
		}
		return errors.Join(err, flushFiles(ctx, g))
	})
	return prepared
}

// flush makes the guest write its files to the disk, as far as possible: the memory of a checkpoint
// cannot be resumed once the host has another QEMU.
func (k checkpointer) flush(ctx context.Context, s Session) { k.inGuest(ctx, s, flushFiles) }

func flushFiles(ctx context.Context, g guestclient.Guest) error {
	return g.SSH.Run(ctx, "sync", ssh.IO{})
}

// guestPatience limits the work in a guest before a checkpoint. A guest that hangs is saved nevertheless.
const guestPatience = time.Minute

func (k checkpointer) inGuest(ctx context.Context, s Session, f func(context.Context, guestclient.Guest) error) {
	limited, cancel := context.WithTimeoutCause(ctx, guestPatience, fail.New(fail.Timeout, "the guest did not answer within %v", guestPatience))
	defer cancel()
	conn, err := Connections{Paths: k.w.Sessions.Config.Paths}.DialOwn(limited, s)
	if err == nil {
		defer conn.Close()
		err = f(limited, s.Guest(conn))
	}
	if err != nil && limited.Err() != nil {
		err = errors.Join(context.Cause(limited), err)
	}
	if err != nil && ctx.Err() == nil {
		k.w.Log.WarnContext(ctx, "failed to prepare the guest for a checkpoint", "error", err)
	}
}

// guestHasSecrets reports whether the settings put secrets into the guest of s.
func (k checkpointer) guestHasSecrets(s Session) bool {
	set, err := Net{Sessions: k.w.Sessions}.settings(s)
	if err != nil {
		return true // unknown
	}
	for name, one := range set.Secrets {
		if to, err := k.w.Sessions.Config.Bound(name, one); err != nil || to.Guest {
			return true
		}
	}
	return false
}

// restore returns the session to the checkpoint that Status.Restore names. Afterwards the session is
// stopped; its VM continues there when it starts.
func (k checkpointer) restore(ctx context.Context, s Session) (Session, error) {
	r := *s.Status.Restore
	memory := false
	err := k.w.step(ctx, s.ID, "restore the checkpoint", func(ctx context.Context, p vm.Progress) (err error) {
		d, err := k.driver()
		if err != nil {
			return err
		}
		if s, err = k.saveCurrent(ctx, s, d, p); err != nil {
			return fmt.Errorf("save the current state: %w", err)
		}
		if err := k.w.Sessions.Gateway(s).Stop(ctx); err != nil {
			return err
		}
		to := s.Status.checkpointByID(r.ID)
		if to == nil {
			return noCheckpoint(s, r.Name)
		}
		if memory = to.Memory; memory {
			if err := k.w.Sessions.Store.ReuseQuestionIDs(ctx, s.ID); err != nil {
				return err
			}
			err = d.Restore(ctx, s.VM(), to.ID, true)
		}
		if !memory || errors.Is(err, vm.ErrNotWoken) {
			memory = false
			k.w.warn(ctx, s.ID, "", "checkpoint %s has no memory that this host can resume: booting from its disk", r.Name)
			err = d.Restore(ctx, s.VM(), to.ID, false)
		}
		return err
	})
	k.w.Sessions.audit(ctx, audit.CheckpointRestored, s.Status.RequestedBy.Actor, "session:"+s.ID, err, s.details(map[string]any{"checkpoint": r.Name}))
	if err != nil {
		k.w.warn(ctx, s.ID, fail.HintOf(err), "checkpoint %s was not restored: %v", r.Name, err)
	}
	return k.endRestore(ctx, s, func(f *Status) {
		currentID := f.Restore.Current // perhaps another one than at the beginning
		f.Restore = nil
		current := f.checkpointByID(currentID)
		if err != nil {
			f.RestoreError = k.viewError(err)
			if current != nil { // the session continues where it was
				f.Resumes = ""
				if current.Memory {
					f.Resumes = current.ID
				}
				current.Remove = true
			} else { // it may have been saved nevertheless
				f.removeUnlisted(currentID)
			}
			return
		}
		for i, c := range f.Checkpoints {
			if c.Name == BeforeRestore && c.ID != currentID && c.ID != f.Resumes {
				f.Checkpoints[i].Remove = true
			}
		}
		if to := f.checkpointByID(r.ID); to != nil {
			f.Program, f.Provisioned = to.Program, to.Provisioned
		}
		if f.Resumes = ""; memory {
			f.Resumes = r.ID
		}
		f.Work, f.Saved = nil, nil
	})
}

// saveCurrent saves the state that a restore replaces, and ends the VM.
func (k checkpointer) saveCurrent(ctx context.Context, s Session, d vm.Checkpointer, p vm.Progress) (Session, error) {
	saved := func(is vm.Checkpoint, id string) (Session, error) {
		secrets := k.guestHasSecrets(s)
		return k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
			f.Checkpoints = append(f.Checkpoints, storedCheckpoint{Checkpoint: Checkpoint{Name: BeforeRestore, CreatedAt: time.Now().UTC()}, ID: id})
			f.Checkpoints[len(f.Checkpoints)-1].complete(is, f, secrets)
		})
	}
	if s.Status.checkpointByID(s.Status.Restore.Current) != nil { // by an earlier keeper
		return s, nil
	}
	m, err := k.w.Driver.Inspect(ctx, s.VM())
	if err != nil {
		return s, err
	}
	running := m.State == vm.Running
	if running {
		if err := errors.Join(k.settle(ctx, s), k.checkSpace(s)); err != nil {
			return s, err
		}
	}
	s, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		if running && f.Restore.Begun { // what a keeper that died has saved is older than the VM's state
			f.removeUnlisted(f.Restore.Current)
			f.Restore.Current = ids.Hex(6)
		}
		f.Restore.Begun = true
	})
	if err != nil {
		return s, err
	}
	id := s.Status.Restore.Current
	if suspended := s.Status.Resumes; suspended != "" {
		if s.Status.checkpointByID(suspended) != nil {
			return s, nil
		}
		return saved(vm.Checkpoint{Memory: true}, suspended)
	}
	if running {
		is, err := d.Suspend(ctx, s.VM(), id, p)
		if err == nil {
			return saved(is, id)
		}
		if !errors.Is(err, vm.ErrNoMemory) {
			return s, err
		}
		k.flush(ctx, s)
		if err := k.w.Driver.Stop(ctx, s.VM(), nil, 0); err != nil {
			return s, err
		}
	}
	is, err := d.Checkpoint(ctx, s.VM(), id, p)
	if err != nil {
		return s, err
	}
	return saved(is, id)
}

// endRestore records the result of a restore. A session whose VM was ended for it is then stopped,
// and starts again.
func (k checkpointer) endRestore(ctx context.Context, s Session, result func(*Status)) (Session, error) {
	m, err := k.w.Driver.Inspect(ctx, s.VM())
	if err != nil {
		return s, err
	}
	var statusErr error
	record := func(row *store.Session) {
		statusErr = change(row, func(f *Status) {
			result(f)
			if m.State != vm.Running {
				f.Endpoint, f.Attention = vm.Endpoint{}, nil
			}
			if f.RestoreError != nil && s.Phase == Stopped && Phase(row.Desired) == Ready { // a destroy stays in force
				row.Desired = string(Stopped)
			}
		})
		if m.State != vm.Running {
			row.TokenSHA256 = ""
		}
	}
	if s.Phase == Ready && m.State != vm.Running {
		s, err = k.w.move(ctx, s, Stopped, nil, record)
	} else {
		s, err = read(k.w.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
			record(row)
			return store.Event{}, nil
		}))
	}
	return s, errors.Join(err, statusErr)
}

// suspend ends the VM of a session that was requested to be suspended, and returns the id of the
// checkpoint that it resumes from. If that fails, the VM runs as before, and the id is empty.
func (k checkpointer) suspend(ctx context.Context, s Session) (Session, string) {
	err := k.w.step(ctx, s.ID, "suspend the VM", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err == nil && s.Status.Workspace != "" {
			err = noMemory(s.Name, s.Status.Workspace)
		}
		if err != nil {
			return err
		}
		m, err := k.w.Driver.Inspect(ctx, s.VM())
		if err != nil {
			return err
		}
		if m.State == vm.Running {
			if err := k.checkSpace(s); err != nil {
				return err
			}
			// What a keeper that died has saved is older than the VM's state.
			was := s.Status.Suspend
			if s, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
				f.removeUnlisted(was)
				f.Suspend = ids.Hex(6)
			}); err != nil {
				return err
			}
			k.flush(ctx, s)
		}
		_, err = d.Suspend(ctx, s.VM(), s.Status.Suspend, p)
		return err
	})
	if err != nil {
		k.w.warn(ctx, s.ID, fail.HintOf(err), "the session is stopped without its memory: %v", err)
		return s, ""
	}
	return s, s.Status.Suspend
}

// noMemory returns the error of saving or restoring the state of a session that has a workspace.
func noMemory(name, workspace string) error {
	return fail.New(fail.Conflict, "the state of session %s cannot be saved or restored, because workspace %s is not part of it", name, workspace)
}

// bootFromDisk prepares a VM to boot from its disk because its memory cannot be resumed.
func (k checkpointer) bootFromDisk(ctx context.Context, s *Session, cause error) error {
	k.w.warn(ctx, s.ID, "", "%v; booting from its disk, without the programs that ran", cause)
	d, err := k.driver()
	if err == nil {
		err = errors.Join(k.w.Sessions.Gateway(*s).Stop(ctx), d.Restore(ctx, s.VM(), "", false))
	}
	if err == nil {
		*s, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, (*Status).hasResumed)
	}
	return err
}
