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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// maxBases limits how many results are kept for a repository.
const maxBases = 4

// BaseVMPrefix begins the names of the VMs that hold the results of setups. They never start.
const BaseVMPrefix = "base-"

// checkpointDigits is how many digits of a key identify a result: as many as a checkpoint's id may have.
const checkpointDigits = 32

func baseVM(key string) string { return BaseVMPrefix + key[:checkpointDigits] }

// RepoBase is the kept result of a repository's setup: a VM that never starts, of which later
// sessions of the repository are forks.
type RepoBase struct {
	RepoKey     string      `json:"repo_key"`
	Profile     string      `json:"profile,omitempty"`
	Branch      string      `json:"branch,omitempty"`
	Key         string      `json:"key"` // changes with everything that the result depends on
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

// RepoBases are the kept results of setups on this host, one file each.
type RepoBases struct{ Paths config.Paths }

func (r RepoBases) dir() string { return filepath.Join(r.Paths.State, "bases") }

func (r RepoBases) file(key string) string {
	return filepath.Join(r.dir(), key[:checkpointDigits]+".json")
}

// List returns all, oldest first. A file that cannot be read is left out.
func (r RepoBases) List() (all []RepoBase, err error) {
	entries, err := os.ReadDir(r.dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		var b RepoBase
		text, rerr := os.ReadFile(filepath.Join(r.dir(), e.Name()))
		if rerr == nil && json.Unmarshal(text, &b) == nil && len(b.Key) == 64 {
			all = append(all, b)
		}
	}
	slices.SortFunc(all, func(a, b RepoBase) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, err
}

// of returns those of a repository.
func (r RepoBases) of(repoKey string) ([]RepoBase, error) {
	all, err := r.List()
	return slices.DeleteFunc(all, func(b RepoBase) bool { return b.RepoKey != repoKey }), err
}

func (r RepoBases) write(b RepoBase) error {
	if err := os.MkdirAll(r.dir(), 0o700); err != nil {
		return err
	}
	text, err := json.Marshal(b)
	if err != nil {
		return err
	}
	return atomicfile.Write(r.file(b.Key), text, 0o600)
}

// use records that a session starts from a result. It returns none if it was removed meanwhile.
func (r RepoBases) use(ctx context.Context, b RepoBase) (RepoBase, error) {
	lock, err := lockfile.Wait(ctx, r.Lock(b.VM), nil)
	if err != nil {
		return RepoBase{}, err
	}
	defer lock.Unlock()
	kept, err := r.of(b.RepoKey)
	i := slices.IndexFunc(kept, func(k RepoBase) bool { return k.Key == b.Key })
	if err != nil || i < 0 {
		return RepoBase{}, err
	}
	kept[i].UsedAt = time.Now().UTC()
	return kept[i], r.write(kept[i])
}

// Lock returns the path of the lock that is held while the VM of a result is removed.
func (r RepoBases) Lock(vm string) string { return filepath.Join(r.Paths.State, "locks", vm) }

// Remove removes a result and its VM. A missing one is a success.
func (r RepoBases) Remove(ctx context.Context, driver vm.Driver, name string) error {
	err := os.Remove(filepath.Join(r.dir(), strings.TrimPrefix(name, BaseVMPrefix)+".json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return driver.Delete(ctx, name)
}

// RemoveUnused removes a result that the user names.
func (r RepoBases) RemoveUnused(ctx context.Context, driver vm.Driver, name string) error {
	kept, err := r.List()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(kept, func(b RepoBase) bool { return b.VM == name }) {
		return fail.New(fail.NotFound, "no setup has the result %s", name).WithHint("agent-sessionizer image list")
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

// removeReplaced removes the results that a new one replaces.
func (r RepoBases) removeReplaced(ctx context.Context, driver vm.Driver, by RepoBase) error {
	kept, err := r.of(by.RepoKey)
	if err != nil {
		return err
	}
	var errs []error
	for _, old := range replaced(kept, by) {
		lock, free, err := lockfile.Try(r.Lock(old.VM))
		if err == nil && free { // otherwise a session starts from it, and the next result replaces it
			err = errors.Join(r.Remove(ctx, driver, old.VM), lock.Remove())
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// replaced returns the results of a repository that a new one replaces: those of the same branch and
// profile, and the least recently used ones beyond maxBases.
func replaced(kept []RepoBase, by RepoBase) (old []RepoBase) {
	slices.SortFunc(kept, func(a, b RepoBase) int { return a.UsedAt.Compare(b.UsedAt) })
	n := 0
	for _, b := range slices.Backward(kept) {
		switch {
		case b.Key == by.Key:
		case b.Branch == by.Branch && b.Profile == by.Profile, n >= maxBases-1:
			old = append(old, b)
		default:
			n++
		}
	}
	return old
}
