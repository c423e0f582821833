package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// sendDirty brings the uncommitted and untracked files of a local clone into
// the guest's repository at tmp. They are made into a commit by way of an index
// and an object directory of our own: the user's stay as they are.
func sendDirty(ctx context.Context, g Guest, dir, head, tmp string) (err error) {
	own, err := os.MkdirTemp("", "agent-sessionizer-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(own)) }()
	// The user's configuration says what is ignored and how files are stored.
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
	return pipe(ctx, g, git, args, command(dirtyScript, tmp, commit))
}

// snapshot makes the commit, and returns the environment in which git sees it.
func snapshot(ctx context.Context, git hostGit, own, head string) (commit string, env []string, err error) {
	paths, err := git.output(ctx, "rev-parse", "--path-format=absolute", "--git-path", "index", "--git-path", "objects")
	if err != nil {
		return "", nil, err
	}
	index, objects, ok := strings.Cut(strings.TrimSuffix(paths, "\n"), "\n")
	if !ok || strings.Contains(objects, "\n") {
		return "", nil, fmt.Errorf("git's answer about its index was not understood")
	}
	ownIndex, ownObjects := filepath.Join(own, "index"), filepath.Join(own, "objects")
	if err := copyIndex(index, ownIndex); err != nil {
		return "", nil, err
	}
	if err := os.Mkdir(ownObjects, 0o700); err != nil {
		return "", nil, err
	}
	env = []string{
		"GIT_INDEX_FILE=" + ownIndex, "GIT_OBJECT_DIRECTORY=" + ownObjects,
		"GIT_ALTERNATE_OBJECT_DIRECTORIES=" + alternate(objects),
		"GIT_AUTHOR_NAME=agent-sessionizer", "GIT_AUTHOR_EMAIL=agent-sessionizer@localhost",
		"GIT_COMMITTER_NAME=agent-sessionizer", "GIT_COMMITTER_EMAIL=agent-sessionizer@localhost",
	}
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

// addUntracked adds what is not ignored. Unlike "git add" it passes over
// repositories inside this one instead of failing at them.
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
	_, _ = io.Copy(io.Discard, r) // lets the list end when adding failed
	return errors.Join(addErr, finished(ctx, cmd.Wait(), "ls-files", stderr))
}

// copyIndex copies the user's index with its time of change, by which git tells
// the files that it must look into.
func copyIndex(from, to string) error {
	info, err := os.Stat(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil // nothing was ever added
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

// alternate quotes a path as git wants it in a list that colons separate.
func alternate(p string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(p) + `"`
}
