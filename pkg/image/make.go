package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	workPrefix = ".work-"     // a directory in which an image of that name is being made
	lockPrefix = ".lock-"     // locked meanwhile
	sayPrefix  = ".progress-" // the last line that its maker reported
	failPrefix = ".failed-"   // why the last attempt to make it failed
	keptPrefix = ".kept-"     // a made image of that name that has not passed its test
	warmPrefix = "warm-"      // a saved state, in an image's directory
	useLock    = ".lock"      // shared while an image is looked up and built on, exclusive while images are removed

)

// MakeOptions defines how an image or a saved state is made.
type MakeOptions struct {
	Space int64 // bytes that must be free at the start
	// Prove tests the files that fill made; it may be nil. Files that fail are kept.
	// The next maker of the same key tests them again instead of calling fill, up to
	// maxProofs times in all.
	Prove    func(ctx context.Context, dir string, files []string) error
	Again    bool                    // make it even if one with the same key exists
	Sweep    func(work string) error // cleans up after a dead maker outside its directory, before that is removed; may be nil
	Progress func(line string)       // receives one short line at a time; may be nil
}

// Make publishes the image i, whose files fill makes in a directory, and returns it. If
// an image with the same name, architecture and key exists, Make returns that one. fill
// returns the names of the files that make up the image. Of several callers one makes
// it; the others wait and get its result. The next maker removes the leftovers of a
// maker that died. Until a new image is published, Lookup returns the previous one.
func (s *Store) Make(ctx context.Context, i Info, o MakeOptions, fill func(ctx context.Context, dir string) ([]string, error)) (Info, error) {
	asked := time.Now()
	m, err := s.begin(ctx, i.Name, o)
	if err != nil {
		return Info{}, err
	}
	defer m.end()
	built, err := s.built()
	if err != nil {
		return Info{}, err
	}
	for _, have := range built {
		// An image made while this call waited is as new as another could be.
		if have.Name == i.Name && have.Arch == i.Arch && have.Key == i.Key && (!o.Again || have.CreatedAt.After(asked)) {
			m.report("image is up to date")
			return m.prefer(built, have)
		}
	}
	if i.Files, err = m.fillProved(ctx, i, fill); err != nil {
		return Info{}, m.failed(ctx, fmt.Errorf("build image %s: %w", i.Name, err))
	}
	i.CreatedAt = time.Now().UTC()
	final := filepath.Join(s.Dir, fmt.Sprintf("%s-%s-%.12s-%d", i.Name, i.Arch, i.Key, i.CreatedAt.UnixNano()))
	if err := m.publish(final, i.Files, i); err != nil {
		return Info{}, err
	}
	if i, err = readInfo(final); err != nil {
		return Info{}, fmt.Errorf("publish image: %w", err)
	}
	return m.prefer(built, i)
}

// prefer makes the image i, which is complete, the one that Lookup returns. Others of its
// name may be newer: a second version of the program made them, or the clock was ahead.
func (m *maker) prefer(built []Info, i Info) (Info, error) {
	var newest time.Time
	for _, other := range built {
		if other.Name == i.Name && other.Arch == i.Arch && other.Path != i.Path && other.age().After(newest) {
			newest = other.age()
		}
	}
	i.Ready = true
	if i.age().After(newest) {
		return i, nil
	}
	i.PreferredAt = newest.Add(time.Nanosecond)
	text, err := json.MarshalIndent(i.described(), "", "  ")
	if err == nil {
		err = atomicfile.Write(filepath.Join(i.Path, metaFile), append(text, '\n'), 0o644)
	}
	if err != nil {
		return Info{}, fmt.Errorf("prefer image %s: %w", filepath.Base(i.Path), err)
	}
	return i, nil
}

// described returns the part of i that metaFile contains; the rest is read from the
// directory.
func (i Info) described() Info {
	i.Path, i.Size, i.Ready, i.Warm = "", 0, false, nil
	return i
}

// Warmed returns the saved state with a key.
func (i Info) Warmed(key string) (Warm, bool) {
	n := slices.IndexFunc(i.Warm, func(w Warm) bool { return w.Key == key })
	if n < 0 {
		return Warm{}, false
	}
	return i.Warm[n], true
}

