package repo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Target names the repositories that receive fetched work; either may be "".
type Target struct {
	Mirror string // a mirror's directory
	Local  string // the user's clone: only refs/agents/SESSION/ and objects are written
}

// Target returns the mirror, or the local clone used as one, as a target.
func (m Mirror) Target() Target {
	if m.Local {
		return Target{Local: m.Dir}
	}
	return Target{Mirror: m.Dir}
}

// With returns where a fetch puts the work when the user names a clone (or ""), and
// which target counts as keeping the work from then on. That is t and not the
// clone, because the user may delete the clone at any time, unless t itself is
// gone.
func (t Target) With(clone string) (into, keep Target) {
	switch there := t.localExists(); {
	case there.Mirror != "":
		return Target{Mirror: there.Mirror, Local: clone}, Target{Mirror: there.Mirror}
	case there.Local != "" && (clone == "" || clone == there.Local):
		return there, there
	case there.Local != "":
		return Target{Mirror: there.Local, Local: clone}, there
	case clone != "":
		return Target{Local: clone}, Target{Local: clone}
	}
	return t, t
}

// localExists returns t without the directories that no longer exist.
func (t Target) localExists() Target {
	for _, dir := range []*string{&t.Mirror, &t.Local} {
		if _, err := os.Stat(*dir); err != nil {
			*dir = ""
		}
	}
	return t
}

// FetchOptions bounds a fetch. Zero values select the defaults.
type FetchOptions struct {
	MaxBytes int64  // received from the guest; default 4 GiB
	MaxRefs  int    // changed by one fetch; default 5000
	TempDir  string // holds the received pack; default is the system's
	Progress Progress

	free func(dir string) (int64, error) // for tests: bytes free on a directory's disk
}

// FetchResult describes the changes of a fetch.
type FetchResult struct {
	Refs    []RefUpdate `json:"refs"`    // sorted by name
	Commits int         `json:"commits"` // new to the host
	Bytes   int64       `json:"bytes"`   // received
}

// RefUpdate is one changed reference under refs/agents/SESSION/.
type RefUpdate struct {
	Name string `json:"name"`
	Old  string `json:"old,omitempty"` // "" if new; kept under replaced/ if nothing else refers to it
	New  string `json:"new"`
}

const (
	maxOffered  = 100_000   // references that a guest may list in total
	maxHaves    = 4000      // commits that the host names to the guest
	diskReserve = 512 << 20 // bytes that a fetch leaves free
)

func (o FetchOptions) filled() FetchOptions {
	if o.MaxBytes <= 0 {
		o.MaxBytes = 4 << 30
	}
	if o.MaxRefs <= 0 {
		o.MaxRefs = 5000
	}
	if o.TempDir == "" {
		o.TempDir = os.TempDir()
	}
	if o.free == nil {
		o.free = freeSpace
	}
	return o
}

// Fetch copies the guest's commits to refs/agents/SESSION/ of the targets: heads/,
// tags/, HEAD, stash/ID, worktrees/ID, and unnamed/ID for references whose names
// are unsuitable on this host. Work that was fetched once stays, even if its branch
// is deleted, renamed or rewritten in the guest (then at replaced/ID).
//
// The guest sends a pack and a list of names, not a bundle. git checks the objects
// of a pack as strictly as requested, which it does for bundles only since version
// 2.46. No name from the guest reaches a git fetch.
//
// Of a fetch that fails, the result has only the bytes that were received: the targets may
// keep them.
func Fetch(ctx context.Context, g Guest, dir, session string, into Target, base Base, opts FetchOptions) (FetchResult, error) {
	opts = opts.filled()
	if err := checkDir(dir); err != nil {
		return FetchResult{}, err
	}
	targets, err := openTargets(ctx, session, into)
	if err != nil {
		return FetchResult{}, err
	}
	out, err := g.Output(ctx, command(offerScript, dir), nil, maxReply)
	if err != nil {
		return FetchResult{}, fmt.Errorf("list the guest's commits: %w", err)
	}
	offered, err := parseOffer(string(out))
	if err != nil {
		return FetchResult{}, err
	}
	var res FetchResult
	if missing, err := missingFrom(ctx, targets, offered); err != nil {
		return res, err
	} else if len(missing) > 0 {
		opts.Progress.report("fetching %d references from the guest", len(missing))
		haves := commonTips(ctx, targets, base)
		if res, err = receive(ctx, g, dir, targets, missing, haves, opts); errors.Is(err, errIncomplete) && len(haves) > 0 {
			// A target has commits without their history; request everything.
			res, err = receive(ctx, g, dir, targets, missing, nil, opts)
		}
		if errors.Is(err, errIncomplete) {
			err = fail.New(fail.Failure, "the guest's objects were refused and nothing was fetched: %w", err).
				WithHint("agent-sessionizer exec SESSION -- git fsck --full")
		}
		if err != nil {
			return FetchResult{Bytes: res.Bytes}, err
		}
	}
	for _, t := range slices.Backward(targets) { // the result reports the first target's changes
		changes, err := t.apply(ctx, offered, opts.MaxRefs)
		if err != nil {
			return FetchResult{Bytes: res.Bytes}, err
		}
		res.Refs = changes
	}
	return res, nil
}

// Known returns the commits of a session that the targets hold, as input for Work.
// A target that is gone holds none.
func Known(ctx context.Context, session string, into Target) ([]string, error) {
	if into = into.localExists(); into == (Target{}) {
		return nil, nil
	}
	targets, err := openTargets(ctx, session, into)
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, t := range targets {
		for _, id := range t.session() {
			ids[id] = true
		}
	}
	return slices.Sorted(maps.Keys(ids)), nil
}

