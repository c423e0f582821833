package review

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Limits of a commit message.
const (
	maxMessage = 64 << 10 // bytes
	maxAuthors = 10       // that are named
	maxName    = 100      // bytes of a name or an address
)

// Land puts what was chosen on a branch, as one commit for each attempt, and refreshes w. It
// works on the marks as they were when it was called. It returns a FindingsError or a
// ConflictError if the user has to decide something; the attempts before it have landed then, as
// the result says.
func (w *Work) Land(ctx context.Context, r LandRequest) (done Landed, err error) {
	w.landing.Lock()
	defer w.landing.Unlock()
	w.mu.Lock()
	stale := w.stale
	w.mu.Unlock()
	if stale {
		if err := w.refresh(ctx); err != nil {
			return done, fmt.Errorf("reload landed changes: %w", err)
		}
	}
	b, err := w.target(ctx, r)
	if err != nil {
		return done, err
	}
	done = Landed{Branch: b.name, Tip: b.tip, Message: cmp.Or(strings.TrimSpace(r.Message), w.DefaultMessage()), Commits: []LandedCommit{}}
	selected, err := w.selected(ctx, r)
	if err != nil {
		return done, err
	}
	if err := w.refuse(ctx, selected, r); err != nil {
		return done, err
	}
	w.mu.Lock()
	w.o.Branch = b.name
	w.mu.Unlock()
	defer func() { // after a part has landed too
		if rerr := w.refresh(context.WithoutCancel(ctx)); rerr != nil {
			err = errors.Join(err, fmt.Errorf("reload landed changes: %w", rerr))
		}
	}()
	for _, s := range selected {
		c, err := w.land(ctx, s, &b, done.Message, r.Resolutions)
		if err == nil || c.Commit != "" { // the branch has a commit even if it could not be recorded
			done.Tip = b.tip
			done.Commits = append(done.Commits, c)
		}
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// target returns the branch of a request, and refuses one that is checked out: its files would seem to
// undo what lands.
func (w *Work) target(ctx context.Context, r LandRequest) (b branch, err error) {
	if len(r.Message) > maxMessage {
		return b, fail.New(fail.Usage, "the message has %d bytes, more than the limit of %d", len(r.Message), maxMessage)
	}
	w.mu.Lock()
	name, first := cmp.Or(r.Branch, w.branch.name), w.attempts[0]
	w.mu.Unlock()
	if b, err = w.findBranch(ctx, name, first); err != nil {
		return b, err
	}
	out, err := w.trees.CheckedOut(ctx)
	if err != nil {
		return b, fmt.Errorf("list work trees: %w", err)
	}
	if dir, ok := out[name]; ok {
		return b, fail.New(fail.Conflict, "%w", &CheckedOutError{Branch: name, Dir: dir})
	}
	return b, nil
}

// selected returns what a request takes of each attempt that has something chosen.
func (w *Work) selected(ctx context.Context, r LandRequest) (all []*selection, err error) {
	attempts := w.Attempts()
	for i, a := range attempts {
		marks := a.chosen(r.Paths)
		if len(marks) == 0 {
			continue
		}
		s, err := a.selectChanges(ctx, i, marks)
		if err != nil {
			return nil, err
		}
		if len(s.edits) > 0 {
			all = append(all, s)
		}
	}
	if len(all) > 0 {
		return all, nil
	}
	name := attempts[0].source.Name
	if len(r.Paths) > 0 {
		return nil, fail.New(fail.NotFound, "no changes to land in %s", printable(strings.Join(r.Paths, ", "))).WithHint("agent-sessionizer review --json %s", name)
	}
	return nil, fail.New(fail.Conflict, "nothing is chosen").WithHint("agent-sessionizer review --land %s -- .", name)
}

// refuse returns a FindingsError for findings that the user has not accepted.
func (w *Work) refuse(ctx context.Context, selected []*selection, r LandRequest) error {
	if r.Unchecked {
		return nil
	}
	found, err := w.check(ctx, selected, r)
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return &FindingsError{found}
	}
	return nil
}

// land puts the selection of one attempt on the branch. It announces the commit in the record before the branch
// gets it. If land is interrupted, the next process to read the record finds out which of both happened.
func (w *Work) land(ctx context.Context, s *selection, b *branch, message string, resolved []Resolution) (c LandedCommit, err error) {
	a := s.attempt
	c = LandedCommit{Session: a.source.Name, Files: s.files}
	if now, err := w.trees.Commit(ctx, a.ref); err != nil || now != a.refID {
		return c, errors.Join(err, errMeanwhile(a.source.Name))
	}
	after, err := w.trees.Edit(ctx, a.landed, s.edits)
	if err != nil {
		return c, err
	}
	ours, err := w.trees.Tree(ctx, b.parent)
	if err != nil {
		return c, err
	}
	tree, err := w.merge(ctx, s, ours, after, resolved)
	if err != nil {
		return c, err
	}
	l := &landing{Branch: b.name, Before: a.was, After: landedTree{a.base, after}, Marks: s.marks}
	if tree != ours {
		if l.Commit, err = w.commit(ctx, a, tree, b.parent, message); err != nil {
			return c, err
		}
	}
	if err := a.keep(ctx, after); err != nil {
		return c, err
	}
	if l.Commit != "" {
		if err := a.change(func() error { return a.file.announce(l) }); err != nil {
			return c, err
		}
		if err := w.trees.UpdateRef(ctx, "refs/heads/"+b.name, l.Commit, b.tip, "review: land the work of "+a.source.Name); err != nil {
			return c, err
		}
		c.Commit, b.tip, b.parent = l.Commit, l.Commit, l.Commit
	}
	return c, a.change(func() error { _, err := a.file.landed(l); return err })
}

// errMeanwhile reports that another process landed changes of a session after this one had read what landed.
func errMeanwhile(session string) error {
	return fail.New(fail.Conflict, "another process landed changes of session %s meanwhile", session).WithHint("agent-sessionizer review %s", session)
}

// keep keeps git from removing a tree that lands.
func (a *Attempt) keep(ctx context.Context, tree string) error {
	keep := repo.NewCommit{Tree: tree, Message: "Landed of session " + a.source.Name}
	if a.refID != "" {
		keep.Parents = []string{a.refID} // keeps older trees, which an interrupted landing may need
	}
	id, err := a.trees.WriteCommit(ctx, keep)
	if err != nil {
		return err
	}
	return a.trees.UpdateRef(ctx, a.ref, id, a.refID, "review: landed")
}

// change calls f, which changes the record on disk. Meanwhile the user's keys cannot keep its lock busy.
func (a *Attempt) change(f func() error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return f()
}

// merge puts the selection on top of the tree that the branch has.
func (w *Work) merge(ctx context.Context, s *selection, ours, theirs string, resolved []Resolution) (string, error) {
	tree, found, err := w.trees.Merge(ctx, s.attempt.landed, ours, theirs)
	if err != nil || len(found) == 0 {
		return tree, err
	}
	edits := map[string]repo.Entry{}
	var open []Conflict
	for _, m := range found {
		c := Conflict{Attempt: s.number, Session: s.attempt.source.Name, Path: m.Path, Base: m.Base, Ours: m.Ours, Theirs: m.Theirs, Why: whyNoTool(m)}
		i := slices.IndexFunc(resolved, func(r Resolution) bool { return r.Conflict == c })
		if i < 0 {
			open = append(open, c)
		} else {
			edits[m.Path] = resolved[i].Result
		}
	}
	if len(open) > 0 {
		return "", &ConflictError{open}
	}
	return w.trees.Edit(ctx, tree, edits)
}

// whyNoTool says why a merge tool cannot resolve a conflict, "" if it can.
func whyNoTool(m repo.MergeConflict) string {
	none := repo.Entry{}
	switch {
	case m.Ours == none && m.Theirs == none:
		return "both sides moved or removed it"
	case m.Ours == none:
		return "the branch removed or moved it"
	case m.Theirs == none:
		return "the agent removed or moved it, and the branch changed it"
	case !m.Ours.Regular() || !m.Theirs.Regular() || m.Base != none && !m.Base.Regular():
		return "it is a link, a submodule or a directory on one side"
	}
	return ""
}

// commit writes the commit of a landing. The user is its author; the agent's authors are in trailers.
func (w *Work) commit(ctx context.Context, a *Attempt, tree, parent, message string) (string, error) {
	c := repo.NewCommit{Tree: tree, Message: message}
	if parent != "" {
		c.Parents = []string{parent}
	}
	authors, err := w.trees.Authors(ctx, a.base, a.head)
	if err != nil {
		return "", err
	}
	for _, author := range authors {
		if t := trailer(author); t != "" && len(c.Trailers) < maxAuthors && !slices.Contains(c.Trailers, t) {
			c.Trailers = append(c.Trailers, t)
		}
	}
	c.Trailers = append(c.Trailers, "Agent-Session: "+a.source.Name, "Agent-Commit: "+a.head)
	return w.trees.WriteCommit(ctx, c)
}

// MergeTool opens a conflict in the user's own merge tool, and returns what the user made of it.
func (w *Work) MergeTool(ctx context.Context, c Conflict, t Terminal) (Resolution, error) {
	e, err := w.trees.MergeTool(ctx, repo.MergeConflict{Path: c.Path, Base: c.Base, Ours: c.Ours, Theirs: c.Theirs}, t)
	return Resolution{Conflict: c, Result: e}, err
}

// Terminal is where a merge tool runs.
type Terminal = repo.Terminal

// trailer names an author of the agent's commits, "" if the author has no name.
func trailer(author repo.Author) string {
	plain := func(s string) string {
		s = strings.Map(func(r rune) rune {
			if r == '<' || r == '>' {
				return -1
			}
			return r
		}, termtext.Line(s))
		return strings.TrimSpace(termtext.Head(s, maxName))
	}
	name, email := plain(author.Name), plain(author.Email)
	if name == "" {
		return ""
	}
	return fmt.Sprintf("Co-authored-by: %s <%s>", name, email)
}
