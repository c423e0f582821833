package repo

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// Mirrors is the host's cache of remote repositories: one bare repository for each,
// at Dir/HOST/OWNER/REPO.git. Its branches and tags are the remote's. Its
// refs/agents/ holds the agents' work and is never pruned.
type Mirrors struct {
	Dir    string
	Pauses func() backoff.BackOff // between attempts to fetch; nil means 5, 10 and 20 seconds, plus or minus 15 %
	Bounds Bounds

	Self string       // path of this program, for a Ref that is PublicOnly
	Log  *slog.Logger // receives details that clients do not learn; may be nil

	public *dialer               // for tests
	folds  func(dir string) bool // for tests: whether the disk folds case
}

// Mirror is a repository on this host from which a repository's history can be
// read.
type Mirror struct {
	Dir     string // a bare mirror, or the local clone
	Local   bool   // Dir is the user's own clone
	Ref     Ref
	Warning string // set if Dir differs from the remote's current state

	stale error // why the remote could not be queried
}

const (
	tmpDir  = ".tmp"   // incomplete clones, and mirrors that are being removed
	lockDir = ".locks" // one file for each mirror

	maxPacks     = 40   // more packs than this are repacked into one
	refreshTries = 2    // for an existing mirror: stale is better than slow
	slowTransfer = "60" // seconds below slowBytes after which a transfer counts as dead
	slowBytes    = "100"
)

// Ensure creates ref's mirror or brings it up to date. Several processes may call
// it at once, and it may be repeated after a process died inside it. If the remote
// cannot be reached, Ensure returns an existing mirror as it is, with a Warning. A
// local clone is its own mirror, and Ensure does not contact its remote.
func (m *Mirrors) Ensure(ctx context.Context, ref Ref, p Progress) (Mirror, error) {
	if ref.PublicOnly {
		return m.ensurePublic(ctx, ref)
	}
	return m.ensure(ctx, ref, p)
}

func (m *Mirrors) ensure(ctx context.Context, ref Ref, p Progress) (Mirror, error) {
	if ref.Path != "" {
		return Mirror{Dir: ref.Path, Local: true, Ref: ref}, nil
	}
	dir, err := m.mirrorDir(ref)
	if err != nil {
		return Mirror{}, err
	}
	unlock, err := m.lock(ctx, ref, p)
	if err != nil {
		return Mirror{}, err
	}
	defer unlock()
	m.sweep(ref)

	mirror := Mirror{Dir: dir, Ref: ref}
	if _, err := os.Stat(filepath.Join(dir, "HEAD")); err == nil {
		leftOut, err := m.refresh(ctx, dir, ref, p)
		mirror.Warning = leftOutWarning(leftOut)
		if err != nil {
			if ctx.Err() != nil {
				return Mirror{}, err
			}
			mirror.stale = explain(ref, err)
			mirror.Warning = fmt.Sprintf("using the history of the last fetch: %v", mirror.stale)
			p.report("%s", mirror.Warning)
		}
		return mirror, nil
	}
	leftOut, err := m.create(ctx, dir, ref, p)
	if err != nil {
		return Mirror{}, explain(ref, err)
	}
	mirror.Warning = leftOutWarning(leftOut)
	return mirror, nil
}

// leftOutWarning names the branches and tags that a mirror lacks.
func leftOutWarning(names []string) string {
	if len(names) == 0 {
		return ""
	}
	shown := strings.Join(names[:min(len(names), 5)], ", ")
	return clip(fmt.Sprintf("%d branches and tags are left out because this disk cannot store their names: %s", len(names), shown))
}

// mirrorDir returns the directory of ref's mirror.
func (m *Mirrors) mirrorDir(ref Ref) (string, error) {
	host, rest, ok := strings.Cut(ref.Key, "/")
	if p, local := strings.CutPrefix(ref.Key, "local:"); local {
		host, rest, ok = "local", path.Base(p)+"-"+digest(p), true
	}
	host = strings.ReplaceAll(host, ":", "_") // a port; a host's name has no "_"
	if !ok || ref.URL == "" || hasDotDot(ref.Key) || !filepath.IsLocal(host) || !filepath.IsLocal(rest) {
		return "", fail.New(fail.Usage, "cannot mirror %q", ref.Key).WithHint("agent-sessionizer open OWNER/REPO")
	}
	return filepath.Join(m.Dir, host, filepath.FromSlash(rest)+".git"), nil
}

