package golden

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Where running VMs cannot be saved, the pool keeps some booted VMs: standby VMs. A
// standby VM is a booted clone of a golden image that has its own identity and no session
// yet. Its gateway lets nothing out, and only its later session ever logs in to it. No two
// sessions get the same standby VM, because taking one means renaming its directory.

const (
	standbyPrefix = "standby-"   // begins the name of the VM and of its directory in the pool
	making        = ".making-"   // prefix for the directory of a VM that is not ready yet
	removing      = ".removing-" // prefix for the directory of a VM that is being deleted
	poolLock      = ".lock"      // held while standby VMs are made or removed
	standbyFile   = "standby.json"

	// KeyFile and GatewayFolder are in a standby VM's directory. KeyFile is the private
	// key of its login, with the public key beside it; GatewayFolder holds its gateway's
	// files.
	KeyFile       = "ssh_key"
	GatewayFolder = "gateway"
)

var standbyName = lazyregexp.New("^" + standbyPrefix + "[0-9a-f]+$")

// Pool makes, hands out and removes standby VMs. Pools in several processes that share a
// directory wait for each other.
type Pool struct {
	VMs     VMs
	Images  *image.Store
	Dir     string
	Waiting int // number of standby VMs to keep of a size
}

// Size is the size of a VM; memory and disk are in bytes.
type Size struct {
	CPUs   int   `json:"cpus"`
	Memory int64 `json:"memory"`
	Disk   int64 `json:"disk"`
}

// Standby is a standby VM.
type Standby struct {
	Size
	VM        string    `json:"vm"`
	Image     string    `json:"image"` // directory of the golden image that it was cloned from
	CreatedAt time.Time `json:"created_at"`
	Dir       string    `json:"-"` // its directory, as passed to ReadStandby
}

// ReadStandby reads the standby VM in a directory, also after it was taken. Its error
// wraps fs.ErrNotExist if the directory holds none.
func ReadStandby(dir string) (Standby, error) {
	s := Standby{Dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, standbyFile))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err == nil && !standbyName.MatchString(s.VM) {
		err = fmt.Errorf("%s: not the name of a standby VM: %q", dir, s.VM)
	}
	return s, err
}