// MakeWarm adds a saved state to the image i. fill makes its files in a directory (see
// vm.Saver.Save). MakeWarm works like Make, and only one maker at a time works on an
// image.
func (s *Store) MakeWarm(ctx context.Context, i Info, w Warm, o MakeOptions, fill func(ctx context.Context, dir string) error) (Warm, error) {
	m, err := s.begin(ctx, i.Name, o)
	if err != nil {
		return Warm{}, err
	}
	defer m.end()
	if i, err = readInfo(i.Path); err != nil {
		return Warm{}, fail.New(fail.NotFound, "image %s is gone: %w", i.Name, err).WithHint("agent-sessionizer image list")
	}
	if have, ok := i.Warmed(w.Key); ok && !o.Again {
		m.report("saved VM is up to date")
		return have, nil
	}
	files := []string{vm.StateFile, vm.DiskFile}
	_, err = m.makeAndFill(ctx, func(ctx context.Context, dir string) ([]string, error) { return files, fill(ctx, dir) })
	if err != nil {
		return Warm{}, m.failed(ctx, fmt.Errorf("save a VM of %d CPUs and %s, booted from image %s: %w", w.CPUs, measure.Size(w.Memory).Human(), i.Name, err))
	}
	w.CreatedAt = time.Now().UTC()
	final := filepath.Join(i.Path, fmt.Sprintf("%s%.12s-%d", warmPrefix, w.Key, w.CreatedAt.UnixNano()))
	if err := m.publish(final, files, w); err != nil {
		return Warm{}, err
	}
	return readWarm(final)
}

// Cool disables the saved state in dir. Prune removes it when no VM builds on its disk.
func (s *Store) Cool(dir string) error {
	if dir == "" {
		return nil
	}
	unlock, err := s.lockExclusive()
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.Remove(filepath.Join(dir, metaFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove saved VM: %w", err)
	}
	return nil
}

func readWarm(dir string) (Warm, error) {
	b, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return Warm{}, err
	}
	var w Warm
	if err := json.Unmarshal(b, &w); err != nil {
		return Warm{}, fmt.Errorf("%s: %w", metaFile, err)
	}
	for _, f := range []string{vm.StateFile, vm.DiskFile} {
		if st, err := os.Stat(filepath.Join(dir, f)); err != nil || st.Size() == 0 {
			return Warm{}, fmt.Errorf("saved VM has no %s", f)
		}
	}
	w.Path, w.Size = dir, DiskUsage(dir)
	return w, nil
}

// Making describes an image that is being made.
type Making struct {
	Name  string    `json:"name"`
	Since time.Time `json:"since"`
	Doing string    `json:"doing"`
}

// Underway lists the images that are being made.
func (s *Store) Underway() ([]Making, error) {
	entries, err := readDir(s.Dir)
	if err != nil {
		return nil, err
	}
	var out []Making
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), lockPrefix)
		if !ok {
			continue
		}
		if !lockfile.Held(filepath.Join(s.Dir, e.Name())) {
			continue
		}
		m := Making{Name: name}
		if b, err := os.ReadFile(filepath.Join(s.Dir, sayPrefix+name)); err == nil {
			_ = json.Unmarshal(b, &m) // a partial line leaves m without details
		}
		out = append(out, m)
	}
	return out, nil
}

// maker makes an image of a name; only one exists at a time.
type maker struct {
	store *Store
	name  string
	o     MakeOptions
	lock  *lockfile.Lock
	dir   string // "" before fill
	kept  bool   // the files are left for the next test
	began time.Time
}

// begin acquires the lock and removes the leftovers of dead makers.
func (s *Store) begin(ctx context.Context, name string, o MakeOptions) (*maker, error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("create image directory: %w", err)
	}
	m := &maker{store: s, name: name, o: o, began: time.Now()}
	var err error
	waiting := func() { o.Progress("waiting for another process that builds this image") }
	if m.lock, err = lockfile.Wait(ctx, filepath.Join(s.Dir, lockPrefix+name), waiting); err != nil {
		return nil, fmt.Errorf("wait for another build: %w", err)
	}
	if err := s.clearWork(name, o.Sweep); err != nil {
		return nil, errors.Join(err, m.lock.Unlock())
	}
	return m, nil
}

func (m *maker) end() {
	// The next maker removes what cannot be removed now.
	_ = os.Remove(filepath.Join(m.store.Dir, sayPrefix+m.name))
	if m.dir != "" {
		_ = os.RemoveAll(m.dir)
	}
	m.lock.Unlock()
}

// report reports a line to the caller and to Underway.
func (m *maker) report(line string) { m.store.Reporter(m.name, m.began, m.o.Progress)(line) }

// Reporter returns a function that passes an image maker's lines to p, which may be
// nil, and to Underway. Only the maker calls it, from within its fill.
func (s *Store) Reporter(name string, began time.Time, p func(line string)) func(line string) {
	return func(line string) {
		if p != nil {
			p(line)
		}
		b, err := json.Marshal(Making{Name: name, Since: began, Doing: line})
		if err == nil {
			_ = os.WriteFile(filepath.Join(s.Dir, sayPrefix+name), b, 0o644) // informational only
		}
	}
}