// create clones into a temporary directory, which becomes the mirror when it is
// complete.
func (m *Mirrors) create(ctx context.Context, dir string, ref Ref, p Progress) (leftOut []string, err error) {
	tmp := filepath.Join(m.temporary(ref), ids.New())
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return nil, fmt.Errorf("create mirror: %w", err)
	}
	defer func() {
		err = errors.Join(err, os.RemoveAll(m.temporary(ref)))
	}()
	g := hostGit{dir: tmp}
	if err := g.run(ctx, "init", "--quiet", "--bare", "--initial-branch=main", "--template=", "."); err != nil {
		return nil, err
	}
	if err := g.run(ctx, "config", "remote.origin.url", ref.URL); err != nil {
		return nil, err
	}
	p.report("cloning %s", ref.Slug)
	if err := m.retry(ctx, 4, p, func() error { leftOut, err = m.update(ctx, tmp, ref, p); return err }); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, fmt.Errorf("create mirror: %w", err)
	}
	if err := os.RemoveAll(dir); err != nil { // a leftover without a HEAD
		return nil, fmt.Errorf("create mirror: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil {
		return nil, fmt.Errorf("create mirror: %w", err)
	}
	return leftOut, nil
}

// refresh fetches into an existing mirror.
func (m *Mirrors) refresh(ctx context.Context, dir string, ref Ref, p Progress) (leftOut []string, err error) {
	g := hostGit{dir: dir}
	was, err := g.output(ctx, "config", "--get", "remote.origin.url")
	if err != nil {
		return nil, err
	}
	// https and ssh URLs can name the same repository. On a file system that folds
	// case, two repositories could share one directory.
	if old, err := Parse(strings.TrimSpace(was), "/"); err != nil || old.Key != ref.Key {
		return nil, fail.New(fail.Conflict, "%s contains another repository", dir).WithHint("rm -r %s", dir)
	}
	if strings.TrimSpace(was) != ref.URL {
		if err := g.run(ctx, "config", "remote.origin.url", ref.URL); err != nil {
			return nil, err
		}
	}
	p.report("fetching %s", ref.Slug)
	err = m.retry(ctx, refreshTries, p, func() error { leftOut, err = m.update(ctx, dir, ref, p); return err })
	if err != nil {
		return nil, err
	}
	return leftOut, tidy(ctx, dir)
}

// tidy limits the number of packs in a mirror. It keeps unreachable objects,
// because a running session may have started from them.
func tidy(ctx context.Context, dir string) error {
	packs, err := filepath.Glob(filepath.Join(dir, "objects", "pack", "*.pack"))
	if err != nil || len(packs) <= maxPacks {
		return err
	}
	return hostGit{dir: dir}.run(ctx, "repack", "-a", "-d", "--keep-unreachable", "--quiet")
}

func (m *Mirrors) temporary(ref Ref) string {
	return filepath.Join(m.Dir, tmpDir, digest(ref.Key))
}

func (m *Mirrors) lockFile(ref Ref) string { return filepath.Join(m.Dir, lockDir, digest(ref.Key)) }

// sweep removes the leftovers of a process that died while cloning. The caller
// holds the lock.
func (m *Mirrors) sweep(ref Ref) {
	_ = os.RemoveAll(m.temporary(ref)) // create reports a leftover that is in the way
}

// lock waits for the repository's lock. Lock files are never removed, because two
// processes could then hold different files of the same name. A lock file's
// modification time records the mirror's last use, for Prune.
func (m *Mirrors) lock(ctx context.Context, ref Ref, p Progress) (func(), error) {
	path := m.lockFile(ref)
	l, err := lockfile.Wait(ctx, path, func() { p.report("waiting for another process to fetch %s", ref.Slug) })
	if err != nil {
		return nil, fmt.Errorf("lock the mirror of %s: %w", ref.Slug, err)
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the mirror of %s: %w", ref.Slug, err), l.Unlock())
	}
	return func() { _ = l.Unlock() }, nil
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:8])
}
