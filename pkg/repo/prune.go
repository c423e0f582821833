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

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Unused is a mirror, or a part of one, that nobody has used for long.
type Unused struct {
	Dir   string
	Repo  string // its Key; "" for what Sweep has found
	Size  int64  // bytes
	Used  time.Time
	Stays string // why it is not removed; "" when it is
}

// PruneOptions say which mirrors are unused.
type PruneOptions struct {
	DryRun bool
	Before time.Time                      // those used since then are not
	InUse  func(key string) (bool, error) // nor are those of which it says so
}

// Prune removes mirrors that nobody has used for long, and returns which those were.
// A mirror that holds work of agents which was never merged into a branch that it
// knows stays, and is returned too: it may be the only place that has it. One that
// somebody uses just now stays as well.
func (m *Mirrors) Prune(ctx context.Context, o PruneOptions) (found []Unused, err error) {
	dirs, err := m.all()
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		u, ok, err := m.prune(ctx, dir, o)
		if err != nil {
			return found, fmt.Errorf("look at the mirror %s: %w", dir, err)
		}
		if ok {
			found = append(found, u)
		}
	}
	return found, nil
}

// all are the directories of mirrors.
func (m *Mirrors) all() (dirs []string, err error) {
	err = filepath.WalkDir(m.Dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // removed meanwhile, or there never was any
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

// prune looks at one mirror; ok is false when it is used, or is not known to be one.
func (m *Mirrors) prune(ctx context.Context, dir string, o PruneOptions) (u Unused, ok bool, err error) {
	url, err := hostGit{dir: dir}.output(ctx, "config", "--get", "remote.origin.url")
	if err != nil {
		return u, false, ctx.Err()
	}
	ref, err := Parse(strings.TrimSpace(url), "/")
	if err != nil {
		return u, false, nil //nolint:nilerr // not one that we made
	}
	if place, err := m.place(ref); err != nil || place != dir {
		return u, false, nil //nolint:nilerr // likewise
	}
	if o.DryRun {
		if store.Held(m.lockFile(ref)) {
			return u, false, nil
		}
	} else {
		lock, free, err := store.TryLock(m.lockFile(ref))
		if err != nil || !free {
			return u, false, err
		}
		defer lock.Unlock() //nolint:errcheck // it ends with the process at the latest
	}
	// Asked under the lock: whoever came first has left its time, or is a session now.
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
		u.Stays = fmt.Sprintf("what is in it cannot be known: %v", errors.Join(err, nerr))
	case only > 0:
		u.Stays = fmt.Sprintf("%d commits of agents may be nowhere else", only)
	case !o.DryRun:
		err = m.discard(ref, dir)
		return u, err == nil, err
	}
	return u, true, nil
}

// discard takes a mirror out of sight in one step, to where the next clone, or
// Prune, finishes deleting it. The caller holds the lock.
func (m *Mirrors) discard(ref Ref, dir string) error {
	tmp := m.temporary(ref)
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return err
	}
	if err := os.Rename(dir, filepath.Join(tmp, token())); err != nil {
		return err
	}
	return os.RemoveAll(tmp)
}

// Sweep removes what clones that were cut short have left, and returns what that
// was; if dry, it only does the latter.
func (m *Mirrors) Sweep(dry bool) (found []Unused, err error) {
	left, err := filepath.Glob(filepath.Join(m.Dir, tmpDir, "*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range left {
		path := filepath.Join(m.Dir, lockDir, filepath.Base(dir))
		if dry {
			if store.Held(path) {
				continue
			}
		} else {
			lock, free, err := store.TryLock(path)
			if err != nil {
				return found, err
			}
			if !free {
				continue
			}
			defer lock.Unlock() //nolint:errcheck // there are few
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

// lastUse is when somebody last took the mirror's lock or brought something in.
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
			return nil //nolint:nilerr // it went meanwhile, and takes nothing
		}
		if st, err := d.Info(); err == nil && st.Mode().IsRegular() {
			sum += st.Size()
		}
		return nil
	})
	return sum
}
