package sessioncmd

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type leaseOptions struct{ json bool }

// NewLeaseCmd returns the command for the time that sessions may run.
func NewLeaseCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "lease", Short: "Extend the time that sessions may run",
		Long: `Extend the time that sessions may run. A lease is how long a session may run before it is
stopped. Set lifetime.lease in config.yaml or in a profile. A warning comes first. A
stopped session keeps its disk, unless lifetime.cleanup_ttl removes it later.`,
		Example: `  agent-sessionizer lease renew repo`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o leaseOptions
	renew := &cobra.Command{
		Use: "renew SESSION [DURATION]", Short: "Extend the lease of a session",
		Long: `Make sure that at least DURATION of a session's lease is left, from now (default 4h). If
more is left, nothing changes. This also counts as use of the session.`,
		Example: `  agent-sessionizer lease renew repo
  agent-sessionizer lease renew repo 90m`,
		Args: app.Usage(cobra.RangeArgs(1, 2)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready), renewals),
		RunE: func(cmd *cobra.Command, args []string) error { return runLeaseRenew(cmd.Context(), a, o, args) },
	}
	renew.Flags().BoolVar(&o.json, "json", false, "print the session as JSON")
	cmd.AddCommand(renew)
	return cmd
}

func renewals(*cobra.Command, []string) []string { return []string{"1h", "4h", "8h", "24h"} }

func runLeaseRenew(ctx context.Context, a *app.App, o leaseOptions, args []string) error {
	h, s, err := app.Named(ctx, a, args[0])
	if err != nil {
		return err
	}
	r := ops.LeaseRequest{SessionPath: ops.SessionPath{ID: s.ID}}
	if len(args) == 2 {
		r.Body.For = args[1]
	}
	if s, err = ops.RenewLease.On(ctx, h, r); err != nil {
		return err
	}
	PushStatus(ctx, h)
	if o.json {
		return a.Con.JSON(s)
	}
	if s.LeaseLeft == 0 {
		a.Con.Say("%s has no lease; its idle time starts again", s.Name)
		return nil
	}
	a.Con.Say("%s: its lease ends in %v", s.Name, session.Brief(time.Duration(s.LeaseLeft)*time.Second))
	return nil
}
