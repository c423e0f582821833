package golden

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Where VMs cannot be saved while they run, some wait: spares. A spare is a
// clone of a golden image that has booted, is somebody, and belongs to nobody:
// its gateway lets nothing out, nobody but its session will ever log in to it,
// and no two sessions get the same one, because to take it is to rename its
// directory.

const (
	sparePrefix = "spare-"     // of the VM, and of its directory in the pool
	making      = ".making-"   // before it: a directory whose VM does not wait yet
	removing    = ".removing-" // before it: one whose VM is deleted
	poolLock    = ".lock"      // held by whoever makes or removes spares
	spareFile   = "spare.json"

	// KeyFile and GatewayFolder are in a spare's directory: the private key of
	// its login, with the public one beside it, and its gateway's files.
	KeyFile       = "ssh_key"
	GatewayFolder = "gateway"
)

var spareName = regexp.MustCompile("^" + sparePrefix + "[0-9a-f]+$")

// Size is that of a VM; memory and disk in bytes.
type Size struct {
	CPUs   int   `json:"cpus"`
	Memory int64 `json:"memory"`
	Disk   int64 `json:"disk"`
}

// Spare is a VM that waits.
type Spare struct {
	Size
	VM        string    `json:"vm"`
	Image     string    `json:"image"` // directory of the golden image that it is a clone of
	CreatedAt time.Time `json:"created_at"`
	Dir       string    `json:"-"` // its directory, ReadSpare's argument
}

// ReadSpare reads the spare of a directory, also of one that was taken. Its
// error is fs.ErrNotExist, wrapped, when there is none.
func ReadSpare(dir string) (Spare, error) {
	s := Spare{Dir: dir}
	b, err := os.ReadFile(filepath.Join(dir, spareFile))
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err == nil && !spareName.MatchString(s.VM) {
		err = fmt.Errorf("%s: no name of a spare VM: %q", dir, s.VM)
	}
	return s, err
}

// Spares returns the VMs that wait in a pool's directory, the oldest first.
func Spares(pool string) ([]Spare, error) {
	found, err := filepath.Glob(filepath.Join(pool, sparePrefix+"*"))
	if err != nil {
		return nil, err
	}
	all := []Spare{}
	for _, dir := range found {
		if s, err := ReadSpare(dir); err == nil { // else it was taken just now, or Drain removes it
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b Spare) int { return a.CreatedAt.Compare(b.CreatedAt) })
	return all, nil
}

func (m *Maker) lacksSpares(i image.Info, size Size) (bool, error) {
	all, err := Spares(m.Pool)
	n := 0
	for _, s := range all {
		if s.Image == i.Path && s.Size == size {
			n++
		}
	}
	return n < m.Waiting, err
}

// Take moves the directory of a spare of that size, a clone of the golden image
// i, to dest, and the spare is the caller's. ok is false when there is none.
func (m *Maker) Take(ctx context.Context, i image.Info, size Size, dest string) (s Spare, ok bool, err error) {
	all, err := Spares(m.Pool)
	if err != nil {
		return Spare{}, false, err
	}
	for _, s := range all {
		if s.Image != i.Path || s.Size != size || !m.waits(ctx, s) {
			continue
		}
		switch err := os.Rename(s.Dir, dest); {
		case errors.Is(err, fs.ErrNotExist):
			continue // somebody was faster
		case err != nil:
			return Spare{}, false, fail.New(fail.Host, "take a VM that waits: %w", err)
		}
		s.Dir = dest
		return s, true, nil
	}
	return Spare{}, false, nil
}

// waits reports whether a spare's VM runs and can still be let into the network.
func (m *Maker) waits(ctx context.Context, s Spare) bool {
	machine, err := m.Driver.Inspect(ctx, s.VM)
	if err != nil || machine.State != vm.Running {
		return false
	}
	st, err := m.gateway(s.Dir).Status(ctx)
	return err == nil && !st.Unplugged
}

// Fill sees to it that m.Waiting spares of a size wait that are clones of the
// golden image i, and no others. Of several callers each waits for the one before.
func (m *Maker) Fill(ctx context.Context, i image.Info, size Size, p vm.Progress) error {
	return m.tend(ctx, true, func() error {
		err := m.drain(ctx, func(s Spare) bool { return s.Image == i.Path && s.Size == size && m.waits(ctx, s) })
		if err != nil {
			return err
		}
		for {
			lacks, err := m.lacksSpares(i, size)
			if err != nil || !lacks {
				return err
			}
			if err := m.addSpare(ctx, i, size, p); err != nil {
				return err
			}
		}
	})
}

