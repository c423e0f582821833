package session

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	maxCheckpoints = 20 // of a session

	// BeforeRestore is the name of the checkpoint of what a restore replaces.
	BeforeRestore = "before-restore"

	checkpointTimeout = 10 * time.Minute
)

var checkpointName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$`)

// CheckpointState is the state of a checkpoint.
type CheckpointState string

// The states of a checkpoint. A removed one is no longer listed.
const (
	CheckpointRequested CheckpointState = "requested"
	CheckpointReady     CheckpointState = "ready"
	CheckpointFailed    CheckpointState = "failed"
)

// Checkpoint is a state of a session that was kept under a name.
type Checkpoint struct {
	Name      string               `json:"name"`
	State     CheckpointState      `json:"state"`
	CreatedAt time.Time            `json:"created_at"`
	Memory    bool                 `json:"memory"`             // whether programs continue, or the VM boots from its disk
	Size      int64                `json:"size"`               // bytes on the host
	Pause     int64                `json:"pause_ms,omitempty"` // how long the VM did not run
	Secrets   bool                 `json:"secrets,omitempty"`  // its memory has secrets that the settings put into the guest
	Error     *lifecycle.ViewError `json:"error,omitempty"`
	Stored    StoredCheckpoint     `json:"stored"`
}

// StoredCheckpoint is what the host needs to use a checkpoint.
type StoredCheckpoint struct {
	ID          string `json:"id"`               // for the driver
	Remove      bool   `json:"remove,omitempty"` // requested by the user
	Program     string `json:"program,omitempty"`
	Provisioned string `json:"provisioned,omitempty"`
}

// Restoring is a restore that was requested.
type Restoring struct {
	Name    string `json:"name"`    // of the checkpoint
	Present string `json:"present"` // id of the checkpoint of what the restore replaces
}

// Checkpoints keeps states of sessions.
type Checkpoints struct{ Sessions *Manager }

// Checkpoints returns the checkpoints of s, the oldest first.
func (s Session) Checkpoints() []Checkpoint {
	return slices.DeleteFunc(slices.Clone(s.Status.Checkpoints), func(c Checkpoint) bool { return c.Stored.Remove })
}

// checkpoint returns the checkpoint of that name, nil if there is none.
func (f *Status) checkpoint(name string) *Checkpoint {
	i := slices.IndexFunc(f.Checkpoints, func(c Checkpoint) bool { return c.Name == name && !c.Stored.Remove })
	if i < 0 {
		return nil
	}
	return &f.Checkpoints[i]
}

// Create makes a checkpoint of a running session, which goes on. Without a name it gets a number.
// Create returns once the keeper has made it or failed to.
func (o Checkpoints) Create(ctx context.Context, s Session, name string) (Checkpoint, error) {
	if s.Phase != Ready {
		return Checkpoint{}, fail.New(fail.Conflict, "session %s is %s, not ready", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	if name != "" && (!checkpointName.MatchString(name) || name == BeforeRestore) {
		return Checkpoint{}, fail.New(fail.Usage, "a checkpoint's name has up to 40 letters, digits, dots, dashes and underscores, and is not %q; got %q", BeforeRestore, name)
	}
	var refused error
	s, err := o.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		refused = nil
		for n := 1; name == "" && n <= maxCheckpoints+1; n++ {
			if f.checkpoint(strconv.Itoa(n)) == nil {
				name = strconv.Itoa(n)
			}
		}
		switch c := f.checkpoint(name); {
		case c != nil && c.State != CheckpointFailed:
			refused = fail.New(fail.Conflict, "session %s already has a checkpoint %s", s.Name, name).WithHint("agent-sessionizer checkpoints %s --remove %s", s.Name, name)
		case c == nil && len(f.Checkpoints) >= maxCheckpoints:
			refused = fail.New(fail.Usage, "session %s already has %d checkpoints", s.Name, maxCheckpoints).WithHint("agent-sessionizer checkpoints %s", s.Name)
		default:
			f.addCheckpoint(name, ids.Hex(6))
		}
	})
	if err = errors.Join(err, refused); err != nil {
		return Checkpoint{}, err
	}
	var made Checkpoint
	_, err = o.await(ctx, s, func(now Session) (bool, error) {
		c := now.Status.checkpoint(name)
		switch {
		case c == nil:
			return false, fail.New(fail.Conflict, "checkpoint %s was removed", name)
		case c.State == CheckpointFailed:
			return false, fail.New(fail.Failure, "%s", c.Error.Message).WithHint("%s", c.Error.Hint)
		}
		made = *c
		return c.State == CheckpointReady, nil
	})
	return made, err
}

// addCheckpoint adds a checkpoint that is not made yet, in the place of one that is to be removed.
func (f *Status) addCheckpoint(name, id string) *Checkpoint {
	if was := f.checkpoint(name); was != nil {
		was.Stored.Remove = true
	}
	f.Checkpoints = append(f.Checkpoints, Checkpoint{Name: name, State: CheckpointRequested, CreatedAt: time.Now().UTC(), Stored: StoredCheckpoint{ID: id}})
	return &f.Checkpoints[len(f.Checkpoints)-1]
}

// Remove removes a checkpoint. It returns once the keeper of a running session has removed it.
func (o Checkpoints) Remove(ctx context.Context, s Session, name string) (Session, error) {
	var id string
	s, err := o.change(ctx, s, name, func(f *Status, c *Checkpoint) { c.Stored.Remove, id = true, c.Stored.ID })
	if err != nil || s.Phase != Ready {
		return s, err // the next keeper removes it
	}
	return o.await(ctx, s, func(now Session) (bool, error) {
		return !slices.ContainsFunc(now.Status.Checkpoints, func(c Checkpoint) bool { return c.Stored.ID == id }), nil
	})
}

// Restore gives a session the state of a checkpoint. What it was is kept as BeforeRestore.
func (o Checkpoints) Restore(ctx context.Context, s Session, name string) (Session, error) {
	if s.Task != "" {
		return s, fail.New(fail.Conflict, "session %s belongs to a task", s.Name)
	}
	if s.Phase != Ready && s.Phase != Stopped {
		return s, fail.New(fail.Conflict, "session %s is %s", s.Name, s.Phase).WithHint("agent-sessionizer open %s", s.Name)
	}
	s, err := o.change(ctx, s, name, func(f *Status, c *Checkpoint) {
		f.Restore, f.RestoreError, f.RequestedBy = &Restoring{Name: name, Present: ids.Hex(6)}, nil, o.Sessions.requestedBy(ctx)
	})
	if err != nil {
		return s, err
	}
	if s.Phase == Stopped {
		return o.Sessions.SetDesired(ctx, s, Ready)
	}
	return s, o.Sessions.Tend(ctx, s.Session)
}

// change changes the row if the session has a complete checkpoint of that name.
func (o Checkpoints) change(ctx context.Context, s Session, name string, f func(*Status, *Checkpoint)) (Session, error) {
	found := false
	now, err := o.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(status *Status) {
		c := status.checkpoint(name)
		if found = c != nil && c.State != CheckpointRequested; found {
			f(status, c)
		}
	})
	if err == nil && !found {
		err = fail.New(fail.NotFound, "session %s has no checkpoint %s", s.Name, ssh.Quote(name)).WithHint("agent-sessionizer checkpoints %s", s.Name)
	}
	return now, err
}

// await waits until done returns true for the session.
func (o Checkpoints) await(ctx context.Context, s Session, done func(Session) (bool, error)) (Session, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, checkpointTimeout, fail.New(fail.Timeout, "the keeper of session %s did not answer within %v", s.Name, checkpointTimeout).
		WithHint("agent-sessionizer logs %s", s.Name))
	defer cancel()
	for n := 1; ; n++ {
		now, err := o.Sessions.Get(ctx, s.ID)
		if err != nil {
			return s, errors.Join(err, context.Cause(ctx))
		}
		if ok, err := done(now); ok || err != nil {
			return now, err
		}
		if n%20 == 0 { // its keeper may have died
			if err := o.Sessions.Tend(ctx, now.Session); err != nil {
				return now, err
			}
		}
		if now.Phase != Ready {
			return now, fail.New(fail.Conflict, "session %s is %s", now.Name, now.Phase)
		}
		select {
		case <-ctx.Done():
			return now, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// checkpoints does the keeper's part of the work with checkpoints.
type checkpoints struct{ w *Worker }

func (w *Worker) checkpoints() checkpoints { return checkpoints{w} }

func (k checkpoints) driver() (vm.Checkpointer, error) {
	d, ok := k.w.Driver.(vm.Checkpointer)
	if !ok {
		return nil, fail.New(fail.Host, "this VM driver keeps no checkpoints")
	}
	return d, nil
}

// tend makes and removes the checkpoints that users requested, and reports whether the session is
// to be restored.
func (k checkpoints) tend(ctx context.Context, id string) (restore bool, err error) {
	s, err := k.w.Sessions.Get(ctx, id)
	if err != nil {
		return false, err
	}
	for _, c := range s.Status.Checkpoints {
		switch {
		case c.Stored.Remove:
			err = errors.Join(err, k.remove(ctx, s, c))
		case c.State == CheckpointRequested:
			err = errors.Join(err, k.make(ctx, s, c))
		}
	}
	return s.Status.Restore != nil, err
}

// remove removes a checkpoint.
func (k checkpoints) remove(ctx context.Context, s Session, c Checkpoint) error {
	d, err := k.driver()
	if err == nil {
		err = d.RemoveCheckpoint(ctx, s.VM(), c.Stored.ID)
	}
	if err != nil {
		return err
	}
	_, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.Checkpoints = slices.DeleteFunc(f.Checkpoints, func(is Checkpoint) bool { return is.Stored.ID == c.Stored.ID })
	})
	k.w.Sessions.audit(ctx, audit.CheckpointRemoved, "keeper", "session:"+s.ID, err, s.details(map[string]any{"checkpoint": c.Name}))
	return err
}

// make makes a checkpoint that was requested, and records the result.
func (k checkpoints) make(ctx context.Context, s Session, c Checkpoint) error {
	var is vm.Checkpoint
	err := k.w.step(ctx, s.ID, "keep a checkpoint", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.room(s)); err != nil {
			return err
		}
		k.flush(ctx, s)
		is, err = d.Checkpoint(ctx, s.VM(), c.Stored.ID, p)
		return err
	})
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the session ends, or the next keeper continues
	}
	k.w.Sessions.audit(ctx, audit.CheckpointMade, s.Status.RequestedBy.Actor, "session:"+s.ID, err, s.details(map[string]any{"checkpoint": c.Name}))
	secrets := k.guestHasSecrets(s)
	_, updateErr := k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		switch now := f.checkpoint(c.Name); {
		case now == nil: // removed meanwhile
		case err != nil:
			now.State, now.Error = CheckpointFailed, lifecycle.LastError(fail.CodeOf(err).String(), k.w.text(err.Error()), fail.HintOf(err))
		default:
			now.complete(is, f, secrets)
		}
	})
	return updateErr
}

// complete records what the driver kept.
func (c *Checkpoint) complete(is vm.Checkpoint, of *Status, secrets bool) {
	c.State, c.Memory, c.Size, c.Pause, c.Secrets = CheckpointReady, is.Memory, is.Size, is.Pause.Milliseconds(), is.Memory && secrets
	c.Stored.Program, c.Stored.Provisioned = of.Program, of.Provisioned
}

// room returns an error if the host may lack the space for the memory of s.
func (k checkpoints) room(s Session) error {
	h, err := MeasureHost(k.w.Sessions.Config.Paths.LimaHome)
	if err != nil {
		return err
	}
	// What changes while it is written is written twice.
	need, reserve := 2*s.Spec.Resources.Memory, k.w.Sessions.Config.Limits.DiskReserve
	if h.FreeDisk < need+reserve {
		return fail.New(fail.Host, "keeping the memory of session %s may take %v, and %v must stay free, but %s has %v free", s.Name, need, reserve, h.DiskDir, h.FreeDisk).
			WithHint("agent-sessionizer prune")
	}
	return nil
}

// flush makes the guest write its files to the disk, as far as possible: the memory of a checkpoint
// is useless once the host has another QEMU.
func (k checkpoints) flush(ctx context.Context, s Session) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := Connections{Paths: k.w.Sessions.Config.Paths}.DialOwn(ctx, s)
	if err == nil {
		defer conn.Close()
		err = conn.Run(ctx, "sync", ssh.IO{})
	}
	if err != nil && ctx.Err() == nil {
		k.w.Log.WarnContext(ctx, "failed to flush the guest's files", "error", err)
	}
}

// guestHasSecrets reports whether the settings put secrets into the guest of s.
func (k checkpoints) guestHasSecrets(s Session) bool {
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

// restore gives the VM the state of a checkpoint, as Status.Restore requests. Afterwards the
// session is stopped, and should be ready.
func (k checkpoints) restore(ctx context.Context, s Session) (Session, error) {
	var present *vm.Checkpoint // once it is kept
	resumes := ""
	to := s.Status.checkpoint(s.Status.Restore.Name)
	err := k.w.step(ctx, s.ID, "restore the checkpoint", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err != nil {
			return err
		}
		if to == nil || to.State != CheckpointReady {
			return fail.New(fail.NotFound, "session %s has no checkpoint %s", s.Name, s.Status.Restore.Name).WithHint("agent-sessionizer checkpoints %s", s.Name)
		}
		if s.Status.Resumes == "" { // otherwise the session is suspended, and its state is kept already
			is, err := k.keepPresent(ctx, s, d, p)
			if err != nil {
				return fmt.Errorf("the present state cannot be kept: %w", err)
			}
			present = &is
		}
		if err := k.w.Sessions.Gateway(s).Stop(ctx); err != nil {
			return err
		}
		if to.Memory {
			err = d.Restore(ctx, s.VM(), to.Stored.ID, true)
			if err == nil {
				resumes = to.Stored.ID
			}
		}
		if !to.Memory || errors.Is(err, vm.ErrNotWoken) {
			k.w.warn(ctx, s.ID, "", "checkpoint %s has no memory that can be resumed here; the VM boots from its disk", to.Name)
			err = d.Restore(ctx, s.VM(), to.Stored.ID, false)
		}
		return err
	})
	name := s.Status.Restore.Name
	k.w.Sessions.audit(ctx, audit.CheckpointRestored, s.Status.RequestedBy.Actor, "session:"+s.ID, err, s.details(map[string]any{"checkpoint": name}))
	if err != nil {
		k.w.warn(ctx, s.ID, fail.HintOf(err), "checkpoint %s was not restored: %v", name, err)
	}
	secrets := k.guestHasSecrets(s)
	return k.leave(ctx, s, func(f *Status) {
		if err != nil {
			f.RestoreError = lifecycle.LastError(fail.CodeOf(err).String(), k.w.text(err.Error()), fail.HintOf(err))
			if present == nil { // nothing has changed
				return
			}
		}
		f.Endpoint, f.Attention = vm.Endpoint{}, nil
		switch {
		case err != nil: // the session continues where it was
			f.Resumes = s.Status.Restore.Present
			return
		case present != nil:
			f.addCheckpoint(BeforeRestore, s.Status.Restore.Present).complete(*present, f, secrets)
		default:
			f.addCheckpoint(BeforeRestore, s.Status.Resumes).complete(vm.Checkpoint{Memory: true}, f, secrets)
		}
		f.Resumes, f.Program, f.Provisioned = resumes, to.Stored.Program, to.Stored.Provisioned
	})
}

// leave ends the request for a restore. A session whose VM was ended for it is then stopped, and
// starts again.
func (k checkpoints) leave(ctx context.Context, s Session, result func(*Status)) (Session, error) {
	ended := func(f *Status) {
		result(f)
		f.Restore = nil
	}
	m, err := k.w.Driver.Inspect(ctx, s.VM())
	if err != nil {
		return s, err
	}
	if s.Phase == Ready && m.State != vm.Running {
		var statusErr error
		s, err = k.w.move(ctx, s, Stopped, nil, func(row *store.Session) {
			row.TokenSHA256 = ""
			statusErr = change(row, ended)
		})
		return s, errors.Join(err, statusErr)
	}
	return k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, ended)
}

// keepPresent keeps the present state of the session and ends its VM.
func (k checkpoints) keepPresent(ctx context.Context, s Session, d vm.Checkpointer, p vm.Progress) (vm.Checkpoint, error) {
	m, err := k.w.Driver.Inspect(ctx, s.VM())
	if err != nil {
		return vm.Checkpoint{}, err
	}
	if m.State == vm.Running {
		if err := k.room(s); err != nil {
			return vm.Checkpoint{}, err
		}
		is, err := d.Suspend(ctx, s.VM(), s.Status.Restore.Present, p)
		if !errors.Is(err, vm.ErrNoMemory) {
			return is, err
		}
		k.flush(ctx, s)
		if err := k.w.Driver.Stop(ctx, s.VM(), nil, 0); err != nil {
			return is, err
		}
	}
	return d.Checkpoint(ctx, s.VM(), s.Status.Restore.Present, p)
}

// suspend ends the VM of a session that was requested to be suspended, and reports whether that
// worked. If not, the VM runs as before.
func (k checkpoints) suspend(ctx context.Context, s Session) bool {
	err := k.w.step(ctx, s.ID, "suspend the VM", func(ctx context.Context, p vm.Progress) error {
		d, err := k.driver()
		if err = errors.Join(err, k.room(s)); err != nil {
			return err
		}
		k.flush(ctx, s)
		_, err = d.Suspend(ctx, s.VM(), s.Status.Suspend, p)
		return err
	})
	if err != nil {
		k.w.warn(ctx, s.ID, fail.HintOf(err), "the session is stopped without its memory: %v", err)
	}
	return err == nil
}

// resumed removes what a suspended session has resumed from. A checkpoint that the user has made
// stays.
func (k checkpoints) resumed(ctx context.Context, s Session) error {
	id := s.Status.Resumes
	if id == "" || slices.ContainsFunc(s.Status.Checkpoints, func(c Checkpoint) bool { return c.Stored.ID == id }) {
		return nil
	}
	d, err := k.driver()
	if err != nil {
		return err
	}
	return d.RemoveCheckpoint(ctx, s.VM(), id)
}

// forget makes a VM boot from its disk whose memory cannot be resumed.
func (k checkpoints) forget(ctx context.Context, s *Session, cause error) error {
	k.w.warn(ctx, s.ID, "", "%v; the VM boots from its disk", cause)
	d, err := k.driver()
	if err == nil {
		err = errors.Join(k.w.Sessions.Gateway(*s).Stop(ctx), d.Restore(ctx, s.VM(), s.Status.Resumes, false))
	}
	if err != nil {
		return err
	}
	was := s.Status.Resumes
	if err := k.resumed(ctx, *s); err != nil {
		return err
	}
	*s, err = k.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		if f.Resumes == was {
			f.Resumes = ""
		}
	})
	return err
}
