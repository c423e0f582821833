package review

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Work is a review in progress. Its methods may be called at the same time.
type Work struct {
	trees   *repo.Trees
	landing sync.Mutex // held by what replaces the attempts

	mu       sync.Mutex
	o        Options
	attempts []*Attempt
	branch   branch
	stale    bool // the attempts may be older than what has landed
}

// branch is where changes land.
type branch struct {
	name   string
	tip    string // the commit that it has, "" if it does not exist
	parent string // of the next commit; "" if that has none
}

// defaultMaxFiles is how many files an attempt may change unless the options say something else.
const defaultMaxFiles = 20_000

func open(ctx context.Context, o Options) (*Work, error) {
	if len(o.Sources) == 0 {
		return nil, errors.New("review: no source")
	}
	o.MaxFiles = cmp.Or(o.MaxFiles, defaultMaxFiles)
	o.Branch = cmp.Or(o.Branch, "review/"+o.Sources[0].Name)
	trees, err := repo.OpenTrees(ctx, o.Clone)
	if err != nil {
		return nil, err
	}
	w := &Work{o: o, trees: trees}
	if err := w.refresh(ctx); err != nil {
		return nil, errors.Join(err, trees.Close())
	}
	return w, nil
}

// Close ends the processes that w uses, and removes its temporary files.
func (w *Work) Close() error { return w.trees.Close() }

// Attempts returns the attempts as of the last refresh.
func (w *Work) Attempts() []*Attempt {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attempts
}

// Branch returns the branch that receives what lands, and the commit that it has or would start
// from.
func (w *Work) Branch() (name, tip string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.branch.name, w.branch.parent
}

// Landed returns the branch as it is, with its latest commit and the first line of its message. Both are
// empty if the branch does not exist yet.
func (w *Work) Landed(ctx context.Context) (done Landed, err error) {
	w.mu.Lock()
	b := w.branch
	w.mu.Unlock()
	done = Landed{Branch: b.name, Tip: b.tip, Commits: []LandedCommit{}}
	if b.tip != "" {
		if done.Message, err = w.trees.Subject(ctx, b.tip); err != nil {
			return done, fmt.Errorf("read branch %s: %w", b.name, err)
		}
	}
	return done, nil
}

// Refresh fetches the agents' latest commits, reads the references and marks again, and replaces the
// attempts. After an error, w is as it was, but refuses to land until a refresh succeeds.
func (w *Work) Refresh(ctx context.Context) error {
	w.landing.Lock()
	defer w.landing.Unlock()
	if w.o.Fetch != nil {
		sources, err := w.o.Fetch(ctx)
		if err != nil {
			return err
		}
		w.mu.Lock()
		w.o.Sources = sources
		w.mu.Unlock()
	}
	return w.refresh(ctx)
}

func (w *Work) refresh(ctx context.Context) error {
	w.mu.Lock()
	w.stale = true
	o := w.o
	w.mu.Unlock()
	var attempts []*Attempt
	for _, src := range o.Sources {
		a, err := w.read(ctx, o, src)
		if err != nil {
			return err
		}
		attempts = append(attempts, a)
	}
	b, err := w.findBranch(ctx, o.Branch, attempts[0])
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attempts, w.branch, w.stale = attempts, b, false
	return nil
}

// findBranch returns a branch and where it would start: at the latest commit of the branch that the agent
// started from, or otherwise where the agent started.
func (w *Work) findBranch(ctx context.Context, name string, a *Attempt) (b branch, err error) {
	if !repo.ValidBranch(name) {
		return b, fail.New(fail.Usage, "invalid branch name %q", name).WithHint("agent-sessionizer review --branch NAME SESSION")
	}
	b.name = name
	if b.tip, err = w.trees.Commit(ctx, "refs/heads/"+name); err != nil {
		return b, fmt.Errorf("read branch %s: %w", name, err)
	}
	b.parent = cmp.Or(b.tip, a.upstream, a.base)
	return b, nil
}

// read reads one attempt.
func (w *Work) read(ctx context.Context, o Options, src Source) (*Attempt, error) {
	a := &Attempt{source: src, trees: w.trees, file: o.recordFile(src.ID), patches: map[int]*Patch{}}
	refs, err := w.trees.Refs(ctx, "refs/agents/"+src.Name+"/")
	if err != nil {
		return nil, fmt.Errorf("read the commits of session %s: %w", src.Name, err)
	}
	if a.head = headOf(refs, src.Base.Branch); a.head == "" {
		return nil, fail.New(fail.NotFound, "no commits of session %s were fetched", src.Name).WithHint("agent-sessionizer fetch %s", src.Name)
	}
	a.ref, a.refID = "refs/agents/"+src.Name+"/"+repo.Landed, refs[repo.Landed]
	if err := a.findBase(ctx); err != nil {
		return nil, err
	}
	rec, err := a.file.readLanded(ctx, w.trees)
	if err != nil {
		return nil, err
	}
	a.rec, a.was = rec, rec.Landed
	if err := a.findLanded(ctx, o); err != nil {
		return nil, err
	}
	if err := a.compare(ctx, o); err != nil {
		return nil, fmt.Errorf("review session %s: %w", src.Name, err)
	}
	return a, nil
}

// headOf returns the agent's latest commit: of what is checked out, of the branch that it started
// from, or of its only branch.
func headOf(refs map[string]string, branch string) string {
	if id := cmp.Or(refs["HEAD"], refs["heads/"+branch]); id != "" {
		return id
	}
	only := ""
	for name, id := range refs {
		if strings.HasPrefix(name, "heads/") {
			if only != "" {
				return ""
			}
			only = id
		}
	}
	return only
}

