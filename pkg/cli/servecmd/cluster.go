package servecmd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/server"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// NewClusterCmd returns the commands for the hosts that share tasks.
func NewClusterCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "cluster", Short: "Share tasks between several hosts",
		Long: `Share tasks between several hosts. A task that is submitted on one of them runs on any
that has room for it, and all of them show it. A host that is lost gives its tasks to
others where their manifests allow it. serve does the work, so it must run on each host.
docs/cluster.md describes what is promised.`,
		Example: `  agent-sessionizer serve --cluster --cluster-address 192.0.2.1:7422   # on the first host
  agent-sessionizer cluster token --role member                        # there, too
  agent-sessionizer serve --join -                                     # on another host`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newClusterListCmd(a), newClusterShowCmd(a), newClusterTokenCmd(a), newClusterDrainCmd(a), newClusterRemoveCmd(a), newClusterLeaveCmd(a))
	return cmd
}

func newClusterListCmd(a *app.App) *cobra.Command {
	var asJSON, all bool
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the hosts of the cluster",
		Example: `  agent-sessionizer cluster list --json | jq -r '.hosts[] | select(.state == "up").name'`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			list, err := app.InServe(cmd.Context(), a, ops.ListClusterHosts, struct{}{})
			if err != nil {
				return err
			}
			if asJSON {
				return a.Con.JSON(list)
			}
			var cells [][]string
			for _, h := range list.Hosts {
				if h.State == fleet.Removed && !all {
					continue
				}
				name := h.Name
				if name == list.Host {
					name += " (this host)"
				}
				cells = append(cells, []string{
					name, string(h.State), string(h.Role), strconv.Itoa(h.FreeSlots) + "/" + strconv.Itoa(h.Slots),
					measure.Size(h.FreeMemory).Human(), measure.Size(h.FreeDisk).Human(), termtext.Line(h.Arch + " " + h.Accel), termtext.Line(h.Version),
				})
			}
			a.Con.Table([]string{"HOST", "STATE", "ROLE", "FREE SLOTS", "MEMORY", "DISK", "MACHINE", "VERSION"}, cells)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	cmd.Flags().BoolVar(&all, "all", false, "also list hosts that were removed")
	return cmd
}

// hostOf returns a host of the cluster by its name, and this host for "".
func hostOf(ctx context.Context, a *app.App, name string) (fleet.HostView, error) {
	list, err := app.InServe(ctx, a, ops.ListClusterHosts, struct{}{})
	if err != nil {
		return fleet.HostView{}, err
	}
	if name == "" {
		name = list.Host
	}
	for _, h := range list.Hosts {
		if h.Name == name {
			return h, nil
		}
	}
	return fleet.HostView{}, fail.New(fail.NotFound, "no host %q in the cluster", name).WithHint("agent-sessionizer cluster list")
}

func newClusterShowCmd(a *app.App) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use: "show [HOST]", Short: "Show a host of the cluster",
		Long: `Show a host of the cluster: this one if HOST is omitted.`,
		Example: `  agent-sessionizer cluster show
  agent-sessionizer cluster show box2 --json`,
		Args: app.Usage(cobra.MaximumNArgs(1)), ValidArgsFunction: completeHosts(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			h, err := hostOf(cmd.Context(), a, strings.Join(args, ""))
			if err != nil {
				return err
			}
			if asJSON {
				return a.Con.JSON(h)
			}
			showHost(a, h)
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON object")
	return cmd
}

func showHost(a *app.App, h fleet.HostView) {
	line := func(key, format string, args ...any) {
		a.Printf("%-12s %s\n", key, termtext.Line(fmt.Sprintf(format, args...)))
	}
	line("host", "%s", h.Name)
	line("state", "%s", h.State)
	line("role", "%s", h.Role)
	line("joined", "%s ago", console.Ago(h.JoinedAt))
	if h.Heartbeat != nil {
		line("heartbeat", "%s ago", console.Ago(*h.Heartbeat))
		line("version", "%s", h.Version)
		line("machine", "%s %s", h.Arch, h.Accel)
		line("free slots", "%d of %d", h.FreeSlots, h.Slots)
		line("free memory", "%s", measure.Size(h.FreeMemory).Human())
		line("free disk", "%s", measure.Size(h.FreeDisk).Human())
		line("images", "%s", strings.Join(h.Images, " "))
		for _, key := range slices.Sorted(maps.Keys(h.Labels)) {
			line("label", "%s=%s", key, h.Labels[key])
		}
	}
	if h.RemovedAt != nil {
		line("removed", "%s ago", console.Ago(*h.RemovedAt))
	}
}

