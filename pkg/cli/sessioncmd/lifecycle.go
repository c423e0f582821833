package sessioncmd

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type startOptions struct{ json bool }

func NewStartCmd(a *app.App) *cobra.Command {
	var o startOptions
	cmd := &cobra.Command{
		Use: "start SESSION", Short: "Start a stopped or broken session without attaching",
		Example: `  agent-sessionizer start repo`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Stopped, session.Stopping, session.Broken)),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			h, s, err := app.Named(ctx, a, args[0])
			if err != nil {
				return err
			}
			if s, err = ops.StartSession.On(ctx, h, ops.SessionPath{ID: s.ID}); err != nil {
				return err
			}
			if s, err = app.Follow(ctx, a, h, s, session.Ready); err != nil {
				return err
			}
			if o.json {
				return a.Con.JSON(s)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the session as JSON")
	return cmd
}

// StopOptions are the flags of stop.
type StopOptions struct{ suspend bool }

func NewStopCmd(a *app.App) *cobra.Command {
	var o StopOptions
	cmd := &cobra.Command{
		Use: "stop SESSION…", Short: "Shut down sessions and keep their disks",
		Long: `Shut down sessions and keep their disks. This frees their memory. "start" or "open"
continues with what is on the disk.

With --suspend, the memory of a running session is saved, too, and all programs resume
at the next start. Where that fails, the session is stopped, with a warning.`,
		Example: `  agent-sessionizer stop repo
  agent-sessionizer stop owner/repo owner/other
  agent-sessionizer stop --suspend repo`,
		Args:              app.Usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: complete.Many(complete.Sessions(a, session.Ready, session.Creating, session.Starting, session.Broken)),
		RunE:              func(cmd *cobra.Command, args []string) error { return RunStop(cmd.Context(), a, o, args) },
	}
	cmd.Flags().BoolVar(&o.suspend, "suspend", false, "save the memory, too, so that programs resume at the next start (QEMU only)")
	return cmd
}

// RunStop stops the sessions of those names.
func RunStop(ctx context.Context, a *app.App, o StopOptions, names []string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		h, s, err := a.Find(ctx, h, name, false)
		if err != nil {
			return err
		}
		if s, err = ops.StopSession.On(ctx, h, ops.StopRequest{SessionPath: ops.SessionPath{ID: s.ID}, Suspend: o.suspend}); err != nil {
			return err
		}
		if s, err = app.Follow(ctx, a, h, s, session.Stopped); err != nil {
			return err
		}
		if s.Suspended {
			a.Con.Say("%s", s.Name+" is suspended")
			continue
		}
		a.Con.Say("%s", s.Name+" is stopped")
	}
	return nil
}

// DestroyOptions are the flags of destroy.
type DestroyOptions struct {
	force   bool
	confirm bool
}

func NewDestroyCmd(a *app.App) *cobra.Command {
	var o DestroyOptions
	cmd := &cobra.Command{
		Use: "destroy SESSION…", Aliases: []string{"rm"}, Short: "Remove sessions and everything in them",
		Long: `Remove sessions: VM, disks, keys, locks and the local tmux session.

A session is not removed while it has uncommitted files, or commits that are neither
pushed nor fetched. The same applies while its unsaved work cannot be determined, and
while a task in it has not ended. The error names the command that saves the work.`,
		Example: `  agent-sessionizer destroy repo
  agent-sessionizer destroy --confirm repo    list the work that would be lost, and ask
  agent-sessionizer destroy --force repo`,
		Args: app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: complete.Many(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return RunDestroy(cmd.Context(), a, o, args) },
	}
	cmd.Flags().BoolVarP(&o.force, "force", "f", false, "destroy even if work would be lost")
	cmd.Flags().BoolVar(&o.confirm, "confirm", false, "list the work that would be lost, and ask for confirmation")
	return cmd
}

// RunDestroy destroys the sessions of those names.
func RunDestroy(ctx context.Context, a *app.App, o DestroyOptions, names []string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		h, s, err := a.Find(ctx, h, name, true)
		if err != nil {
			return err
		}
		if s.State == session.Gone {
			a.Con.Say("%s", name+" is gone already")
			continue
		}
		if o.confirm && !o.force && s.State != session.Destroying {
			if err := confirmLosingWork(ctx, a, h, s); err != nil {
				return err
			}
		}
		if _, err = ops.DestroySession.On(ctx, h, ops.DestroyRequest{SessionPath: ops.SessionPath{ID: s.ID}, Force: o.force || o.confirm}); err != nil {
			return err
		}
		if _, err = app.Follow(ctx, a, h, s, session.Gone); err != nil {
			return err
		}
		a.Con.Say("%s", s.Name+" is gone")
	}
	return nil
}

// confirmLosingWork asks before s is destroyed, with what that would lose.
func confirmLosingWork(ctx context.Context, a *app.App, h ops.Host, s session.View) error {
	lost, err := ops.GetUnsaved.On(ctx, h, ops.SessionPath{ID: s.ID})
	if err != nil {
		return err
	}
	ok, err := a.Con.Confirm(destroyQuestion(h, s, lost), "--force")
	if err != nil {
		return err
	}
	if !ok {
		return fail.New(fail.Interrupted, "%s was not destroyed", s.Name)
	}
	return nil
}

// destroyQuestion returns the question whether to destroy s on h, with what that would lose.
func destroyQuestion(h ops.Host, s session.View, lost ops.Unsaved) string {
	what := cmp.Or(lost.What, "nothing; everything is pushed or fetched")
	return fmt.Sprintf("Destroy %s (%s)? It would lose: %s.", app.NameOn(h, s.Name), s.DisplayName(), what)
}
