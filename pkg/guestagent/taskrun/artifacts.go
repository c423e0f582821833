package taskrun

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/bmatcuk/doublestar/v4"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// Files in the directory of a collection.
const (
	outPatch    = "patch"
	outList     = "untracked"
	outCheckout = "checkout" // contains the checkout's path
	outManifest = "manifest.jsonl"
)

const (
	beatEvery = 10 * time.Second // interval of heartbeats while a large file is read
	lowDisk   = 256 << 20        // bytes; with less free space a collection is kept in memory
	maxLook   = 5_000_000        // number of names compared with patterns
)

const longPath = "its path is too long" // reason for skipping a file

// collected is one line of a collection's own manifest.
type collected struct {
	guestproto.Artifact
	Path []byte `json:"path,omitempty"` // below the checkout; names may contain any bytes
	Own  string `json:"own,omitempty"`  // or the name of a file in the collection
}

// collector creates one collection.
type collector struct {
	attempt Attempt
	ask     guestproto.TaskCollect
	dir     string   // directory of the collection
	tree    *os.Root // the checkout
	out     io.Writer
	list    *bufio.Writer // the manifest

	patterns []string
	files    int
	bytes    int64
	skipped  int // total, including unlisted ones
	subs     int // number of submodules inspected
	taken    map[string]bool
}

// Collect creates a collection of the agent's work in its checkout, and prints its
// content. It changes nothing in the checkout.
func (t Attempt) Collect(ctx context.Context, in io.Reader, out io.Writer) error {
	ask, err := guestproto.DecodeTaskCollect(in)
	if err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	id := ids.Hex(8)
	// Earlier collections are obsolete, so remove them. A host that still asks for
	// one gets an error and starts a new collection.
	places := t.outPlaces()
	for _, place := range places {
		if err := os.RemoveAll(place); err != nil {
			return fmt.Errorf("remove the last collection: %w", err)
		}
	}
	place := places[0]
	if len(places) > 1 && freeBytes(filepath.Dir(t.dir)) < lowDisk {
		place = places[1] // the agent may have filled the disk
	}
	beating := &beatWriter{out: out}
	defer beating.begin()()
	c := &collector{attempt: t, ask: ask, dir: filepath.Join(place, id), out: beating, taken: map[string]bool{}}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return fmt.Errorf("create a collection: %w", err)
	}
	if err := c.run(ctx); err != nil {
		return fmt.Errorf("create a collection: %w", err)
	}
	return sendJSON(c.out, guestproto.FrameEnd, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(guestproto.Collection{ID: id, More: max(0, c.skipped-guestproto.MaxTaskSkipped)})
	})
}

// outPlaces returns the directories that may hold a collection.
func (t Attempt) outPlaces() []string {
	places := []string{t.path(taskOut)}
	if !t.guest.Fake {
		places = append(places, "/dev/shm/agent-task-"+strings.ReplaceAll(t.name, "/", "-"))
	}
	return places
}

func freeBytes(dir string) int64 {
	var st syscall.Statfs_t
	if syscall.Statfs(dir, &st) != nil {
		return 0
	}
	return int64(st.Bavail * uint64(st.Bsize))
}

func (c *collector) run(ctx context.Context) (err error) {
	if err := os.WriteFile(filepath.Join(c.dir, outCheckout), []byte(c.ask.Dir), 0o600); err != nil {
		return err
	}
	manifest, err := os.OpenFile(filepath.Join(c.dir, outManifest), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, manifest.Close()) }()
	c.list = bufio.NewWriter(manifest)
	if c.tree, err = os.OpenRoot(c.ask.Dir); err != nil {
		if err := c.skip(c.ask.Dir, errorWithoutPath(err)); err != nil {
			return err
		}
		return c.list.Flush()
	}
	defer c.tree.Close()
	untracked, err := c.work(ctx)
	if err != nil {
		return err
	}
	if err := c.named(ctx); err != nil {
		return err
	}
	for _, name := range untracked {
		if err := c.copyFile(ctx, name, guestproto.UntrackedDir); err != nil {
			return err
		}
	}
	return c.list.Flush()
}

// work collects the patch and the untracked files, and returns the names of the
// latter. Without a patch, it lists all files that are not ignored, because the
// agent's work must be among them.
func (c *collector) work(ctx context.Context) (untracked []string, err error) {
	git := taskGit{dir: c.ask.Dir, scratch: c.dir}
	patched, err := c.patch(ctx, git, c.ask.Base, outPatch, guestproto.PatchName(c.attempt.id()))
	if err != nil {
		return nil, err
	}
	names, more, err := c.untracked(ctx, git, !patched)
	if err != nil {
		return nil, err
	}
	if patched {
		below, err := c.submodules(ctx, "", c.ask.Base, 0)
		if err != nil {
			return nil, err
		}
		names = append(names, below...)
	}
	slices.Sort(names)
	c.skipped += more
	var text bytes.Buffer
	for _, name := range names {
		fmt.Fprintln(&text, guestproto.EscapeName(name))
	}
	if err := os.WriteFile(filepath.Join(c.dir, outList), text.Bytes(), 0o600); err != nil {
		return nil, err
	}
	return names, c.copyOwnFile(ctx, outList, guestproto.UntrackedName(c.attempt.id()))
}

