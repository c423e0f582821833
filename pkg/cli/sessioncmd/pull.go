package sessioncmd

import (
	"context"
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/review/screen"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// reviewing is a review and what it needs of this host.
type reviewing struct {
	a     *app.App
	host  ops.Host
	work  *review.Work
	pulls review.Pulls
}

// pullsOf opens pull requests for a session's repository, from a clone.
func pullsOf(e ops.Engine, s session.View, clone string) review.Pulls {
	return review.Pulls{Clone: clone, Key: s.RepoKey, Base: s.Base.Branch, Token: func(ctx context.Context, host string) (secret.Value, error) {
		return e.PullToken(ctx, s, host)
	}}
}

// showScreen runs the terminal interface.
func (r reviewing) showScreen(ctx context.Context) error {
	return screen.Run(ctx, screen.Options{
		Work: r.work, In: os.Stdin, Out: os.Stdout, Env: os.Environ(),
		Send: func(ctx context.Context, to review.Source, prompt string) error {
			return sendPrompt(ctx, r.host, to, prompt)
		},
		CheckPull:  r.pulls.Check,
		CreatePull: func(ctx context.Context, done review.Landed) (string, error) { return r.pulls.Create(ctx, done, nil) },
	})
}

// openTool runs the user's merge tool on the terminal.
func (r reviewing) openTool(ctx context.Context, c review.Conflict) (review.Resolution, error) {
	return r.work.MergeTool(ctx, c, review.Terminal{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
}

// openPull opens a pull request for what landed, and shows the progress of the push.
func (r reviewing) openPull(ctx context.Context, done review.Landed) (string, error) {
	steps := r.a.Con.Steps()
	defer steps.Close()
	return r.pulls.Create(ctx, done, func(msg string) {
		steps.Update(console.Step{Name: "push", State: console.Progress, Detail: msg})
	})
}