func (m *maker) makeDir() (err error) {
	if m.dir, err = os.MkdirTemp(m.store.Dir, workPrefix+m.name+"-"); err != nil {
		return fmt.Errorf("create build directory: %w", err)
	}
	return nil
}

// makeAndFill creates the work directory and calls fill on it.
func (m *maker) makeAndFill(ctx context.Context, fill func(ctx context.Context, dir string) ([]string, error)) ([]string, error) {
	if err := m.store.checkSpace(m.o.Space); err != nil {
		return nil, err
	}
	if err := m.makeDir(); err != nil {
		return nil, err
	}
	m.report("begin")
	return fill(ctx, m.dir)
}

// Failure describes why the last attempt to make an image of a name failed.
type Failure struct {
	At    time.Time `json:"at"`
	Error string    `json:"error"`
	Kept  bool      `json:"kept,omitempty"` // the image was made and only has to pass its test
}

// Failure returns the last failure, until an image of that name is made.
func (s *Store) Failure(name string) (Failure, bool) {
	var f Failure
	b, err := os.ReadFile(filepath.Join(s.Dir, failPrefix+name))
	return f, err == nil && json.Unmarshal(b, &f) == nil
}

// Failures returns the failures of all names.
func (s *Store) Failures() ([]Failure, error) {
	entries, err := readDir(s.Dir)
	var all []Failure
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), failPrefix)
		if !ok {
			continue
		}
		if f, ok := s.Failure(name); ok {
			all = append(all, f)
		}
	}
	return all, err
}

// failed records err for Failure, unless the work was cancelled.
func (m *maker) failed(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	b, jerr := json.Marshal(Failure{At: time.Now().UTC(), Error: err.Error(), Kept: m.kept})
	if jerr == nil {
		_ = os.WriteFile(filepath.Join(m.store.Dir, failPrefix+m.name), b, 0o644) // informational only
	}
	return err
}

// publish moves the finished files and their description into a directory, makes them
// durable, and renames the directory to its final name.
func (m *maker) publish(final string, files []string, meta any) error {
	out := filepath.Join(m.dir, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return fmt.Errorf("publish image: %w", err)
	}
	for _, f := range files {
		if err := os.Rename(filepath.Join(m.dir, f), filepath.Join(out, f)); err != nil {
			return fmt.Errorf("publish image: %w", err)
		}
	}
	b, err := json.MarshalIndent(meta, "", "  ")
	if err != nil {
		return fmt.Errorf("publish image: %w", err)
	}
	if err := os.WriteFile(filepath.Join(out, metaFile), append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("publish image: %w", err)
	}
	for _, f := range append(slices.Clone(files), metaFile, ".") {
		if err := syncPath(filepath.Join(out, f)); err != nil {
			return err
		}
	}
	if err := os.Rename(out, final); err != nil {
		return fmt.Errorf("publish image: %w", err)
	}
	_ = os.Remove(filepath.Join(m.store.Dir, failPrefix+m.name)) // informational only
	return syncPath(filepath.Dir(final))
}

// clearWork removes the leftovers of dead makers of a name. The caller holds the lock
// of that name.
func (s *Store) clearWork(name string, sweep func(work string) error) error {
	entries, err := readDir(s.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), workPrefix+name+"-") {
			continue
		}
		dir := filepath.Join(s.Dir, e.Name())
		if sweep != nil {
			if err := sweep(dir); err != nil {
				return err
			}
		}
		if err := removeTree(dir); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) checkSpace(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.Dir, &st); err != nil {
		return fmt.Errorf("measure free disk space: %w", err)
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < need { //nolint:unconvert // not int64 on darwin
		return fail.New(fail.Host, "not enough disk space: %.1f GiB needed in %s, %.1f GiB free",
			float64(need)/(1<<30), s.Dir, float64(free)/(1<<30)).WithHint("agent-sessionizer image prune")
	}
	return nil
}

// Use keeps every image in place until release is called. It protects an image from its
// lookup until a VM's directory records that it builds on the image.
func (s *Store) Use() (release func(), err error) {
	return s.lockUse((*flock.Flock).RLock)
}

// lockExclusive locks out all users of images, so that images can be removed.
func (s *Store) lockExclusive() (release func(), err error) {
	return s.lockUse((*flock.Flock).Lock)
}

func (s *Store) lockUse(lock func(*flock.Flock) error) (release func(), err error) {
	if err := os.MkdirAll(s.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("create image directory: %w", err)
	}
	f := flock.New(filepath.Join(s.Dir, useLock))
	// The lock is held only briefly, so waiting needs no limit.
	if err := lock(f); err != nil {
		return nil, fmt.Errorf("lock images: %w", err)
	}
	return func() { _ = f.Close() }, nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	return nil
}
