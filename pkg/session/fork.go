package session

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// MaxForks limits how many forks one call creates.
const MaxForks = 16

// ForkOf names what a fork was made from.
type ForkOf struct {
	Session    string      `json:"session"`    // id
	VM         string      `json:"vm"`         // of that session
	Checkpoint string      `json:"checkpoint"` // the driver's id
	Name       string      `json:"name,omitempty"`
	Memory     bool        `json:"memory"`
	From       golden.From `json:"from"` // how the VM of its oldest ancestor was made
}

// Fork creates sessions that continue from a checkpoint of s: they have its files and, where the
// checkpoint has memory, its programs. Without a checkpoint, they continue from the current state of
// s, which must be running. A single fork gets exactly the label, if one is given. Otherwise a number
// is added to the label, or to that of s. After an error, the forks that were created stay.
func (o Checkpoints) Fork(ctx context.Context, s Session, checkpoint, label string, count int) (forks []Session, err error) {
	switch {
	case count < 1 || count > MaxForks:
		return nil, fail.New(fail.Usage, "fork session %s: the number of forks must be from 1 to %d, got %d", s.Name, MaxForks, count)
	case s.Task != "":
		return nil, fail.New(fail.Conflict, "fork session %s: it belongs to task %s", s.Name, s.Task)
	}
	if s, err = o.Sessions.Get(ctx, s.ID); err != nil {
		return nil, err
	}
	if s.Phase == Gone || s.Phase == Destroying || s.Desired == Gone {
		return nil, fail.New(fail.Conflict, "fork session %s: it is %s", s.Name, s.Phase).WithHint("agent-sessionizer list")
	}
	if err := o.mayFork(ctx, s, checkpoint, label, count); err != nil {
		return nil, err
	}
	var c storedCheckpoint
	if checkpoint != "" {
		found := s.Status.checkpoint(checkpoint)
		if found == nil {
			return nil, noCheckpoint(s, checkpoint)
		}
		c = *found
	} else {
		id := ids.Hex(6)
		defer func() { // the keeper removes it once all forks have their files
			_, cerr := o.update(context.WithoutCancel(ctx), s, func(_ Phase, f *Status) error {
				if c := f.checkpointByID(id); c != nil {
					c.Remove = true
				}
				return nil
			})
			err = errors.Join(err, cerr)
		}()
		if c, err = o.create(ctx, s, id, "fork-"+id, true); err != nil {
			return nil, err
		}
	}
	if err := s.checkFork(c); err != nil {
		return nil, err
	}
	of := ForkOf{Session: s.ID, VM: s.VM(), Checkpoint: c.ID, Memory: c.Memory, From: s.origin()}
	if !c.Temporary {
		of.Name = c.Name
	}
	for range count {
		f, err := o.fork(ctx, s, c, of, label, count == 1)
		if err != nil {
			if len(forks) > 0 {
				var names []string
				for _, f := range forks {
					names = append(names, f.Name)
				}
				err = fail.New(fail.CodeOf(err), "created %d of %d forks (%s): %w", len(forks), count, strings.Join(names, ", "), err).WithHint("%s", fail.HintOf(err))
			}
			return forks, err
		}
		forks = append(forks, f)
	}
	return forks, nil
}

// origin returns how the VM of s, or of its oldest ancestor, was made.
func (s Session) origin() golden.From {
	if of := s.forkOf(); of != nil {
		return of.From
	}
	return s.Status.From
}

// checkFork returns why a checkpoint of s cannot be forked, nil if it can.
func (s Session) checkFork(c storedCheckpoint) error {
	what := "checkpoint " + ssh.Quote(c.Name) + " of session " + s.Name
	if c.Temporary {
		what = "session " + s.Name
	}
	switch {
	case c.State != CheckpointComplete:
		return fail.New(fail.Conflict, "fork %s: it is %s", what, c.State).WithHint("agent-sessionizer checkpoints %s", s.Name)
	case c.Memory && !c.Prepared && c.Temporary:
		return fail.New(fail.Failure, "fork %s: the guest could not be prepared for forks", what).WithHint("agent-sessionizer logs --of keeper %s", s.Name)
	case c.Memory && !c.Prepared:
		return fail.New(fail.Conflict, "fork %s: the guest was not prepared for forks when it was saved", what).
			WithHint("agent-sessionizer restore %s %s # then fork the session", s.Name, ssh.Quote(c.Name))
	case !c.Memory && s.origin() == golden.FromGeneric:
		return fail.New(fail.Conflict, "fork %s: it has no memory, and a fork would keep the identity of a VM that was made from a generic image", what).
			WithHint("agent-sessionizer image build --from %s # then open another session", ssh.Quote(s.Spec.Image))
	}
	return nil
}

// mayFork refuses early, before the memory of s is saved, what would be refused later.
func (o Checkpoints) mayFork(ctx context.Context, s Session, checkpoint, label string, count int) error {
	if label != "" && count == 1 {
		if other, err := o.Sessions.ByLabel(ctx, s.RepoKey, label); err == nil && other.Label == label {
			return labelTaken(other, withLabel(s.Name, checkpoint))
		}
	}
	return o.Sessions.hasRoom(ctx, s.Spec.Resources, "")
}

