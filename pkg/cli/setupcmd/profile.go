package setupcmd

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
)

// NewProfileCmd returns the command for the profiles of the settings.
func NewProfileCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "profile", Short: "List and show profiles",
		Long: `List and show profiles. A profile is a named set of settings for sessions. Choose one with
--profile, with "profile" in config.yaml (for all sessions or for a repository), or with
vm.profile in a manifest. Define profiles under "profiles" in config.yaml. To change a
shipped profile, copy it as a whole: yours replaces all of its settings.`,
		Example: `  agent-sessionizer profile list
  agent-sessionizer open owner/repo --profile yolo-ephemeral`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var listJSON, showJSON bool
	list := &cobra.Command{
		Use: "list", Short: "List profiles with size, network, budget and lifetime",
		Example: `  agent-sessionizer profile list`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(*cobra.Command, []string) error { return runProfileList(a, listJSON) },
	}
	list.Flags().BoolVar(&listJSON, "json", false, "print a JSON array of profiles")
	show := &cobra.Command{
		Use: "show NAME", Short: "Show the settings that a profile gives a new session",
		Example: `  agent-sessionizer profile show yolo-ephemeral`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Profiles(a)),
		RunE: func(_ *cobra.Command, args []string) error { return runProfileShow(a, showJSON, args[0]) },
	}
	show.Flags().BoolVar(&showJSON, "json", false, "print the settings as JSON")
	cmd.AddCommand(list, show)
	return cmd
}

// profiles returns the settings of a session with each profile.
func profiles(a *app.App) (all []config.Settings, err error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	for _, name := range cfg.Profiles() {
		set, err := cfg.For("", name)
		if err != nil {
			return nil, err
		}
		all = append(all, set)
	}
	return all, nil
}

func runProfileList(a *app.App, asJSON bool) error {
	all, err := profiles(a)
	if err != nil {
		return err
	}
	if asJSON {
		return a.Con.JSON(all)
	}
	var rows [][]string
	for _, p := range all {
		rows = append(rows, []string{
			p.Profile, fmt.Sprintf("%d CPU %v %v", p.Resources.CPUs, p.Resources.Memory, p.Resources.Disk), string(p.Network.Mode), p.Budget.Session.String(),
			p.Lifetime.Lease.String(), p.Lifetime.IdleTTL.String(), p.Lifetime.CleanupTTL.String(),
		})
	}
	a.Con.Table([]string{"NAME", "SIZE", "NETWORK", "BUDGET", "LEASE", "IDLE", "CLEANUP"}, rows)
	return nil
}

func runProfileShow(a *app.App, asJSON bool, name string) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	set, err := cfg.For("", name)
	if err != nil {
		return err
	}
	if asJSON {
		return a.Con.JSON(set)
	}
	text, err := config.Text(set)
	if err != nil {
		return err
	}
	a.Printf("%s", text)
	return nil
}
