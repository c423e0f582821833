package golden

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// PruneImages is image.Store.Prune, with what dead makers have left running.
func (m *Maker) PruneImages(ctx context.Context, o image.PruneOptions) ([]image.Leftover, error) {
	o.Sweep = func(name, work string) error {
		source, golden := image.GoldenOf(name)
		if !golden {
			return nil
		}
		return m.clear(ctx, vmName(source), work)
	}
	return m.Images.Prune(o)
}

// PruneSpares removes the spares that keep does not want, and what makers of some
// left when they died, and returns what that was. While another process makes or
// removes spares it waits; a dry run does not, and looks only at those that wait.
func (m *Maker) PruneSpares(ctx context.Context, dry bool, keep func(Spare) bool) (found []image.Leftover, err error) {
	if _, err := os.Stat(m.Pool); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	busy := dry && store.Held(filepath.Join(m.Pool, poolLock))
	if !dry {
		lock, err := m.lock(ctx, true)
		if err != nil {
			return nil, err
		}
		defer lock.Unlock() //nolint:errcheck // it ends with the process at the latest
	}
	if !busy {
		left, err := m.unfinished()
		if err != nil {
			return nil, err
		}
		for name, dir := range left {
			l := m.leftover(ctx, name, dir, "its maker was cut short")
			if !dry {
				err = m.scrap(ctx, name, dir)
			}
			if err != nil {
				return found, err
			}
			found = append(found, l)
		}
	}
	unwanted, err := m.unwanted(keep)
	if err != nil {
		return found, err
	}
	for _, dir := range unwanted {
		l := m.leftover(ctx, filepath.Base(dir), dir, "it waits, and no session will be given it")
		removed := dry
		if !dry {
			if removed, err = m.retire(ctx, dir); err != nil {
				return found, err
			}
		}
		if removed {
			found = append(found, l)
		}
	}
	return found, nil
}

// PoolVMs are the names of the VMs of a pool's directory, also of those that do
// not wait yet, or are being removed.
func PoolVMs(pool string) ([]string, error) {
	entries, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if name := VMOf(e.Name()); spareName.MatchString(name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// VMOf is the name of the VM that a directory of the pool is about.
func VMOf(dir string) string {
	name := filepath.Base(dir)
	for _, prefix := range []string{making, removing} {
		name = strings.TrimPrefix(name, prefix)
	}
	return name
}

// leftover is a VM's directory in the pool; its size is the VM's, too.
func (m *Maker) leftover(ctx context.Context, name, dir, why string) image.Leftover {
	l := image.Leftover{Path: dir, Size: image.DiskUsage(dir), Why: why}
	if machine, err := m.Driver.Inspect(ctx, name); err == nil { // else there is none
		l.Size += machine.DiskUsed
	}
	return l
}
