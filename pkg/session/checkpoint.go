package session

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	maxCheckpoints = 20 // of a session, without BeforeRestore

	// BeforeRestore is the name of the checkpoint of the state that a restore replaces.
	BeforeRestore = "before-restore"

	checkpointTimeout = 15 * time.Minute

	temporaryTime = time.Hour // for a checkpoint whose forks were not created
)

var checkpointName = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$`)

// CheckpointState is the state of a checkpoint.
type CheckpointState string

// The states of a checkpoint. A removed one is no longer listed.
const (
	CheckpointPending  CheckpointState = "pending"
	CheckpointComplete CheckpointState = "complete"
	CheckpointFailed   CheckpointState = "failed"
)

// Checkpoint is a saved state of a session.
type Checkpoint struct {
	Name      string               `json:"name"`
	State     CheckpointState      `json:"state"`
	CreatedAt time.Time            `json:"created_at"`
	Memory    bool                 `json:"memory"`             // whether programs resume, or the VM boots from its disk
	Size      int64                `json:"size"`               // bytes on the host when it was created; the disk's part is shared with the session
	Pause     int64                `json:"pause_ms,omitempty"` // how long the VM was paused
	Forkable  bool                 `json:"forkable"`           // whether fork accepts it
	Secrets   bool                 `json:"secrets,omitempty"`  // its memory contains secrets that the settings put into the guest
	Error     *lifecycle.ViewError `json:"error,omitempty"`    // why it failed
}

// storedCheckpoint is a checkpoint in the session's status.
type storedCheckpoint struct {
	Checkpoint
	ID          string `json:"id"`                    // of the driver's checkpoint
	Prepared    bool   `json:"prepared,omitempty"`    // a fork of its memory can get an identity of its own
	Temporary   bool   `json:"temporary,omitempty"`   // it was created for forks, and is not listed
	Remove      bool   `json:"remove,omitempty"`      // it is to be removed, and no longer listed
	By          string `json:"by,omitempty"`          // who requested it
	Program     string `json:"program,omitempty"`     // Status.Program at that time
	Provisioned string `json:"provisioned,omitempty"` // Status.Provisioned at that time
}

// restoreRequest is a restore that a user requested.
type restoreRequest struct {
	Name    string `json:"name"`
	ID      string `json:"id"`              // of the checkpoint to restore
	Current string `json:"current"`         // of the checkpoint for the state that it replaces
	Begun   bool   `json:"begun,omitempty"` // the session may have changed, so it must be completed
}

// Checkpoints returns the checkpoints of s, the oldest first.
func (s Session) Checkpoints() []Checkpoint {
	all := []Checkpoint{}
	for _, c := range s.Status.Checkpoints {
		if !c.Remove && !c.Temporary {
			c.Forkable = s.checkFork(c) == nil
			all = append(all, c.Checkpoint)
		}
	}
	return all
}

// checkpoint returns the checkpoint of that name, nil if there is none.
func (f *Status) checkpoint(name string) *storedCheckpoint {
	return f.findCheckpoint(func(c storedCheckpoint) bool { return c.Name == name && !c.Remove })
}

func (f *Status) checkpointByID(id string) *storedCheckpoint {
	return f.findCheckpoint(func(c storedCheckpoint) bool { return c.ID == id })
}

func (f *Status) findCheckpoint(is func(storedCheckpoint) bool) *storedCheckpoint {
	if i := slices.IndexFunc(f.Checkpoints, is); i >= 0 {
		return &f.Checkpoints[i]
	}
	return nil
}

// countCheckpoints returns the number of checkpoints that a user created.
func (f *Status) countCheckpoints() (n int) {
	for _, c := range f.Checkpoints {
		if !c.Remove && !c.Temporary && c.Name != BeforeRestore {
			n++
		}
	}
	return n
}

// hasSavedState reports whether the session can return to an earlier state.
func (f *Status) hasSavedState() bool {
	kept := func(c storedCheckpoint) bool { return !c.Remove }
	return slices.ContainsFunc(f.Checkpoints, kept) || f.Resumes != "" || f.Suspend != "" || f.Restore != nil
}

// addCheckpoint adds a pending checkpoint. One with that name is removed.
func (f *Status) addCheckpoint(name, id, by string) *storedCheckpoint {
	if was := f.checkpoint(name); was != nil {
		was.Remove = true
	}
	f.Checkpoints = append(f.Checkpoints, storedCheckpoint{Checkpoint: Checkpoint{Name: name, State: CheckpointPending, CreatedAt: time.Now().UTC()}, ID: id, By: by})
	return &f.Checkpoints[len(f.Checkpoints)-1]
}

// removeUnlisted schedules the removal of a driver's checkpoint that is not in the list.
func (f *Status) removeUnlisted(id string) {
	if id != "" && f.checkpointByID(id) == nil {
		f.Checkpoints = append(f.Checkpoints, storedCheckpoint{ID: id, Remove: true})
	}
}

// failPending records that the session ended before its pending checkpoints were created.
func (f *Status) failPending(why string) {
	for i, c := range f.Checkpoints {
		if c.State == CheckpointPending {
			f.Checkpoints[i].State, f.Checkpoints[i].Error = CheckpointFailed, &lifecycle.ViewError{Code: fail.Conflict.String(), Message: why}
		}
	}
	if f.Restore != nil && !f.Restore.Begun {
		f.Restore, f.RestoreError = nil, &lifecycle.ViewError{Code: fail.Conflict.String(), Message: why}
	}
}

// hasResumed records that the VM has resumed the memory that it had when it was suspended or
// restored, or that it no longer can.
func (f *Status) hasResumed() {
	f.removeUnlisted(f.Resumes)
	f.Resumes = ""
}

// complete records what the driver saved.
func (c *storedCheckpoint) complete(is vm.Checkpoint, of *Status, secrets bool) {
	c.State, c.Memory, c.Size, c.Pause, c.Secrets = CheckpointComplete, is.Memory, is.Size, is.Pause.Milliseconds(), is.Memory && secrets
	c.Program, c.Provisioned = of.Program, of.Provisioned
}

// Checkpoints saves and restores the states of sessions.
type Checkpoints struct{ Sessions *Manager }

// Create creates a checkpoint of a running session, which keeps running. Without a name it gets the
// lowest free number. Create returns once the keeper has created it or failed to.
func (o Checkpoints) Create(ctx context.Context, s Session, name string) (Checkpoint, error) {
	if name != "" && (!checkpointName.MatchString(name) || name == BeforeRestore) {
		return Checkpoint{}, fail.New(fail.Usage, "the name must be 1 to 40 letters, digits, dots, dashes or underscores, start with a letter or digit, and not be %q; got %q", BeforeRestore, name)
	}
	c, err := o.create(ctx, s, ids.Hex(6), name, false)
	c.Forkable = err == nil && s.checkFork(c) == nil
	return c.Checkpoint, err
}

func (o Checkpoints) create(ctx context.Context, s Session, id, name string, temporary bool) (storedCheckpoint, error) {
	s, err := o.update(ctx, s, func(phase Phase, f *Status) error {
		if phase != Ready {
			return fail.New(fail.Conflict, "session %s is %s, not ready", s.Name, phase).WithHint("agent-sessionizer start %s", s.Name)
		}
		if f.Workspace != "" {
			return noMemory(s.Name, f.Workspace)
		}
		for n := 1; name == ""; n++ {
			if f.checkpoint(strconv.Itoa(n)) == nil {
				name = strconv.Itoa(n)
			}
		}
		switch c := f.checkpoint(name); {
		case c != nil && c.State != CheckpointFailed:
			return fail.New(fail.Conflict, "session %s already has a checkpoint %s", s.Name, name).WithHint("agent-sessionizer checkpoints %s --remove %s", s.Name, name)
		case c == nil && !temporary && f.countCheckpoints() >= maxCheckpoints:
			return fail.New(fail.Conflict, "session %s already has %d checkpoints", s.Name, maxCheckpoints).WithHint("agent-sessionizer checkpoints %s", s.Name)
		}
		f.addCheckpoint(name, id, o.Sessions.Actor).Temporary = temporary
		return nil
	})
	if err != nil {
		return storedCheckpoint{}, err
	}
	var created storedCheckpoint
	return created, o.await(ctx, s, func(now Session) (bool, error) {
		c := now.Status.checkpointByID(id)
		switch {
		case c == nil || c.Remove:
			return false, fail.New(fail.Conflict, "checkpoint %s was removed", name)
		case c.State == CheckpointFailed:
			return false, fail.New(fail.ParseCode(c.Error.Code), "%s", c.Error.Message).WithHint("%s", c.Error.Hint)
		}
		created = *c
		return c.State == CheckpointComplete, nil
	})
}

// Remove removes a checkpoint. It returns once the keeper of a running session has removed it; a
// stopped session frees the space when it starts again.
func (o Checkpoints) Remove(ctx context.Context, s Session, name string) (Session, error) {
	id := ""
	s, err := o.update(ctx, s, func(_ Phase, f *Status) error {
		c := f.checkpoint(name)
		switch {
		case c == nil:
			return noCheckpoint(s, name)
		case c.State == CheckpointPending, f.Restore != nil && f.Restore.ID == c.ID:
			return fail.New(fail.Conflict, "checkpoint %s of session %s is in use", name, s.Name).WithHint("agent-sessionizer checkpoints %s", s.Name)
		}
		c.Remove, id = true, c.ID
		return nil
	})
	if err != nil || s.Phase != Ready {
		return s, err
	}
	err = o.await(ctx, s, func(now Session) (bool, error) { return now.Status.checkpointByID(id) == nil, nil })
	return s, err
}

// Restore requests that a session return to a checkpoint. The state that this replaces is saved as
// BeforeRestore.
func (o Checkpoints) Restore(ctx context.Context, s Session, name string) (Session, error) {
	if s.Task != "" {
		return s, fail.New(fail.Conflict, "restore session %s: it belongs to task %s", s.Name, s.Task)
	}
	request := func(phase Phase, f *Status) error {
		c := f.checkpoint(name)
		switch {
		case phase != Ready && phase != Stopped:
			return fail.New(fail.Conflict, "session %s is %s", s.Name, phase).WithHint("agent-sessionizer open %s", s.Name)
		case c == nil:
			return noCheckpoint(s, name)
		case c.State != CheckpointComplete:
			return fail.New(fail.Conflict, "checkpoint %s of session %s is %s", name, s.Name, c.State).WithHint("agent-sessionizer checkpoints %s", s.Name)
		case f.Restore != nil:
			return fail.New(fail.Conflict, "checkpoint %s is being restored", f.Restore.Name).WithHint("agent-sessionizer logs %s", s.Name)
		case f.Workspace != "":
			return noMemory(s.Name, f.Workspace)
		}
		f.Restore, f.RestoreError = &restoreRequest{Name: name, ID: c.ID, Current: ids.Hex(6)}, nil
		f.RequestedBy = o.Sessions.requestedBy(ctx)
		return nil
	}
	if s.Phase == Stopped {
		return o.Sessions.setDesired(ctx, s, Ready, request)
	}
	s, err := o.update(ctx, s, request)
	if err == nil {
		err = o.Sessions.Tend(ctx, s.Session)
	}
	return s, err
}

func noCheckpoint(s Session, name string) error {
	return fail.New(fail.NotFound, "session %s has no checkpoint %s", s.Name, ssh.Quote(name)).WithHint("agent-sessionizer checkpoints %s", s.Name)
}

// update changes the session's status, unless f returns an error.
func (o Checkpoints) update(ctx context.Context, s Session, f func(Phase, *Status) error) (Session, error) {
	return read(o.Sessions.Store.Update(ctx, s.ID, func(row *store.Session) (store.Event, error) {
		var refused error
		err := change(row, func(status *Status) { refused = f(Phase(row.Phase), status) })
		return store.Event{}, errors.Join(err, refused)
	}))
}

// await waits until done returns true for the session. It starts another keeper if the keeper dies.
func (o Checkpoints) await(ctx context.Context, s Session, done func(Session) (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, checkpointTimeout, fail.New(fail.Timeout, "the keeper of session %s did not answer within %v", s.Name, checkpointTimeout).
		WithHint("agent-sessionizer logs %s", s.Name))
	defer cancel()
	for n := 1; ; n++ {
		now, err := o.Sessions.Get(ctx, s.ID)
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		if ok, err := done(now); ok || err != nil {
			return err
		}
		if now.Phase != Ready {
			return fail.New(fail.Conflict, "session %s is %s", now.Name, now.Phase)
		}
		if n%20 == 0 {
			if err := o.Sessions.Tend(ctx, now.Session); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
