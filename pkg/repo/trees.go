package repo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// Entry is a file of a tree: its mode as git prints it, such as "100644", and the id of its
// content. The zero value is a file that does not exist.
type Entry struct {
	Mode string `json:"mode,omitempty"`
	ID   string `json:"id,omitempty"`
}

// Modes of entries.
const (
	ModeFile       = "100644"
	ModeExecutable = "100755"
	ModeLink       = "120000"
	ModeSubmodule  = "160000"
)

// Regular reports whether e is a file with content of its own, and not a link or a submodule.
func (e Entry) Regular() bool { return strings.HasPrefix(e.Mode, "100") }

// Trees reads and writes objects of a local clone. All its gits but those that read and write
// references run in a temporary repository that has the clone's objects and nothing else of
// it: neither the configuration of the user or the clone nor attributes in the agent's trees
// can choose a program to run, or change what the output looks like.
type Trees struct {
	clone   hostGit // for references, and the user's name
	git     hostGit // in the temporary repository
	dir     string  // the temporary repository
	lock    *lockfile.Lock
	objects string // the clone's
	reader  objectReader
	indexes atomic.Int64
}

const treesPrefix = "agent-sessionizer-review-"

// Limits of a git that reads what an agent committed.
const (
	treesTime   = 5 * time.Minute // processor time
	treesMemory = 4 << 30         // bytes of address space
	treesFile   = 4 << 30         // bytes of a file that it writes
)

// noAttributes overrides every attribute that selects a conversion or a program.
const noAttributes = "* !merge !diff -filter -ident -text -eol -working-tree-encoding !conflict-marker-size !whitespace\n"

// OpenTrees opens the clone that contains dir. The caller closes the result.
func OpenTrees(ctx context.Context, dir string) (*Trees, error) {
	clone := hostGit{dir: dir}
	out, err := clone.output(ctx, "rev-parse", "--path-format=absolute", "--show-object-format", "--git-path", "objects", "--git-path", "shallow")
	if err != nil {
		return nil, localError(dir, err)
	}
	at := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(at) != 3 {
		return nil, fail.New(fail.Failure, "inspect %s: git printed %d lines, want 3", echo(dir), len(at))
	}
	t := &Trees{clone: clone, objects: at[1]}
	crash.Here(crash.BeforeFile)
	t.dir, t.lock, err = lockfile.TempDir("", treesPrefix, os.RemoveAll)
	crash.Here(crash.AfterFile)
	if err != nil {
		return nil, fail.New(fail.Host, "create temporary repository: %w", err)
	}
	crash.Here(crash.BeforeFile)
	err = t.init(ctx, at[0], at[2])
	crash.Here(crash.AfterFile)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("create temporary repository: %w", err), t.Close())
	}
	return t, nil
}

