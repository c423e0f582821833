// Package cli is the command line: it reads arguments, wires the other packages together,
// and turns errors into messages and exit codes. It is the only package that knows them
// all, and none of them knows it.
package cli

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/imagecmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/netcmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/servecmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/sessioncmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/setupcmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/taskcmd"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Main runs the command line in os.Args and returns the exit status.
func Main() int {
	postponeGC(time.Second)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &app.App{Con: console.New(os.Stdout, os.Stderr, os.Getenv), Redact: secret.NewRedactor()}
	defer a.Close()
	slog.SetDefault(a.Con.Logger(console.Log{Level: slog.LevelWarn, Redact: a.Redact})) // until the settings are loaded
	root := newRootCmd(a)
	err := root.ExecuteContext(app.WithTrace(ctx))
	return exitCode(ctx, a, err)
}

// youngGC is a percentage for debug.SetGCPercent at which a short command collects no garbage.
const youngGC = 400

// postponeGC makes collections of garbage rare until the process has run for d. Most commands end
// before, and one collection would take about a seventh of their time. A process that sets its own percentage
// keeps it.
func postponeGC(d time.Duration) {
	before := debug.SetGCPercent(youngGC)
	time.AfterFunc(d, func() {
		if now := debug.SetGCPercent(before); now != youngGC {
			debug.SetGCPercent(now)
		}
	})
}

// exitCode prints err, unless it needs no message, and returns the exit status. This is the
// only place where errors become messages and exit codes.
func exitCode(ctx context.Context, a *app.App, err error) int {
	if err == nil {
		return 0
	}
	if code, ok := errors.AsType[app.RemoteExit](err); ok {
		return int(code)
	}
	code := fail.CodeOf(err)
	switch {
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		code = fail.Interrupted
		if fail.HintOf(err) == "" {
			return int(code)
		}
	case errors.Is(err, context.DeadlineExceeded) && code == fail.Failure:
		code = fail.Timeout
	case errors.Is(err, ssh.ErrUnreachable) && fail.HintOf(err) == "":
		err = fail.New(code, "%w", err).WithHint("agent-sessionizer list")
	}
	if text := err.Error(); a.Redact.Redact(text) != text {
		err = fail.New(code, "%s", a.Redact.Redact(text)).WithHint("%s", a.Redact.Redact(fail.HintOf(err)))
	}
	a.Con.Fail(err)
	return int(code)
}

func newRootCmd(a *app.App) *cobra.Command {
	var o rootOptions
	cmd := &cobra.Command{
		Use:   "agent-sessionizer [REPO]",
		Short: "Give every coding agent its own virtual machine",
		Long: strings.TrimSpace(`
Give every coding agent its own virtual machine, one tmux key away.

REPO is owner/repo, a git URL, a local path or ".". Its session is opened, or created if
it does not exist. Without REPO the picker opens. In other commands, SESSION is a
session's name, the start of its id, or its repository. Results go to standard output,
everything else to standard error. Commands that show something have --json.`),
		Example: `  agent-sessionizer owner/repo            open or create the session of a GitHub repository
  agent-sessionizer .                     open the session of the current repository
  agent-sessionizer exec repo -- make     run a command in it
  agent-sessionizer fetch repo            fetch the agent's commits
  agent-sessionizer destroy repo          remove it; refuses if work would be lost`,
		Args:              oneRepo,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Version:           app.Version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		ValidArgsFunction: complete.Repos(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.open.Given = app.ChangedFlags(cmd)
			err := runRoot(cmd.Context(), a, o, args)
			if _, ok := errors.AsType[app.NotRepoError](err); ok {
				if hint := suggestCommand(cmd, args, o.open.Given...); hint != "" {
					return fail.New(fail.CodeOf(err), "%w", err).WithHint("%s", hint)
				}
			}
			return err
		},
	}
	cmd.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := app.ExclusiveFlags(cmd); err != nil {
			return err
		}
		return checkHost(a, cmd)
	}
	cmd.PersistentFlags().StringVar(&a.Chosen, "host", "", "`HOST` to work on: a context, a host of the cluster, ssh://[USER@]HOST, https://HOST:PORT, unix:///PATH or local")
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		hint := cmd.CommandPath() + " --help"
		if args := cmd.Flags().Args(); !cmd.HasParent() && len(args) > 0 { // arguments before the wrong flag
			hint = cmp.Or(suggestCommand(cmd, args[:1], "--help"), hint)
		}
		return fail.New(fail.Usage, "%w", err).WithHint("%s", hint)
	})
	f := cmd.Flags()
	f.BoolVar(&o.list, "list", false, "list sessions, like the list command")
	f.StringVar(&o.stop, "stop", "", "`REPO` whose session to stop, like the stop command")
	f.StringVar(&o.destroy, "destroy", "", "`REPO` whose session to destroy, like the destroy command")
	f.BoolVar(&o.open.JSON, "json", false, "print JSON, with --list or REPO")
	cmd.MarkFlagsMutuallyExclusive("list", "stop", "destroy")
	o.open.Flags(f)
	sessioncmd.AddClient(cmd, &o.open.Client)
	cmd.AddGroup(&cobra.Group{ID: "session", Title: "Sessions:"}, &cobra.Group{ID: "work", Title: "Work in a session:"}, &cobra.Group{ID: "tasks", Title: "Unattended tasks:"}, &cobra.Group{ID: "setup", Title: "Setup:"})
	for group, cmds := range map[string][]*cobra.Command{
		"session": {sessioncmd.NewOpenCmd(a), sessioncmd.NewListCmd(a), sessioncmd.NewStatusCmd(a), sessioncmd.NewNextCmd(a), sessioncmd.NewLastCmd(a), sessioncmd.NewAnswerCmd(a), sessioncmd.NewStartCmd(a), sessioncmd.NewStopCmd(a), sessioncmd.NewDestroyCmd(a), sessioncmd.NewLogsCmd(a), sessioncmd.NewRecordingsCmd(a), sessioncmd.NewUsageCmd(a), sessioncmd.NewBudgetCmd(a), sessioncmd.NewHomeCmd(a), sessioncmd.NewLeaseCmd(a), sessioncmd.NewCheckpointCmd(a), sessioncmd.NewCheckpointsCmd(a), sessioncmd.NewRestoreCmd(a), sessioncmd.NewForkCmd(a), sessioncmd.NewWorkspaceCmd(a)},
		"work":    {sessioncmd.NewExecCmd(a), sessioncmd.NewSSHCmd(a), sessioncmd.NewSSHConfigCmd(a), sessioncmd.NewCodeCmd(a), sessioncmd.NewCpCmd(a), sessioncmd.NewDiffCmd(a), sessioncmd.NewFetchCmd(a), sessioncmd.NewReviewCmd(a), netcmd.NewNetCmd(a), sessioncmd.NewPortsCmd(a)},
		"tasks":   {taskcmd.NewTaskCmd(a), servecmd.NewServeCmd(a), servecmd.NewDashboardCmd(a), servecmd.NewMCPCmd(a), servecmd.NewClusterCmd(a)},
		"setup":   {imagecmd.NewImageCmd(a), setupcmd.NewSecretsCmd(a), setupcmd.NewLoginCmd(a), setupcmd.NewLogoutCmd(a), setupcmd.NewConfigCmd(a), setupcmd.NewProfileCmd(a), setupcmd.NewContextCmd(a), setupcmd.NewTmuxCmd(a), sessioncmd.NewTrustCmd(a), setupcmd.NewDoctorCmd(a), setupcmd.NewDiagnoseCmd(a), imagecmd.NewPruneCmd(a), setupcmd.NewAuditCmd(a), newCompletionCmd(), newManCmd(a), newVersionCmd(a)},
		"":        slices.Concat(newHiddenCmds(a), sessioncmd.NewPickerCmds(a), newTopics()),
	} {
		for _, c := range cmds {
			c.GroupID = group
			cmd.AddCommand(c)
		}
	}
	cmd.SetHelpCommandGroupID("setup")
	complete.FinishFlags(cmd, complete.FlagValues(a))
	cmd.SetOut(a.Con.Out)
	cmd.SetErr(a.Con.Err)
	return cmd
}

