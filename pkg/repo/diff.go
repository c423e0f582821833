package repo

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// DiffOptions says how a difference is shown.
type DiffOptions struct {
	Stat     bool  // files and how much of each changed
	NameOnly bool  // names of changed files
	Width    int   // of --stat, 0 for 80
	Color    bool  // colours of our own; the guest's never pass
	MaxBytes int64 // that are shown; 0 for 256 MiB
}

// Diff writes what changed in the guest since base, including uncommitted and
// untracked files, without disturbing the guest's index. What the guest sends
// is made safe for a terminal: control and invisible characters are spelled out.
func Diff(ctx context.Context, g Guest, dir string, base Base, opts DiffOptions, w io.Writer) error {
	if err := checkDir(dir); err != nil {
		return err
	}
	if base.Commit != "" && !objectID.MatchString(base.Commit) {
		return fail.New(fail.Usage, "%q is not a commit", clip(base.Commit)).WithHint("agent-sessionizer list --json")
	}
	args := []string{dir, base.Commit}
	switch {
	case opts.NameOnly:
		args = append(args, "--name-only")
	case opts.Stat:
		args = append(args, "--stat="+strconv.Itoa(max(opts.Width, 80)))
	default:
		args = append(args, "--patch")
	}
	limit := opts.MaxBytes
	if limit <= 0 {
		limit = 256 << 20
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tooMuch := fail.New(fail.Conflict, "the difference is larger than %d bytes; the rest is not shown", limit).
		WithHint("agent-sessionizer diff --stat SESSION")
	printed := newPrinter(w, opts.Color && !opts.Stat && !opts.NameOnly)
	in := &counted{w: printed, left: limit, full: func() { cancel(tooMuch) }}
	said := &tail{keep: maxText}
	err := g.Run(ctx, command(diffScript, args...), ssh.IO{Stdout: in, Stderr: said})
	flushErr := printed.close()
	switch {
	case in.over:
		return tooMuch
	case printed.err != nil:
		return printed.err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("compare the guest's work: %w", guestError(err, said))
	}
	return flushErr
}
