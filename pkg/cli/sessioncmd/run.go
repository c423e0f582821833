package sessioncmd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/attach"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

func NewExecCmd(a *app.App) *cobra.Command {
	var record recordName
	cmd := &cobra.Command{
		Use:   "exec SESSION [--] COMMAND [ARG…]",
		Short: "Run a command in a session, in the repository's directory",
		Long: `Run a command as the agent, in the repository's directory, with the session's
secrets in its environment. The command's standard streams and exit status are passed
through. With --record=NAME, "review" shows the exit status and the commit that was
checked out.`,
		Example: `  agent-sessionizer exec repo -- make test
  agent-sessionizer exec --record=tests repo -- make test
  agent-sessionizer exec repo -- sh -c 'make && ./run'`,
		Args:              app.Usage(cobra.MinimumNArgs(2)),
		ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runExec(cmd.Context(), a, record, args[0], args[1:])
		},
	}
	cmd.Flags().Var(&record, "record", "record the exit status for review; NAME defaults to the command; must precede SESSION")
	cmd.Flags().Lookup("record").NoOptDefVal = unnamed
	cmd.Flags().SetInterspersed(false) // flags after the command belong to the command
	return cmd
}

// recordName is a flag value: the name under which a result is recorded.
type recordName struct {
	on   bool
	name string
}

// unnamed is the value of the flag without one. The help shows it: --record[=NAME].
const unnamed = "NAME"

func (r *recordName) Set(text string) error {
	if len(text) > ops.MaxResultName {
		return fmt.Errorf("must have at most %d bytes", ops.MaxResultName)
	}
	r.on = true
	if text != unnamed {
		r.name = text
	}
	return nil
}

func (r *recordName) String() string { return r.name }

// Type returns a type that the help does not show.
func (*recordName) Type() string { return "bool" }

func runExec(ctx context.Context, a *app.App, record recordName, what string, command []string) error {
	typed := command
	if command[0] == "--" {
		command = command[1:]
	}
	if len(command) == 0 {
		return fail.New(fail.Usage, "no command given").WithHint("agent-sessionizer exec --help")
	}
	h, s, err := app.Running(ctx, a, what)
	if record.on && record.name == "" && len(typed) > 1 && typed[0] != "--" && fail.CodeOf(err) == fail.NotFound { // --record NAME
		return fail.New(fail.NotFound, "%w", err).WithHint("agent-sessionizer exec --record=%s %s %s", ssh.Quote(what), ssh.Quote(typed[0]), ssh.Quote(typed[1:]...))
	}
	if err != nil {
		return err
	}
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	err = remote(conn.Run(ctx, inRepo(s, ssh.Quote(command...)), ssh.IO{Stdin: os.Stdin, Stdout: a.Con.Out, Stderr: a.Con.Err}))
	if exit, ok := errors.AsType[app.RemoteExit](err); record.on && (ok || err == nil) {
		if err := recordResult(ctx, h, s, record.name, command, int(exit)); err != nil {
			a.Con.Warn("the result was not recorded: %v", err) // the exit status is the command's
		}
	}
	return err
}

func recordResult(ctx context.Context, h ops.Host, s session.View, name string, command []string, code int) error {
	r := ops.ResultRequest{SessionPath: ops.SessionPath{ID: s.ID}}
	r.Body.Name, r.Body.ExitCode = name, code
	if r.Body.Command = ssh.Quote(command...); len(r.Body.Command) > ops.MaxResultCommand {
		r.Body.Command = termtext.Brief(r.Body.Command, ops.MaxResultCommand-len("…"))
	}
	_, err := ops.RecordResult.On(ctx, h, r)
	return err
}

// inRepo returns a shell command line that runs line in the repository's directory. The
// login shell reads the session's secrets.
func inRepo(s session.View, line string) string {
	if s.Dir == "" {
		return line
	}
	return "cd " + ssh.Quote(s.Dir) + " && " + line
}

// remote turns the exit status of a guest's command into this program's.
func remote(err error) error {
	if exit, ok := errors.AsType[*ssh.ExitError](err); ok {
		return app.RemoteExit(exit.Code)
	}
	return err
}

func NewSSHCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ssh SESSION [-- COMMAND [ARG…]]",
		Short: "Open a plain shell in a session, without tmux",
		Long: `Open a plain shell in a session, without tmux. A lost connection is restored
automatically. With a command, it does the same as "exec".`,
		Example: `  agent-sessionizer ssh repo
  agent-sessionizer ssh repo -- git log --oneline`,
		Args:              app.Usage(cobra.MinimumNArgs(1)),
		ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return runExec(cmd.Context(), a, recordName{}, args[0], args[1:])
			}
			ctx := cmd.Context()
			if !app.Interactive() {
				return fail.New(fail.Usage, "open shell: no terminal").WithHint("agent-sessionizer exec %s -- COMMAND", args[0])
			}
			h, s, err := app.Running(ctx, a, args[0])
			if err != nil {
				return err
			}
			return Terminal(ctx, a, h, s, inRepo(s, `exec "$SHELL" -l`), false) // the loss of the connection ends the shell
		},
	}
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// Terminal runs a guest command on the user's terminal. It reconnects after the connection
// was lost, even if the VM was stopped and started in the meantime. If shared is true, it first uses
// the keeper's connection, which saves a login. After the loss of that, it depends on no other process.
func Terminal(ctx context.Context, a *app.App, h ops.Host, s session.View, command string, shared bool) error {
	code, err := attach.Run(ctx, attach.Options{
		Dial: func(ctx context.Context) (*ssh.Client, error) {
			defer func() { shared = false }()
			return dialStarting(ctx, h, s.ID, shared)
		},
		Command: command, In: os.Stdin, Out: os.Stdout, Term: os.Getenv("TERM"), Title: s.ShortName(),
		OnCopy: copyToClipboard(ctx, tmux.SlugName(s.ShortName(), s.ID)),
	})
	if err != nil {
		return err
	}
	if code != 0 {
		return app.RemoteExit(code)
	}
	return nil
}

func NewSSHConfigCmd(a *app.App) *cobra.Command {
	var o sshConfigOptions
	cmd := &cobra.Command{
		Use:   "ssh-config [SESSION…]",
		Short: "Print or install OpenSSH client configuration",
		Long: `Print OpenSSH client configuration for sessions, for editors and scp. It disables
everything that would give a guest access to this host: agent, X11 and port forwarding,
tunnels, your other keys, sent variables, local commands and connection sharing.

With --install, ~/.ssh/config includes the configuration of all sessions of this host, now
and later, until --uninstall. Other programs then know each session by its name, as shown
by "list --json". Editors that need port forwarding use NAME-editor. A session's entry is
updated when its VM starts, and removed with the session. The rest of the file stays.

Without --install, save the output to a file; "ssh -F FILE" then reads no other
configuration.`,
		Example: `  agent-sessionizer ssh-config --install && ssh NAME
  agent-sessionizer ssh-config >~/.ssh/agents && ssh -F ~/.ssh/agents NAME
  agent-sessionizer ssh-config --forwards >~/.ssh/agents   # for editors that forward ports`,
		ValidArgsFunction: complete.Many(complete.Sessions(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.install || o.uninstall {
				if len(args) > 0 {
					return fail.New(fail.Usage, "--install and --uninstall are for all sessions").WithHint("agent-sessionizer ssh-config --install")
				}
				return includeSSHConfig(cmd.Context(), a, o)
			}
			return runSSHConfig(cmd.Context(), a, o, args)
		},
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print a JSON array")
	cmd.Flags().BoolVar(&o.forwards, "forwards", false, "allow forwarded ports, including those of your \"Host *\"")
	cmd.Flags().BoolVar(&o.install, "install", false, "make ~/.ssh/config include the sessions of this host")
	cmd.Flags().BoolVar(&o.uninstall, "uninstall", false, "remove from ~/.ssh/config what --install added")
	cmd.MarkFlagsMutuallyExclusive("install", "uninstall", "forwards")
	return cmd
}

type sshConfigOptions struct{ json, forwards, install, uninstall bool }

func runSSHConfig(ctx context.Context, a *app.App, o sshConfigOptions, names []string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	var sessions []session.View
	for _, name := range names {
		s, err := app.FindSession(ctx, h, name)
		if err != nil {
			return err
		}
		sessions = append(sessions, s)
	}
	if len(names) == 0 {
		list, err := ops.ListSessions.On(ctx, h, struct{}{})
		if err != nil {
			return err
		}
		sessions = list.Sessions
	}
	hosts := []session.SSHHost{}
	for _, s := range sessions {
		if !s.Reachable {
			a.Con.Say("%s", s.Name+" has no running VM")
			continue
		}
		m, row, err := a.Local(ctx, h, s)
		if err != nil {
			return err
		}
		block, err := session.Connections{Paths: m.Config.Paths}.SSHConfig(row)
		if err != nil {
			return err
		}
		block.Forwards = o.forwards
		hosts = append(hosts, block)
	}
	if o.json {
		return a.Con.JSON(hosts)
	}
	for _, h := range hosts {
		a.Printf("%s", h)
	}
	return nil
}

func NewCpCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files into or out of a session",
		Long: `Copy a file or a directory. A path in the guest is SESSION:PATH, relative to the
repository's directory, or SESSION:~/PATH in the agent's home. Files from a guest are
not trusted: links are not followed, devices are refused, and nothing is written
outside the destination.`,
		Example: `  agent-sessionizer cp notes.md repo:docs/
  agent-sessionizer cp repo:build/report.html .`,
		Args: app.Usage(cobra.ExactArgs(2)), ValidArgsFunction: completeCopy(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runCp(cmd.Context(), a, args[0], args[1])
		},
	}
}