// untracked returns the untracked files of a repository. If git cannot distinguish
// them from tracked ones, it returns all files that are not ignored, as in the case
// without a patch. An error aborts the collection: files missing from the list
// would be lost with the VM.
func (c *collector) untracked(ctx context.Context, git taskGit, whole bool) (names []string, more int, err error) {
	names, more, err = git.untracked(ctx, whole, c.ask.MaxFiles)
	if err != nil && !whole && ctx.Err() == nil {
		names, more, err = git.untracked(ctx, true, c.ask.MaxFiles)
	}
	if ctx.Err() != nil {
		return nil, 0, context.Cause(ctx)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("list untracked files: %w", err)
	}
	return names, more, nil
}

// patch collects the patch of a repository since a commit, or records why there is
// none. It skips an empty patch, which git apply would reject.
func (c *collector) patch(ctx context.Context, git taskGit, base, file, name string) (taken bool, err error) {
	failed := git.patch(ctx, base, filepath.Join(c.dir, file), c.ask.MaxBytes)
	if ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if failed != nil {
		return false, c.skip(name, errorWithoutPath(failed))
	}
	if guestproto.CheckArtifactName(name) != nil {
		return true, c.skip(name, longPath)
	}
	if info, err := os.Stat(filepath.Join(c.dir, file)); err != nil || info.Size() == 0 {
		return true, err
	}
	return true, c.copyOwnFile(ctx, file, name)
}

