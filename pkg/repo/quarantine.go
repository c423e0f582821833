package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
)

// quarantine holds objects from a guest, beside a target's objects, until they are
// verified. Its directory is named like git's own quarantine, so that "git gc"
// removes one left by a dead process.
type quarantine struct {
	git     hostGit // reads the target's objects, writes to dir
	dir     string
	objects string // the target's object directory
}

const (
	indexTime   = 30 * time.Minute // processor time for checking a pack
	indexMemory = 2 << 30          // bytes of address space
)

func (t *target) quarantine(ctx context.Context) (*quarantine, error) {
	objects, err := t.git.objects(ctx)
	if err != nil {
		return nil, err
	}
	q := &quarantine{git: t.git, objects: objects}
	q.dir = filepath.Join(q.objects, "tmp_objdir-incoming-"+ids.New())
	q.git.env = writingTo(q.dir, q.objects)
	if err := os.MkdirAll(filepath.Join(q.dir, "pack"), 0o700); err != nil {
		return nil, fmt.Errorf("receive the guest's commits: %w", err)
	}
	return q, nil
}

// objects returns the directory of a repository's objects.
func (g hostGit) objects(ctx context.Context) (string, error) {
	out, err := g.output(ctx, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	return strings.TrimSuffix(out, "\n"), err
}

// writingTo returns the environment of a git that reads a repository's objects, and writes to dir.
func writingTo(dir, objects string) []string {
	return []string{"GIT_OBJECT_DIRECTORY=" + dir, "GIT_ALTERNATE_OBJECT_DIRECTORIES=" + alternate(objects)}
}

func (q *quarantine) remove() error { return os.RemoveAll(q.dir) }

// indexPack checks a pack of size bytes, and that it makes the tips complete.
func (q *quarantine) indexPack(ctx context.Context, pack io.ReadSeeker, size int64, tips []string, opts FetchOptions) (commits int, err error) {
	if free, err := opts.free(q.objects); err != nil {
		return 0, err
	} else if free < 2*size+diskReserve {
		return 0, fullDisk(q.objects)
	}
	if _, err := pack.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	if err := q.index(ctx, pack, opts.MaxBytes); err != nil {
		return 0, err
	}
	return q.complete(ctx, tips)
}

// index adds a pack to the quarantine if every object in it passes git's strictest
// check.
func (q *quarantine) index(ctx context.Context, pack io.Reader, maxBytes int64) error {
	g := q.git
	g.stdin = pack
	// A thin pack grows by the objects that it builds on.
	g.limits = &resourceLimits{fileBytes: 2*maxBytes + 64<<20, cpu: indexTime, memory: indexMemory}
	_, err := g.output(ctx, "-c", "pack.threads=2", "-c", "core.packedGitWindowSize=32m", "-c", "core.packedGitLimit=512m",
		"-c", "core.bigFileThreshold=64m", "-c", "core.deltaBaseCacheLimit=96m", "-c", "transfer.fsckObjects=true",
		"index-pack", "--stdin", "--fix-thin", "--strict", fmt.Sprintf("--max-input-size=%d", maxBytes))
	if ge, ok := errors.AsType[*gitError](err); ok {
		if diskFullErrors.MatchString(ge.stderr) {
			return fullDisk(q.objects)
		}
		return fail.New(fail.Failure, "the guest's objects were refused and nothing was fetched: %w", err).
			WithHint("agent-sessionizer exec SESSION -- git fsck --strict")
	}
	return err
}

// complete checks that the new commits lack nothing, and counts them.
func (q *quarantine) complete(ctx context.Context, tips []string) (int, error) {
	g := q.git
	want := strings.Join(tips, "\n") + "\n"
	g.limits = &resourceLimits{fileBytes: 64 << 20, cpu: indexTime, memory: indexMemory}
	g.stdin = strings.NewReader(want)
	if _, err := g.output(ctx, "rev-list", "--objects", "--quiet", "--stdin", "--not", "--all"); err != nil {
		return 0, fmt.Errorf("%w: %w", errIncomplete, err)
	}
	g.stdin = strings.NewReader(want)
	out, err := g.output(ctx, "rev-list", "--count", "--stdin", "--not", "--all")
	if err != nil {
		return 0, err
	}
	return number(out)
}

// release moves the packs to the target's objects. Indexes go last, because git
// uses a pack as soon as its index exists.
func (q *quarantine) release() error {
	files, err := filepath.Glob(filepath.Join(q.dir, "pack", "pack-*"))
	if err != nil {
		return err
	}
	slices.SortStableFunc(files, func(a, b string) int { return last(a) - last(b) })
	to := filepath.Join(q.objects, "pack")
	if err := os.MkdirAll(to, 0o777); err != nil { //nolint:gosec // as git creates it, subject to the user's umask
		return fmt.Errorf("store the guest's commits: %w", err)
	}
	for _, f := range files {
		crash.Here(crash.BeforeFile)
		err := os.Rename(f, filepath.Join(to, filepath.Base(f)))
		crash.Here(crash.AfterFile)
		if err != nil {
			return fmt.Errorf("store the guest's commits: %w", err)
		}
	}
	return nil
}

func last(name string) int {
	if strings.HasSuffix(name, ".idx") {
		return 1
	}
	return 0
}
