package session

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// maxSavedSetups limits how many saved setups a repository has.
const maxSavedSetups = 4

// SetupVMPrefix begins the names of the VMs of saved setups. They never start.
const SetupVMPrefix = "setup-"

// checkpointDigits is how many digits of a key identify a saved setup: as many as a checkpoint's id may have.
const checkpointDigits = 32

func setupVM(key string) string { return SetupVMPrefix + key[:checkpointDigits] }

// SavedSetup is a VM in which a repository's setup has run. The VM never starts: later sessions of the
// repository are forked from it.
type SavedSetup struct {
	RepoKey     string      `json:"repo_key"`
	Profile     string      `json:"profile,omitempty"`
	Branch      string      `json:"branch,omitempty"`
	Key         string      `json:"key"` // changes with everything that the setup depends on
	VM          string      `json:"vm"`
	Checkpoint  string      `json:"checkpoint"` // the driver's id
	Memory      bool        `json:"memory"`
	From        golden.From `json:"from"`
	Provisioned string      `json:"provisioned,omitempty"`
	Program     string      `json:"program,omitempty"`
	Size        int64       `json:"size"` // bytes on the host when it was created
	CreatedAt   time.Time   `json:"created_at"`
	UsedAt      time.Time   `json:"used_at"`
}

// SavedSetups are the saved setups on this host, one file each.
type SavedSetups struct{ Paths config.Paths }

func (r SavedSetups) dir() string { return filepath.Join(r.Paths.State, "setups") }

func (r SavedSetups) file(key string) string {
	return filepath.Join(r.dir(), key[:checkpointDigits]+".json")
}