type rootOptions struct {
	list    bool
	stop    string
	destroy string
	open    sessioncmd.OpenOptions
}

func runRoot(ctx context.Context, a *app.App, o rootOptions, args []string) error {
	switch {
	case o.list:
		return sessioncmd.RunList(ctx, a, sessioncmd.ListOptions{JSON: o.open.JSON})
	case o.stop != "":
		return sessioncmd.RunStop(ctx, a, sessioncmd.StopOptions{}, []string{o.stop})
	case o.destroy != "":
		return sessioncmd.RunDestroy(ctx, a, sessioncmd.DestroyOptions{}, []string{o.destroy})
	case len(args) == 1:
		return sessioncmd.RunOpen(ctx, a, o.open, args[0])
	}
	return sessioncmd.RunPick(ctx, a, o.open)
}

// oneRepo accepts at most one argument. If there are more, the first was probably meant as
// a command.
func oneRepo(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		if hint := suggestCommand(cmd, args, app.ChangedFlags(cmd)...); hint != "" {
			return fail.New(fail.Usage, "unknown command %q", args[0]).WithHint("%s", hint)
		}
	}
	return app.Usage(cobra.MaximumNArgs(1))(cmd, args)
}

// suggestCommand suggests commands that the user probably meant, if the first of args resembles the
// name of one. Otherwise it returns "".
func suggestCommand(root *cobra.Command, args []string, flags ...string) string {
	if len(args[0]) < 2 { // too short: it is a prefix of many commands
		return ""
	}
	root.SuggestionsMinimumDistance = min(2, len(args[0])/2) // a short word resembles many names
	var hints []string
	for _, name := range root.SuggestionsFor(args[0]) {
		hints = append(hints, ssh.Quote(slices.Concat([]string{root.Name(), name}, flags, args[1:])...))
	}
	return strings.Join(hints, ", or: ")
}

// checkHost refuses a command that works only on this host if another is chosen.
func checkHost(a *app.App, cmd *cobra.Command) error {
	if a.AnyHost = app.OnAnyHost(cmd); a.AnyHost {
		return nil
	}
	if cmd.Hidden { // processes of this host
		a.Chosen = app.ThisHost
		return nil
	}
	to, err := app.Context(a)
	if err != nil || to.URL == "" {
		return err
	}
	return fail.New(fail.Usage, "%s works only on this host, but %s is chosen", cmd.CommandPath(), to.URL).WithHint("%s", app.Again(cmd, []string{"host"}, "--host", app.ThisHost))
}
