package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
)

func newKeptCmd(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "kept", Short: "What is kept of sessions for the next ones of their repositories",
		Long: `What the setting "keep" has saved of sessions, by repository: transcripts, settings,
histories. It was saved when the session stopped or was destroyed, and comes back
when a session of the same repository is made anew.`,
		Example: `  agent-sessionizer kept                    what is kept, how large, how old
  agent-sessionizer kept rm owner/repo      forget it`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runKept(cmd.Context(), a, asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print an array")
	cmd.AddCommand(&cobra.Command{
		Use: "rm REPO…", Short: "Forget what is kept of repositories; a session that lives saves anew when it stops",
		Example: `  agent-sessionizer kept rm owner/repo`,
		Args:    usage(cobra.MinimumNArgs(1)), ValidArgsFunction: a.completeKept,
		RunE: func(cmd *cobra.Command, args []string) error { return runKeptRm(cmd.Context(), a, args) },
	})
	return cmd
}

func runKept(ctx context.Context, a *app, asJSON bool) error {
	m, err := a.plainManager(ctx)
	if err != nil {
		return err
	}
	all, err := m.Kept()
	if err != nil {
		return err
	}
	if asJSON {
		return a.con.JSON(all)
	}
	if len(all) == 0 {
		a.con.Say("%s", `nothing is kept; the setting "keep" says what should be`)
		return nil
	}
	header, rows := []string{"REPO", "SIZE", "AGO", "SESSION"}, [][]string{}
	for _, k := range all {
		rows = append(rows, []string{k.RepoKey, fmt.Sprint(config.Size(k.Size)), ago(k.SavedAt), k.Session})
	}
	a.con.Table(header, rows)
	return nil
}

func runKeptRm(ctx context.Context, a *app, repos []string) error {
	m, err := a.plainManager(ctx)
	if err != nil {
		return err
	}
	for _, what := range repos {
		if key, err := repoKey(what); err == nil {
			what = string(key)
		}
		key, err := m.DropKept(what)
		if err != nil {
			return err
		}
		a.con.Say("%s", "nothing of "+key+" is kept any more")
	}
	return nil
}

// completeKept offers the repositories that have a saved home.
func (a *app) completeKept(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	m, err := a.plainManager(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	all, err := m.Kept()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, k := range all {
		out = append(out, k.RepoKey)
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
