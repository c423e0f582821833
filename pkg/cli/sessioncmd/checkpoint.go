package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
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

// NewCheckpointCmd returns the command that creates a checkpoint.
func NewCheckpointCmd(a *app.App) *cobra.Command {
	var o checkpointOptions
	cmd := &cobra.Command{
		Use: "checkpoint SESSION [NAME]", Short: "Create a checkpoint of a running session",
		Long: `Create a checkpoint of a running session: its disk and its memory, with all programs. The
session keeps running. "restore" returns to the checkpoint. On macOS (vz), a checkpoint
contains only the disk.

NAME defaults to the lowest free number.`,
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
	c, err := withStep(a, "create a checkpoint", func() (session.Checkpoint, error) { return ops.CreateCheckpoint.On(ctx, h, r) })
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(c)
	}
	pause := ""
	if c.Memory {
		pause = fmt.Sprintf("; the session was paused for %d ms", c.Pause)
	}
	a.Con.Say("%s: checkpoint %s contains %s (%s)%s", s.Name, c.Name, contents(c), measure.Size(c.Size).Human(), pause)
	if c.Secrets {
		a.Con.Warn("the checkpoint contains secrets (guest: true)")
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
	switch {
	case c.State != session.CheckpointComplete:
		return "-"
	case c.Memory:
		return "disk and memory"
	}
	return "disk"
}

// NewCheckpointsCmd returns the command that lists and removes checkpoints.
func NewCheckpointsCmd(a *app.App) *cobra.Command {
	var o checkpointOptions
	cmd := &cobra.Command{
		Use: "checkpoints SESSION", Short: "List or remove the checkpoints of a session",
		Long: `List or remove the checkpoints of a session. SIZE is the space that the checkpoint took
when it was created. A pending checkpoint is still being written.`,
		Example: `  agent-sessionizer checkpoints repo
  agent-sessionizer checkpoints repo --remove 1`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runCheckpoints(cmd.Context(), a, o, args[0]) },
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print the checkpoints as JSON")
	cmd.Flags().StringArrayVar(&o.remove, "remove", nil, "`NAME` of a checkpoint to remove; repeatable")
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
			a.Con.Say("%s has no checkpoints; create one with: agent-sessionizer checkpoint %s", s.Name, s.Name)
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
			note = "contains secrets (guest: true)"
		}
		rows = append(rows, []string{c.Name, console.Ago(c.CreatedAt), string(c.State), contents(c), measure.Size(c.Size).Human(), cmp.Or(note, "-")})
	}
	a.Con.Table([]string{"NAME", "AGE", "STATE", "CONTENTS", "SIZE", "NOTE"}, rows)
	return nil
}

type restoreOptions struct{ json bool }

// NewRestoreCmd returns the command that returns to a checkpoint.
func NewRestoreCmd(a *app.App) *cobra.Command {
	var o restoreOptions
	cmd := &cobra.Command{
		Use: "restore SESSION CHECKPOINT", Short: "Return a session to one of its checkpoints",
		Long: `Return a session to one of its checkpoints. Its programs continue from that point, if the
checkpoint contains memory that this host can resume; otherwise the VM boots from the
checkpoint's disk. Network connections are closed. A stopped session is started.

Before that, the current state is saved as the checkpoint "before-restore", so that you
can undo the restore. An older "before-restore" is removed.`,
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
			case now.State == session.Broken:
				return now, app.Broken(now)
			case now.Desired != session.Ready && session.AtRest(now.State, now.Desired) && now.RestoreError == nil:
				return now, fail.New(fail.Conflict, "session %s is %s", now.Name, now.State).WithHint("agent-sessionizer list")
			case now.Restoring != "":
			case now.RestoreError != nil:
				e := fail.New(fail.ParseCode(now.RestoreError.Code), "%s", now.RestoreError.Message)
				e.Hint = now.RestoreError.Hint
				return now, e
			case now.State == session.Ready:
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
	what = "is at checkpoint " + name
	if !s.Resumed {
		what = "has booted from the disk of checkpoint " + name + ", without its programs"
	}
	a.Con.Say("%s %s; to undo this: agent-sessionizer restore %s %s", s.Name, what, s.Name, session.BeforeRestore)
	return nil
}
