package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// AbsoluteImage makes a relative image path from the command line absolute. "" stays "".
func AbsoluteImage(text string) (string, error) {
	if text == "" {
		return "", nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find working directory: %w", err)
	}
	ref, err := config.ParseImageRef(text, dir)
	return ref.String(), err
}

// NotRepoError is the error for a word that is neither a session nor a repository.
type NotRepoError struct{ error }

func (e NotRepoError) Unwrap() error { return e.error }

// ResolveRepo finds a session by name, id or repository. If what is a repository without a
// session, ResolveRepo returns the repository in ref, with a fail.NotFound error.
func ResolveRepo(ctx context.Context, h ops.Host, what string) (s session.View, ref repo.Ref, err error) {
	s, findErr := ops.FindSession.On(ctx, h, ops.FindRequest{Name: what})
	if fail.CodeOf(findErr) != fail.NotFound {
		ref, _ = repo.ParseRemote(what)
		return s, ref, findErr
	}
	if ref, err = ParseRepo(what); err != nil || ref.Branch != "" {
		return s, ref, cmp.Or(err, findErr)
	}
	s, err = ops.FindSession.On(ctx, h, ops.FindRequest{Name: ref.Key})
	return s, ref, err
}

// ParseRepo parses a repository that the user named, possibly by a path.
func ParseRepo(what string) (repo.Ref, error) {
	cwd, err := os.Getwd()
	if err != nil {
		return repo.Ref{}, fail.New(fail.Host, "find working directory: %w", err)
	}
	ref, err := repo.Parse(what, cwd)
	if err != nil {
		return repo.Ref{}, NotRepoError{err}
	}
	return ref, nil
}

// FindSession finds a session by name, id, repository or the path of a local clone.
func FindSession(ctx context.Context, h ops.Host, what string) (session.View, error) {
	return findSession(ctx, h, ops.FindRequest{Name: what})
}

// FindExact finds a session as FindSession does, but never guesses the label. It also finds
// a session that is gone.
func FindExact(ctx context.Context, h ops.Host, what string) (session.View, error) {
	return findSession(ctx, h, ops.FindRequest{Name: what, Gone: true})
}

func findSession(ctx context.Context, h ops.Host, r ops.FindRequest) (session.View, error) {
	s, err := ops.FindSession.On(ctx, h, r)
	if fail.CodeOf(err) == fail.NotFound && (strings.HasPrefix(r.Name, ".") || filepath.IsAbs(r.Name)) {
		if ref, perr := ParseRepo(r.Name); perr == nil {
			r.Name = ref.Key
			return ops.FindSession.On(ctx, h, r)
		}
	}
	return s, err
}

// preflight reports immediately what would otherwise fail a minute later. The architecture is
// that of the VM.
func (a *App) preflight(ctx context.Context, arch string) error {
	driver, err := a.Driver(QuietLog())
	if err != nil {
		return err
	}
	return CanRun(ctx, driver, arch)
}

// CanRun returns what the host lacks to run VMs of an architecture, or nil.
func CanRun(ctx context.Context, driver vm.Driver, arch string) error {
	errs := driver.Check(ctx, arch)
	switch {
	case len(errs) == 0:
		return nil
	case len(errs) == 1 || arch != vm.HostArch(): // doctor checks the host's architecture only
		return errs[0]
	}
	return fail.New(fail.Host, "%w", errors.Join(errs...)).WithHint("agent-sessionizer doctor")
}

// Named finds the session for commands that do not need a running VM.
func Named(ctx context.Context, a *App, what string) (ops.Host, session.View, error) {
	h, err := a.Host(ctx)
	if err != nil {
		return nil, session.View{}, err
	}
	return a.Find(ctx, h, what, false)
}

// Running finds a session and ensures that it accepts logins. It waits for a session that
// is being created or started, but does not start a stopped one without the user's request.
func Running(ctx context.Context, a *App, what string) (ops.Host, session.View, error) {
	h, s, err := Named(ctx, a, what)
	if err != nil {
		return nil, s, err
	}
	switch {
	case s.State == session.Ready:
	case s.Desired == session.Ready && (s.State == session.Creating || s.State == session.Starting):
		s, err = Follow(ctx, a, h, s, session.Ready)
	case s.State == session.Broken && s.Reachable:
		a.Con.Say("%s", s.Name+" is broken: "+s.Message())
	default:
		err = fail.New(fail.Conflict, "session %s is %s", s.Name, s.State).WithHint("agent-sessionizer start %s", s.Name)
	}
	return h, s, err
}

// RepoKey parses --repo, in the syntax of the settings files or of open.
func RepoKey(what string) (config.RepoKey, error) {
	if key, ok := config.ParseRepoKey(what); ok || what == "" {
		return key, nil
	}
	ref, err := ParseRepo(what)
	return config.RepoKey(ref.Key), err
}
