package image

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// Leftover is a file or directory that is no longer needed.
type Leftover struct {
	Path string // a directory or a file, removed unless it was a dry run
	Size int64  // bytes on disk
	Why  string
}

// PruneOptions defines what Prune does.
type PruneOptions struct {
	DryRun bool
	// InUse reports whether VMs' disks refer to files in the directory of an image or a
	// saved state. It may be nil.
	InUse func(dir string) bool
	// Sweep is MakeOptions.Sweep, for the work directory of an image's maker.
	Sweep func(name, work string) error
}

// Prune deletes images that a newer one of the same name replaced, damaged images, and
// leftovers of dead builds, and returns what it deleted. It keeps images whose files
// VMs' disks refer to, and does not touch running builds. A dry run changes nothing,
// and other processes may outdate its result.
func (s *Store) Prune(o PruneOptions) ([]Leftover, error) {
	entries, err := readDir(s.Dir)
	if err != nil || len(entries) == 0 {
		return nil, err
	}
	if !o.DryRun {
		unlock, err := s.lockExclusive()
		if err != nil {
			return nil, err
		}
		defer unlock()
		if entries, err = readDir(s.Dir); err != nil {
			return nil, err
		}
	}
	built, err := s.built()
	if err != nil {
		return nil, err
	}
	p := pruner{store: s, PruneOptions: o}
	if err = p.pruneWarm(built); err == nil {
		err = p.pruneImages(built, entries)
	}
	if err == nil {
		err = p.sweep(entries)
	}
	return p.found, err
}

// pruner does the work of one Prune. The caller holds the lock of the images, unless it
// is a dry run.
type pruner struct {
	PruneOptions
	store *Store
	found []Leftover
}

func (p *pruner) inUse(dir string) bool { return p.InUse != nil && p.InUse(dir) }

// drop removes a leftover, unless it is a dry run.
func (p *pruner) drop(path, why string, remove func() error) error {
	l := Leftover{Path: path, Size: DiskUsage(path), Why: why}
	if !p.DryRun {
		if err := remove(); err != nil {
			return err
		}
	}
	p.found = append(p.found, l)
	return nil
}

// pruneWarm removes saved states that are damaged or replaced by a newer one of the
// same size, unless a VM builds on them.
func (p *pruner) pruneWarm(images []Info) error {
	for _, i := range images {
		newest := map[[2]int64]Warm{}
		for _, w := range i.Warm {
			size := [2]int64{int64(w.CPUs), w.Memory}
			if w.CreatedAt.After(newest[size].CreatedAt) {
				newest[size] = w
			}
		}
		keep := map[string]bool{}
		for _, w := range newest {
			keep[w.Path] = true
		}
		states, err := filepath.Glob(filepath.Join(i.Path, warmPrefix+"*"))
		if err != nil {
			return err
		}
		for _, dir := range states {
			if keep[dir] || p.inUse(dir) {
				continue
			}
			why := "replaced by a newer saved VM"
			if _, err := readWarm(dir); err != nil {
				why = "unusable saved VM"
			}
			if err := p.drop(dir, why, func() error { return p.store.discard(i.Name, dir) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// pruneImages removes images that are damaged or replaced by a newer one.
func (p *pruner) pruneImages(images []Info, entries []fs.DirEntry) error {
	keep := map[string]bool{}
	for _, i := range images {
		keep[i.Path] = i.Ready
	}
	for _, e := range entries {
		dir := filepath.Join(p.store.Dir, e.Name())
		if !e.IsDir() || !published.MatchString(e.Name()) || keep[dir] || p.inUse(dir) {
			continue
		}
		why := "replaced by a newer image"
		if _, err := readInfo(dir); err != nil {
			why = err.Error()
		}
		name, _, _ := strings.Cut(e.Name(), "-")
		if err := p.drop(dir, why, func() error { return p.store.discard(name, dir) }); err != nil {
			return err
		}
	}
	return nil
}

// sweep removes the work of dead builders. A process that gets a builder's lock knows
// that no builder is alive.
func (p *pruner) sweep(entries []fs.DirEntry) error {
	for _, e := range entries {
		name, isWork := strings.CutPrefix(e.Name(), workPrefix)
		kept, isKept := strings.CutPrefix(e.Name(), keptPrefix)
		if !e.IsDir() || !isWork && !isKept {
			continue
		}
		why := "left by an interrupted build of %s"
		if isKept {
			name, why = kept, "a build of %s that failed its test"
		}
		name, _, _ = strings.Cut(name, "-")
		unlock, dead, err := p.lockIfDead(name)
		if err != nil {
			return err
		}
		if !dead {
			continue
		}
		work := filepath.Join(p.store.Dir, e.Name())
		err = p.drop(work, fmt.Sprintf(why, name), func() error {
			if p.Sweep != nil {
				if err := p.Sweep(name, work); err != nil {
					return err
				}
			}
			return removeTree(work)
		})
		if err := errors.Join(err, unlock()); err != nil {
			return err
		}
	}
	return nil
}

// lockIfDead takes the makers' lock of a name. A dry run only looks at it.
func (p *pruner) lockIfDead(name string) (unlock func() error, dead bool, err error) {
	path := filepath.Join(p.store.Dir, lockPrefix+name)
	if p.DryRun {
		return func() error { return nil }, !lockfile.Held(path), nil
	}
	lock, dead, err := lockfile.Try(path)
	return lock.Unlock, dead, err
}
