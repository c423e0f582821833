package imagecmd

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gc"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// PruneOptions are the flags of prune.
type PruneOptions struct {
	dryRun bool
	json   bool
	unused config.Duration
}

func (o *PruneOptions) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.dryRun, "dry-run", "n", false, "list what would be removed; change nothing")
	cmd.Flags().BoolVar(&o.json, "json", false, "print a JSON object: removed and kept, with sizes and reasons")
}

func NewPruneCmd(a *app.App) *cobra.Command {
	o := PruneOptions{unused: config.Duration(90 * 24 * time.Hour)}
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove unused images, VMs and mirrors",
		Long: `Remove what is no longer used, and list it with the reason:

  - images and saved VMs that newer ones replaced, unused standby VMs and leftovers of
    interrupted builds ("image prune" removes only these);
  - leftovers of sessions that are gone: VMs, directories, logs;
  - logs, artifacts and events of tasks that ended long ago (tasks.cleanup_ttl);
  - recordings to which nothing was added for 30 days (recordings.keep);
  - mirrors not used for 90 days whose repository has no session;
  - saved setups not used for 90 days;
  - files left by commands that were killed.

Leftovers are also removed automatically: at most once an hour, a command looks for them
in the background. Nothing that belongs to an existing session or is in use is removed.
Things that look abandoned but may still be needed are kept and listed: mirrors with
agents' commits that no branch has, and VMs and directories of unknown sessions.`,
		Example: `  agent-sessionizer prune --dry-run
  agent-sessionizer prune --unused-for 30d
  agent-sessionizer prune --dry-run --json | jq .size`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runPrune(cmd.Context(), a, o, append(gc.Orphans(), gc.SavedSetups, gc.Images, gc.Mirrors)...)
		},
	}
	o.flags(cmd)
	cmd.Flags().Var(&o.unused, "unused-for", "remove mirrors and saved setups unused for `TIME`, such as 30d or 12h")
	return cmd
}

func runPrune(ctx context.Context, a *app.App, o PruneOptions, parts ...gc.Part) error {
	report, err := Prune(ctx, a, app.Actor(), o, parts...)
	if report.Removed == nil { // it could not start
		return err
	}
	return errors.Join(printReport(a, report, o), err)
}

// Prune removes what is no longer used, on behalf of by.
func Prune(ctx context.Context, a *app.App, by string, o PruneOptions, parts ...gc.Part) (gc.Report, error) {
	cfg, err := a.Settings()
	if err != nil {
		return gc.Report{}, err
	}
	sessions := a.Reconciled
	if o.dryRun {
		sessions = a.PlainManager // starts no keepers
	}
	return gc.Run(ctx, gc.Options{
		Config: cfg, DryRun: o.dryRun, Unused: time.Duration(o.unused), Sessions: sessions,
		Driver: func() (vm.Driver, error) { return a.Driver(app.QuietLog()) }, Maker: func() (*golden.Maker, error) { return Maker(a) },
		Actor: by, Audit: a.AuditTo(cfg), Say: a.Con.Say,
	}, parts...)
}

func printReport(a *app.App, r gc.Report, o PruneOptions) error {
	if o.json {
		return a.Con.JSON(r)
	}
	for _, l := range r.Kept {
		a.Con.Say("kept: %s %s (%v): %s", l.Kind, l.Name, config.Size(l.Size), l.Why)
	}
	if len(r.Removed) > 0 {
		header, rows := []string{"WHAT", "NAME", "SIZE", "WHY"}, [][]string{}
		for _, l := range r.Removed {
			rows = append(rows, []string{l.Kind, l.Name, config.Size(l.Size).String(), l.Why})
		}
		a.Con.Table(header, rows)
	}
	word := "freed"
	if o.dryRun {
		word = "would be freed"
	}
	a.Printf("%v %s\n", config.Size(r.Size), word)
	return nil
}
