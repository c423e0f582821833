package sessioncmd

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type workspaceOptions struct {
	json    bool
	size    config.Size
	profile string
	trust   bool
}

// trustUsage is the usage of the flag with which sessions run what earlier ones left.
const trustUsage = "run the hooks and settings that earlier sessions left in the workspace"

// NewWorkspaceCmd returns the command for disks that outlive sessions.
func NewWorkspaceCmd(a *app.App) *cobra.Command {
	var o workspaceOptions
	group := &cobra.Command{
		Use: "workspace", Aliases: []string{"ws"}, Short: "Manage disks that outlive sessions",
		Long: `Manage workspaces. A workspace is a disk that outlives sessions. "open --workspace" puts
the checkout of a new session into it, at /work. At most one session has a workspace.

An earlier session may have been compromised. So git directories, .envrc files and
agents' settings in a workspace are moved to /work/.set-aside-ID before anything runs in
the next session, and the checkout is cloned again, unless you trust the workspace.`,
		Example: `  agent-sessionizer workspace create scratch
  agent-sessionizer open owner/repo --workspace scratch
  agent-sessionizer workspace rebind scratch`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	create := &cobra.Command{
		Use: "create NAME", Short: "Create a workspace",
		Long: `Create a workspace. Its disk is created when a session first starts with it, and takes
only the space that is written to.`,
		Example: `  agent-sessionizer workspace create scratch
  agent-sessionizer workspace create data --size 200GiB`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error { return runWorkspaceCreate(cmd.Context(), a, o, args[0]) },
	}
	create.Flags().Var(&o.size, "size", "size of the disk (default 80GiB)")
	list := &cobra.Command{
		Use: "list", Short: "List workspaces",
		Example: `  agent-sessionizer workspace list`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return runWorkspaceList(cmd.Context(), a, o) },
	}
	list.Flags().BoolVar(&o.json, "json", false, "print a JSON array")
	workspaces := complete.Args(complete.Workspaces(a))
	show := &cobra.Command{
		Use: "show NAME", Short: "Show a workspace",
		Example: `  agent-sessionizer workspace show scratch`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: workspaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runWorkspace(cmd.Context(), a, o, func(ctx context.Context, h ops.Host) (ops.Workspace, error) {
				return ops.GetWorkspace.On(ctx, h, ops.WorkspacePath{Name: args[0]})
			})
		},
	}
	attach := &cobra.Command{
		Use: "attach NAME SESSION", Short: "Attach a workspace to a stopped session",
		Long: `Attach a workspace to a stopped session. The session has it at /work from its next start
on. Its checkout stays where it is.`,
		Example: `  agent-sessionizer workspace attach data repo`,
		Args:    app.Usage(cobra.ExactArgs(2)), ValidArgsFunction: complete.Args(complete.Workspaces(a), complete.Sessions(a, session.Stopped)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runWorkspaceAttach(cmd.Context(), a, o, args[0], args[1])
		},
	}
	attach.Flags().BoolVar(&o.trust, "trust-workspace", false, trustUsage)
	detach := &cobra.Command{
		Use: "detach NAME", Short: "Detach a workspace from its stopped session",
		Example: `  agent-sessionizer workspace detach data`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: workspaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runWorkspace(cmd.Context(), a, o, func(ctx context.Context, h ops.Host) (ops.Workspace, error) {
				return ops.DetachWorkspace.On(ctx, h, ops.WorkspacePath{Name: args[0]})
			})
		},
	}
	resize := &cobra.Command{
		Use: "resize NAME SIZE", Short: "Make a workspace larger",
		Long:    `Make a workspace larger. Its file system grows when a session next starts with it.`,
		Example: `  agent-sessionizer workspace resize data 400GiB`,
		Args:    app.Usage(cobra.ExactArgs(2)), ValidArgsFunction: workspaces,
		RunE: func(cmd *cobra.Command, args []string) error {
			r := ops.ResizeWorkspaceRequest{WorkspacePath: ops.WorkspacePath{Name: args[0]}}
			if err := r.Body.Size.Set(args[1]); err != nil {
				return fail.New(fail.Usage, "SIZE: %w", err)
			}
			return runWorkspace(cmd.Context(), a, o, func(ctx context.Context, h ops.Host) (ops.Workspace, error) {
				return ops.ResizeWorkspace.On(ctx, h, r)
			})
		},
	}
	rebind := &cobra.Command{
		Use: "rebind NAME", Short: "Replace the session of a workspace with a new one",
		Long: `Replace the session whose checkout is in a workspace with a new one: a new VM with the
same repository and the same /work. The old session is destroyed, with everything outside
the workspace.`,
		Example: `  agent-sessionizer workspace rebind scratch
  agent-sessionizer workspace rebind scratch --profile yolo-workspace`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: workspaces,
		RunE: func(cmd *cobra.Command, args []string) error { return runWorkspaceRebind(cmd.Context(), a, o, args[0]) },
	}
	rebind.Flags().StringVar(&o.profile, "profile", "", "profile `NAME` of the new session (default that of the old one)")
	rebind.Flags().BoolVar(&o.trust, "trust-workspace", false, trustUsage)
	remove := &cobra.Command{
		Use: "delete NAME", Aliases: []string{"rm"}, Short: "Delete a workspace and everything in it",
		Example: `  agent-sessionizer workspace delete scratch`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: workspaces,
		RunE: func(cmd *cobra.Command, args []string) error { return runWorkspaceDelete(cmd.Context(), a, args[0]) },
	}
	for _, cmd := range []*cobra.Command{create, show, attach, detach, resize} {
		cmd.Flags().BoolVar(&o.json, "json", false, "print the workspace as JSON")
	}
	rebind.Flags().BoolVar(&o.json, "json", false, "print the new session as JSON")
	group.AddCommand(create, list, show, attach, detach, rebind, resize, remove)
	return group
}