// List returns all saved setups, oldest first. A file that cannot be read is left out.
func (r SavedSetups) List() (all []SavedSetup, err error) {
	entries, err := os.ReadDir(r.dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		var b SavedSetup
		text, rerr := os.ReadFile(filepath.Join(r.dir(), e.Name()))
		if rerr == nil && json.Unmarshal(text, &b) == nil && len(b.Key) == 64 && e.Name() == filepath.Base(r.file(b.Key)) {
			all = append(all, b)
		}
	}
	slices.SortFunc(all, func(a, b SavedSetup) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, err
}

// Leftovers returns the pattern of the names of files that a killed process may have left.
func (r SavedSetups) Leftovers() string { return filepath.Join(r.dir(), ".*.tmp") }

// OfRepo returns the saved setups of a repository.
func (r SavedSetups) OfRepo(repoKey string) ([]SavedSetup, error) {
	all, err := r.List()
	return slices.DeleteFunc(all, func(b SavedSetup) bool { return b.RepoKey != repoKey }), err
}

func (r SavedSetups) write(b SavedSetup) error {
	if err := os.MkdirAll(r.dir(), 0o700); err != nil {
		return err
	}
	text, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return atomicfile.Write(r.file(b.Key), text, 0o600)
}

// MarkUsed records that a session starts from b, and returns it. It returns the zero value if b no longer
// exists.
func (r SavedSetups) MarkUsed(ctx context.Context, b SavedSetup) (SavedSetup, error) {
	lock, err := lockfile.Wait(ctx, r.Lock(b.VM), nil)
	if err != nil {
		return SavedSetup{}, err
	}
	defer lock.Unlock()
	kept, err := r.OfRepo(b.RepoKey)
	i := slices.IndexFunc(kept, func(k SavedSetup) bool { return k.Key == b.Key })
	if err != nil || i < 0 {
		return SavedSetup{}, err
	}
	kept[i].UsedAt = time.Now().UTC()
	return kept[i], r.write(kept[i])
}

// Lock returns the path of the lock that is held while a saved setup is made, used or removed.
func (r SavedSetups) Lock(vm string) string { return filepath.Join(r.Paths.State, "locks", vm) }

// Remove removes a saved setup, whose lock the caller holds. A missing one is a success.
func (r SavedSetups) Remove(ctx context.Context, driver vm.Driver, name string) error {
	err := os.Remove(filepath.Join(r.dir(), strings.TrimPrefix(name, SetupVMPrefix)+".json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return driver.Delete(ctx, name)
}

// RemoveUnused removes the saved setup of that name, unless a session is being created from it.
func (r SavedSetups) RemoveUnused(ctx context.Context, driver vm.Driver, name string) error {
	kept, err := r.List()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(kept, func(b SavedSetup) bool { return b.VM == name }) {
		return fail.New(fail.NotFound, "no saved setup is named %s", name).WithHint("agent-sessionizer image list")
	}
	lock, free, err := lockfile.Try(r.Lock(name))
	if err != nil {
		return err
	}
	if !free {
		return fail.New(fail.Conflict, "a session is being created from %s", name).WithHint("agent-sessionizer list")
	}
	return errors.Join(r.Remove(ctx, driver, name), lock.Remove())
}

// removeReplaced removes the saved setups that a new one replaces.
func (r SavedSetups) removeReplaced(ctx context.Context, driver vm.Driver, by SavedSetup) error {
	kept, err := r.OfRepo(by.RepoKey)
	if err != nil {
		return err
	}
	var errs []error
	for _, old := range replaced(kept, by) {
		lock, free, err := lockfile.Try(r.Lock(old.VM))
		if err == nil && free { // otherwise a session starts from it, and the next saved setup replaces it
			err = errors.Join(r.Remove(ctx, driver, old.VM), lock.Remove())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// replaced returns the saved setups of a repository that a new one replaces: those of the same branch and
// profile, and the least recently used ones beyond maxSavedSetups.
func replaced(kept []SavedSetup, by SavedSetup) (old []SavedSetup) {
	slices.SortFunc(kept, func(a, b SavedSetup) int { return a.UsedAt.Compare(b.UsedAt) })
	n := 0
	for _, b := range slices.Backward(kept) {
		switch {
		case b.Key == by.Key:
		case b.Branch == by.Branch && b.Profile == by.Profile, n >= maxSavedSetups-1:
			old = append(old, b)
		default:
			n++
		}
	}
	return old
}

// chooseSavedSetup makes s start from the saved result of the same setup, if one exists.
func (b booter) chooseSavedSetup(ctx context.Context, s *Session, saved []SavedSetup, from fetchedRepo) error {
	plan := from.plan
	if of := s.Status.FromSetup; of != nil && of.Name != plan.Key { // the branch has moved since an earlier try
		if err := b.detachSavedSetup(ctx, s); err != nil {
			return err
		}
	}
	i := slices.IndexFunc(saved, func(k SavedSetup) bool { return k.Key == plan.Key })
	if s.Status.FromSetup != nil { // chosen before
		return b.w.guestSetup().storeProject(ctx, s, from.project)
	}
	if s.Status.From != "" || plan.Key == "" || i < 0 {
		return nil
	}
	k, err := SavedSetups{b.w.Sessions.Config.Paths}.MarkUsed(ctx, saved[i])
	if err != nil || k.VM == "" {
		return err
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.From, f.Provisioned, f.Program = golden.FromSetup, k.Provisioned, k.Program
		f.FromSetup = &ForkOf{VM: k.VM, Checkpoint: k.Checkpoint, Name: k.Key, Memory: k.Memory, From: k.From}
	})
	if err != nil {
		return err
	}
	// Before the boot, because programs of the repository run from then on.
	return b.w.guestSetup().storeProject(ctx, s, from.project)
}

// detachSavedSetup makes a new session start without the saved setup that it was to start from.
func (b booter) detachSavedSetup(ctx context.Context, s *Session) (err error) {
	// First, because the VM must be made again if this keeper dies now.
	if *s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) { f.Forked = false }); err != nil {
		return err
	}
	if err := errors.Join(b.w.Sessions.Gateway(*s).Stop(ctx), b.w.Driver.Delete(ctx, s.VM())); err != nil {
		return err
	}
	*s, err = b.w.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		f.FromSetup, f.From, f.Provisioned, f.Program, f.Resumes, f.Base, f.Setup = nil, "", "", "", "", nil, nil
	})
	return err
}