func labelTaken(by Session, fork string) error {
	return fail.New(fail.Conflict, "create the fork %s: session %s already has that label", by.DisplayName(), by.Name).WithHint("agent-sessionizer fork %s", ssh.Quote(fork))
}

// fork creates one session.
func (o Checkpoints) fork(ctx context.Context, s Session, c storedCheckpoint, of ForkOf, label string, exact bool) (Session, error) {
	m := o.Sessions
	spec := s.Spec
	spec.Fork, spec.Numbered = &of, false
	was := s.Status
	status := Status{
		Net: was.Net, Budget: was.Budget, Project: was.Project, Dir: strings.TrimPrefix(was.Dir, was.Root), Base: was.Base, Target: was.Target,
		From: golden.FromFork, Provisioned: c.Provisioned, Program: c.Program, RequestedBy: m.requestedBy(ctx),
		SetupPlan: was.SetupPlan, Setup: was.Setup,
	}
	labels, asked := freeLabels(cmp.Or(label, s.Label)), label
	if exact && label != "" {
		labels = func(yield func(string) bool) { yield(label) }
	}
	n := store.Session{ID: ids.New(), RepoKey: s.RepoKey, Repo: s.Repo}
	row, created, err := m.insert(ctx, n, spec, status, labels, asked)
	if err != nil {
		return Session{}, err
	}
	f, err := read(row, nil)
	if err != nil {
		return f, err
	}
	if !created {
		return f, labelTaken(f, withLabel(s.Name, of.Name))
	}
	err = m.wake(ctx, f.ID)
	m.audit(ctx, audit.SessionForked, m.Actor, "session:"+f.ID, err, f.details(map[string]any{"fork_of": s.ID, "checkpoint": of.Name}))
	return f, err
}

// isNeeded reports whether a session that is being forked needs a checkpoint to make its VM. Without
// an id, it reports whether one needs any checkpoint of the session.
func (m *Manager) isNeeded(ctx context.Context, session, id string) (bool, error) {
	rows, err := m.Store.Sessions(ctx, false)
	if err != nil {
		return false, err
	}
	for _, row := range rows {
		s, err := read(row, nil)
		if err != nil {
			return false, err
		}
		of := s.Spec.Fork
		if of != nil && of.Session == session && (id == "" || of.Checkpoint == id) && !s.Status.Forked &&
			s.Phase != Destroying && s.Desired != Gone && time.Since(s.CreatedAt) < temporaryTime {
			return true, nil
		}
	}
	return false, nil
}

// IsBeingForked reports whether forks of s are being made, which would fail without it.
func (m *Manager) IsBeingForked(ctx context.Context, s Session) (bool, error) {
	return m.isNeeded(ctx, s.ID, "")
}

// forkOf returns what the VM of s is a fork of, nil if it is none.
func (s Session) forkOf() *ForkOf { return cmp.Or(s.Spec.Fork, s.Status.FromSetup) }

// fork makes the VM of a fork, unless it exists. Then the fork has all that it needs.
func (b booter) fork(ctx context.Context, s *Session) error {
	if s.Status.Forked {
		return nil
	}
	return b.w.step(ctx, s.ID, "fork the VM", func(ctx context.Context, _ vm.Progress) error {
		of := *s.forkOf()
		d, err := b.w.checkpointer().driver()
		if err != nil {
			return err
		}
		authorized, err := b.key(s.ID)
		if err != nil {
			return err
		}
		if of.Session != "" && s.Spec.Enforced {
			parent, err := b.w.Sessions.Get(ctx, of.Session)
			if err == nil && parent.Phase != Gone {
				err = b.w.Sessions.Gateway(*s).Inherit(ctx, b.w.Sessions.Gateway(parent))
			}
			if err != nil {
				return err
			}
		}
		if err := b.w.standbys().freeStandbyMemory(ctx, s.Spec.Resources.Memory); err != nil {
			return err
		}
		release, err := b.w.Golden.Images.Use()
		if err != nil {
			return err
		}
		defer release()
		memory := of.Memory
		fork := func() error {
			return d.Fork(ctx, of.VM, of.Checkpoint, vm.Spec{
				Name: s.Name, User: guestclient.User, AuthorizedKey: authorized, Boot: guestclient.BootScript(), ExternalNet: s.Spec.Enforced,
			}, memory)
		}
		if err = fork(); errors.Is(err, vm.ErrNotWoken) && of.From != golden.FromGeneric {
			b.w.warn(ctx, s.ID, "", "%v; booting from the disk, without the programs", err)
			memory = false
			err = fork()
		}
		if errors.Is(err, vm.ErrNotFound) || errors.Is(err, fs.ErrNotExist) || fail.CodeOf(err) == fail.NotFound {
			return fail.New(fail.NotFound, "the checkpoint no longer exists: %w", err).WithHint("agent-sessionizer destroy --force %s", s.Name)
		}
		if err != nil {
			return err
		}
		*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
			if f.Forked = true; memory {
				f.Resumes = of.Checkpoint
			} else {
				f.removeUnlisted(of.Checkpoint)
			}
		})
		return err
	})
}