// runWorkspace performs an operation and shows the workspace.
func runWorkspace(ctx context.Context, a *app.App, o workspaceOptions, f func(context.Context, ops.Host) (ops.Workspace, error)) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	ws, err := f(ctx, h)
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(ws)
	}
	a.Printf("%s: %v, %v used, created %s ago, %s\n", ws.Name, config.Size(ws.Size), config.Size(ws.Used), console.Ago(ws.CreatedAt), holderOf(ws))
	return nil
}

func holderOf(ws ops.Workspace) string {
	if ws.Session == "" {
		return "no session has it"
	}
	return "session " + ws.SessionName + " has it"
}

func runWorkspaceCreate(ctx context.Context, a *app.App, o workspaceOptions, name string) error {
	var r ops.WorkspaceRequest
	r.Body.Name, r.Body.Size = name, o.size
	return runWorkspace(ctx, a, o, func(ctx context.Context, h ops.Host) (ops.Workspace, error) {
		return ops.CreateWorkspace.On(ctx, h, r)
	})
}

func runWorkspaceList(ctx context.Context, a *app.App, o workspaceOptions) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	list, err := ops.ListWorkspaces.On(ctx, h, struct{}{})
	if err != nil {
		return err
	}
	if o.json {
		return a.Con.JSON(list.Workspaces)
	}
	if len(list.Workspaces) == 0 {
		a.Con.Say("no workspaces; create one: agent-sessionizer workspace create NAME")
		return nil
	}
	var rows [][]string
	for _, ws := range list.Workspaces {
		rows = append(rows, []string{ws.Name, fmt.Sprint(config.Size(ws.Size)), fmt.Sprint(config.Size(ws.Used)), console.Ago(ws.CreatedAt), cmp.Or(ws.SessionName, "-")})
	}
	a.Con.Table([]string{"NAME", "SIZE", "USED", "AGE", "SESSION"}, rows)
	return nil
}

func runWorkspaceAttach(ctx context.Context, a *app.App, o workspaceOptions, name, what string) error {
	_, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	r := ops.AttachWorkspaceRequest{WorkspacePath: ops.WorkspacePath{Name: name}}
	r.Body.Session, r.Body.Trust = s.ID, o.trust
	return runWorkspace(ctx, a, o, func(ctx context.Context, h ops.Host) (ops.Workspace, error) {
		return ops.AttachWorkspace.On(ctx, h, r)
	})
}

func runWorkspaceRebind(ctx context.Context, a *app.App, o workspaceOptions, name string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	r := ops.RebindWorkspaceRequest{WorkspacePath: ops.WorkspacePath{Name: name}}
	r.Body.Profile, r.Body.Trust = o.profile, o.trust
	made, err := ops.RebindWorkspace.On(ctx, h, r)
	if err != nil {
		return err
	}
	for _, n := range made.Notices {
		a.Con.Say("%s", n)
	}
	s, err := app.Follow(ctx, a, h, made.View, session.Ready)
	if err != nil {
		return err
	}
	PushStatus(ctx, h)
	if o.json {
		return a.Con.JSON(s)
	}
	a.Printf("%s\n", s.Name)
	return nil
}

func runWorkspaceDelete(ctx context.Context, a *app.App, name string) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	if _, err := ops.DeleteWorkspace.On(ctx, h, ops.WorkspacePath{Name: name}); err != nil {
		return err
	}
	a.Con.Say("deleted workspace %s", name)
	return nil
}
