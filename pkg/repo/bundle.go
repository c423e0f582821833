package repo

import (
	"context"
	"fmt"
	"io"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// Bundle writes one branch of a session's fetched work to w, without the history of base, as a
// bundle of at most limit bytes. It returns fail.NotFound if the branch has no commits of its own.
func Bundle(ctx context.Context, w io.Writer, from Target, session, branch, base string, limit int64) error {
	targets, err := openTargets(ctx, session, from.localExists())
	if err != nil {
		return err
	}
	t := targets[0]
	name := t.prefix + "heads/" + branch
	if tip := t.refs[name]; tip == "" || tip == base {
		return fail.New(fail.NotFound, "branch %s has no commits of its own", clip(branch))
	}
	args := []string{"bundle", "create", "--quiet", "-", name}
	if objectID.MatchString(base) {
		args = append(args, "^"+base)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := &pipe.Writer{W: w, Left: limit, Full: cancel}
	g := t.git
	g.stdout = out
	err = g.run(ctx, args...)
	if out.Over {
		return fail.New(fail.Conflict, "the commits of branch %s are larger than %d MiB", clip(branch), limit>>20)
	}
	if err != nil {
		return fmt.Errorf("pack branch %s: %w", clip(branch), err)
	}
	return nil
}
