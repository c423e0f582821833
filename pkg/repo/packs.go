package repo

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A push sends the history as a pack with its index, which git writes on the host. A bundle would not
// have the index, and the guest would have to compute every object of the history to make it: for a
// large repository that takes a small or emulated guest minutes.
//
// The archive that receive.sh unpacks into .git has the pack, the index and agent-sessionizer/refs, which
// is what offered returns.

// packs makes the archive of a source's history.
type packs struct {
	git  hostGit // writes to dir instead of the source's objects
	dir  string
	refs string
	name string                          // of the pack, without suffix
	free func(dir string) (int64, error) // bytes free on a directory's disk
}

// send sends the source's history to line, which unpacks it in the guest.
func send(ctx context.Context, g Guest, src Source, o origin, line string, p Progress) (err error) {
	if o.kind == "empty" {
		return run(ctx, g, line)
	}
	ps, err := newPacks(ctx, src, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(ps.dir)) }()
	if ps.refs, err = offered(ctx, ps.git, src, o); err != nil {
		return err
	}
	if err := ps.write(ctx); err != nil {
		return err
	}
	return pipeInto(ctx, g, line, func(_ context.Context, w io.Writer) error { return ps.archive(w, p) })
}

func newPacks(ctx context.Context, src Source, p Progress) (*packs, error) {
	git := hostGit{dir: src.Dir, progress: p}
	objects, err := git.objects(ctx)
	if err != nil {
		return nil, err
	}
	ps := &packs{git: git, free: freeSpace}
	if ps.dir, err = os.MkdirTemp(src.TempDir, "agent-sessionizer-push-"); err != nil {
		return nil, fail.New(fail.Host, "pack the history: %w", err)
	}
	ps.git.env = writingTo(ps.dir, objects)
	return ps, nil
}

// offered returns the branches and tags that a guest gets, one a line: the object id, a space and the
// full name.
func offered(ctx context.Context, git hostGit, src Source, o origin) (string, error) {
	among := []string{"refs/heads", "refs/tags"}
	if o.remote != "" {
		among = append(among, "refs/remotes/"+o.remote)
	}
	if sessionName.MatchString(src.Session) {
		among = append(among, "refs/agents/"+src.Session)
	}
	refs, err := git.output(ctx, append([]string{"for-each-ref", "--format=%(objectname) %(refname)"}, among...)...)
	if err == nil && o.branch == "" {
		refs += o.commit + " HEAD\n"
	}
	return refs, err
}

// tipsOf returns the ids of refs, one a line.
func tipsOf(refs string) string {
	var tips strings.Builder
	for line := range strings.Lines(refs) {
		id, _, _ := strings.Cut(line, " ")
		tips.WriteString(id + "\n")
	}
	return tips.String()
}

// write writes the pack and its index.
func (ps *packs) write(ctx context.Context) error {
	free, err := ps.free(ps.dir)
	if err != nil {
		return err
	}
	reserve := min(diskReserve, free/2) // leave some, even on a small disk
	room := free - reserve
	if room <= 0 {
		return fullDisk(ps.dir)
	}
	ctx, stop := ps.keepFree(ctx, reserve)
	defer stop()
	g := ps.git
	g.stdin, g.limits = strings.NewReader(tipsOf(ps.refs)), &resourceLimits{fileBytes: room}
	name, err := g.output(ctx, "-c", "pack.packSizeLimit=0", "pack-objects", "--progress", "--revs", "--delta-base-offset", filepath.Join(ps.dir, "pack"))
	if ge, ok := errors.AsType[*gitError](err); ok && (diskFullErrors.MatchString(ge.stderr) || tooLargeErrors.MatchString(ge.stderr)) {
		return fullDisk(ps.dir)
	}
	ps.name = "pack-" + strings.TrimSpace(name)
	return err
}

// keepFree returns a context that ends when less than reserve is free, because other pushes and the
// index of a pack need space at the same time. Call stop after use.
func (ps *packs) keepFree(ctx context.Context, reserve int64) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if free, err := ps.free(ps.dir); err == nil && free < reserve {
				cancel(fullDisk(ps.dir))
			}
		}
	})
	return ctx, func() { cancel(nil); watch.Wait() }
}

// archive writes the archive. It reports every tenth of a large pack.
func (ps *packs) archive(w io.Writer, p Progress) error {
	t := tar.NewWriter(w)
	refs := tar.Header{Name: "agent-sessionizer/refs", Mode: 0o644, Size: int64(len(ps.refs))}
	if err := t.WriteHeader(&refs); err != nil {
		return err
	}
	if _, err := io.WriteString(t, ps.refs); err != nil {
		return err
	}
	for _, suffix := range []string{".pack", ".idx"} {
		if err := addFile(t, filepath.Join(ps.dir, ps.name+suffix), tar.Header{Name: "objects/pack/" + ps.name + suffix, Mode: 0o444}, p); err != nil {
			return err
		}
	}
	return t.Close()
}

func addFile(t *tar.Writer, name string, h tar.Header, p Progress) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	h.Size = info.Size()
	if err := t.WriteHeader(&h); err != nil {
		return err
	}
	_, err = io.Copy(t, &tenths{r: f, size: h.Size, say: p})
	return err
}

// tenths reports how much of a large file was read, after every tenth of it.
type tenths struct {
	r          io.Reader
	size, read int64
	last       int64
	say        Progress
}

func (t *tenths) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.read += int64(n)
	if now := t.read * 10 / max(t.size, 1); now > t.last && t.size > 8<<20 {
		t.last = now
		t.say.report("sending objects: %d %%", now*10)
	}
	return n, err
}