// Drain removes the spares that keep does not want, nil wants none. While another
// process makes or removes some, it waits, or does nothing.
func (m *Maker) Drain(ctx context.Context, wait bool, keep func(Spare) bool) error {
	return m.tend(ctx, wait, func() error { return m.drain(ctx, keep) })
}

// tend runs f while no other process makes or removes spares, and first removes
// what one that died has left. When there is another it waits for it, or returns.
func (m *Maker) tend(ctx context.Context, wait bool, f func() error) error {
	lock, err := m.lock(ctx, wait)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Unlock() //nolint:errcheck // it ends with the process at the latest
	left, err := m.unfinished()
	if err != nil {
		return err
	}
	for name, dir := range left {
		if err := m.scrap(ctx, name, dir); err != nil {
			return err
		}
	}
	return f()
}

// lock takes the pool's lock, for which it waits if told, else it returns nil.
func (m *Maker) lock(ctx context.Context, wait bool) (*store.Lock, error) {
	for {
		lock, ok, err := store.TryLock(filepath.Join(m.Pool, poolLock))
		if err != nil || ok || !wait {
			return lock, err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for another maker of VMs that wait: %w", ctx.Err())
		case <-time.After(statePoll):
		}
	}
}

// unfinished are the directories of VMs that their maker, or remover, has left
// when it died, by the VM's name. The caller holds the lock.
func (m *Maker) unfinished() (map[string]string, error) {
	left := map[string]string{}
	for _, prefix := range []string{making, removing} {
		found, err := filepath.Glob(filepath.Join(m.Pool, prefix+sparePrefix+"*"))
		if err != nil {
			return nil, err
		}
		for _, dir := range found {
			left[VMOf(dir)] = dir
		}
	}
	return left, nil
}

func (m *Maker) drain(ctx context.Context, keep func(Spare) bool) error {
	unwanted, err := m.unwanted(keep)
	if err != nil {
		return err
	}
	for _, dir := range unwanted {
		if _, err := m.retire(ctx, dir); err != nil {
			return err
		}
	}
	return nil
}

// unwanted are the directories of the spares that keep does not want.
func (m *Maker) unwanted(keep func(Spare) bool) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(m.Pool, sparePrefix+"*"))
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(found, func(dir string) bool {
		s, err := ReadSpare(dir)
		return err == nil && keep != nil && keep(s)
	}), nil
}

// retire removes a spare, unless a session is faster.
func (m *Maker) retire(ctx context.Context, dir string) (removed bool, err error) {
	name := filepath.Base(dir)
	gone := filepath.Join(m.Pool, removing+name)
	if err := os.Rename(dir, gone); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, m.scrap(ctx, name, gone)
}

// Discard removes a spare that was taken.
func (m *Maker) Discard(ctx context.Context, s Spare) error { return m.scrap(ctx, s.VM, s.Dir) }

// scrap removes a VM that is no session's, with its directory.
func (m *Maker) scrap(ctx context.Context, name, dir string) error {
	if err := m.clear(ctx, name, dir); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// addSpare boots one and publishes it.
func (m *Maker) addSpare(ctx context.Context, i image.Info, size Size, p vm.Progress) (err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	release, err := m.Images.Use()
	if err != nil {
		return err
	}
	defer release()
	img, err := i.Image()
	if err != nil {
		return err
	}
	random := make([]byte, 3)
	_, _ = rand.Read(random) // never fails, says crypto/rand
	s := Spare{Size: size, VM: sparePrefix + fmt.Sprintf("%x", random), Image: i.Path}
	dir := filepath.Join(m.Pool, making+s.VM)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.scrap(context.WithoutCancel(ctx), s.VM, dir))
		}
	}()
	say(p, "booting a VM of %d CPUs and %d MiB that waits", size.CPUs, size.Memory>>20)
	b, err := m.boot(ctx, vm.Spec{Name: s.VM, CPUs: size.CPUs, Memory: size.Memory, Disk: size.Disk, Image: img}, dir, nowhere(), p)
	if err != nil {
		return err
	}
	defer b.close()
	trouble, err := b.guest.Own(ctx)
	if err == nil && trouble != "" {
		err = fail.New(fail.Failure, "the guest did not become one of its own: %s", trouble)
	}
	if err != nil {
		return err
	}
	s.CreatedAt = time.Now().UTC()
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	for name, content := range map[string][]byte{KeyFile: b.private, KeyFile + ".pub": []byte(b.authorized), spareFile: text} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return err
		}
	}
	return os.Rename(dir, filepath.Join(m.Pool, s.VM))
}
