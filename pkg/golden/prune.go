package golden

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// PruneImages runs image.Store.Prune. It also removes VMs and gateways that dead makers
// left running.
func (m *Maker) PruneImages(ctx context.Context, o image.PruneOptions) ([]image.Leftover, error) {
	o.Sweep = func(name, work string) error {
		source, golden := image.GoldenOf(name)
		if !golden {
			return nil
		}
		return m.VMs.clear(ctx, vmName(source), work)
	}
	return m.Images.Prune(o)
}

// Prune removes the standby VMs for which keep returns false and the leftovers of
// makers that died, and returns what it removed. While another process makes or removes
// standby VMs, it waits; a dry run does not wait, and considers only finished ones.
func (p *Pool) Prune(ctx context.Context, dry bool, keep func(Standby) bool) (found []image.Leftover, err error) {
	if _, err := os.Stat(p.Dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	busy := dry && lockfile.Held(filepath.Join(p.Dir, poolLock))
	if !dry {
		lock, err := p.lock(ctx, true)
		if err != nil {
			return nil, err
		}
		defer lock.Unlock()
	}
	if !busy {
		left, err := p.unfinished()
		if err != nil {
			return nil, err
		}
		for name, dir := range left {
			l := p.leftover(ctx, name, dir, "left by an interrupted build of a standby VM")
			if !dry {
				err = p.delete(ctx, name, dir)
			}
			if err != nil {
				return found, err
			}
			found = append(found, l)
		}
	}
	unwanted, err := p.unwanted(keep)
	if err != nil {
		return found, err
	}
	for _, dir := range unwanted {
		l := p.leftover(ctx, filepath.Base(dir), dir, "unused standby VM")
		removed := dry
		if !dry {
			if removed, err = p.retire(ctx, dir); err != nil {
				return found, err
			}
		}
		if removed {
			found = append(found, l)
		}
	}
	return found, nil
}

// PoolVMs returns the names of the VMs in a pool's directory, including those that are
// not ready yet or are being removed.
func PoolVMs(pool string) ([]string, error) {
	entries, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if name := VMOf(e.Name()); standbyName.MatchString(name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// VMOf returns the name of the VM that a directory of the pool belongs to.
func VMOf(dir string) string {
	name := filepath.Base(dir)
	for _, prefix := range []string{making, removing} {
		name = strings.TrimPrefix(name, prefix)
	}
	return name
}

// leftover describes a VM's directory in the pool. Its size includes the VM's disk.
func (p *Pool) leftover(ctx context.Context, name, dir, why string) image.Leftover {
	l := image.Leftover{Path: dir, Size: image.DiskUsage(dir), Why: why}
	if machine, err := p.VMs.Driver.Inspect(ctx, name); err == nil { // otherwise there is no VM
		l.Size += machine.DiskUsed
	}
	return l
}
