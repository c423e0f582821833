package sessioncmd

import (
	"cmp"
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type checkpointOptions struct {
	json   bool
	remove []string
}

// NewCheckpointCmd returns the command that keeps the present state of a session.
func NewCheckpointCmd(a *app.App) *cobra.Command {
	var o checkpointOptions
	cmd := &cobra.Command{
		Use: "checkpoint SESSION [NAME]", Short: "Keep the present state of a running session",
		Long: `Keep the present state of a running session: its disk, its memory and its running
programs. The session goes on. "restore" returns to the checkpoint. On macOS (vz), a
checkpoint has the disk alone.

Without a NAME, the checkpoint gets a number.`,
		Example: `  agent-sessionizer checkpoint repo
  agent-sessionizer checkpoint repo before-refactoring`,
		Args: app.Usage(cobra.RangeArgs(1, 2)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready)),
		RunE: func(cmd *cobra.Command, args []string) error { return runCheckpoint(cmd.Context(), a, o, args) },
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the checkpoint as JSON")
	return cmd
}

func runCheckpoint(ctx context.Context, a *app.App, o checkpointOptions, args []string) error {
	h, s, err := app.Named(ctx, a, args[0])
	if err != nil {
		return err
	}
	r := ops.CheckpointRequest{SessionPath: ops.SessionPath{ID: s.ID}}
	if len(args) == 2 {
		r.Body.Name = args[1]
	}
	c, err := withStep(a, "keep a checkpoint", func() (session.Checkpoint, error) { return ops.CreateCheckpoint.On(ctx, h, r) })
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(c)
	}
	a.Con.Say("%s: checkpoint %s has %s (%s); it paused the session for %d ms", s.Name, c.Name, contents(c), measure.Size(c.Size).Human(), c.Pause)
	if c.Secrets {
		a.Con.Warn("its memory has the secrets that the settings put into the guest (guest: true)")
	}
	return nil
}

// withStep shows a step while f runs.
func withStep[T any](a *app.App, name string, f func() (T, error)) (T, error) {
	view := a.Con.Steps()
	defer view.Close()
	began := time.Now()
	step := console.Step{Name: name, State: console.Start}
	view.Update(step)
	v, err := f()
	if step.State, step.Elapsed = console.Done, time.Since(began); err != nil {
		step.State = console.Failed
	}
	view.Update(step)
	return v, err
}

func contents(c session.Checkpoint) string {
	if c.Memory {
		return "disk and memory"
	}
	return "the disk"
}

// NewCheckpointsCmd returns the command that lists and removes checkpoints.
func NewCheckpointsCmd(a *app.App) *cobra.Command {
	var o checkpointOptions
	cmd := &cobra.Command{
		Use: "checkpoints SESSION", Short: "List or remove the checkpoints of a session",
		Example: `  agent-sessionizer checkpoints repo
  agent-sessionizer checkpoints repo --remove 1`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runCheckpoints(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the checkpoints as JSON")
	cmd.Flags().StringArrayVar(&o.remove, "remove", nil, "remove the checkpoint of this name; repeatable")
	return cmd
}

func runCheckpoints(ctx context.Context, a *app.App, o checkpointOptions, what string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	at := ops.SessionPath{ID: s.ID}
	for _, name := range o.remove {
		if _, err := ops.RemoveCheckpoint.On(ctx, h, ops.CheckpointPath{SessionPath: at, Name: name}); err != nil {
			return err
		}
	}
	l, err := ops.ListCheckpoints.On(ctx, h, at)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(l.Checkpoints)
	}
	if len(l.Checkpoints) == 0 {
		if len(o.remove) == 0 {
			a.Con.Say("%s has no checkpoints; make one with: agent-sessionizer checkpoint %s", s.Name, s.Name)
		}
		return nil
	}
	var rows [][]string
	for _, c := range l.Checkpoints {
		note := ""
		switch {
		case c.Error != nil:
			note = c.Error.Message
		case c.Secrets:
			note = "with the guest's secrets"
		}
		rows = append(rows, []string{c.Name, console.Ago(c.CreatedAt), string(c.State), contents(c), measure.Size(c.Size).Human(), cmp.Or(note, "-")})
	}
	a.Con.Table([]string{"NAME", "AGE", "STATE", "HAS", "SIZE", "NOTE"}, rows)
	return nil
}

type restoreOptions struct{ json bool }

// NewRestoreCmd returns the command that returns to a checkpoint.
func NewRestoreCmd(a *app.App) *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use: "restore SESSION CHECKPOINT", Short: "Return a session to one of its checkpoints",
		Long: `Return a session to one of its checkpoints. Its programs continue where they were then.
Their network connections have ended, and the clock is set.

What the session is now is kept as the checkpoint "before-restore", so that you can undo
this. A second restore replaces that checkpoint.`,
		Example: `  agent-sessionizer restore repo 1
  agent-sessionizer restore repo before-restore    undo the restore`,
		Args: app.Usage(cobra.ExactArgs(2)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready, session.Stopped), complete.Checkpoints(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runRestore(cmd.Context(), a, o, args[0], args[1])
		},
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the session as JSON")
	return cmd
}

func runRestore(ctx context.Context, a *app.App, o restoreOptions, what, name string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	at := ops.SessionPath{ID: s.ID}
	if _, err = ops.RestoreCheckpoint.On(ctx, h, ops.CheckpointPath{SessionPath: at, Name: name}); err != nil {
		return err
	}
	s, err = withStep(a, "restore the checkpoint", func() (session.View, error) {
		for n := 1; ; n++ {
			now, err := ops.GetSession.On(ctx, h, at)
			if err == nil && n%5 == 0 { // its keeper may have died
				_, err = ops.TendSession.On(ctx, h, at)
			}
			switch {
			case err != nil:
				return now, err
			case now.Restoring != "" || now.State != session.Ready && now.State != session.Broken && now.Desired == session.Ready:
			case now.RestoreError != nil:
				e := fail.New(fail.ParseCode(now.RestoreError.Code), "%s", now.RestoreError.Message)
				e.Hint = now.RestoreError.Hint
				return now, e
			case now.State == session.Broken:
				return now, app.Broken(now)
			case now.State != session.Ready:
				return now, fail.New(fail.Conflict, "session %s is %s", now.Name, now.State).WithHint("agent-sessionizer list")
			default:
				return now, nil
			}
			select {
			case <-ctx.Done():
				return now, app.DetachedError(now)
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(s)
	}
	a.Con.Say("%s is at checkpoint %s; to undo this: agent-sessionizer restore %s %s", s.Name, name, s.Name, session.BeforeRestore)
	return nil
}
