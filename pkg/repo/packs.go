package repo

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// A push sends the history as a pack with its index, which git writes on the host. A bundle would not
// have the index, and the guest would have to compute every object of the history to make it: for a
// large repository that takes a small or emulated guest minutes.
//
// The archive that receive.sh unpacks into .git has the pack, the index and agent-sessionizer/refs,
// which has one line for each branch and tag: the object id, a space and the full name.

// packs makes the archive of a source's history.
type packs struct {
	git  hostGit // writes to dir instead of the source's objects
	dir  string
	refs string
	name string // of the pack, without suffix
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
	if err := ps.listRefs(ctx, src, o); err != nil {
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
	ps := &packs{git: git}
	if ps.dir, err = os.MkdirTemp(src.TempDir, "agent-sessionizer-push-"); err != nil {
		return nil, fail.New(fail.Host, "pack the history: %w", err)
	}
	ps.git.env = writingTo(ps.dir, objects)
	return ps, nil
}

// listRefs finds the branches and tags to send.
func (ps *packs) listRefs(ctx context.Context, src Source, o origin) error {
	patterns := []string{"refs/heads", "refs/tags"}
	if o.remote != "" {
		patterns = append(patterns, "refs/remotes/"+o.remote)
	}
	if sessionName.MatchString(src.Session) {
		patterns = append(patterns, "refs/agents/"+src.Session)
	}
	refs, err := ps.git.output(ctx, append([]string{"for-each-ref", "--format=%(objectname) %(refname)"}, patterns...)...)
	if err == nil && o.branch == "" {
		refs += o.commit + " HEAD\n"
	}
	ps.refs = refs
	return err
}

// write writes the pack and its index.
func (ps *packs) write(ctx context.Context) error {
	free, err := freeSpace(ps.dir)
	if err != nil {
		return err
	}
	if free -= diskReserve; free <= 0 {
		return fullDisk(ps.dir)
	}
	var tips strings.Builder
	for line := range strings.Lines(ps.refs) {
		id, _, _ := strings.Cut(line, " ")
		tips.WriteString(id + "\n")
	}
	g := ps.git
	g.stdin, g.limits = strings.NewReader(tips.String()), &resourceLimits{fileBytes: free}
	name, err := g.output(ctx, "-c", "pack.packSizeLimit=0", "pack-objects", "--progress", "--revs", "--delta-base-offset", filepath.Join(ps.dir, "pack"))
	if ge, ok := errors.AsType[*gitError](err); ok && diskFullErrors.MatchString(ge.stderr) {
		return fullDisk(ps.dir)
	}
	ps.name = "pack-" + strings.TrimSpace(name)
	return err
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
