package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// Terminal is where a program of the user runs.
type Terminal struct {
	In       io.Reader
	Out, Err io.Writer
}

// maxMerged limits the size of a file that a merge tool returns.
const maxMerged = 64 << 20

// MergeTool opens a conflict in the user's own merge tool, and stores the file that results. The tool
// sees a temporary repository with only that file, under a plain name: nothing that the agent
// committed can select a filter or another program.
func (t *Trees) MergeTool(ctx context.Context, c MergeConflict, term Terminal) (e Entry, err error) {
	if !c.Ours.Regular() || !c.Theirs.Regular() || c.Base != (Entry{}) && !c.Base.Regular() {
		return e, fail.New(fail.Conflict, "a merge tool cannot resolve %s: it needs a file on both sides", clip(c.Path))
	}
	dir, err := os.MkdirTemp(t.dir, "merge-")
	if err != nil {
		return e, fail.New(fail.Host, "create temporary repository: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	name := plainName(c.Path)
	if err := t.prepareTool(ctx, dir, name, c); err != nil {
		return e, fmt.Errorf("prepare merge: %w", err)
	}
	ctx = context.WithoutCancel(ctx) // Ctrl-C belongs to the tool, and must not lose what the user merged
	if err := runTool(ctx, dir, name, term); err != nil {
		return e, err
	}
	content, err := readMerged(filepath.Join(dir, name))
	if err != nil {
		return e, err
	}
	e.Mode = c.Ours.Mode
	if c.Theirs.Mode != c.Base.Mode {
		e.Mode = c.Theirs.Mode
	}
	e.ID, err = t.WriteBlob(ctx, content)
	return e, err
}

var unusual = lazyregexp.New(`[^A-Za-z0-9._-]+`)

// plainName returns the name of a file for a merge tool: its last part, which shows its type,
// without characters that are special to any shell or to git.
func plainName(file string) string {
	name := strings.TrimLeft(unusual.ReplaceAllString(path.Base(file), "_"), ".-_")
	if name == "" {
		return "file"
	}
	return name[max(0, len(name)-100):]
}

// prepareTool makes a repository in dir whose only file has the conflict.
func (t *Trees) prepareTool(ctx context.Context, dir, name string, c MergeConflict) error {
	g := hostGit{dir: dir}
	if err := g.run(ctx, "init", "--quiet", "--template=", "--initial-branch=none", "--object-format="+t.objectFormat(c.Ours.ID), dir); err != nil {
		return err
	}
	info := map[string]string{"info/attributes": noAttributes, "objects/info/alternates": t.objects + "\n"}
	for file, content := range info {
		file = filepath.Join(dir, ".git", file)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			return err
		}
	}
	if err := t.copyToolSettings(ctx, g); err != nil {
		return err
	}
	var index strings.Builder
	stages := t.dir + "/stage-"
	for i, e := range []Entry{c.Base, c.Ours, c.Theirs} {
		content := ""
		if e != (Entry{}) {
			fmt.Fprintf(&index, "%s %s %d\t%s\x00", e.Mode, e.ID, i+1, name)
			var size int64
			var err error
			if content, size, err = t.Blob(ctx, e.ID, maxMerged); err != nil {
				return err
			} else if size > maxMerged {
				return fail.New(fail.Conflict, "%s has %d bytes, too many for a merge tool", clip(c.Path), size)
			}
		}
		file := filepath.Join(dir, name)
		if i != 1 {
			file = stages + []string{"base", "", "agent"}[i]
			defer os.Remove(file)
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			return err
		}
	}
	g.stdin = strings.NewReader(index.String())
	if err := g.run(ctx, "update-index", "-z", "--index-info"); err != nil {
		return err
	}
	err := t.git.run(ctx, "merge-file", "--quiet", "-L", "branch", "-L", "before", "-L", "agent", filepath.Join(dir, name), stages+"base", stages+"agent")
	if ge, ok := errors.AsType[*gitError](err); ok && ge.code > 0 && ge.code < 128 {
		return nil // the number of conflicts
	}
	return err
}

// objectFormat returns the object format of a repository with such an id.
func (t *Trees) objectFormat(id string) string {
	if len(id) == 64 {
		return "sha256"
	}
	return "sha1"
}

// copyToolSettings copies the clone's own settings of merge tools. The others apply anyway.
func (t *Trees) copyToolSettings(ctx context.Context, to hostGit) error {
	out, err := t.clone.query(ctx, "config", "--local", "--includes", "-z", "--get-regexp", `^(merge\.(gui)?tool|merge(tool)?\.conflictstyle|mergetool\..*)$`)
	if err != nil {
		return err
	}
	for setting := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		if key, value, ok := strings.Cut(setting, "\n"); ok {
			if err := to.run(ctx, "config", "--add", key, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// runTool runs the merge tool on the terminal.
func runTool(ctx context.Context, dir, name string, term Terminal) error {
	git, err := exec.LookPath("git")
	if err != nil {
		return fail.New(fail.Host, "git is not installed: %w", err).WithHint("sudo apt-get install git")
	}
	cmd := exec.CommandContext(ctx, git, "-c", "mergetool.keepBackup=false", "-c", "mergetool.keepTemporaries=false", "-c", "core.hooksPath=/dev/null", "mergetool", "--", name)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, term.In, term.Out, term.Err
	for _, kv := range os.Environ() {
		if variable, _, _ := strings.Cut(kv, "="); !strings.HasPrefix(variable, "GIT_") || kept.MatchString(variable) {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	if err := cmd.Run(); err != nil {
		return fail.New(fail.Failure, "run merge tool: %w", err).WithHint("git mergetool --tool-help")
	}
	return nil
}

// readMerged reads what a merge tool left, and refuses a file with conflict markers.
func readMerged(file string) (string, error) {
	info, err := os.Lstat(file)
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxMerged {
		return "", fail.New(fail.Failure, "the merge tool left no file of at most %d MiB", maxMerged>>20)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return "", fail.New(fail.Host, "read merged file: %w", err)
	}
	text := "\n" + string(content)
	if strings.Contains(text, "\n<<<<<<< ") && strings.Contains(text, "\n>>>>>>> ") {
		return "", fail.New(fail.Conflict, "the file still has conflict markers")
	}
	return string(content), nil
}
