// Package netcmd has the commands for the network of sessions.
package netcmd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

func NewNetCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "Show and change what a session may reach",
		Long: `Show and change what a session may reach.

The session's gateway makes the decisions. It is a process on this host that root in the
guest cannot bypass. For a session without a gateway, only the guest reports decisions.
docs/security-model.md describes what is enforced even against root in the guest.`,
		Example: `  agent-sessionizer net denied repo
  agent-sessionizer net allow repo files.example.org
  agent-sessionizer net explain repo github.com`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o netOptions
	log := &cobra.Command{
		Use: "log SESSION", Short: "Show network decisions: names, connections, bytes",
		Example: `  agent-sessionizer net log -f repo
  agent-sessionizer net log --json -n 100 repo`,
		Args: app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runNetLog(cmd.Context(), a, o, args[0]) },
	}
	log.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing new decisions")
	log.Flags().IntVarP(&o.last, "last", "n", 0, "number `N` of latest decisions to show (default all)")
	denied := &cobra.Command{
		Use: "denied SESSION", Short: "Show what was denied, how often, and how to allow it",
		Example: `  agent-sessionizer net denied repo`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Session(a),
		RunE: func(cmd *cobra.Command, args []string) error { return runNetDenied(cmd.Context(), a, o, args[0]) },
	}
	allow := &cobra.Command{
		Use: "allow SESSION NAME[:PORT]…", Short: "Allow names, @groups or requests in a session immediately",
		Example: `  agent-sessionizer net allow repo files.example.org '*.example.net' db.example.org:5432
  agent-sessionizer net allow repo @pypi
  agent-sessionizer net allow repo 'POST https://api.github.com/user/repos'`,
		Args: app.Usage(cobra.MinimumNArgs(2)), ValidArgsFunction: complete.Many(complete.Sessions(a), deniedNames(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], ops.AllowNames)
		},
	}
	deny := &cobra.Command{
		Use: "deny SESSION NAME[:PORT]…", Short: "Deny names or requests immediately, even if allowed",
		Example: `  agent-sessionizer net deny repo gist.github.com
  agent-sessionizer net deny repo 'DELETE https://api.example.org/**'`,
		Args: app.Usage(cobra.MinimumNArgs(2)), ValidArgsFunction: complete.Many(complete.Sessions(a), allowedNames(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], ops.DenyNames)
		},
	}
	explain := &cobra.Command{
		Use: "explain SESSION HOST[:PORT]|METHOD URL", Short: "Explain whether a session may reach a host or send a request",
		Example: `  agent-sessionizer net explain repo github.com
  agent-sessionizer net explain repo 192.168.1.10:5432
  agent-sessionizer net explain repo POST https://api.github.com/user/repos`,
		Args: app.Usage(cobra.RangeArgs(2, 3)), ValidArgsFunction: complete.Args(complete.Sessions(a), recentlyDeniedNames(a)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetExplain(cmd.Context(), a, o, args[0], strings.Join(args[1:], " "))
		},
	}
	reload := &cobra.Command{
		Use: "reload SESSION", Short: "Reload network settings into a running session",
		Example: `  agent-sessionizer config edit network-allowlist.txt && agent-sessionizer net reload repo`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready)),
		RunE: func(cmd *cobra.Command, args []string) error {
			h, s, err := app.Running(cmd.Context(), a, args[0])
			if err != nil {
				return err
			}
			_, err = ops.ReloadNetwork.On(cmd.Context(), h, ops.SessionPath{ID: s.ID})
			return err
		},
	}
	status := &cobra.Command{
		Use: "status SESSION", Short: "Show gateway and guest firewall status",
		Example: `  agent-sessionizer net status repo`,
		Args:    app.Usage(cobra.ExactArgs(1)), ValidArgsFunction: complete.Args(complete.Sessions(a, session.Ready)),
		RunE: func(cmd *cobra.Command, args []string) error { return runNetStatus(cmd.Context(), a, o, args[0]) },
	}
	for _, c := range []*cobra.Command{log, denied, explain, status} {
		c.Flags().BoolVar(&o.json, "json", false, "print JSON")
	}
	cmd.AddCommand(log, denied, explain, allow, deny, reload, status)
	return cmd
}

type netOptions struct {
	json   bool
	follow bool
	last   int
}

// inGuest calls f with the guest of a running session.
func inGuest(ctx context.Context, a *app.App, what string, f func(guestclient.Guest) error) error {
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(guestclient.Guest{SSH: conn, Root: s.Root})
}