func newClusterTokenCmd(a *app.App) *cobra.Command {
	role, valid := string(cluster.Member), ""
	cmd := &cobra.Command{
		Use: "token", Short: "Create a token with which one host can join, and print it",
		Long: `Create a token with which one host can join the cluster, once, and print it. It is a
secret until then. A worker only runs tasks. A member also submits tasks. A
core also holds what the cluster remembers; with three of them, one may be lost.`,
		Example: `  agent-sessionizer cluster token | ssh box2 agent-sessionizer serve --join -
  agent-sessionizer cluster token --role worker --valid 10m >token`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var r ops.InviteRequest
			r.Body.Role, r.Body.Valid = cluster.Role(role), valid
			t, err := app.InServe(cmd.Context(), a, ops.InviteHost, r)
			if err != nil {
				return err
			}
			a.Printf("%s\n", t.Token)
			a.Con.Say("it admits one host, until %s; on that host: agent-sessionizer serve --join - # and paste it", t.ExpiresAt.Local().Format("15:04 on 2 January"))
			return nil
		},
	}
	cmd.Flags().StringVar(&role, "role", role, "`ROLE` of the host: worker, member or core")
	cmd.Flags().StringVar(&valid, "valid", "", "`DURATION` until the token expires; 1h when omitted, at most 168h")
	return cmd
}

func newClusterDrainCmd(a *app.App) *cobra.Command {
	var undo bool
	cmd := &cobra.Command{
		Use: "drain HOST", Short: "Let a host take no more tasks",
		Long: `Let a host take no more tasks. Those that it has continue. With --undo, it takes tasks
again.`,
		Example: `  agent-sessionizer cluster drain box2
  agent-sessionizer cluster drain box2 --undo`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeHosts(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			r := ops.DrainRequest{ClusterHostPath: ops.ClusterHostPath{Name: args[0]}}
			r.Body.Drained = !undo
			_, err := app.InServe(cmd.Context(), a, ops.DrainHost, r)
			return err
		},
	}
	cmd.Flags().BoolVar(&undo, "undo", false, "let it take tasks again")
	return cmd
}

func newClusterRemoveCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "remove HOST", Aliases: []string{"rm"}, Short: "Remove a host from the cluster for good",
		Long: `Remove a host from the cluster for good, also one whose keys were stolen. Its keys are
refused from then on. Its tasks are released after 90 seconds, when its lease has ended.
Its name is never used again.`,
		Example: `  agent-sessionizer cluster remove box2`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: completeHosts(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := app.InServe(cmd.Context(), a, ops.RemoveHost, ops.ClusterHostPath{Name: args[0]})
			return err
		},
	}
}

func newClusterLeaveCmd(a *app.App) *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "leave", Short: "Let this host forget its cluster",
		Long: `Let this host forget its cluster, and delete its keys. serve must not run. Afterwards,
run "cluster remove" on a core. Tasks of other hosts that have not ended are no longer
listed here.

It refuses while this host has tasks of the cluster, or some to send to it, or is a
core. With --force, these tasks become its own: use it only if the cluster is lost,
because another host may run them, too.`,
		Example: `  agent-sessionizer cluster leave
  agent-sessionizer cluster leave --force # the cluster no longer exists`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return leave(cmd.Context(), a, force) },
	}
	cmd.Flags().BoolVar(&force, "force", false, "also if this host has tasks of the cluster, or is a core")
	return cmd
}

func leave(ctx context.Context, a *app.App, force bool) error {
	m, err := a.PlainManager(ctx)
	if err != nil {
		return err
	}
	paths := m.Config.Paths
	if err := server.CheckStopped(paths); err != nil {
		return err
	}
	s, err := cluster.LoadState(paths.Cluster())
	if errors.Is(err, cluster.ErrNone) {
		return fail.New(fail.NotFound, "this host belongs to no cluster").WithHint("agent-sessionizer cluster --help")
	}
	if err != nil && !force { // of files that are damaged, it can only be forgotten
		return err
	}
	if s.Role.Allows(cluster.CoreOf) && !force {
		return fail.New(fail.Conflict, "this host is a core: it stores what the cluster remembers").WithHint("agent-sessionizer cluster leave --help # --force")
	}
	var over []string
	for _, p := range task.Phases() {
		if p.Over() {
			over = append(over, string(p))
		}
	}
	if err := m.Store.LeaveCluster(ctx, over, force); err != nil {
		return err
	}
	if err := os.RemoveAll(paths.Cluster()); err != nil {
		return fail.New(fail.Host, "delete the keys of this host: %w", err).WithHint("ls -ld %s", paths.Cluster())
	}
	a.AuditTo(a.Config)(ctx, audit.Record{Type: audit.HostLeft, Actor: app.Actor(), Resource: "host:" + s.Name, Outcome: audit.Success})
	a.Con.Say("this host has left the cluster %s; on a core: agent-sessionizer cluster remove %s", s.Cluster, s.Name)
	return nil
}

// completeHosts offers the names of the hosts.
func completeHosts(a *app.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		var names []string
		if len(args) == 0 {
			names = app.ClusterHosts(cmd.Context(), a)
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