// named collects the files that match the patterns.
func (c *collector) named(ctx context.Context) error {
	for _, p := range c.ask.Patterns {
		if p = path.Clean(p); p == "." {
			p = "**"
		}
		if !doublestar.ValidatePattern(p) {
			if err := c.skip(p, "it is not a valid pattern"); err != nil {
				return err
			}
			continue
		}
		c.patterns = append(c.patterns, p)
	}
	if len(c.patterns) == 0 {
		return nil
	}
	looked := 0
	dirs := []string{""}
	for len(dirs) > 0 {
		dir := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		entries, err := c.readDir(dir)
		if err != nil && dir != "" {
			err = c.skip(dir, errorWithoutPath(err))
		}
		if err != nil {
			return err
		}
		for _, e := range entries {
			if looked++; looked > maxLook {
				return c.skip(dir, fmt.Sprintf("the limit of %d files compared with the patterns was reached", maxLook))
			}
			name := path.Join(dir, e.Name())
			switch {
			case e.Name() == ".git":
			case e.IsDir():
				if slices.ContainsFunc(c.patterns, func(p string) bool { return mayBeBelow(p, name) }) {
					dirs = append(dirs, name)
				}
			case slices.ContainsFunc(c.patterns, func(p string) bool { return matchesPath(p, name) }):
				if err := c.copyFile(ctx, name, guestproto.FilesDir); err != nil {
					return err
				}
			}
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// readDir returns the sorted entries of a directory in the checkout.
func (c *collector) readDir(dir string) ([]fs.DirEntry, error) {
	if dir == "" {
		dir = "."
	}
	d, err := c.tree.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	entries, err := d.ReadDir(maxLook)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, errors.Join(err, d.Close())
}

// matchesPath reports whether a pattern matches a file, or a directory that contains it.
func matchesPath(pattern, name string) bool {
	return doublestar.MatchUnvalidated(pattern, name) || doublestar.MatchUnvalidated(pattern+"/**", name)
}

// mayBeBelow reports whether a pattern may match something in a directory.
func mayBeBelow(pattern, dir string) bool {
	if strings.Contains(pattern, "{") { // braces may contain slashes
		return true
	}
	want, have := strings.Split(pattern, "/"), strings.Split(dir, "/")
	for i := range min(len(want), len(have)) {
		if strings.Contains(want[i], "**") {
			return true
		}
		if !doublestar.MatchUnvalidated(want[i], have[i]) {
			return false
		}
	}
	return true
}

// copyFile collects a file of the checkout, or records why it cannot.
func (c *collector) copyFile(ctx context.Context, name, into string) error {
	if c.taken[name] {
		return nil
	}
	c.taken[name] = true
	a := guestproto.Artifact{Name: into + "/" + guestproto.EscapeName(name)}
	if err := guestproto.CheckArtifactName(a.Name); err != nil {
		return c.skip(a.Name, longPath)
	}
	f, err := openRegular(c.tree, name)
	if err != nil {
		return c.skip(a.Name, errorWithoutPath(err))
	}
	defer f.Close()
	return c.add(ctx, collected{Artifact: a, Path: []byte(name)}, f)
}

// copyOwnFile collects a file of the collection.
func (c *collector) copyOwnFile(ctx context.Context, file, name string) error {
	f, err := os.Open(filepath.Join(c.dir, file))
	if err != nil {
		return err
	}
	defer f.Close()
	return c.add(ctx, collected{Artifact: guestproto.Artifact{Name: name}, Own: file}, f)
}

// add hashes a file and adds it to the manifest.
func (c *collector) add(ctx context.Context, a collected, f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return c.skip(a.Name, errorWithoutPath(err))
	}
	left := c.ask.MaxBytes - c.bytes
	if c.files >= c.ask.MaxFiles {
		return c.skip(a.Name, fmt.Sprintf("there are more than %d files", c.ask.MaxFiles))
	}
	tooLarge := func() error {
		return c.skip(a.Name, fmt.Sprintf("the total would be more than %d bytes", c.ask.MaxBytes))
	}
	if info.Size() > left {
		return tooLarge()
	}
	sum := sha256.New()
	n, err := io.Copy(sum, io.LimitReader(during{ctx, f}, left+1))
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return c.skip(a.Name, errorWithoutPath(err))
	case n > left: // the file is growing
		return tooLarge()
	}
	c.files++
	c.bytes += n
	a.Size, a.SHA256, a.Executable = n, hex.EncodeToString(sum.Sum(nil)), a.Own == "" && info.Mode()&0o100 != 0
	return c.writeEntry(a)
}

// skip records a file that is not collected.
func (c *collector) skip(name, why string) error {
	if c.skipped++; c.skipped > guestproto.MaxTaskSkipped {
		return nil
	}
	return c.writeEntry(collected{Artifact: guestproto.Artifact{Name: guestproto.Clean(name), Skipped: guestproto.Clean(why)}})
}

func (c *collector) writeEntry(a collected) error {
	line, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if _, err := c.list.Write(append(line, '\n')); err != nil {
		return err
	}
	text, err := json.Marshal(a.Artifact)
	if err != nil {
		return err
	}
	return guestproto.WriteFrame(c.out, guestproto.FrameArtifact, text)
}

// notRegular is the error for a file that is not regular.
type notRegular string

func (n notRegular) Error() string { return string(n) }

// openRegular opens a regular file and follows no link. It does not block, as
// opening a pipe would.
func openRegular(tree *os.Root, name string) (*os.File, error) {
	info, err := tree.Lstat(name)
	if err != nil {
		return nil, err
	}
	switch kind := info.Mode().Type(); {
	case kind&fs.ModeSymlink != 0:
		target, err := tree.Readlink(name)
		if err != nil {
			return nil, err
		}
		return nil, notRegular(fmt.Sprintf("it is a symbolic link to %q", guestproto.Clean(target)))
	case kind&fs.ModeDir != 0:
		return nil, notRegular("it is a directory")
	case kind != 0:
		return nil, notRegular("it is a pipe, socket or device")
	}
	f, err := tree.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	opened, err := f.Stat()
	if err == nil && !os.SameFile(info, opened) {
		err = notRegular("it changed while it was being opened")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// errorWithoutPath returns the text of an error without the path.
func errorWithoutPath(err error) string {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "it no longer exists"
	case errors.Is(err, fs.ErrPermission):
		return "the agent is not permitted to read it"
	}
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		err = e.Err
	}
	return sys.OneLine(err)
}

// during is a reader that fails once ctx ends.
type during struct {
	ctx context.Context //nolint:containedctx // the context bounds the reads
	r   io.Reader
}

func (d during) Read(p []byte) (int, error) {
	if err := d.ctx.Err(); err != nil {
		return 0, err
	}
	return d.r.Read(p)
}

// beatWriter is a stream of frames with a minimum rate.
type beatWriter struct {
	mu  sync.Mutex
	out io.Writer
}

// Write writes one complete frame.
func (b *beatWriter) Write(frame []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.out.Write(frame)
}

// begin sends heartbeats until the returned function is called.
func (b *beatWriter) begin() (end func()) {
	done := make(chan struct{})
	var beats sync.WaitGroup
	beats.Go(func() {
		tick := time.NewTicker(beatEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if guestproto.WriteFrame(b, guestproto.FrameBeat, nil) != nil {
					return // the reader is gone; the next frame reports the same error
				}
			case <-done:
				return
			}
		}
	})
	return func() { close(done); beats.Wait() }
}