func runNetChange(ctx context.Context, a *app.App, what string, names []string, op ops.Operation[ops.NamesRequest, session.View]) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	r := ops.NamesRequest{SessionPath: ops.SessionPath{ID: s.ID}}
	r.Body.Names = names
	if s, err = op.On(ctx, h, r); err != nil {
		return err
	}
	if s.State != session.Ready {
		a.Con.Say("%s", "saved; it takes effect when the session runs again")
	}
	return nil
}

func runNetExplain(ctx context.Context, a *app.App, o netOptions, what, target string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	answer, err := ops.ExplainName.On(ctx, h, ops.ExplainRequest{SessionPath: ops.SessionPath{ID: s.ID}, Target: target})
	if err != nil {
		return err
	}
	found := answer.Decisions
	if o.json {
		return a.Con.JSON(found)
	}
	for _, e := range found {
		verdict := "denied"
		if e.Allowed {
			verdict = "allowed"
		}
		subject := e.Host
		switch {
		case e.Request != "":
			subject = e.Request
		case e.Port != 0:
			subject = fmt.Sprintf("%s port %d", e.Host, e.Port)
		case answer.Name:
			subject = "the name " + e.Host
		}
		why := e.Reason
		if e.Rule != "" {
			why += ": " + e.Rule
		}
		if e.Source != "" {
			why += " (" + e.Source + ")"
		}
		a.Printf("%-7s  %s  %s\n", verdict, subject, why)
	}
	if !found[0].Allowed && answer.Name && (answer.Mode == policy.Allowlist || found[0].Request != "") {
		if found[0].Request != "" {
			target = found[0].Request
		} else if policy.IsRequest(target) {
			target = found[0].Host
		}
		a.Con.Say("%s", "allow it: "+ssh.Quote("agent-sessionizer", "net", "allow", s.Name, target))
	}
	if !s.Enforced {
		a.Con.Say("%s", "this session has no gateway: root in the guest can bypass these rules")
	}
	return nil
}

// netStatus is the JSON output of net status.
type netStatus struct {
	Enforced bool              `json:"enforced"`
	Gateway  *gateway.Status   `json:"gateway,omitempty"`
	Guest    guestproto.Status `json:"guest"`
}

func runNetStatus(ctx context.Context, a *app.App, o netOptions, what string) error {
	h, s, err := app.Running(ctx, a, what)
	if err != nil {
		return err
	}
	network, err := ops.GetNetwork.On(ctx, h, ops.SessionPath{ID: s.ID})
	if err != nil {
		return err
	}
	st := netStatus{Enforced: s.Enforced, Gateway: network.Gateway}
	var gatewayErr error
	if s.Enforced && st.Gateway == nil {
		gatewayErr = errors.New(network.GatewayError)
	}
	err = inGuest(ctx, a, what, func(g guestclient.Guest) error {
		st.Guest, err = g.Status(ctx)
		return err
	})
	if err != nil {
		return errors.Join(gatewayErr, err)
	}
	if o.json {
		return errors.Join(gatewayErr, a.Con.JSON(st))
	}
	egress := "none (network.enforce was false when the session was created)"
	switch {
	case gatewayErr != nil:
		egress = "down: " + gatewayErr.Error()
	case st.Gateway != nil && st.Gateway.PolicyError != "":
		egress = "running, allows nothing: " + st.Gateway.PolicyError
	case st.Gateway != nil:
		egress = "running"
	}
	firewall := "running"
	if !st.Guest.Ready() {
		firewall = "down: " + st.Guest.Firewall.Error + " " + st.Guest.DNS.Error
	}
	pairs := [][2]string{{"gateway", egress}}
	if g := st.Gateway; g != nil {
		pairs = append(
			pairs,
			[2]string{"mode", string(g.Mode)},
			[2]string{"names", strconv.Itoa(g.Names)},
			[2]string{"allowed", strconv.FormatUint(g.Stats.Allowed, 10)},
			[2]string{"denied", strconv.FormatUint(g.Stats.Denied, 10)},
			[2]string{"connections", strconv.Itoa(g.Stats.Open)},
		)
	}
	a.Pairs(append(
		pairs,
		[2]string{"guest firewall", firewall},
		[2]string{"guest mode", st.Guest.Policy.Mode},
		[2]string{"guest allowed", strconv.FormatInt(st.Guest.Counters.Allowed, 10)},
		[2]string{"guest denied", strconv.FormatInt(st.Guest.Counters.Denied, 10)},
	))
	return nil
}
