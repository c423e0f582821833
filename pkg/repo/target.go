package repo

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// target is one repository on the host that work is fetched into.
type target struct {
	git    hostGit
	prefix string            // "refs/agents/SESSION/"
	refs   map[string]string // all its references: name to object
}

// openTargets reads the references of the given targets, mirror first.
func openTargets(ctx context.Context, session string, into Target) ([]*target, error) {
	if !sessionName.MatchString(session) {
		return nil, fail.New(fail.Usage, "invalid session name %q", clip(session)).WithHint("agent-sessionizer list")
	}
	var targets []*target
	for _, dir := range []string{into.Mirror, into.Local} {
		if dir == "" {
			continue
		}
		if _, err := os.Stat(dir); err != nil {
			return nil, fail.New(fail.NotFound, "the repository to fetch into no longer exists: %w", err).WithHint("agent-sessionizer fetch --into DIR %s", session)
		}
		t := &target{git: hostGit{dir: dir}, prefix: "refs/agents/" + session + "/"}
		if err := t.read(ctx); err != nil {
			return nil, localError(dir, err)
		}
		targets = append(targets, t)
	}
	if len(targets) == 0 {
		return nil, fail.New(fail.Usage, "no repository to fetch into").WithHint("agent-sessionizer fetch --into DIR %s", session)
	}
	return targets, nil
}

func (t *target) read(ctx context.Context) error {
	out, err := t.git.output(ctx, "for-each-ref", "--format=%(objectname) %(refname)")
	if err != nil {
		return err
	}
	t.refs = map[string]string{}
	for line := range strings.Lines(out) {
		id, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		t.refs[name] = id
	}
	return nil
}

// session returns this session's references, by the name below the prefix.
func (t *target) session() map[string]string {
	own := map[string]string{}
	for name, id := range t.refs {
		if rest, ok := strings.CutPrefix(name, t.prefix); ok {
			own[rest] = id
		}
	}
	return own
}

// commonTips returns commits that every target has with their full history, because
// a reference in each points to them. The session's own commits come first.
func commonTips(ctx context.Context, targets []*target, base Base) []string {
	seen := map[string]int{}
	for _, t := range targets {
		for _, id := range slices.Compact(slices.Sorted(maps.Values(t.refs))) {
			seen[id]++
		}
	}
	var tips, rest []string
	for id, n := range seen {
		if n < len(targets) {
			continue
		}
		if slices.Contains(slices.Collect(maps.Values(targets[0].session())), id) {
			tips = append(tips, id)
		} else {
			rest = append(rest, id)
		}
	}
	slices.Sort(tips)
	slices.Sort(rest)
	tips = append(tips, rest...)
	tips = tips[:min(len(tips), maxHaves)]
	if objectID.MatchString(base.Commit) && seen[base.Commit] < len(targets) && allReach(ctx, targets, base.Commit) {
		tips = append(tips, base.Commit)
	}
	return tips
}

// allReach reports whether a commit is part of every target's history.
func allReach(ctx context.Context, targets []*target, commit string) bool {
	for _, t := range targets {
		out, err := t.git.output(ctx, "for-each-ref", "--count=1", "--contains="+commit)
		if err != nil || out == "" {
			return false
		}
	}
	return true
}

// missingFrom returns the offered objects that at least one target lacks.
func missingFrom(ctx context.Context, targets []*target, offered map[string]string) ([]string, error) {
	ids := slices.Compact(slices.Sorted(maps.Values(offered)))
	missing := map[string]bool{}
	for _, t := range targets {
		reachable := map[string]bool{}
		for _, id := range t.refs {
			reachable[id] = true
		}
		var ask []string
		for _, id := range ids {
			if !reachable[id] {
				ask = append(ask, id)
			}
		}
		// The existence of an object is not enough: it may be a leftover without
		// its history.
		lacks, err := t.unreached(ctx, ask)
		if err != nil {
			return nil, err
		}
		for _, id := range lacks {
			missing[id] = true
		}
	}
	return slices.Sorted(maps.Keys(missing)), nil
}

// unreached returns those ids that no reference of the target leads to.
func (t *target) unreached(ctx context.Context, ids []string) ([]string, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	g := t.git
	g.stdin = strings.NewReader(strings.Join(ids, "\n") + "\n")
	out, err := g.output(ctx, "cat-file", "--batch-check=%(objecttype) %(objectname)")
	if err != nil {
		return nil, err
	}
	var commits, lacks []string
	for i, line := range slices.Collect(strings.Lines(out)) {
		if i >= len(ids) {
			break
		}
		if strings.TrimSpace(line) == "commit "+ids[i] {
			commits = append(commits, ids[i])
		} else {
			lacks = append(lacks, ids[i]) // does not exist, or a tag that nothing points to
		}
	}
	if len(commits) == 0 {
		return lacks, nil
	}
	g.stdin = strings.NewReader(strings.Join(commits, "\n") + "\n")
	out, err = g.output(ctx, "rev-list", "--stdin", "--not", "--all")
	if ctx.Err() != nil {
		return nil, err
	}
	if err != nil { // leftovers without their history
		lacks = append(lacks, commits...)
		return lacks, nil //nolint:nilerr // the remedy is to request them from the guest again
	}
	loose := map[string]bool{}
	for _, id := range strings.Fields(out) {
		loose[id] = true
	}
	for _, id := range commits {
		if loose[id] {
			lacks = append(lacks, id)
		}
	}
	return lacks, nil
}

