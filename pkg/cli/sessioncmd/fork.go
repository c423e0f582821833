package sessioncmd

import (
	"context"
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

type forkOptions struct {
	count        int
	label        string
	detach, json bool
	given        []string // the flags given, for hints that repeat them
}

// NewForkCmd returns the command that creates sessions from a session.
func NewForkCmd(a *app.App) *cobra.Command {
	var o forkOptions
	cmd := &cobra.Command{
		Use: "fork SESSION[@CHECKPOINT]", Short: "Fork a session or one of its checkpoints",
		Long: `Create sessions that continue from the current state of a running session, or from one of
its checkpoints. The original keeps running. A fork starts with the original's files and
programs, and has its own VM, network gateway and token. Secrets are resolved again.
Network connections are closed. If the memory cannot be resumed, or the checkpoint has
none, as on macOS (vz), the fork boots from the disk.

A fork is another session of the repository. Without --label, it gets its session's label
and the next free number: owner/repo@2, or owner/repo@dev-2. With --label, one fork gets
exactly LABEL; several forks get LABEL, LABEL-2, …

By default, the command attaches to the fork. With -d or with several forks, it waits
until all are ready and prints their names.`,
		Example: `  agent-sessionizer fork repo
  agent-sessionizer fork repo@before-refactoring --label other-way
  agent-sessionizer fork repo -n 3`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Forkable(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.given = app.ChangedFlags(cmd)
			return runFork(cmd.Context(), a, o, args[0])
		},
	}
	cmd.Flags().IntVarP(&o.count, "number", "n", 1, "number `N` of forks, 1 to 16")
	cmd.Flags().StringVar(&o.label, "label", "", "`LABEL` of the fork (default the session's label and a number)")
	cmd.Flags().BoolVarP(&o.detach, "detach", "d", false, "do not attach; wait until the fork is ready")
	cmd.Flags().BoolVar(&o.json, "json", false, "print the forks as JSON when they are ready (implies -d)")
	return cmd
}

func runFork(ctx context.Context, a *app.App, o forkOptions, what string) error {
	if o.count < 1 || o.count > session.MaxForks {
		return fail.New(fail.Usage, "--number must be from 1 to %d, got %d", session.MaxForks, o.count)
	}
	h, s, checkpoint, err := findCheckpoint(ctx, a, what)
	if err != nil {
		return err
	}
	attach := !o.detach && !o.json && o.count == 1
	if attach {
		if err := (tmux.Client{}).Check(ctx); err != nil {
			return err
		}
		if !app.Interactive() {
			return fail.New(fail.Usage, "attach to the fork: no terminal").WithHint("agent-sessionizer fork %s", ssh.Quote(append(o.given, "-d", what)...))
		}
	}
	r := ops.ForkRequest{SessionPath: ops.SessionPath{ID: s.ID}}
	r.Body.Checkpoint, r.Body.Label, r.Body.Count = checkpoint, o.label, o.count
	step := "save the session's state"
	if checkpoint != "" {
		step = "read the checkpoint"
	}
	list, err := withStep(a, step, func() (ops.SessionList, error) { return ops.ForkSession.On(ctx, h, r) })
	if err != nil {
		return err
	}
	if attach {
		return attachLocal(ctx, a, h, list.Sessions[0], "")
	}
	var errs []error
	for i, f := range list.Sessions {
		f, err := app.Follow(ctx, a, h, f, session.Ready)
		errs = append(errs, err)
		if f.ID != "" {
			list.Sessions[i] = f
		}
		if err == nil && !o.json {
			a.Printf("%s\n", f.Name)
		}
	}
	if o.json {
		errs = append(errs, a.Con.JSON(list.Sessions))
	}
	return errors.Join(errs...)
}

// findCheckpoint finds a session, or the session and the checkpoint that follows the last "@".
func findCheckpoint(ctx context.Context, a *app.App, what string) (h ops.Host, s session.View, checkpoint string, err error) {
	h, s, err = app.Named(ctx, a, what)
	if err != nil && fail.CodeOf(err) != fail.NotFound {
		return h, s, "", err
	}
	at := strings.LastIndexByte(what, '@')
	if at < 1 {
		return h, s, "", err
	}
	h, other, otherErr := app.Named(ctx, a, what[:at])
	switch {
	case err != nil && otherErr != nil && fail.CodeOf(otherErr) != fail.NotFound: // such as an ambiguous name
		return h, s, "", otherErr
	case otherErr != nil, other.ID == s.ID:
		return h, s, "", err
	}
	list, otherErr := ops.ListCheckpoints.On(ctx, h, ops.SessionPath{ID: other.ID})
	if otherErr != nil {
		return h, s, "", otherErr
	}
	for _, c := range list.Checkpoints {
		switch {
		case c.Name != what[at+1:]:
		case err == nil:
			return h, s, "", fail.New(fail.Usage, "%q is ambiguous: it names session %s and a checkpoint of session %s", what, s.Name, other.Name).
				WithHint("agent-sessionizer fork %s, or: agent-sessionizer fork %s", s.Name, ssh.Quote(other.Name+"@"+c.Name))
		default:
			return h, other, c.Name, nil
		}
	}
	if err != nil {
		err = fail.New(fail.NotFound, "no session %q, and session %s has no checkpoint %s", what, other.Name, ssh.Quote(what[at+1:])).WithHint("agent-sessionizer checkpoints %s", other.Name)
	}
	return h, s, "", err
}