// init creates the temporary repository.
func (t *Trees) init(ctx context.Context, format, shallow string) error {
	t.git = hostGit{dir: t.dir, limits: &resourceLimits{fileBytes: treesFile, cpu: treesTime, memory: treesMemory}}
	if err := t.git.run(ctx, "init", "--quiet", "--bare", "--template=", "--initial-branch=none", "--object-format="+format, t.dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(t.dir, "info"), 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(t.dir, "info", "attributes"), []byte(noAttributes), 0o600); err != nil {
		return err
	}
	if ends, err := os.ReadFile(shallow); err == nil {
		if err := os.WriteFile(filepath.Join(t.dir, "shallow"), ends, 0o600); err != nil {
			return err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	t.git.env = []string{"GIT_DIR=" + t.dir, "GIT_OBJECT_DIRECTORY=" + t.objects, "GIT_ATTR_NOSYSTEM=1"}
	t.git.settings = []string{
		"-c", "core.attributesFile=/dev/null", "-c", "core.protectHFS=true", "-c", "core.protectNTFS=true",
		"-c", "core.packedGitWindowSize=32m", "-c", "core.packedGitLimit=512m", "-c", "core.deltaBaseCacheLimit=96m", "-c", "core.bigFileThreshold=64m",
	}
	t.reader.git = t.git
	return nil
}

// Close ends the processes that t uses and removes the temporary repository.
func (t *Trees) Close() error {
	err := t.reader.close()
	crash.Here(crash.BeforeFile)
	err = errors.Join(err, os.RemoveAll(t.dir))
	crash.Here(crash.AfterFile)
	return errors.Join(err, t.lock.Unlock())
}

// Commit returns the commit that a reference of the clone, or an object's id, leads to, and "" if there is
// none.
func (t *Trees) Commit(ctx context.Context, name string) (string, error) {
	out, err := t.clone.query(ctx, "rev-parse", "--verify", "--quiet", "--end-of-options", name+"^{commit}")
	return strings.TrimSpace(out), err
}

// Subject returns the first line of a commit's message.
func (t *Trees) Subject(ctx context.Context, commit string) (string, error) {
	out, err := t.git.output(ctx, "log", "--no-color", "--no-notes", "--no-show-signature", "--max-count=1", "--format=tformat:%s", commit, "--")
	return strings.TrimSpace(out), err
}

// Refs returns the references of the clone below a prefix, by the name after it.
func (t *Trees) Refs(ctx context.Context, prefix string) (map[string]string, error) {
	own := &target{git: t.clone, prefix: prefix}
	if err := own.read(ctx); err != nil {
		return nil, err
	}
	return own.session(), nil
}

// Tree returns the tree of a commit, or of a tree. For "" it returns the empty tree.
func (t *Trees) Tree(ctx context.Context, commit string) (string, error) {
	if commit == "" {
		g := t.git
		g.stdin = strings.NewReader("")
		out, err := g.output(ctx, "hash-object", "-w", "-t", "tree", "--stdin")
		return strings.TrimSpace(out), err
	}
	if !objectID.MatchString(commit) {
		return "", fail.New(fail.Usage, "commit must be an object's id, got %q", clip(commit))
	}
	out, err := t.git.output(ctx, "rev-parse", "--verify", "--quiet", commit+"^{tree}")
	if err != nil {
		return "", fail.New(fail.NotFound, "read the tree of %.12s: %w", commit, err)
	}
	return strings.TrimSpace(out), nil
}

// MergeBase returns the newest commit that both commits contain, or "".
func (t *Trees) MergeBase(ctx context.Context, a, b string) (string, error) {
	out, err := t.git.query(ctx, "merge-base", a, b)
	first, _, _ := strings.Cut(out, "\n")
	return first, err
}

// Contains reports whether a commit is part of the history of another.
func (t *Trees) Contains(ctx context.Context, history, commit string) (bool, error) {
	at, err := t.MergeBase(ctx, history, commit)
	return at == commit, err
}

// TreeChange is a file that differs between two trees.
type TreeChange struct {
	Status   byte // A, M, D, R or T
	Path     string
	OldPath  string // of a renamed file
	Old, New Entry
}

// Changes lists the files that differ between two trees, sorted by path. More than limit are an error.
func (t *Trees) Changes(ctx context.Context, from, to string, limit int) ([]TreeChange, error) {
	args := []string{"diff-tree", "-r", "-z", "--raw", "--no-abbrev", "--no-ext-diff", "--no-textconv"}
	out, err := t.git.output(ctx, append(args, "-M", "-l1000", from, to)...)
	if _, ok := errors.AsType[*gitError](err); ok { // the files may be too large to compare
		out, err = t.git.output(ctx, append(args, "--no-renames", from, to)...)
	}
	if err != nil {
		return nil, fmt.Errorf("compare trees: %w", err)
	}
	changes, err := parseRaw(out)
	if err == nil && len(changes) > limit {
		err = fail.New(fail.Conflict, "%d files differ, more than the limit of %d", len(changes), limit)
	}
	return changes, err
}

// parseRaw parses the output of diff-tree -z --raw.
func parseRaw(out string) ([]TreeChange, error) {
	var changes []TreeChange
	parts := strings.Split(strings.TrimSuffix(out, "\x00"), "\x00")
	if out == "" {
		return nil, nil
	}
	for len(parts) > 1 {
		// :MODE SP MODE SP ID SP ID SP STATUS NUL PATH NUL [PATH NUL]
		f := strings.Fields(strings.TrimPrefix(parts[0], ":"))
		if len(f) != 5 {
			break
		}
		c := TreeChange{Status: f[4][0], Path: parts[1], Old: entry(f[0], f[2]), New: entry(f[1], f[3])}
		parts = parts[2:]
		if c.Status == 'R' || c.Status == 'C' {
			if len(parts) == 0 {
				return nil, fmt.Errorf("compare trees: git's output ends early")
			}
			c.OldPath, c.Path = c.Path, parts[0]
			parts = parts[1:]
		}
		changes = append(changes, c)
	}
	if len(parts) > 0 {
		return nil, fmt.Errorf("compare trees: git printed %q", clip(parts[0]))
	}
	return changes, nil
}

func entry(mode, id string) Entry {
	if strings.Trim(mode, "0") == "" {
		return Entry{}
	}
	return Entry{Mode: mode, ID: id}
}

// Diff returns the difference of two blobs as a unified diff without a header.
func (t *Trees) Diff(ctx context.Context, from, to string) (string, error) {
	if !objectID.MatchString(from) || !objectID.MatchString(to) {
		return "", fmt.Errorf("compare files: %q and %q must be ids", clip(from), clip(to))
	}
	out, err := t.git.output(ctx, "-c", "diff.suppressBlankEmpty=false", "diff", "--text", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames",
		"--diff-algorithm=histogram", "--indent-heuristic", "--unified=3", "--inter-hunk-context=0", from, to)
	if err != nil {
		return "", fmt.Errorf("compare files: %w", err)
	}
	if at := strings.Index(out, "\n@@ "); at >= 0 {
		return out[at+1:], nil
	}
	return "", nil
}

// WriteBlob stores a file's content and returns its id.
func (t *Trees) WriteBlob(ctx context.Context, content string) (string, error) {
	g := t.git
	g.stdin = strings.NewReader(content)
	out, err := g.output(ctx, "hash-object", "-w", "-t", "blob", "--stdin", "--no-filters")
	return strings.TrimSpace(out), err
}

// Entries returns the entry of each of those paths that exists in a tree.
func (t *Trees) Entries(ctx context.Context, tree string, paths ...string) (map[string]Entry, error) {
	found := map[string]Entry{}
	if len(paths) == 0 {
		return found, nil
	}
	wanted := map[string]bool{}
	for _, p := range paths {
		wanted[p] = true
	}
	out, err := t.git.output(ctx, "ls-tree", "-r", "-z", "--full-tree", tree)
	if err != nil {
		return nil, fmt.Errorf("list files: %w", err)
	}
	for line := range strings.SplitSeq(out, "\x00") {
		// MODE SP TYPE SP OBJECT TAB PATH
		is, path, _ := strings.Cut(line, "\t")
		if f := strings.Fields(is); len(f) == 3 && wanted[path] {
			found[path] = Entry{Mode: f[0], ID: f[2]}
		}
	}
	return found, nil
}

// Edit returns a tree that differs from another one in the given files. A file with the zero
// value is removed.
func (t *Trees) Edit(ctx context.Context, tree string, edits map[string]Entry) (string, error) {
	if len(edits) == 0 {
		return tree, nil
	}
	index := filepath.Join(t.dir, "index-"+strconv.FormatInt(t.indexes.Add(1), 10))
	defer os.Remove(index)
	g := t.git
	g.env = append(append([]string{}, g.env...), "GIT_INDEX_FILE="+index)
	if err := g.run(ctx, "read-tree", tree); err != nil {
		return "", fmt.Errorf("read tree: %w", err)
	}
	// Removals go first: a file may take the place of a directory.
	var removed, added strings.Builder
	none := strings.Repeat("0", len(tree))
	for path, e := range edits {
		if e == (Entry{}) {
			fmt.Fprintf(&removed, "0 %s\t%s\x00", none, path)
		} else {
			fmt.Fprintf(&added, "%s %s\t%s\x00", e.Mode, e.ID, path)
		}
	}
	g.stdin = strings.NewReader(removed.String() + added.String())
	if err := g.run(ctx, "update-index", "-z", "--index-info"); err != nil {
		return "", fmt.Errorf("change tree: %w", err)
	}
	g.stdin = nil
	crash.Here(crash.BeforeFile)
	out, err := g.output(ctx, "write-tree")
	crash.Here(crash.AfterFile)
	if err != nil {
		return "", fmt.Errorf("write tree: %w", err)
	}
	return strings.TrimSpace(out), nil
}
