package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
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
	keep := map[string]bool{}
	for _, i := range built {
		keep[i.Path] = i.Ready
	}
	found, err := s.pruneWarm(built, o)
	if err != nil {
		return found, err
	}
	for _, e := range entries {
		dir := filepath.Join(s.Dir, e.Name())
		if !e.IsDir() || !published.MatchString(e.Name()) || keep[dir] || o.inUse(dir) {
			continue
		}
		why := "replaced by a newer image"
		if _, err := readInfo(dir); err != nil {
			why = err.Error()
		}
		name, _, _ := strings.Cut(e.Name(), "-")
		if found, err = s.discardFound(found, name, dir, why, o); err != nil {
			return found, err
		}
	}
	swept, err := s.sweep(entries, o)
	return append(found, swept...), err
}

func (o PruneOptions) inUse(dir string) bool { return o.InUse != nil && o.InUse(dir) }

// discardFound discards an image of a name, or a part of it.
func (s *Store) discardFound(found []Leftover, name, dir, why string, o PruneOptions) ([]Leftover, error) {
	l := Leftover{Path: dir, Size: DiskUsage(dir), Why: why}
	if !o.DryRun {
		if err := s.discard(name, dir); err != nil {
			return found, err
		}
	}
	return append(found, l), nil
}

// pruneWarm removes saved states that are damaged or replaced by a newer one of the
// same size, unless a VM builds on them.
func (s *Store) pruneWarm(images []Info, o PruneOptions) (found []Leftover, err error) {
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
			return found, err
		}
		for _, dir := range states {
			if keep[dir] || o.inUse(dir) {
				continue
			}
			why := "replaced by a newer saved VM"
			if _, err := readWarm(dir); err != nil {
				why = "unusable saved VM"
			}
			if found, err = s.discardFound(found, i.Name, dir, why, o); err != nil {
				return found, err
			}
		}
	}
	return found, nil
}

// sweep removes the work of dead builders. A process that gets a builder's lock knows
// that no builder is alive.
func (s *Store) sweep(entries []fs.DirEntry, o PruneOptions) (found []Leftover, err error) {
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
		lock, err := s.ifDead(name, o.DryRun)
		if errors.Is(err, errLocked) {
			continue
		}
		if err != nil {
			return found, err
		}
		l := Leftover{Path: filepath.Join(s.Dir, e.Name()), Why: fmt.Sprintf(why, name)}
		l.Size = DiskUsage(l.Path)
		if !o.DryRun {
			if o.Sweep != nil {
				err = o.Sweep(name, l.Path)
			}
			if err == nil {
				err = removeTree(l.Path)
			}
		}
		lock.Close()
		if err != nil {
			return found, err
		}
		found = append(found, l)
	}
	return found, nil
}

// ifDead takes the makers' lock of a name. A dry run does not create the lock file: no
// process holds a lock whose file does not exist, and closing a nil file does nothing.
func (s *Store) ifDead(name string, dry bool) (*os.File, error) {
	path := filepath.Join(s.Dir, lockPrefix+name)
	if _, err := os.Lstat(path); dry && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return tryLock(path, unix.LOCK_EX)
}
