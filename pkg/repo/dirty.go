package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
)

// sendDirty copies the uncommitted and untracked files of a local clone into the
// guest's repository at tmp. It creates a commit from them with a temporary index
// and object directory, so that the user's own do not change.
func sendDirty(ctx context.Context, g Guest, dir, head, tmp string) (err error) {
	own, lock, err := lockfile.TempDir("", "agent-sessionizer-changes-", os.RemoveAll)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(own), lock.Unlock()) }()
	// The user's configuration determines which files are ignored and how they are
	// stored.
	git := hostGit{dir: dir, user: true}
	commit, env, err := snapshot(ctx, git, own, head)
	if err != nil {
		return err
	}
	git.env = env
	revs := commit + "\n"
	if head != "" {
		revs += "^" + head + "\n"
	}
	git.stdin = strings.NewReader(revs)
	args := []string{"pack-objects", "--revs", "--thin", "--stdout", "--delta-base-offset", "-q"}
	return pipeGit(ctx, g, git, args, command(dirtyScript, tmp, commit))
}

// snapshot creates the commit, and returns the environment in which git can read
// it.
func snapshot(ctx context.Context, git hostGit, own, head string) (commit string, env []string, err error) {
	paths, err := git.output(ctx, "rev-parse", "--path-format=absolute", "--git-path", "index", "--git-path", "objects")
	if err != nil {
		return "", nil, err
	}
	index, objects, ok := strings.Cut(strings.TrimSuffix(paths, "\n"), "\n")
	if !ok || strings.Contains(objects, "\n") {
		return "", nil, fmt.Errorf("parse git's description of the index: unexpected format")
	}
	ownIndex, ownObjects := filepath.Join(own, "index"), filepath.Join(own, "objects")
	if err := copyIndex(index, ownIndex); err != nil {
		return "", nil, err
	}
	if err := os.Mkdir(ownObjects, 0o700); err != nil {
		return "", nil, err
	}
	env = append(
		writingTo(ownObjects, objects), "GIT_INDEX_FILE="+ownIndex,
		"GIT_AUTHOR_NAME=agent-sessionizer", "GIT_AUTHOR_EMAIL=agent-sessionizer@localhost",
		"GIT_COMMITTER_NAME=agent-sessionizer", "GIT_COMMITTER_EMAIL=agent-sessionizer@localhost",
	)
	git.env = env
	if err := git.run(ctx, "add", "--update", "--", "."); err != nil {
		return "", nil, err
	}
	if err := addUntracked(ctx, git); err != nil {
		return "", nil, err
	}
	tree, err := git.output(ctx, "write-tree")
	if err != nil {
		return "", nil, err
	}
	args := []string{"commit-tree", "--no-gpg-sign", "-m", "uncommitted changes", strings.TrimSpace(tree)}
	if head != "" {
		args = append(args, "-p", head)
	}
	out, err := git.output(ctx, args...)
	return strings.TrimSpace(out), env, err
}

// addUntracked adds all files that are not ignored. Unlike "git add" it skips
// nested repositories instead of failing on them.
func addUntracked(ctx context.Context, git hostGit) (err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	list := git
	list.stdout = w
	cmd, stderr, err := list.command(ctx, []string{"ls-files", "--others", "--exclude-standard", "-z"})
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return errors.Join(err, w.Close())
	}
	_ = w.Close()
	git.stdin = r
	addErr := git.run(ctx, "update-index", "--add", "--remove", "--replace", "-z", "--stdin")
	_, _ = io.Copy(io.Discard, r) // drain the list so that ls-files ends even if adding failed
	return errors.Join(addErr, finished(ctx, cmd.Wait(), "ls-files", stderr))
}

// copyIndex copies the user's index with its modification time, by which git
// decides which files to inspect.
func copyIndex(from, to string) error {
	info, err := os.Stat(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil // nothing has ever been added
	}
	if err != nil {
		return err
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.WriteFile(to, data, 0o600); err != nil {
		return err
	}
	return os.Chtimes(to, info.ModTime(), info.ModTime())
}

// alternate quotes a path for git's colon-separated lists.
func alternate(p string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(p) + `"`
}
