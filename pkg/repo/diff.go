package repo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// DiffOptions controls how a difference is shown.
type DiffOptions struct {
	Stat     bool  // files and the amount of change in each
	NameOnly bool  // names of changed files
	Width    int   // of --stat, 0 for 80
	Color    bool  // our own colours; the guest's never pass
	MaxBytes int64 // of output; 0 for 256 MiB, for Compare 16 MiB
}

// Diff writes the changes in the guest since base, including uncommitted and
// untracked files, without modifying the guest's index. It makes the guest's output
// safe for a terminal by escaping control and invisible characters.
func Diff(ctx context.Context, g Guest, dir string, base Base, opts DiffOptions, w io.Writer) error {
	args := []string{"--patch"}
	switch {
	case opts.NameOnly:
		args = []string{"--name-only"}
	case opts.Stat:
		args = []string{"--stat=" + strconv.Itoa(max(opts.Width, 80))}
	}
	printed := newPrinter(w, opts.Color && !opts.Stat && !opts.NameOnly)
	err := opts.compare(ctx, g, dir, base, args, printed)
	flushErr := printed.close()
	if printed.err != nil { // the reader is gone, which caused the other errors
		return printed.err
	}
	return errors.Join(err, flushErr)
}

// compare writes git's difference in the format that args select, without escaping
// it.
func (o DiffOptions) compare(ctx context.Context, g Guest, dir string, base Base, args []string, w io.Writer) error {
	if err := checkDir(dir); err != nil {
		return err
	}
	if base.Commit != "" && !objectID.MatchString(base.Commit) {
		return fail.New(fail.Usage, "base must be a commit, got %q", clip(base.Commit)).WithHint("agent-sessionizer list --json")
	}
	limit := o.MaxBytes
	if limit <= 0 {
		limit = 256 << 20
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	tooMuch := fail.New(fail.Conflict, "the diff is larger than %d bytes; the rest is not shown", limit).
		WithHint("agent-sessionizer diff --stat SESSION")
	in := &pipe.Writer{W: w, Left: limit, Full: func() { cancel(tooMuch) }}
	stderr := &tailBuffer{keep: maxText}
	err := g.Run(ctx, command(diffScript, append([]string{dir, base.Commit}, args...)...), ssh.IO{Stdout: in, Stderr: stderr})
	switch {
	case in.Over:
		return tooMuch
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("compare the guest's work: %w", guestError(err, stderr))
	}
	return nil
}
