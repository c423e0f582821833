package repo

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// probeTime bounds the queries about a local clone during parsing.
const probeTime = 20 * time.Second

// parseLocal finds the clone that contains dir, and its remote.
func parseLocal(dir string) (Ref, error) {
	info, err := os.Stat(dir)
	if err != nil || !info.IsDir() {
		return Ref{}, fail.New(fail.NotFound, "%s is not a directory", echo(dir)).WithHint("ls -ld %s", dir)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return Ref{}, fail.New(fail.NotFound, "%s: %w", echo(dir), err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTime)
	defer cancel()
	top, err := topLevel(ctx, dir)
	if err != nil {
		return Ref{}, err
	}
	if err := printable(top); err != nil {
		return Ref{}, err
	}
	ref := Ref{Key: "local:" + top, Slug: strings.TrimSuffix(filepath.Base(top), ".git"), Path: top}
	name, found, err := localRemote(ctx, top)
	if err != nil {
		return Ref{}, localError(top, err)
	}
	if name != "" {
		ref.Key, ref.Slug, ref.URL = found.Key, found.Slug, found.URL
	}
	return ref, nil
}

// topLevel returns the root of the work tree that contains dir, or the bare
// repository.
func topLevel(ctx context.Context, dir string) (string, error) {
	g := hostGit{dir: dir}
	out, err := g.output(ctx, "rev-parse", "--is-bare-repository", "--is-inside-work-tree", "--absolute-git-dir")
	if err != nil {
		return "", localError(dir, err)
	}
	lines := strings.SplitN(strings.TrimSuffix(out, "\n"), "\n", 3)
	switch {
	case len(lines) != 3:
		return "", fail.New(fail.Failure, "inspect %s: git printed no path", echo(dir))
	case lines[0] == "true":
		return filepath.EvalSymlinks(lines[2])
	case lines[1] != "true":
		return "", fail.New(fail.Usage, "%s is inside a repository's .git directory", echo(dir)).WithHint("cd ..")
	}
	if out, err = g.output(ctx, "rev-parse", "--show-toplevel"); err != nil {
		return "", localError(dir, err)
	}
	return filepath.EvalSymlinks(strings.TrimSuffix(out, "\n"))
}

// localError explains why git failed in a local directory.
func localError(dir string, err error) error {
	ge, ok := errors.AsType[*gitError](err)
	switch {
	case !ok:
		return err
	case strings.Contains(ge.stderr, "dubious ownership"):
		return fail.New(fail.Host, "%s belongs to another user, and git does not trust it", echo(dir)).
			WithHint("git config --global --add safe.directory %s", dir)
	case strings.Contains(ge.stderr, "not a git repository"):
		return fail.New(fail.NotFound, "%s is not a git repository", echo(dir)).WithHint("git -C %s init", dir)
	}
	return fail.New(fail.Failure, "inspect %s: %w", echo(dir), err)
}

// localRemote returns the name and address of a local clone's remote, which is origin or
// the only one. The name is "" if a guest could not reach it. The address leaves out the
// credentials of an https URL.
func localRemote(ctx context.Context, dir string) (string, Ref, error) {
	g := hostGit{dir: dir}
	out, err := g.output(ctx, "remote")
	if err != nil {
		return "", Ref{}, err
	}
	names := strings.Fields(out)
	name := ""
	for _, n := range names {
		if n == "origin" || len(names) == 1 {
			name = n
		}
	}
	if name == "" || !validRefName(name) {
		return "", Ref{}, nil
	}
	raw, err := g.query(ctx, "config", "--get", "remote."+name+".url")
	if err != nil || raw == "" {
		return "", Ref{}, err
	}
	if ref, ok := remoteRef(raw); ok {
		return name, ref, nil
	}
	// The URL may be one of the user's abbreviations (url.*.insteadOf).
	g.user = true
	if raw, err = g.output(ctx, "remote", "get-url", name); err != nil {
		return "", Ref{}, err
	}
	if ref, ok := remoteRef(raw); ok {
		return name, ref, nil
	}
	return "", Ref{}, nil
}

func remoteRef(raw string) (Ref, bool) {
	raw = strings.TrimSpace(raw)
	if !strings.Contains(raw, ":") || strings.HasPrefix(raw, "file:") || strings.HasPrefix(raw, "/") {
		return Ref{}, false
	}
	if u, err := url.Parse(raw); err == nil && u.Scheme == "https" && u.User != nil {
		u.User = nil
		raw = u.String()
	}
	ref, err := Parse(raw, "/")
	return ref, err == nil
}
