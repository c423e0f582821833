package sessioncmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func NewHomeCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "home", Short: "List and remove the saved homes of repositories",
		Long: `List and remove the saved homes of repositories. A saved home holds what the setting
"persist" selects: transcripts, settings, histories. It is saved when a session stops or
is destroyed, and restored when a new session of the same repository is created.

owner/repo@LABEL has its own saved home. Its first session starts with that of owner/repo.`,
		Example: `  agent-sessionizer home list
  agent-sessionizer home rm owner/repo`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var asJSON bool
	list := &cobra.Command{
		Use: "list", Short: "List saved homes with their size and age",
		Example: `  agent-sessionizer home list`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return runHomeList(cmd.Context(), a, asJSON) },
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	remove := &cobra.Command{
		Use: "rm REPO…", Short: "Remove the saved homes of repositories",
		Long: `Remove the saved homes of repositories. A session that exists saves its home again when
it stops.`,
		Example: `  agent-sessionizer home rm owner/repo`,
		Args:    app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: completeSavedHomes(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runHomeRemove(cmd.Context(), a, args) },
	}
	cmd.AddCommand(list, remove)
	return cmd
}

func runHomeList(ctx context.Context, a *app.App, asJSON bool) error {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return err
	}
	all, err := session.SavedHomes{Paths: m.Config.Paths}.List()
	if err != nil {
		return err
	}
	if asJSON {
		return a.Con.JSON(all)
	}
	if len(all) == 0 {
		a.Con.Say("%s", `no saved homes; the setting "persist" selects what to save`)
		return nil
	}
	header, rows := []string{"REPO", "SIZE", "AGE", "SESSION"}, [][]string{}
	for _, k := range all {
		rows = append(rows, []string{k.Name(), fmt.Sprint(config.Size(k.Size)), console.Ago(k.SavedAt), k.Session})
	}
	a.Con.Table(header, rows)
	return nil
}

func runHomeRemove(ctx context.Context, a *app.App, repos []string) error {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return err
	}
	for _, what := range repos {
		name, err := removeHome(session.SavedHomes{Paths: m.Config.Paths}, what)
		if err != nil {
			return err
		}
		a.Con.Say("%s", "removed the saved home of "+name)
	}
	return nil
}

// removeHome removes the saved home that what names: as home list prints it, or as commands take
// the name of a session.
func removeHome(homes session.SavedHomes, what string) (name string, err error) {
	if name, err = homes.Remove(what); fail.CodeOf(err) != fail.NotFound {
		return name, err
	}
	ref, rerr := app.ParseRepo(what)
	key, kerr := app.RepoKey(what)
	switch {
	case rerr == nil && ref.Branch != "":
		return homes.Remove(session.SavedHome{RepoKey: ref.Key, Label: ref.Branch}.Name())
	case kerr == nil:
		return homes.Remove(string(key))
	}
	return name, err
}

// completeSavedHomes offers the repositories that have a saved home.
func completeSavedHomes(a *app.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		m, err := a.PlainManager(cmd.Context())
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		all, err := session.SavedHomes{Paths: m.Config.Paths}.List()
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var out []string
		for _, k := range all {
			out = append(out, k.Name())
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	}
}