// apply points this session's references to the offered objects. Nothing that was
// fetched before becomes unreachable, even if the process dies in between.
func (t *target) apply(ctx context.Context, offered map[string]string, maxRefs int) ([]RefUpdate, error) {
	own := t.session()
	changes := t.changes(own, offered)
	if len(changes) > maxRefs {
		return nil, fail.New(fail.Conflict, "the guest changed %d references, more than the limit of %d", len(changes), maxRefs).
			WithHint("agent-sessionizer fetch --max-refs=N SESSION")
	}
	if len(changes) == 0 {
		return changes, nil
	}
	inWay := obstacles(own, changes)
	keep, err := t.unreachableAfter(ctx, own, changes, inWay)
	if err != nil {
		return nil, err
	}
	var first, second, third strings.Builder
	for _, id := range keep {
		if _, ok := own["replaced/"+id]; !ok {
			fmt.Fprintf(&first, "create %sreplaced/%s %s\n", t.prefix, id, id)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(inWay)) {
		fmt.Fprintf(&second, "delete %s%s %s\n", t.prefix, name, inWay[name])
	}
	for i, c := range changes {
		old := c.Old
		if old == "" {
			old = strings.Repeat("0", len(c.New))
		}
		fmt.Fprintf(&third, "update %s%s %s %s\n", t.prefix, c.Name, c.New, old)
		changes[i].Name = t.prefix + c.Name
	}
	return changes, t.update(ctx, first.String(), second.String(), third.String())
}

// update runs transactions of git update-ref, one after the other.
func (t *target) update(ctx context.Context, transactions ...string) error {
	for _, s := range transactions {
		if s == "" {
			continue
		}
		g := t.git
		g.stdin = strings.NewReader(s)
		crash.Here(crash.BeforeFile)
		err := g.run(ctx, "update-ref", "--no-deref", "--stdin")
		crash.Here(crash.AfterFile)
		if err != nil {
			return fmt.Errorf("record the guest's work: %w", err)
		}
	}
	return nil
}

// obstacles returns the references that conflict with changes: "a" with "a/b" and
// the reverse, and "A" with "a", because the disk may fold case.
func obstacles(own map[string]string, changes []RefUpdate) map[string]string {
	inWay := map[string]string{}
	changed, above := map[string]string{}, map[string]bool{} // by folded name
	for _, c := range changes {
		changed[foldName(c.Name)] = c.Name
		for p := range parents(foldName(c.Name)) {
			above[p] = true
		}
	}
	for name, id := range own {
		folded := foldName(name)
		if to, ok := changed[folded]; above[folded] || ok && to != name {
			inWay[name] = id
		}
		for p := range parents(folded) {
			if changed[p] != "" {
				inWay[name] = id
			}
		}
	}
	return inWay
}

// changes compares the offered references with the existing ones. If the host
// already has the same object under that name as its own branch or tag, it is not
// the agent's work, unless an earlier fetch created that name here.
func (t *target) changes(own, offered map[string]string) []RefUpdate {
	changes := []RefUpdate{}
	for _, name := range slices.Sorted(maps.Keys(offered)) {
		id := offered[name]
		old, had := own[name]
		short := strings.TrimPrefix(name, "heads/")
		same := t.refs["refs/"+name] == id || t.refs["refs/remotes/origin/"+short] == id
		if old == id || !had && same && name != "HEAD" {
			continue
		}
		changes = append(changes, RefUpdate{Name: name, Old: old, New: id})
	}
	return changes
}

// unreachableAfter returns the objects that would no longer be reachable from the session's
// references after the changes.
func (t *target) unreachableAfter(ctx context.Context, own map[string]string, changes []RefUpdate, inWay map[string]string) ([]string, error) {
	var olds, lost []string
	after := maps.Clone(own)
	drop := func(name, id string) {
		if strings.HasPrefix(name, "tags/") {
			lost = append(lost, id) // an annotated tag is a separate object
		} else {
			olds = append(olds, id)
		}
		delete(after, name)
	}
	for name, id := range inWay {
		drop(name, id)
	}
	for _, c := range changes {
		if c.Old != "" {
			drop(c.Name, c.Old)
		}
	}
	for _, c := range changes {
		after[c.Name] = c.New
	}
	if len(olds) > 0 {
		var revs strings.Builder
		revs.WriteString(strings.Join(olds, "\n") + "\n")
		for _, id := range after {
			revs.WriteString("^" + id + "\n")
		}
		g := t.git
		g.stdin = strings.NewReader(revs.String())
		out, err := g.output(ctx, "rev-list", "--stdin")
		if ctx.Err() != nil {
			return nil, err
		}
		gone := map[string]bool{}
		for _, id := range strings.Fields(out) {
			gone[id] = true
		}
		for _, id := range olds {
			if gone[id] || err != nil { // if git fails, keep all of them
				lost = append(lost, id)
			}
		}
	}
	slices.Sort(lost)
	return slices.Compact(lost), nil
}

// parents returns the prefixes of a reference's name that end before a slash.
func parents(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for i, c := range name {
			if c == '/' && !yield(name[:i]) {
				return
			}
		}
	}
}
