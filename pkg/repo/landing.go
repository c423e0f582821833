package repo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// MergeConflict is a file that two trees changed in ways that cannot be combined.
type MergeConflict struct {
	Path               string
	Base, Ours, Theirs Entry
}

// noOne is the author of commits that only git itself reads.
const noOne = "agent-sessionizer <agent-sessionizer@localhost> 0 +0000"

// Merge combines the changes of two trees since a third. If some conflict, the tree has both versions of
// them with conflict markers.
func (t *Trees) Merge(ctx context.Context, base, ours, theirs string) (tree string, conflicts []MergeConflict, err error) {
	switch base {
	case ours:
		return theirs, nil, nil
	case theirs:
		return ours, nil, nil
	}
	// Older versions of git merge only commits. These exist only here.
	commits := t.git
	commits.env = append(append([]string{}, commits.env...), identityEnv(noOne, noOne)...)
	commits.env = append(commits.env, writingTo(filepath.Join(t.dir, "objects"), t.objects)...)
	commit := func(tree string, parents ...string) string {
		if err != nil {
			return ""
		}
		commits.stdin = strings.NewReader("")
		var out string
		out, err = commits.output(ctx, append([]string{"commit-tree", tree}, parents...)...)
		return strings.TrimSpace(out)
	}
	root := commit(base)
	a, b := commit(ours, "-p", root), commit(theirs, "-p", root)
	if err != nil {
		return "", nil, fmt.Errorf("prepare merge: %w", err)
	}
	g := t.git
	g.env = append(append([]string{}, g.env...), "GIT_ALTERNATE_OBJECT_DIRECTORIES="+alternate(filepath.Join(t.dir, "objects")))
	g.settings = append(append([]string{}, g.settings...), "-c", "merge.directoryRenames=false", "-c", "merge.renames=true", "-c", "merge.renameLimit=1000", "-c", "merge.conflictStyle=merge")
	crash.Here(crash.BeforeFile)
	out, err := g.output(ctx, "merge-tree", "--write-tree", "-z", "--no-messages", a, b)
	crash.Here(crash.AfterFile)
	if ge, ok := errors.AsType[*gitError](err); ok && ge.code == 1 && out != "" {
		err = nil
	}
	if err != nil {
		return "", nil, fmt.Errorf("merge: %w", err)
	}
	return parseMerge(out)
}

// parseMerge parses the output of merge-tree: a tree, and the entries of files with conflicts.
func parseMerge(out string) (tree string, conflicts []MergeConflict, err error) {
	tree, rest, _ := strings.Cut(out, "\x00")
	if !objectID.MatchString(tree) {
		return "", nil, fmt.Errorf("merge: git printed %q", clip(tree))
	}
	byPath := map[string]*MergeConflict{}
	for line := range strings.SplitSeq(strings.TrimSuffix(rest, "\x00"), "\x00") {
		// MODE SP OBJECT SP STAGE TAB PATH
		is, path, ok := strings.Cut(line, "\t")
		f := strings.Fields(is)
		if !ok || len(f) != 3 {
			continue // the end of the list
		}
		c := byPath[path]
		if c == nil {
			c = &MergeConflict{Path: path}
			byPath[path] = c
		}
		switch e := entry(f[0], f[1]); f[2] {
		case "1":
			c.Base = e
		case "2":
			c.Ours = e
		case "3":
			c.Theirs = e
		}
	}
	for _, path := range slices.Sorted(maps.Keys(byPath)) {
		conflicts = append(conflicts, *byPath[path])
	}
	return tree, conflicts, nil
}

// Author is who made a commit, as the agent wrote it.
type Author struct{ Name, Email string }

// maxAuthors limits the commits whose authors are read.
const maxAuthors = 500

// Authors returns the authors of an agent's commits since base, without repetitions, the latest first.
func (t *Trees) Authors(ctx context.Context, base, head string) ([]Author, error) {
	args := []string{"log", "-z", "--no-color", "--no-notes", "--no-show-signature", "--no-mailmap", fmt.Sprintf("--max-count=%d", maxAuthors), "--format=tformat:%an%n%ae", head}
	if base != "" {
		args = append(args, "^"+base)
	}
	out, err := t.git.output(ctx, append(args, "--")...)
	if err != nil {
		return nil, fmt.Errorf("read the agent's commits: %w", err)
	}
	var authors []Author
	for record := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		name, email, ok := strings.Cut(strings.TrimSuffix(record, "\n"), "\n")
		if a := (Author{name, email}); ok && !slices.Contains(authors, a) {
			authors = append(authors, a)
		}
	}
	return authors, nil
}

// NewCommit describes a commit to create.
type NewCommit struct {
	Tree     string
	Parents  []string
	Message  string
	Trailers []string // "Key: value", added to the message
}

// WriteCommit creates a commit by the user, without hooks and without a signature.
func (t *Trees) WriteCommit(ctx context.Context, c NewCommit) (string, error) {
	author, err := t.identity(ctx, "GIT_AUTHOR_IDENT")
	if err != nil {
		return "", err
	}
	committer, err := t.identity(ctx, "GIT_COMMITTER_IDENT")
	if err != nil {
		return "", err
	}
	g := t.git
	g.env = append(append([]string{}, g.env...), identityEnv(author, committer)...)
	g.stdin = strings.NewReader(strings.TrimSpace(c.Message) + "\n")
	args := []string{"interpret-trailers", "--no-divider", "--where=end", "--if-exists=addIfDifferent"}
	for _, trailer := range c.Trailers {
		args = append(args, "--trailer", trailer)
	}
	message, err := g.output(ctx, args...)
	if err != nil {
		return "", fmt.Errorf("write commit message: %w", err)
	}
	args = []string{"commit-tree", c.Tree}
	for _, p := range c.Parents {
		args = append(args, "-p", p)
	}
	g.stdin = strings.NewReader(message)
	crash.Here(crash.BeforeFile)
	out, err := g.output(ctx, args...)
	crash.Here(crash.AfterFile)
	if err != nil {
		return "", fmt.Errorf("write commit: %w", err)
	}
	return strings.TrimSpace(out), nil
}

