package cli

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gc"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

type pruneOptions struct {
	dryRun bool
	json   bool
	unused config.Duration
}

func (o *pruneOptions) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.dryRun, "dry-run", "n", false, "list what would be removed; change nothing")
	cmd.Flags().BoolVar(&o.json, "json", false, "print a JSON object: removed and kept, with sizes and reasons")
}

func newPruneCmd(a *app) *cobra.Command {
	o := pruneOptions{unused: config.Duration(90 * 24 * time.Hour)}
	cmd := &cobra.Command{
		Use: "prune", Short: "Remove unused images, VMs and mirrors",
		Long: `Remove what is no longer used, and list it with the reason:

  - images and saved VMs that newer ones replaced, unused standby VMs and leftovers of
    interrupted builds ("image prune" removes only these);
  - leftovers of sessions that are gone: VMs, directories, logs;
  - logs, artifacts and events of tasks that ended long ago (tasks.cleanup_ttl);
  - mirrors of repositories that have no session and were not used for 90 days;
  - files left by commands that were killed.

Leftovers are also removed automatically: at most once an hour, a command looks for them
in the background. Nothing that belongs to an existing session or is in use is removed.
Things that look abandoned but may still be needed are kept and listed: mirrors with
agents' commits that no branch has, and VMs and directories of unknown sessions.`,
		Example: `  agent-sessionizer prune --dry-run
  agent-sessionizer prune --unused-for 30d
  agent-sessionizer prune --dry-run --json | jq .size`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runPrune(cmd.Context(), a, o, append(gc.Orphans(), gc.Images, gc.Mirrors)...)
		},
	}
	o.flags(cmd)
	cmd.Flags().Var(&o.unused, "unused-for", "`TIME` without use after which mirrors are removed, such as 30d or 12h")
	return cmd
}

func runPrune(ctx context.Context, a *app, o pruneOptions, parts ...gc.Part) error {
	report, err := a.prune(ctx, actor(), o, parts...)
	if report.Removed == nil { // it could not start
		return err
	}
	return errors.Join(a.printReport(report, o), err)
}

// prune removes what is no longer used, on behalf of by.
func (a *app) prune(ctx context.Context, by string, o pruneOptions, parts ...gc.Part) (gc.Report, error) {
	cfg, err := a.settings()
	if err != nil {
		return gc.Report{}, err
	}
	sessions := a.reconciled
	if o.dryRun {
		sessions = a.plainManager // starts no keepers
	}
	return gc.Run(ctx, gc.Options{
		Config: cfg, DryRun: o.dryRun, Unused: time.Duration(o.unused), Sessions: sessions,
		Driver: func() (vm.Driver, error) { return a.driver(quietLog()) }, Maker: a.maker,
		Actor: by, Audit: a.auditTo(cfg), Say: a.con.Say,
	}, parts...)
}

func (a *app) printReport(r gc.Report, o pruneOptions) error {
	if o.json {
		return a.con.JSON(r)
	}
	for _, l := range r.Kept {
		a.con.Say("kept: %s %s (%v): %s", l.Kind, l.Name, config.Size(l.Size), l.Why)
	}
	if len(r.Removed) > 0 {
		header, rows := []string{"WHAT", "NAME", "SIZE", "WHY"}, [][]string{}
		for _, l := range r.Removed {
			rows = append(rows, []string{l.Kind, l.Name, config.Size(l.Size).String(), l.Why})
		}
		a.con.Table(header, rows)
	}
	word := "freed"
	if o.dryRun {
		word = "would be freed"
	}
	a.printf("%v %s\n", config.Size(r.Size), word)
	return nil
}