func runCp(ctx context.Context, a *app.App, from, to string) error {
	isHost := func(name string) bool { return a.IsHost(ctx, name) }
	fromSession, fromPath, fromGuest := guestPath(from, isHost)
	toSession, toPath, toGuest := guestPath(to, isHost)
	if fromGuest == toGuest {
		return fail.New(fail.Usage, "exactly one of SOURCE and DESTINATION must be SESSION:PATH").WithHint("agent-sessionizer cp --help")
	}
	h, s, err := app.Running(ctx, a, fromSession+toSession)
	if err != nil {
		return err
	}
	conn, err := h.Dial(ctx, s.ID, false) // bulk data must not pass through the keeper
	if err != nil {
		return err
	}
	defer conn.Close()
	progress, done := a.Transfer()
	defer done()
	if toGuest {
		err = conn.CopyTo(ctx, from, inGuest(s, toPath), progress)
	} else {
		err = conn.CopyFrom(ctx, inGuest(s, fromPath), to, progress)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.NotFound, "%w", err)
	}
	return err
}

// inGuest returns the path in the guest that a user means by p.
func inGuest(s session.View, p string) string {
	switch {
	case p == "~", strings.HasPrefix(p, "~/"):
		return p // the guest resolves it
	case strings.HasPrefix(p, "/"):
		return s.Root + p
	}
	return s.Dir + "/" + p
}

// guestPath splits SESSION:PATH, and HOST:SESSION:PATH for a host of the cluster. As with scp, a local
// path that contains a colon must have a slash before the colon.
func guestPath(arg string, isHost func(string) bool) (name, path string, ok bool) {
	name, path, ok = strings.Cut(arg, ":")
	if !ok || name == "" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "/") {
		return "", "", false
	}
	if of, rest, more := strings.Cut(path, ":"); more && of != "" && !strings.HasPrefix(of, "/") && isHost(name) {
		return name + ":" + of, rest, true
	}
	return name, path, true
}

// dialStarting connects to a session's guest for a terminal. A session that has no VM but is about to
// get it, such as one that is being restored, is unreachable.
func dialStarting(ctx context.Context, h ops.Host, id string, shared bool) (*ssh.Client, error) {
	c, err := h.Dial(ctx, id, shared)
	if fail.CodeOf(err) != fail.Conflict {
		return c, err
	}
	now, getErr := ops.GetSession.On(ctx, h, ops.SessionPath{ID: id})
	if getErr == nil && now.Desired == session.Ready && now.State != session.Broken {
		return nil, fmt.Errorf("%w: %w", ssh.ErrUnreachable, err)
	}
	return nil, err
}