// identity returns the user's name, address and the time, as git writes them into a commit.
func (t *Trees) identity(ctx context.Context, which string) (string, error) {
	g := t.clone
	g.user = true
	for _, name := range []string{"GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"} {
		if v := os.Getenv(name); v != "" {
			g.env = append(g.env, name+"="+v)
		}
	}
	out, err := g.output(ctx, "var", which)
	if err != nil {
		return "", fail.New(fail.Host, "git does not know your name: %w", err).WithHint("git config --global user.name 'Your Name' && git config --global user.email you@example.com")
	}
	return strings.TrimSpace(out), nil
}

var identityParts = lazyregexp.New(`^(.*) <(.*)> ([0-9]+ [+-][0-9]{4})$`)

// identityEnv returns the variables from which git takes author and committer.
func identityEnv(author, committer string) []string {
	var env []string
	for role, is := range map[string]string{"AUTHOR": author, "COMMITTER": committer} {
		if f := identityParts.FindStringSubmatch(is); f != nil {
			env = append(env, "GIT_"+role+"_NAME="+f[1], "GIT_"+role+"_EMAIL="+f[2], "GIT_"+role+"_DATE=@"+f[3])
		}
	}
	return env
}

// CheckedOut returns the branches that are checked out, with the directory of the work tree of each.
func (t *Trees) CheckedOut(ctx context.Context) (map[string]string, error) {
	out, err := t.clone.output(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return nil, err
	}
	branches, dir := map[string]string{}, ""
	for line := range strings.SplitSeq(out, "\x00") {
		if path, ok := strings.CutPrefix(line, "worktree "); ok {
			dir = path
		} else if name, ok := strings.CutPrefix(line, "branch refs/heads/"); ok {
			branches[name] = dir
		}
	}
	return branches, nil
}

// UpdateRef points a reference of the clone to a commit, if it still points to old; "" if it does not
// exist yet.
func (t *Trees) UpdateRef(ctx context.Context, name, commit, old, why string) error {
	if old == "" {
		old = strings.Repeat("0", len(commit))
	}
	crash.Here(crash.BeforeFile)
	err := t.clone.run(ctx, "update-ref", "--no-deref", "-m", why, name, commit, old)
	crash.Here(crash.AfterFile)
	if err != nil {
		return fail.New(fail.Conflict, "update %s, which may have changed meanwhile: %w", name, err).WithHint("git log --oneline -1 %s", name)
	}
	return nil
}

// CopyRefs copies the commits of a session to the clone from another repository that has them, such as
// the mirror. The reference that says what has landed in that repository is left out.
func (t *Trees) CopyRefs(ctx context.Context, from, session string) error {
	if !sessionName.MatchString(session) {
		return fail.New(fail.Usage, "invalid session name %q", clip(session)).WithHint("agent-sessionizer list")
	}
	refs := "refs/agents/" + session + "/"
	if err := t.moveObstacles(ctx, from, refs); err != nil {
		return err
	}
	g := t.clone
	g.env = []string{"GIT_ALLOW_PROTOCOL=file"}
	crash.Here(crash.BeforeFile)
	err := g.run(ctx, "-c", "transfer.fsckObjects=true", "-c", "protocol.file.allow=always", "fetch", "--quiet", "--no-tags", "--no-prune", "--no-write-fetch-head", "--no-recurse-submodules",
		"--no-auto-maintenance", "--end-of-options", from, "+"+refs+"*:"+refs+"*", "^"+refs+Landed)
	crash.Here(crash.AfterFile)
	if err != nil {
		return fail.New(fail.Failure, "copy the commits of session %s: %w", session, err)
	}
	return nil
}

// moveObstacles moves references of the clone to replaced/ID whose names conflict with those of another
// repository, such as "heads/a" with "heads/a/b".
func (t *Trees) moveObstacles(ctx context.Context, from, prefix string) error {
	here, there := &target{git: t.clone, prefix: prefix}, &target{git: hostGit{dir: from}, prefix: prefix}
	if err := errors.Join(here.read(ctx), there.read(ctx)); err != nil {
		return err
	}
	var changes []RefUpdate
	for name := range there.session() {
		if name != Landed {
			changes = append(changes, RefUpdate{Name: name})
		}
	}
	own := here.session()
	var keep, remove strings.Builder
	for name, id := range obstacles(own, changes) {
		if _, ok := own["replaced/"+id]; !ok {
			own["replaced/"+id] = id
			fmt.Fprintf(&keep, "create %sreplaced/%s %s\n", prefix, id, id)
		}
		fmt.Fprintf(&remove, "delete %s%s %s\n", prefix, name, id)
	}
	return here.update(ctx, keep.String(), remove.String())
}

// Landed is the name, below refs/agents/SESSION/, of a commit with what has landed of a session. It keeps git
// from removing these objects. A fetch from a guest never writes such a name.
const Landed = "landed"
