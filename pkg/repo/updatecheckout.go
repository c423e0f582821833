package repo

import (
	"context"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Updatable reports whether UpdateCheckout can bring a checkout to this source later: the source has
// commits, and is not shallow.
func (s Source) Updatable(ctx context.Context) (bool, error) {
	o, err := examine(ctx, s)
	return err == nil && o.kind != "empty" && o.shallow == "", err
}

// updateTime limits the transfer of an update, because the guest may not answer.
const updateTime = 20 * time.Minute

// UpdateCheckout makes the checkout of an earlier Push equal to that of a new one: it sends missing
// commits and resets tracked files. Untracked files stay; other changes are lost. It ignores uncommitted
// changes of the source.
func UpdateCheckout(ctx context.Context, g Guest, src Source, dst Checkout, p Progress) (Base, error) {
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
		return Base{}, fail.New(fail.Conflict, "update checkout %s in the guest: it is incomplete, or the source is empty or shallow", dir)
	}
	if src.NewBranch != "" {
		o.branch = src.NewBranch
	}
	p.report("copying new history into the guest")
	limited, cancel := context.WithTimeoutCause(ctx, updateTime, fail.New(fail.Timeout, "timed out after %v", updateTime))
	defer cancel()
	if err := sendNew(limited, g, src, o, dir, p); err != nil {
		return Base{}, fmt.Errorf("update the checkout in the guest: %w", err)
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
	refs, err := offered(ctx, git, src, o)
	if err != nil {
		return err
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
	return pipeGit(ctx, g, git, args, command(updateScript+checkoutScript, dir, src.URL, o.kind, o.remote, o.branch, o.commit, o.head, o.format))
}

// revisions returns the input of pack-objects that selects all objects in refs that the guest lacks.
func revisions(ctx context.Context, git hostGit, refs, known string) (string, error) {
	revs := tipsOf(refs)
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
			revs += "^" + id + "\n"
		}
	}
	return revs, nil
}
