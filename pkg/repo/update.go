package repo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// Bounds limits the resources that a remote's mirror may use. Zero values select
// the defaults.
type Bounds struct {
	Bytes   int64         // of the mirror on disk; 20 GiB
	Refs    int           // branches and tags; 50,000
	Time    time.Duration // of one fetch; 2 h
	Memory  int64         // bytes of one git process; 4 GiB; not enforced by macOS
	Reserve int64         // bytes that stay free on the disk; 512 MiB

	route *publicRoute // for a Ref that is PublicOnly
}

func (b Bounds) filled() Bounds {
	set := func(n *int64, value int64) {
		if *n <= 0 {
			*n = value
		}
	}
	set(&b.Bytes, 20<<30)
	set(&b.Memory, 4<<30)
	set(&b.Reserve, diskReserve)
	if b.Refs <= 0 {
		b.Refs = 50_000
	}
	if b.Time <= 0 {
		b.Time = 2 * time.Hour
	}
	return b
}

// update makes the branches, tags and HEAD of a bare repository equal to the
// remote's, and returns the names that it left out. The remote is untrusted: git
// first requests its list, and then only objects on that list.
func (m *Mirrors) update(ctx context.Context, dir string, ref Ref, p Progress) (leftOut []string, err error) {
	b := m.Bounds.filled()
	ctx, cancel := context.WithTimeoutCause(ctx, b.Time, fail.New(fail.Timeout, "%s did not finish within %v (limits.mirror_time)", remoteHost(ref.URL), b.Time).
		WithHint("agent-sessionizer config edit # and raise limits.mirror_time"))
	defer cancel()
	if ref.PublicOnly {
		if b.route, err = m.dialer().route(ctx, ref, m.Self); err != nil {
			return nil, err
		}
		defer b.route.close()
	}
	list, err := listRemote(ctx, dir, ref, b)
	if err != nil {
		return nil, err
	}
	local := target{git: hostGit{dir: dir}}
	if err := local.read(ctx); err != nil {
		return nil, err
	}
	leftOut = list.dropUnsupported(m.foldsNames(dir))
	var gone, changed strings.Builder
	for _, name := range slices.Sorted(maps.Keys(local.refs)) {
		if isRemoteName(name) && list.refs[name] == "" {
			fmt.Fprintf(&gone, "delete %s %s\n", name, local.refs[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(list.refs)) {
		if id := list.refs[name]; local.refs[name] != id {
			fmt.Fprintf(&changed, "+%s:%s\n", id, name)
		}
	}
	if gone.Len() > 0 { // delete first, because a new name may conflict with an old one
		g := hostGit{dir: dir, stdin: strings.NewReader(gone.String())}
		if err := g.run(ctx, "update-ref", "--no-deref", "--stdin"); err != nil {
			return nil, err
		}
	}
	if changed.Len() > 0 {
		if err := fetchObjects(ctx, dir, ref, b, changed.String(), p); err != nil {
			return nil, err
		}
	}
	if name, ok := strings.CutPrefix(list.head, "refs/heads/"); ok && validRefName(name) {
		return leftOut, hostGit{dir: dir}.run(ctx, "symbolic-ref", "HEAD", list.head)
	}
	return leftOut, nil
}

// network returns a git that contacts the remote within the bounds.
func (b Bounds) network(dir string, memory, fileBytes int64, p Progress) hostGit {
	g := hostGit{dir: dir, network: true, progress: p, limits: &resourceLimits{fileBytes: fileBytes, data: memory}}
	if b.route != nil {
		g.settings, g.env = b.route.args, b.route.env
	}
	return g
}

func slowTransfers() []string {
	return []string{"-c", "http.lowSpeedLimit=" + slowBytes, "-c", "http.lowSpeedTime=" + slowTransfer}
}

// remoteList is the list of a remote's references.
type remoteList struct {
	refs map[string]string // branches and tags: full name to object
	head string            // the full name of the branch that HEAD names, or ""
}

func isRemoteName(name string) bool {
	return strings.HasPrefix(name, "refs/heads/") || strings.HasPrefix(name, "refs/tags/")
}

func listRemote(ctx context.Context, dir string, ref Ref, b Bounds) (remoteList, error) {
	tooMany := fail.New(fail.Conflict, "%s has more than %d branches and tags (limits.mirror_refs)", ref.Slug, b.Refs).
		WithHint("agent-sessionizer config edit # and raise limits.mirror_refs")
	runCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	var out bytes.Buffer
	in := &pipe.Writer{W: &out, Left: maxOutput, Full: cancel}
	g := b.network(dir, b.Memory/4, 64<<20, nil)
	g.stdout = in
	err := g.run(runCtx, append(slowTransfers(), "ls-remote", "--symref", "--", ref.URL, "HEAD", "refs/heads/*", "refs/tags/*")...)
	switch {
	case ctx.Err() != nil:
		return remoteList{}, context.Cause(ctx)
	case in.Over:
		return remoteList{}, tooMany
	case err != nil:
		return remoteList{}, err
	}
	list := remoteList{refs: map[string]string{}}
	for line := range strings.Lines(out.String()) {
		id, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		branch, symbolic := strings.CutPrefix(id, "ref: ")
		switch {
		case symbolic && name == "HEAD":
			list.head = branch
		case symbolic, strings.HasSuffix(name, "^{}"), !isRemoteName(name):
		case !objectID.MatchString(id):
			return remoteList{}, fail.New(fail.Failure, "parse the reference list of %s: invalid line %q", ref.Slug, clip(line))
		default:
			list.refs[name] = id
		}
		if len(list.refs) > b.Refs {
			return remoteList{}, tooMany
		}
	}
	return list, nil
}

// dropUnsupported removes and returns the names that this host cannot store: names that git or
// the file system rejects, and names that collide on a disk that folds case.
func (l *remoteList) dropUnsupported(folds bool) (leftOut []string) {
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(l.refs)) {
		key := name
		if folds {
			key = foldName(name)
		}
		if seen[key] || !fitsDisk(name, folds) {
			leftOut = append(leftOut, name)
			delete(l.refs, name)
		}
		seen[key] = true
	}
	return leftOut
}

// fetchObjects fetches the objects that refspecs name by their ids, and updates the
// references that they name.
func fetchObjects(ctx context.Context, dir string, ref Ref, b Bounds, refspecs string, p Progress) (err error) {
	free, err := freeSpace(dir)
	if err != nil {
		return err
	}
	space, onDisk := b.Bytes-size(dir), free-b.Reserve
	var tooLarge error = fail.New(fail.Conflict, "the mirror of %s would be larger than %d MiB (limits.mirror_size)", ref.Slug, b.Bytes>>20).
		WithHint("agent-sessionizer config edit # and raise limits.mirror_size")
	if onDisk < space {
		space, tooLarge = onDisk, fullDisk(dir)
	}
	if space <= 0 {
		return tooLarge
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removePartialPacks(dir))
		}
	}()
	g := b.network(dir, b.Memory, space, p)
	g.stdin = strings.NewReader(refspecs)
	// Store everything as one pack, because a pack is a single file that the file
	// size limit bounds. That limit would not bound loose objects or packs from
	// other addresses.
	err = g.run(ctx, append(slowTransfers(), "-c", "fetch.unpackLimit=1", "-c", "transfer.bundleURI=false", "-c", "fetch.uriProtocols=",
		"fetch", "--progress", "--no-tags", "--no-auto-maintenance", "--no-recurse-submodules", "--no-write-fetch-head", "--stdin", "--", ref.URL)...)
	if ge, ok := errors.AsType[*gitError](err); ok && tooLargeErrors.MatchString(ge.stderr) {
		return tooLarge
	}
	return err
}

// removePartialPacks removes the leftovers of a failed fetch from a mirror, so that
// failures do not fill the disk. The caller holds the mirror's lock; agents' work
// arrives in separate directories.
func removePartialPacks(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, "objects", "pack", "tmp_*"))
	for _, file := range left {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}
