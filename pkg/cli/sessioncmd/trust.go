package sessioncmd

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func NewTrustCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "trust DIR", Short: "Confirm the repository that a directory is a clone of",
		Long: `Confirm that a directory is a clone of the repository that its own settings name.
Its sessions then get the secrets and the saved home of that repository. "open" asks
once for each clone. Without a terminal, use this command beforehand.`,
		Example: `  agent-sessionizer trust .`,
		Args:    app.Usage(cobra.ExactArgs(1)),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error { return runTrust(cmd.Context(), a, args[0]) },
	}
}

func runTrust(ctx context.Context, a *app.App, dir string) error {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return err
	}
	cwd, err := os.Getwd()
	if err != nil {
		return fail.New(fail.Host, "find working directory: %w", err)
	}
	ref, err := repo.Parse(dir, cwd)
	if err != nil {
		return err
	}
	if ref.Path == "" {
		return fail.New(fail.Usage, "%q must be a directory, such as . or ./repo", dir).WithHint("agent-sessionizer trust --help")
	}
	if err := (session.Clones{Paths: m.Config.Paths}).Trust(ref); err != nil {
		return err
	}
	a.Con.Say("%s", ref.Path+" is confirmed as a clone of "+ref.Key)
	return nil
}

// confirmClone asks about a local clone on its first use, if there is a terminal to ask on.
func confirmClone(ctx context.Context, a *app.App, h ops.Host, o OpenOptions, ref repo.Ref) error {
	if _, here := h.(ops.Engine); !here {
		return nil // it has no clones of this host
	}
	m, err := a.Manager(ctx)
	if err != nil {
		return err
	}
	err = session.Clones{Paths: m.Config.Paths}.Check(ref)
	if !errors.Is(err, session.ErrUntrusted) || o.noWait { // the picker owns the terminal then
		return err
	}
	ok, aerr := a.Con.Confirm(fmt.Sprintf("%s claims to be a clone of %s. Give its sessions the secrets and the saved home of that repository?", ref.Path, ref.Key), "-d")
	switch {
	case fail.CodeOf(aerr) == fail.Usage: // no terminal
		return err
	case aerr != nil:
		return aerr
	case !ok:
		return fail.New(fail.Interrupted, "%s is not confirmed", ref.Path)
	}
	return session.Clones{Paths: m.Config.Paths}.Trust(ref)
}
