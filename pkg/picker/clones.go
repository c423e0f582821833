package picker

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
)

// A separate process searches for local clones and writes what it finds to the cache. A
// directory on a network file system that does not answer blocks only that process.
// While one search hangs, no other one starts.

// FindCommand is the hidden command that runs this process.
const FindCommand = "find-clones"

const (
	maxDepth   = 4      // below a root
	maxEntries = 10_000 // of one directory
	maxDirs    = 50_000 // visited below one root
	maxClones  = 1000
	findTime   = 20 * time.Second
	findAgain  = time.Minute
)

// Clone is a local clone below one of the user's roots.
type Clone struct {
	Path  string `json:"path"`
	Key   string `json:"key"` // from repo.Ref
	Slug  string `json:"slug"`
	Stamp string `json:"stamp"` // of its git configuration, which names its remote
}

// cloneFile is the content of the cache.
type cloneFile struct {
	Roots  []string `json:"roots"`
	Clones []Clone  `json:"clones"`
}

func cloneCache(p config.Paths) string { return filepath.Join(p.Cache, "clones.json") }
func cloneLock(p config.Paths) string  { return filepath.Join(p.Cache, "clones.lock") }

// cloneCacheReader reads the cache, and reads it again when it has changed.
type cloneCacheReader struct {
	file  string
	roots []string
	at    time.Time
	last  []Clone
}

func (r *cloneCacheReader) read() []Clone {
	if len(r.roots) == 0 {
		return nil
	}
	// A missing or damaged cache counts as empty; the next search writes a new one.
	if fi, err := os.Stat(r.file); err == nil && !fi.ModTime().Equal(r.at) {
		r.at, r.last = fi.ModTime(), loadClones(r.file, r.roots)
	}
	return r.last
}

func loadClones(file string, roots []string) []Clone {
	var cached cloneFile
	text, err := os.ReadFile(file)
	if err != nil || json.Unmarshal(text, &cached) != nil || !slices.Equal(cached.Roots, roots) {
		return nil
	}
	return cached.Clones
}

// find starts the search process, unless the cache is recent or a search is running.
func (p *Picker) find(ctx context.Context) error {
	cfg := p.Manager.Config
	if len(cfg.Roots) == 0 {
		return nil
	}
	fi, err := os.Stat(cloneCache(cfg.Paths))
	if err == nil && time.Since(fi.ModTime()) < findAgain && loadClones(cloneCache(cfg.Paths), cfg.Roots) != nil {
		return nil
	}
	if lockfile.Held(cloneLock(cfg.Paths)) {
		return nil
	}
	return lifecycle.Detach(ctx, p.Manager.Self, nil, FindCommand)
}

// FindClones implements FindCommand: it searches for clones below the configured roots
// and writes the cache. Clones that it does not reach in time are missing from the
// cache.
func FindClones(ctx context.Context, cfg *config.Config) error {
	lock, free, err := lockfile.Try(cloneLock(cfg.Paths))
	if err != nil || !free {
		return err
	}
	defer lock.Unlock()
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()

	known := map[string]Clone{}
	for _, c := range loadClones(cloneCache(cfg.Paths), cfg.Roots) {
		known[c.Path] = c
	}
	// Use one walker per root, so that the others continue when one hangs in a system
	// call. A hanging walker ends with the process.
	found := make(chan string)
	var walkers sync.WaitGroup
	for _, root := range cfg.Roots {
		walkers.Go(func() { walk(ctx, root, found) })
	}
	go func() { walkers.Wait(); close(found) }()
	all := cloneFile{Roots: cfg.Roots, Clones: []Clone{}}
collect:
	for len(all.Clones) < maxClones {
		select {
		case path, more := <-found:
			if !more {
				break collect
			}
			if c, ok := identify(path, known); ok {
				all.Clones = append(all.Clones, c)
			}
		case <-ctx.Done():
			break collect
		}
	}
	slices.SortFunc(all.Clones, func(a, b Clone) int { return strings.Compare(a.Path, b.Path) })
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return atomicfile.WriteUnflushed(cloneCache(cfg.Paths), text, 0o600)
}

// walk reports the clones below root, nearest first. It follows no symbolic link except
// root itself, and does not descend into clones.
func walk(ctx context.Context, root string, found chan<- string) {
	type place struct {
		dir   string
		depth int
	}
	if real, err := filepath.EvalSymlinks(root); err == nil {
		root = real
	}
	next := []place{{root, 0}}
	for looked := 0; len(next) > 0 && looked < maxDirs && ctx.Err() == nil; looked++ {
		at := next[0]
		next = next[1:]
		if fi, err := os.Lstat(filepath.Join(at.dir, ".git")); err == nil && fi.IsDir() {
			select {
			case found <- at.dir:
			case <-ctx.Done():
			}
			continue
		}
		if at.depth == maxDepth {
			continue
		}
		for _, name := range directories(at.dir) {
			next = append(next, place{filepath.Join(at.dir, name), at.depth + 1})
		}
	}
}

// directories returns the subdirectories of dir that may hold clones, in order. It
// returns none if dir cannot be read.
func directories(dir string) []string {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	entries, _ := f.ReadDir(maxEntries) // entries read before an error count
	var names []string
	for _, e := range entries {
		// Hidden directories hold caches and settings; node_modules holds thousands of
		// foreign directories.
		if e.Type()&fs.ModeType == fs.ModeDir && e.Name()[0] != '.' && e.Name() != "node_modules" {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// identify asks git which repository a clone belongs to, unless that is already known.
func identify(path string, known map[string]Clone) (Clone, bool) {
	fi, err := os.Stat(filepath.Join(path, ".git", "config"))
	if err != nil {
		return Clone{}, false
	}
	stamp := fmt.Sprintf("%d %d", fi.Size(), fi.ModTime().UnixNano())
	if c, ok := known[path]; ok && c.Stamp == stamp {
		return c, true
	}
	ref, err := repo.Parse(path, "/")
	if err != nil || ref.Path != path {
		return Clone{}, false
	}
	return Clone{Path: path, Key: ref.Key, Slug: ref.Slug, Stamp: stamp}, true
}
