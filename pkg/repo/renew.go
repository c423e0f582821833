package repo

import (
	"bytes"
	"context"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Renewable reports whether a checkout of the source can be renewed later: it has commits, and is not
// shallow.
func (s Source) Renewable(ctx context.Context) (bool, error) {
	o, err := examine(ctx, s)
	return err == nil && o.kind != "empty" && o.shallow == "", err
}

// renewTime limits Renew, because the guest may not answer.
const renewTime = 20 * time.Minute

// Renew brings a checkout that an earlier Push made, perhaps in another guest, to what Push would
// make now. It sends only what the checkout lacks. Files that git does not track stay, such as
// installed dependencies; everything else that was changed since is lost.
func Renew(ctx context.Context, g Guest, src Source, dst Checkout, p Progress) (Base, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, renewTime, fail.New(fail.Timeout, "the checkout was not renewed within %v", renewTime))
	defer cancel()
	dir := path.Clean(dst.Dir)
	found, err := probeCheckout(ctx, g, dst)
	if err != nil {
		return Base{}, err
	}
	o, err := examine(ctx, src)
	if err != nil {
		return Base{}, err
	}
	if !found.done || o.kind == "empty" || o.shallow != "" {
		return Base{}, fail.New(fail.Conflict, "%s in the guest cannot be renewed", dir)
	}
	if src.NewBranch != "" {
		o.branch = src.NewBranch
	}
	p.report("copying new history into the guest")
	if err := sendNew(ctx, g, src, o, dir, p); err != nil {
		return Base{}, fmt.Errorf("renew the repository in the guest: %w", err)
	}
	if src.Dirty {
		p.report("copying uncommitted changes")
		if err := sendDirty(ctx, g, src.Dir, o.commit, dir); err != nil {
			return Base{}, fmt.Errorf("copy the uncommitted changes into the guest: %w", err)
		}
	}
	base := Base{Commit: o.commit, Branch: o.branch}
	base.Warnings = extras(ctx, g, dir, p)
	return base, context.Cause(ctx)
}

// sendNew sends the list of refs, and the history that the checkout lacks.
func sendNew(ctx context.Context, g Guest, src Source, o origin, dir string, p Progress) error {
	known, err := g.Output(ctx, command("cat -- \"$1\"", dir+"/.git/agent-sessionizer/known"), nil, maxReply)
	if err != nil {
		return err
	}
	git := hostGit{dir: src.Dir}
	among := []string{"refs/heads", "refs/tags"}
	if o.remote != "" {
		among = append(among, "refs/remotes/"+o.remote)
	}
	if sessionName.MatchString(src.Session) {
		among = append(among, "refs/agents/"+src.Session)
	}
	refs, err := git.output(ctx, append([]string{"for-each-ref", "--format=%(objectname) %(refname)"}, among...)...)
	if err != nil {
		return err
	}
	if o.branch == "" {
		refs += o.commit + " HEAD\n"
	}
	revs, err := revisions(ctx, git, refs, string(known))
	if err != nil {
		return err
	}
	stderr := &tailBuffer{keep: maxText}
	write := command("cat >\"$1\"", dir+"/.git/agent-sessionizer/refs")
	if err := guestError(g.Run(ctx, write, ssh.IO{Stdin: strings.NewReader(refs), Stderr: stderr}), stderr); err != nil {
		return err
	}
	git.stdin, git.progress = strings.NewReader(revs), p
	args := []string{"pack-objects", "--revs", "--thin", "--stdout", "--delta-base-offset", "--progress"}
	return pipeInto(ctx, g, git, args, command(renewScript+checkoutScript, dir, src.URL, o.kind, o.remote, o.branch, o.commit, o.head, o.format))
}

// revisions returns the input of pack-objects: everything that refs lists, without what the guest
// says that it has.
func revisions(ctx context.Context, git hostGit, refs, known string) (string, error) {
	var revs bytes.Buffer
	for line := range strings.Lines(refs) {
		id, _, _ := strings.Cut(line, " ")
		revs.WriteString(id + "\n")
	}
	var ids strings.Builder
	for _, id := range strings.Fields(known) {
		if objectID.MatchString(id) {
			ids.WriteString(id + "\n")
		}
	}
	git.stdin = strings.NewReader(ids.String())
	out, err := git.output(ctx, "cat-file", "--batch-check=%(objectname)")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(out) {
		if id := strings.TrimSpace(line); objectID.MatchString(id) { // otherwise the host no longer has it
			revs.WriteString("^" + id + "\n")
		}
	}
	return revs.String(), nil
}