// Holds reports whether a repository of the target has all those commits with their history.
func Holds(ctx context.Context, session string, into Target, commits []string) (bool, error) {
	if into = into.localExists(); into == (Target{}) {
		return false, nil
	}
	targets, err := openTargets(ctx, session, into)
	if err != nil {
		return false, err
	}
	for _, t := range targets {
		lacks, err := t.unreached(ctx, commits)
		if err != nil {
			return false, err
		}
		if len(lacks) == 0 {
			return true, nil
		}
	}
	return false, nil
}

// parseOffer parses the guest's list into the names that its references get below
// refs/agents/SESSION/ on the host.
func parseOffer(out string) (map[string]string, error) {
	offered := map[string]string{}
	bad := func(line string) error {
		return fail.New(fail.Failure, "the guest's list of commits is invalid: %q", clip(line))
	}
	ended := false
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 3)
		if ended || len(f) > 1 && !objectID.MatchString(f[1]) || len(offered) >= maxOffered {
			return nil, bad(line)
		}
		switch {
		case len(f) == 1 && f[0] == "end":
			ended = true
		case len(f) == 2 && f[0] == "head":
			offered["HEAD"] = f[1]
		case len(f) == 2 && f[0] == "stash":
			offered["stash/"+f[1]] = f[1]
		case len(f) == 2 && f[0] == "tree":
			offered["worktrees/"+f[1]] = f[1]
		case len(f) == 3 && f[0] == "ref":
			offered[placeFor(f[2], f[1])] = f[1]
		default:
			return nil, bad(line)
		}
	}
	if !ended {
		return nil, bad("the end is missing")
	}
	return resolveNameConflicts(offered), nil
}

// placeFor returns where a guest's reference goes: its own name if that is valid,
// otherwise a name made from the object's id.
func placeFor(name, id string) string {
	for prefix, to := range map[string]string{"refs/heads/": "heads/", "refs/tags/": "tags/"} {
		if rest, ok := strings.CutPrefix(name, prefix); ok && validRefName(rest) {
			return to + rest
		}
	}
	return "unnamed/" + id
}

// resolveNameConflicts moves names aside that conflict ("a" and "a/b"; on some disks "a" and
// "A"), and drops work trees whose commit is also listed elsewhere.
func resolveNameConflicts(offered map[string]string) map[string]string {
	tips := map[string]bool{}
	for name, id := range offered {
		if !strings.HasPrefix(name, "worktrees/") {
			tips[id] = true
		}
	}
	placed, above := map[string]bool{}, map[string]bool{} // by folded name
	for _, name := range slices.Sorted(maps.Keys(offered)) {
		id := offered[name]
		if strings.HasPrefix(name, "worktrees/") && tips[id] {
			delete(offered, name)
			continue
		}
		clash := placed[foldName(name)] || above[foldName(name)]
		for parent := range parents(foldName(name)) {
			clash = clash || placed[parent]
		}
		if clash {
			delete(offered, name)
			offered["unnamed/"+id] = id
			continue
		}
		placed[foldName(name)] = true
		for parent := range parents(foldName(name)) {
			above[parent] = true
		}
	}
	return offered
}

// errIncomplete reports that objects which the new commits need are missing.
var errIncomplete = errors.New("the guest's commits are incomplete")

// receive transfers a pack from the guest into every target, or into none.
func receive(ctx context.Context, g Guest, dir string, targets []*target, missing, haves []string, opts FetchOptions) (res FetchResult, err error) {
	if err := os.MkdirAll(opts.TempDir, 0o700); err != nil { // it may be a cache that was removed
		return res, err
	}
	f, err := os.CreateTemp(opts.TempDir, "agent-sessionizer-*.pack")
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	free, err := opts.free(opts.TempDir)
	if err != nil {
		return res, err
	}
	if free -= diskReserve; free <= 0 {
		return res, fullDisk(opts.TempDir)
	}
	var want strings.Builder
	for _, id := range missing {
		want.WriteString(id + "\n")
	}
	for _, id := range haves {
		want.WriteString("^" + id + "\n")
	}
	runCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	in := &pipe.Writer{W: f, Left: min(opts.MaxBytes, free), Full: cancel}
	stderr := &tailBuffer{keep: maxText}
	runErr := g.Run(runCtx, command(packScript, dir), ssh.IO{
		Stdin: strings.NewReader(want.String()), Stdout: in, Stderr: &progressWriter{tail: stderr, say: opts.Progress},
	})
	switch {
	case ctx.Err() != nil:
		return res, context.Cause(ctx)
	case in.Over && free < opts.MaxBytes:
		return res, fullDisk(opts.TempDir)
	case in.Over:
		return res, fail.New(fail.Conflict, "the guest's work is larger than %d MiB", opts.MaxBytes>>20).
			WithHint("agent-sessionizer fetch --max-size=SIZE SESSION")
	case runErr != nil:
		return res, fmt.Errorf("fetch the guest's commits: %w", guestError(runErr, stderr))
	}
	res.Bytes = in.Passed
	var held []*quarantine
	defer func() {
		for _, q := range held {
			err = errors.Join(err, q.remove())
		}
	}()
	for _, t := range targets {
		q, err := t.quarantine(ctx)
		if err != nil {
			return res, err
		}
		held = append(held, q)
		commits, err := q.indexPack(ctx, f, in.Passed, missing, opts)
		if err != nil {
			return res, err
		}
		res.Commits = max(res.Commits, commits)
	}
	for _, q := range held {
		if err := q.release(); err != nil {
			return res, err
		}
	}
	return res, nil
}

func freeSpace(dir string) (int64, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("read free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil //nolint:unconvert // the types differ on other systems
}

func fullDisk(dir string) error {
	return fail.New(fail.Host, "not enough free space in %s", dir).WithHint("df -h %s", dir)
}
