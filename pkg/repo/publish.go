package repo

import (
	"context"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Remote returns the remote of a clone that is the repository with that key.
func Remote(ctx context.Context, clone, key string) (name string, ref Ref, err error) {
	name, ref, err = localRemote(ctx, clone)
	if err != nil {
		return "", Ref{}, localError(clone, err)
	}
	if name == "" {
		return "", Ref{}, fail.New(fail.Conflict, "%s has no remote to push to", echo(clone)).WithHint("git -C %s remote -v", ssh.Quote(clone))
	}
	g := hostGit{dir: clone, user: true}
	to, err := g.output(ctx, "remote", "get-url", "--push", "--all", name)
	if err != nil {
		return "", Ref{}, localError(clone, err)
	}
	for url := range strings.Lines(to) {
		if at, ok := remoteRef(url); ref.Key != key || !ok || at.Key != key {
			return "", Ref{}, fail.New(fail.Conflict, "the remote %s of %s is not the session's repository %s", name, echo(clone), clip(key)).
				WithHint("git -C %s remote -v", ssh.Quote(clone))
		}
	}
	return name, ref, nil
}

// DefaultBranch returns the branch that the clone knows as its remote's default, or "".
func DefaultBranch(ctx context.Context, clone, remote string) (string, error) {
	out, err := hostGit{dir: clone}.query(ctx, "symbolic-ref", "--quiet", "refs/remotes/"+remote+"/HEAD")
	return strings.TrimPrefix(strings.TrimSpace(out), "refs/remotes/"+remote+"/"), err
}

// PushBranch pushes a commit to a branch of a clone's remote. It never overwrites commits there,
// runs no hooks, and pushes nothing else.
func PushBranch(ctx context.Context, clone, remote, branch, commit string, p Progress) error {
	if !ValidBranch(branch) || !objectID.MatchString(commit) {
		return fail.New(fail.Usage, "invalid branch name %q", clip(branch)).WithHint("agent-sessionizer review --pr --branch NAME SESSION")
	}
	g := hostGit{dir: clone, network: true, progress: p}
	err := g.run(ctx, "-c", "push.followTags=false", "-c", "push.gpgSign=false", "push", "--progress", "--no-follow-tags", "--recurse-submodules=no", "--no-verify",
		"--no-mirror", "--", remote, commit+":refs/heads/"+branch)
	if err != nil {
		return fail.New(fail.Failure, "push branch %s: %w", branch, err).WithHint("git -C %s push %s %s", ssh.Quote(clone), remote, branch)
	}
	return nil
}
