// Package cli is the command line: it reads arguments, wires the other packages together,
// and turns errors into messages and exit codes. It is the only package that knows them
// all, and none of them knows it.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// version is set at build time.
var version = "dev"

// Main runs the command line in os.Args and returns the exit status.
func Main() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	a := &app{con: console.New(os.Stdout, os.Stderr, os.Getenv), redact: secret.NewRedactor()}
	defer a.close()
	slog.SetDefault(a.con.Logger(console.Log{Level: slog.LevelWarn, Redact: a.redact})) // until the settings are loaded
	root := newRootCmd(a)
	err := root.ExecuteContext(withTrace(ctx))
	return a.exitCode(ctx, err)
}

// remoteExit is the exit status of a command that ran in a guest. It becomes this program's
// exit status unchanged.
type remoteExit int

func (e remoteExit) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// exitCode prints err, unless it needs no message, and returns the exit status. This is the
// only place where errors become messages and exit codes.
func (a *app) exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	if code, ok := errors.AsType[remoteExit](err); ok {
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
	if text := err.Error(); a.redact.Redact(text) != text {
		err = fail.New(code, "%s", a.redact.Redact(text)).WithHint("%s", a.redact.Redact(fail.HintOf(err)))
	}
	a.con.Fail(err)
	return int(code)
}

func newRootCmd(a *app) *cobra.Command {
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
		Version:           version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		ValidArgsFunction: a.completeRepos,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.open.given = changedFlags(cmd)
			err := runRoot(cmd.Context(), a, o, args)
			if _, ok := errors.AsType[notRepoError](err); ok {
				if hint := suggestCommand(cmd, args, o.open.given...); hint != "" {
					return fail.New(fail.CodeOf(err), "%w", err).WithHint("%s", hint)
				}
			}
			return err
		},
	}
	cmd.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return a.checkHost(cmd) }
	cmd.PersistentFlags().StringVar(&a.chosen, "host", "", "`HOST` to work on: a context, ssh://[USER@]HOST, https://HOST:PORT, unix:///PATH or local")
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
	f.BoolVar(&o.open.json, "json", false, "print JSON, with --list or REPO")
	cmd.MarkFlagsMutuallyExclusive("list", "stop", "destroy")
	o.open.flags(f)
	addClient(cmd, &o.open.client)
	cmd.AddGroup(&cobra.Group{ID: "session", Title: "Sessions:"}, &cobra.Group{ID: "work", Title: "Work in a session:"}, &cobra.Group{ID: "tasks", Title: "Unattended tasks:"}, &cobra.Group{ID: "setup", Title: "Setup:"})
	for group, cmds := range map[string][]*cobra.Command{
		"session": {newOpenCmd(a), newListCmd(a), newStatusCmd(a), newNextCmd(a), newLastCmd(a), newStartCmd(a), newStopCmd(a), newDestroyCmd(a), newLogsCmd(a), newHomeCmd(a)},
		"work":    {newExecCmd(a), newSSHCmd(a), newSSHConfigCmd(a), newCpCmd(a), newDiffCmd(a), newFetchCmd(a), newNetCmd(a), newPortsCmd(a)},
		"tasks":   {newTaskCmd(a), newServeCmd(a)},
		"setup":   {newImageCmd(a), newSecretsCmd(a), newConfigCmd(a), newContextCmd(a), newTmuxCmd(a), newTrustCmd(a), newDoctorCmd(a), newPruneCmd(a), newAuditCmd(a), newCompletionCmd(), newManCmd(a), newVersionCmd(a)},
		"":        slices.Concat(newHiddenCmds(a), newPickerCmds(a), newTopics()),
	} {
		for _, c := range cmds {
			c.GroupID = group
			cmd.AddCommand(c)
		}
	}
	cmd.SetHelpCommandGroupID("setup")
	finishFlags(cmd, a.flagValues())
	cmd.SetOut(a.con.Out)
	cmd.SetErr(a.con.Err)
	return cmd
}

type rootOptions struct {
	list    bool
	stop    string
	destroy string
	open    openOptions
}

func runRoot(ctx context.Context, a *app, o rootOptions, args []string) error {
	switch {
	case o.list:
		return runList(ctx, a, listOptions{json: o.open.json})
	case o.stop != "":
		return runStop(ctx, a, stopOptions{}, []string{o.stop})
	case o.destroy != "":
		return runDestroy(ctx, a, destroyOptions{}, []string{o.destroy})
	case len(args) == 1:
		return runOpen(ctx, a, o.open, args[0])
	}
	return runPick(ctx, a, o.open)
}

// oneRepo accepts at most one argument. If there are more, the first was probably meant as
// a command.
func oneRepo(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		if hint := suggestCommand(cmd, args, changedFlags(cmd)...); hint != "" {
			return fail.New(fail.Usage, "unknown command %q", args[0]).WithHint("%s", hint)
		}
	}
	return usage(cobra.MaximumNArgs(1))(cmd, args)
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

// changedFlags returns the flags that were set on cmd, as arguments.
func changedFlags(cmd *cobra.Command) []string {
	var args []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		for _, v := range values {
			switch f.NoOptDefVal {
			case "":
				args = append(args, "--"+f.Name, v)
			case v:
				args = append(args, "--"+f.Name)
			default:
				args = append(args, "--"+f.Name+"="+v)
			}
		}
	})
	return args
}

// usage turns cobra's errors about arguments into usage errors.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return fail.New(fail.Usage, "%w", err).WithHint("%s --help", cmd.CommandPath())
		}
		return nil
	}
}