// Standbys returns the standby VMs in a pool's directory, oldest first.
func Standbys(pool string) ([]Standby, error) {
	found, err := filepath.Glob(filepath.Join(pool, standbyPrefix+"*"))
	if err != nil {
		return nil, err
	}
	all := []Standby{}
	for _, dir := range found {
		if s, err := ReadStandby(dir); err == nil { // otherwise it was just taken, or Drain will remove it
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Standby) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, nil
}

func (p *Pool) missing(i image.Info, size Size) (bool, error) {
	all, err := Standbys(p.Dir)
	n := 0
	for _, s := range all {
		if s.Image == i.Path && s.Size == size {
			n++
		}
	}
	return n < p.Waiting, err
}

// Take moves the directory of a standby VM of that size, cloned from the golden image i,
// to dest. The VM then belongs to the caller. ok is false if no standby VM fits.
func (p *Pool) Take(ctx context.Context, i image.Info, size Size, dest string) (s Standby, ok bool, err error) {
	all, err := Standbys(p.Dir)
	if err != nil {
		return Standby{}, false, err
	}
	for _, s := range all {
		if s.Image != i.Path || s.Size != size || !p.isWaiting(ctx, s) {
			continue
		}
		switch err := os.Rename(s.Dir, dest); {
		case errors.Is(err, fs.ErrNotExist):
			continue // another process took it first
		case err != nil:
			return Standby{}, false, fail.New(fail.Host, "take standby VM: %w", err)
		}
		s.Dir = dest
		return s, true, nil
	}
	return Standby{}, false, nil
}

// isWaiting reports whether a standby VM runs and can still be connected to the network.
func (p *Pool) isWaiting(ctx context.Context, s Standby) bool {
	machine, err := p.VMs.Driver.Inspect(ctx, s.VM)
	if err != nil || machine.State != vm.Running {
		return false
	}
	st, err := p.VMs.gateway(s.Dir).Status(ctx)
	return err == nil && !st.Detached
}

// Fill ensures that there are p.Waiting standby VMs of a size, cloned from the golden
// image i, and no others. Concurrent callers run one after the other.
func (p *Pool) Fill(ctx context.Context, i image.Info, size Size, progress vm.Progress) error {
	return p.withLock(ctx, true, func() error {
		err := p.drain(ctx, func(s Standby) bool { return s.Image == i.Path && s.Size == size && p.isWaiting(ctx, s) })
		if err != nil {
			return err
		}
		for {
			lacks, err := p.missing(i, size)
			if err != nil || !lacks {
				return err
			}
			if err := p.add(ctx, i, size, progress); err != nil {
				return err
			}
		}
	})
}

// Drain removes every standby VM for which keep returns false; a nil keep removes all.
// While another process makes or removes standby VMs, Drain waits if wait is set and
// otherwise does nothing.
func (p *Pool) Drain(ctx context.Context, wait bool, keep func(Standby) bool) error {
	return p.withLock(ctx, wait, func() error { return p.drain(ctx, keep) })
}

// withLock runs f while no other process makes or removes standby VMs. It first
// removes the leftovers of processes that died. If another process is at work,
// withLock waits for it or returns, depending on wait.
func (p *Pool) withLock(ctx context.Context, wait bool, f func() error) error {
	lock, err := p.lock(ctx, wait)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Unlock()
	left, err := p.unfinished()
	if err != nil {
		return err
	}
	for name, dir := range left {
		if err := p.delete(ctx, name, dir); err != nil {
			return err
		}
	}
	return f()
}

// lock acquires the pool's lock. If another process holds the lock, it waits if wait is
// set and otherwise returns nil.
func (p *Pool) lock(ctx context.Context, wait bool) (*lockfile.Lock, error) {
	path := filepath.Join(p.Dir, poolLock)
	if !wait {
		lock, _, err := lockfile.Try(path)
		return lock, err
	}
	lock, err := lockfile.Wait(ctx, path, nil)
	if err != nil {
		return nil, fmt.Errorf("wait for another process that makes standby VMs: %w", err)
	}
	return lock, nil
}

// unfinished returns the directories that processes left when they died while making or
// removing a VM, by the VM's name. The caller holds the lock.
func (p *Pool) unfinished() (map[string]string, error) {
	left := map[string]string{}
	for _, prefix := range []string{making, removing} {
		found, err := filepath.Glob(filepath.Join(p.Dir, prefix+standbyPrefix+"*"))
		if err != nil {
			return nil, err
		}
		for _, dir := range found {
			left[VMOf(dir)] = dir
		}
	}
	return left, nil
}

func (p *Pool) drain(ctx context.Context, keep func(Standby) bool) error {
	unwanted, err := p.unwanted(keep)
	if err != nil {
		return err
	}
	for _, dir := range unwanted {
		if _, err := p.retire(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

// unwanted returns the directories of the standby VMs for which keep returns false.
func (p *Pool) unwanted(keep func(Standby) bool) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(p.Dir, standbyPrefix+"*"))
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(found, func(dir string) bool {
		s, err := ReadStandby(dir)
		return err == nil && keep != nil && keep(s)
	}), nil
}

// retire removes a standby VM, unless a session takes it first.
func (p *Pool) retire(ctx context.Context, dir string) (removed bool, err error) {
	name := filepath.Base(dir)
	gone := filepath.Join(p.Dir, removing+name)
	if err := os.Rename(dir, gone); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, p.delete(ctx, name, gone)
}

// Discard removes a standby VM that was taken.
func (p *Pool) Discard(ctx context.Context, s Standby) error {
	return p.delete(ctx, s.VM, s.Dir)
}

// delete removes a VM that belongs to no session, with its directory.
func (p *Pool) delete(ctx context.Context, name, dir string) error {
	if err := p.VMs.clear(ctx, name, dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// add boots a standby VM and publishes it.
func (p *Pool) add(ctx context.Context, i image.Info, size Size, progress vm.Progress) (err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	release, err := p.Images.Use()
	if err != nil {
		return err
	}
	defer release()
	img, err := i.Image()
	if err != nil {
		return err
	}
	s := Standby{Size: size, VM: standbyPrefix + ids.Hex(3), Image: i.Path}
	dir := filepath.Join(p.Dir, making+s.VM)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.delete(context.WithoutCancel(ctx), s.VM, dir))
		}
	}()
	report(progress, "booting a standby VM of %d CPUs and %d MiB", size.CPUs, size.Memory>>20)
	b, err := p.VMs.boot(ctx, vm.Spec{Name: s.VM, CPUs: size.CPUs, Memory: size.Memory, Disk: size.Disk, Image: img}, dir, nowhere(), progress)
	if err != nil {
		return err
	}
	defer b.close()
	trouble, err := b.guest.FinishIdentity(ctx)
	if err == nil && trouble != "" {
		err = fail.New(fail.Failure, "the guest did not set up its own disks and file-system journal: %s", trouble)
	}
	if err != nil {
		return err
	}
	s.CreatedAt = time.Now().UTC()
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{KeyFile: b.private, KeyFile + ".pub": []byte(b.authorized), standbyFile: text} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return os.Rename(dir, filepath.Join(p.Dir, s.VM))
}