// findBase finds what the agent's changes are compared with: the commit that it started from, or a
// later one of the same branch on the host, if the agent has that one too.
func (a *Attempt) findBase(ctx context.Context) (err error) {
	a.base = a.source.Base.Commit
	if a.upstream, err = a.findUpstream(ctx); err != nil || a.upstream == "" {
		return err
	}
	if a.base != "" {
		if behind, err := a.trees.Contains(ctx, a.base, a.upstream); err != nil || behind {
			a.upstream = a.base // the branch of the clone is older
			return err
		}
	}
	both, err := a.trees.MergeBase(ctx, a.head, a.upstream)
	if err != nil || both == "" || both == a.base {
		return err
	}
	later := a.base == ""
	if !later {
		later, err = a.trees.Contains(ctx, both, a.base)
	}
	if later {
		a.base = both
	}
	return err
}

// findUpstream returns the latest commit on this host of the branch that the agent started from.
func (a *Attempt) findUpstream(ctx context.Context) (string, error) {
	name := a.source.Base.Branch
	if !repo.ValidBranch(name) {
		return "", nil
	}
	own, err := a.trees.Commit(ctx, "refs/heads/"+name)
	if err != nil {
		return "", err
	}
	remote, err := a.trees.Commit(ctx, "refs/remotes/origin/"+name)
	if err != nil || remote == "" || own == "" {
		return cmp.Or(own, remote), err
	}
	newer, err := a.trees.Contains(ctx, remote, own)
	if newer {
		return remote, err
	}
	return own, err
}

// findLanded finds the tree that has landed, as it is on top of the base.
func (a *Attempt) findLanded(ctx context.Context, o Options) (err error) {
	if a.baseTree, err = a.trees.Tree(ctx, a.base); err != nil {
		return err
	}
	if a.headTree, err = a.trees.Tree(ctx, a.head); err != nil {
		return err
	}
	a.landed = a.baseTree
	was := a.was
	if was.Tree == "" {
		if a.source.Parent == "" {
			return nil
		}
		return a.inherit(ctx, o)
	}
	if _, err := a.trees.Tree(ctx, was.Tree); err != nil {
		return fail.New(fail.Host, "read what has landed of session %s: %w", a.source.Name, err).WithHint("rm %s # deletes choices and notes; shows everything again", ssh.Quote(a.file.path))
	}
	a.landed, err = a.rebase(ctx, was)
	return err
}

// rebase moves a landed tree to the current base. Files for which that is impossible count as not landed.
func (a *Attempt) rebase(ctx context.Context, was landedTree) (string, error) {
	if was.Base == a.base {
		return was.Tree, nil
	}
	from, err := a.trees.Tree(ctx, was.Base)
	if err != nil {
		return "", err
	}
	tree, conflicts, err := a.trees.Merge(ctx, from, a.baseTree, was.Tree)
	if err != nil || len(conflicts) == 0 {
		return tree, err
	}
	edits := map[string]repo.Entry{}
	var paths []string
	for _, c := range conflicts {
		paths = append(paths, c.Path)
	}
	entries, err := a.trees.Entries(ctx, a.baseTree, paths...)
	for _, path := range paths {
		edits[path] = entries[path]
	}
	if err != nil {
		return "", err
	}
	return a.trees.Edit(ctx, tree, edits)
}

// inherit takes over what has landed of the session that this one was forked from, as far as this one
// has the same.
func (a *Attempt) inherit(ctx context.Context, o Options) error {
	parent, err := o.recordFile(a.source.Parent).readLanded(ctx, a.trees)
	if err != nil || parent.Landed.Tree == "" {
		return err
	}
	if _, err := a.trees.Tree(ctx, parent.Landed.Tree); err != nil {
		return nil //nolint:nilerr // without the objects, everything is offered
	}
	tree, err := a.rebase(ctx, parent.Landed)
	if err != nil {
		return err
	}
	landed, err := a.trees.Changes(ctx, a.baseTree, tree, o.MaxFiles)
	if err != nil {
		return err
	}
	var paths []string
	for _, c := range landed {
		paths = append(paths, c.Path, c.OldPath)
	}
	has, err := a.trees.Entries(ctx, a.headTree, paths...)
	if err != nil {
		return err
	}
	edits := map[string]repo.Entry{}
	for _, c := range landed {
		if has[c.Path] == c.New {
			edits[c.Path] = c.New
			if _, stays := has[c.OldPath]; c.OldPath != "" && !stays {
				edits[c.OldPath] = repo.Entry{}
			}
		}
	}
	a.landed, err = a.trees.Edit(ctx, a.baseTree, edits)
	return err
}

// compare lists the files that differ from what has landed, and those that landed.
func (a *Attempt) compare(ctx context.Context, o Options) error {
	changes, err := a.trees.Changes(ctx, a.landed, a.headTree, o.MaxFiles)
	if err != nil {
		return err
	}
	open := map[string]bool{}
	for _, c := range changes {
		f := File{
			Path: c.Path, OldPath: c.OldPath, Status: Status(c.Status),
			OldMode: c.Old.Mode, OldID: c.Old.ID, NewMode: c.New.Mode, NewID: c.New.ID,
		}
		open[f.Path], open[f.oldPath()] = true, true
		a.changed = append(a.changed, f)
		if f.matches(o.Paths) {
			a.files = append(a.files, f)
		}
	}
	done, err := a.trees.Changes(ctx, a.baseTree, a.landed, o.MaxFiles)
	if err != nil {
		return err
	}
	for _, c := range done {
		if !open[c.Path] {
			a.done = append(a.done, c.Path)
		}
	}
	slices.SortFunc(a.files, func(x, y File) int { return cmp.Compare(x.Path, y.Path) })
	return nil
}
