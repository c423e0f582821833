package sessioncmd

import (
	"context"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type portsOptions struct {
	close bool
	json  bool
}

func NewPortsCmd(a *app.App) *cobra.Command {
	var o portsOptions
	cmd := &cobra.Command{
		Use:   "ports SESSION [PORT…]",
		Short: "Publish guest ports on this host's loopback, or list them",
		Long: `Publish ports of the guest on this host's loopback, or list the published ports.

No port is published automatically. A port stays published, at the same address if
possible, until it is closed or the session is destroyed.`,
		Example: `  agent-sessionizer ports repo 3000          http://3000.NAME.localhost:PORT
  agent-sessionizer ports repo               list published ports
  agent-sessionizer ports repo 3000 --close`,
		Args: app.Usage(cobra.MinimumNArgs(1)), ValidArgsFunction: complete.Many(complete.Sessions(a), publishedPorts(a)),
		RunE: func(cmd *cobra.Command, args []string) error { return runPorts(cmd.Context(), a, o, args[0], args[1:]) },
	}
	cmd.Flags().BoolVar(&o.close, "close", false, "close the ports, or all ports if none is named")
	cmd.Flags().BoolVar(&o.json, "json", false, "print published ports as JSON")
	return cmd
}

// publishedPort is one entry of the JSON output of ports.
type publishedPort struct {
	session.PublishedPort
	URL string `json:"url,omitempty"`
}

func runPorts(ctx context.Context, a *app.App, o portsOptions, what string, args []string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	var ports []uint16
	for _, arg := range args {
		port, err := strconv.ParseUint(arg, 10, 16)
		if err != nil || port == 0 {
			return fail.New(fail.Usage, "port must be 1 to 65535, got %q", arg)
		}
		ports = append(ports, uint16(port))
	}
	switch {
	case o.close:
		if len(ports) == 0 {
			for _, p := range s.Ports {
				ports = append(ports, p.Guest)
			}
		}
		for _, port := range ports {
			if s, err = ops.UnpublishPort.On(ctx, h, ops.PortRequest{SessionPath: ops.SessionPath{ID: s.ID}, Port: port}); err != nil {
				return err
			}
		}
	case len(ports) > 0:
		r := ops.PortsRequest{SessionPath: ops.SessionPath{ID: s.ID}}
		r.Body.Ports = ports
		s, err = ops.PublishPorts.On(ctx, h, r)
	}
	if err != nil {
		return err
	}
	list := []publishedPort{}
	for _, p := range s.Ports {
		list = append(list, publishedPort{PublishedPort: p})
		if p.Host != 0 {
			list[len(list)-1].URL = p.URL(s.Name)
		}
	}
	if o.json {
		return a.Con.JSON(list)
	}
	if len(list) == 0 {
		if !o.close {
			a.Con.Say("%s", "no published ports; publish one with: agent-sessionizer ports "+s.Name+" 3000")
		}
		return nil
	}
	for _, p := range list {
		note := ""
		switch {
		case p.Error != "":
			note = "  " + p.Error
		case s.State != session.Ready:
			note = "  (when the session runs)"
		}
		a.Printf("%d  %s%s\n", p.Guest, p.URL, note)
	}
	return nil
}
