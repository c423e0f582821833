package repo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// Unused is a mirror, or a part of one, that has not been used for a long time.
type Unused struct {
	Dir   string
	Repo  string // the repository's Key; "" in results of Sweep
	Size  int64  // bytes
	Used  time.Time
	Stays string // why it is not removed; "" if it is
}

// PruneOptions selects the unused mirrors.
type PruneOptions struct {
	DryRun bool
	Before time.Time                      // mirrors used since then are not unused
	InUse  func(key string) (bool, error) // nor are those for which this returns true
}

// Prune removes mirrors that have not been used for a long time, and returns them.
// It keeps a mirror that holds agents' work which was never merged into one of the
// mirror's branches, because the mirror may be the only copy; it returns that
// mirror too. It also keeps a mirror that is in use now.
func (m *Mirrors) Prune(ctx context.Context, o PruneOptions) (found []Unused, err error) {
	dirs, err := m.mirrorDirs()
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		u, ok, err := m.prune(ctx, dir, o)
		if err != nil {
			return found, fmt.Errorf("inspect mirror %s: %w", dir, err)
		}
		if ok {
			found = append(found, u)
		}
	}
	return found, nil
}

// mirrorDirs returns the directories of all mirrors.
func (m *Mirrors) mirrorDirs() (dirs []string, err error) {
	err = filepath.WalkDir(m.Dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed meanwhile, or never created
		case err != nil:
			return err
		case !d.IsDir() || path == m.Dir:
			return nil
		case strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case strings.HasSuffix(d.Name(), ".git"):
			dirs = append(dirs, path)
			return fs.SkipDir
		}
		return nil
	})
	return dirs, err
}

// prune handles one mirror. ok is false if the mirror is in use, or is not known to
// be a mirror.
func (m *Mirrors) prune(ctx context.Context, dir string, o PruneOptions) (u Unused, ok bool, err error) {
	url, err := hostGit{dir: dir}.output(ctx, "config", "--get", "remote.origin.url")
	if err != nil {
		return u, false, ctx.Err()
	}
	ref, err := Parse(strings.TrimSpace(url), "/")
	if err != nil {
		return u, false, nil //nolint:nilerr // not one that we created
	}
	if place, err := m.mirrorDir(ref); err != nil || place != dir {
		return u, false, nil //nolint:nilerr // not one that we created
	}
	if o.DryRun {
		if lockfile.Held(m.lockFile(ref)) {
			return u, false, nil
		}
	} else {
		lock, free, err := lockfile.Try(m.lockFile(ref))
		if err != nil || !free {
			return u, false, err
		}
		defer lock.Unlock()
	}
	// Check under the lock: an earlier user has updated the time, or is a session
	// by now.
	if u.Used = m.lastUse(ref, dir); u.Used.After(o.Before) {
		return u, false, nil
	}
	if used, err := o.InUse(ref.Key); err != nil || used {
		return u, false, err
	}
	u.Dir, u.Repo, u.Size = dir, ref.Key, size(dir)
	out, err := hostGit{dir: dir}.output(ctx, "rev-list", "--count", "--glob=refs/agents", "--not", "--branches", "--tags")
	if ctx.Err() != nil {
		return u, false, ctx.Err()
	}
	only, nerr := number(out)
	switch {
	case err != nil || nerr != nil:
		u.Stays = fmt.Sprintf("its contents are unknown: %v", errors.Join(err, nerr))
	case only > 0:
		u.Stays = fmt.Sprintf("%d commits of agents may exist nowhere else", only)
	case !o.DryRun:
		err = m.discard(ref, dir)
		return u, err == nil, err
	}
	return u, true, nil
}

// discard moves a mirror away atomically and then deletes it. If it is interrupted,
// the next clone, or Sweep, finishes the deletion. The caller holds the lock.
func (m *Mirrors) discard(ref Ref, dir string) error {
	tmp := m.temporary(ref)
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(tmp, ids.New())); err != nil {
		return err
	}
	return os.RemoveAll(tmp)
}

// Sweep removes the leftovers of interrupted clones, and returns them. If dry, it
// only returns them.
func (m *Mirrors) Sweep(dry bool) (found []Unused, err error) {
	left, err := filepath.Glob(filepath.Join(m.Dir, tmpDir, "*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range left {
		path := filepath.Join(m.Dir, lockDir, filepath.Base(dir))
		if dry {
			if lockfile.Held(path) {
				continue
			}
		} else {
			lock, free, err := lockfile.Try(path)
			if err != nil {
				return found, err
			}
			if !free {
				continue
			}
			defer lock.Unlock()
		}
		u := Unused{Dir: dir, Size: size(dir)}
		if !dry {
			if err := os.RemoveAll(dir); err != nil {
				return found, err
			}
		}
		found = append(found, u)
	}
	return found, nil
}

// lastUse returns when the mirror's lock was last taken or data was last added.
func (m *Mirrors) lastUse(ref Ref, dir string) (last time.Time) {
	paths := []string{m.lockFile(ref)}
	for _, name := range []string{"HEAD", "packed-refs", "objects", "objects/pack", "refs", "refs/heads", "refs/agents"} {
		paths = append(paths, filepath.Join(dir, name))
	}
	for _, path := range paths {
		if st, err := os.Stat(path); err == nil && st.ModTime().After(last) {
			last = st.ModTime()
		}
	}
	return last
}

func size(dir string) (sum int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // removed meanwhile, so it uses no space
		}
		if st, err := d.Info(); err == nil && st.Mode().IsRegular() {
			sum += st.Size()
		}
		return nil
	})
	return sum
}
