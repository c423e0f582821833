package taskrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const (
	gitTime       = 10 * time.Minute // per command
	maxNests      = 16               // repositories nested in each other
	maxSubmodules = 1000             // per repository
)

// taskGit queries git about a checkout that the agent may have manipulated. It
// changes nothing in the checkout. Of the programs configured there, it runs only
// the filters that git needs to compare files.
type taskGit struct {
	dir     string
	scratch string // directory for temporary files
	env     []string
	stdin   io.Reader
}

// run runs git and writes its output to out.
func (g taskGit) run(ctx context.Context, out io.Writer, args ...string) error {
	verb := args[slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "-") })]
	ctx, cancel := context.WithTimeoutCause(ctx, gitTime, fmt.Errorf("git %s took longer than %v", verb, gitTime))
	defer cancel()
	cmd := exec.CommandContext(ctx, "git", append([]string{
		"--no-pager", "--work-tree=" + g.dir,
		"-c", "core.hooksPath=" + os.DevNull, "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false",
		"-c", "core.splitIndex=false", "-c", "core.quotePath=false", "-c", "diff.orderFile=" + os.DevNull,
		"-c", "submodule.recurse=false", "-c", "diff.autoRefreshIndex=true", "-c", "gc.auto=0", "-c", "maintenance.auto=false",
		"-c", "safe.directory=*", // files created with sudo do not belong to the agent
	}, args...)...)
	cmd.Dir = g.dir
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "GIT_") && !strings.HasPrefix(entry, "LC_") && !strings.HasPrefix(entry, "LANG") {
			cmd.Env = append(cmd.Env, entry)
		}
	}
	cmd.Env = append(cmd.Env,
		"LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=", "GIT_OPTIONAL_LOCKS=0", "GIT_NO_REPLACE_OBJECTS=1", "GIT_NO_LAZY_FETCH=1",
		"GIT_ALLOW_PROTOCOL=none", "GIT_CEILING_DIRECTORIES="+filepath.Dir(g.dir), // otherwise an enclosing repository would answer
	)
	cmd.Env = append(cmd.Env, g.env...)
	stderr := pipe.Buffer{Limit: sys.MaxOutput}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = g.stdin, out, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if _, ran := errors.AsType[*exec.ExitError](err); ran {
		first, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return fmt.Errorf("git %s: %w: %s", verb, err, guestproto.Clean(first))
	}
	return err
}

func (g taskGit) line(ctx context.Context, args ...string) (string, error) {
	out := pipe.Buffer{Limit: sys.MaxOutput}
	err := g.run(ctx, &out, args...)
	return strings.TrimSuffix(out.String(), "\n"), err
}

// patch writes the difference between base and the files that are tracked now,
// whether committed, staged or not.
func (g taskGit) patch(ctx context.Context, base, file string, most int64) (err error) {
	if base == "" {
		if base, err = g.line(ctx, "hash-object", "-t", "tree", os.DevNull); err != nil {
			return err
		}
	} else if _, err := g.line(ctx, "rev-parse", "--git-dir"); err != nil {
		return err
	} else if _, err := g.line(ctx, "cat-file", "-e", base+"^{commit}"); err != nil {
		return errors.New("the commit that the agent started from is no longer in its repository")
	}
	index, err := g.line(ctx, "rev-parse", "--path-format=absolute", "--git-path", "index")
	if err != nil {
		return err
	}
	// Work on a copy: git records in the index which files it found unchanged.
	if index, err = copyIndex(index, filepath.Join(g.scratch, "index")); err != nil {
		return err
	}
	g.env = append(g.env, "GIT_INDEX_FILE="+index)
	if err := g.forgetSpecial(ctx); err != nil {
		return err
	}
	out, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err = errors.Join(err, out.Close()); err != nil {
			err = errors.Join(err, os.Remove(file))
		}
	}()
	limited := &pipe.Writer{W: out, Left: most}
	err = g.run(ctx, limited, "diff", "--binary", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color", "--find-renames", "-l400",
		"--ignore-submodules=dirty", "--submodule=short", "--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "--unified=3", "--inter-hunk-context=0",
		base, "--")
	if limited.Over {
		return fmt.Errorf("it has more than %d bytes", most)
	}
	return err
}

// copyIndex copies an index, if there is one. It keeps the modification time,
// because git uses it to decide which files to inspect.
func copyIndex(from, to string) (string, error) {
	info, err := os.Lstat(from)
	if errors.Is(err, os.ErrNotExist) {
		return to, nil
	}
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", errors.New("the repository's index must be a regular file")
	}
	text, err := os.ReadFile(from)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(to, text, 0o600); err != nil {
		return "", err
	}
	return to, os.Chtimes(to, info.ModTime(), info.ModTime())
}

// untracked returns the files that are neither ignored nor tracked, or with whole
// all files that are not ignored. more is the number of files above most.
func (g taskGit) untracked(ctx context.Context, whole bool, most int) (names []string, more int, err error) {
	empty, err := g.emptyRepository()
	if err != nil {
		return nil, 0, err
	}
	var list func(below string, args []string, depth int) error
	list = func(below string, args []string, depth int) error {
		inner := taskGit{dir: filepath.Join(g.dir, below), scratch: g.scratch}
		var nested []string
		out := &sys.Entries{Use: func(name string) {
			switch full := below + name; {
			case strings.HasSuffix(name, "/"):
				nested = append(nested, full)
			case len(names) < most:
				names = append(names, full)
			default:
				more++
			}
		}}
		if err := inner.run(ctx, out, append(args, "ls-files", "--others", "--exclude-standard", "-z")...); err != nil {
			return err
		}
		// git lists a repository that the agent created in the checkout as a single
		// entry. Its files are work like any other, so list them too.
		for _, dir := range nested {
			if depth < maxNests && len(names) < most {
				if err := list(dir, []string{"--git-dir=" + empty}, depth+1); err != nil {
					return err
				}
			}
		}
		return nil
	}
	var args []string
	if whole {
		args = []string{"--git-dir=" + empty}
	}
	err = list("", args, 0)
	return names, more, err
}

// emptyRepository creates a repository without tracked files.
func (g taskGit) emptyRepository() (string, error) {
	dir := filepath.Join(g.scratch, "empty.git")
	return dir, errors.Join(
		os.MkdirAll(filepath.Join(dir, "objects"), 0o700), os.MkdirAll(filepath.Join(dir, "refs"), 0o700),
		os.WriteFile(filepath.Join(dir, "HEAD"), []byte("ref: refs/heads/none\n"), 0o600),
	)
}

// forgetSpecial removes from the copied index every entry that is no longer a file,
// directory or link: git would open a pipe and wait for a writer.
func (g taskGit) forgetSpecial(ctx context.Context) error {
	var special bytes.Buffer
	err := g.run(ctx, &sys.Entries{Use: func(name string) {
		const ordinary = os.ModeDir | os.ModeSymlink
		if info, err := os.Lstat(filepath.Join(g.dir, name)); err == nil && info.Mode().Type()&^ordinary != 0 {
			special.WriteString(name + "\x00")
		}
	}}, "ls-files", "--cached", "-z")
	if err != nil || special.Len() == 0 {
		return err
	}
	g.stdin = &special
	return g.run(ctx, io.Discard, "update-index", "--force-remove", "-z", "--stdin")
}
