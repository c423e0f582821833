package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

func newNetCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "Show and change what a session may reach",
		Long: `Show and change what a session may reach.

The session's gateway makes the decisions. It is a process on this host that root in the
guest cannot bypass. For a session without a gateway, only the guest reports decisions.
docs/security-model.md describes what is enforced even against root in the guest.`,
		Example: `  agent-sessionizer net denied repo
  agent-sessionizer net allow repo files.example.org
  agent-sessionizer net explain repo github.com`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o netOptions
	log := &cobra.Command{
		Use: "log SESSION", Short: "Show network decisions: names, connections, bytes",
		Example: `  agent-sessionizer net log -f repo
  agent-sessionizer net log --json -n 100 repo`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetLog(cmd.Context(), a, o, args[0]) },
	}
	log.Flags().BoolVarP(&o.follow, "follow", "f", false, "keep printing new decisions")
	log.Flags().IntVarP(&o.last, "last", "n", 0, "number `N` of latest decisions to show (default all)")
	denied := &cobra.Command{
		Use: "denied SESSION", Short: "Show what was denied, how often, and how to allow it",
		Example: `  agent-sessionizer net denied repo`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetDenied(cmd.Context(), a, o, args[0]) },
	}
	allow := &cobra.Command{
		Use: "allow SESSION NAME[:PORT]…", Short: "Allow names or @groups in a session immediately",
		Example: `  agent-sessionizer net allow repo files.example.org '*.example.net' db.example.org:5432
  agent-sessionizer net allow repo @pypi`,
		Args: usage(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeMany(a.sessions(), a.deniedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], (*session.Manager).Allow)
		},
	}
	deny := &cobra.Command{
		Use: "deny SESSION NAME[:PORT]…", Short: "Deny names in a session immediately, even if allowed",
		Example: `  agent-sessionizer net deny repo gist.github.com`,
		Args:    usage(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeMany(a.sessions(), a.allowedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], (*session.Manager).Deny)
		},
	}
	explain := &cobra.Command{
		Use: "explain SESSION HOST[:PORT]", Short: "Explain whether a session may reach a name or address",
		Example: `  agent-sessionizer net explain repo github.com
  agent-sessionizer net explain repo 192.168.1.10:5432`,
		Args: usage(cobra.ExactArgs(2)), ValidArgsFunction: a.completeArgs(a.sessions(), a.recentlyDeniedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetExplain(cmd.Context(), a, o, args[0], args[1])
		},
	}
	reload := &cobra.Command{
		Use: "reload SESSION", Short: "Reload network settings into a running session",
		Example: `  agent-sessionizer config edit network-allowlist.txt && agent-sessionizer net reload repo`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeArgs(a.sessions(session.Ready)),
		RunE: func(cmd *cobra.Command, args []string) error {
			m, s, err := a.running(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return m.ApplyPolicy(cmd.Context(), s)
		},
	}
	status := &cobra.Command{
		Use: "status SESSION", Short: "Show gateway and guest firewall status",
		Example: `  agent-sessionizer net status repo`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeArgs(a.sessions(session.Ready)),
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

// named finds the session for commands that do not need a running VM.
func (a *app) named(ctx context.Context, what string) (*session.Manager, session.Session, error) {
	m, err := a.manager(ctx)
	if err != nil {
		return nil, session.Session{}, err
	}
	s, err := findSession(ctx, m, what)
	return m, s, err
}

// inGuest calls f with the guest of a running session.
func (a *app) inGuest(ctx context.Context, what string, f func(guestclient.Guest, session.Session) error) error {
	m, s, err := a.running(ctx, what)
	if err != nil {
		return err
	}
	conn, err := m.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(guestclient.Guest{SSH: conn, Root: s.Status.Root}, s)
}

func runNetChange(ctx context.Context, a *app, what string, names []string, change func(*session.Manager, context.Context, session.Session, []string) (session.Session, error)) error {
	m, s, err := a.named(ctx, what)
	if err != nil {
		return err
	}
	if s, err = change(m, ctx, s, names); err != nil {
		return err
	}
	if s.Phase != session.Ready {
		a.con.Say("%s", "saved; it takes effect when the session runs again")
	}
	return nil
}

// explanation is the JSON output of net explain.
type explanation struct {
	Host    string `json:"host"`
	Port    uint16 `json:"port,omitempty"`
	Allowed bool   `json:"allowed"`
	Rule    string `json:"rule,omitempty"`
	Source  string `json:"source,omitempty"`
	Reason  string `json:"reason"`
}

func runNetExplain(ctx context.Context, a *app, o netOptions, what, target string) error {
	m, s, err := a.named(ctx, what)
	if err != nil {
		return err
	}
	q, err := question(target)
	if err != nil {
		return err
	}
	p, err := m.Policy(s)
	if err != nil {
		return err
	}
	host := q.Name
	if host == "" {
		host = q.Addr.String()
	}
	var found []explanation
	explain := func(q policy.Question) {
		d := p.Decide(q)
		found = append(found, explanation{host, q.Port, d.Allowed, d.Rule, d.Source, d.Reason})
	}
	if explain(q); q.Name != "" && q.Port == 0 && found[0].Allowed {
		for _, port := range p.PortsOut() {
			explain(policy.Question{Name: q.Name, Port: port})
		}
	}
	if o.json {
		return a.con.JSON(found)
	}
	for _, e := range found {
		verdict := "denied"
		if e.Allowed {
			verdict = "allowed"
		}
		subject := e.Host
		if e.Port != 0 {
			subject = fmt.Sprintf("%s port %d", e.Host, e.Port)
		} else if q.Name != "" {
			subject = "the name " + e.Host
		}
		why := e.Reason
		if e.Rule != "" {
			why += ": " + e.Rule
		}
		if e.Source != "" {
			why += " (" + e.Source + ")"
		}
		a.printf("%-7s  %s  %s\n", verdict, subject, why)
	}
	if !found[0].Allowed && q.Name != "" && p.Mode == policy.Allowlist {
		a.con.Say("%s", "allow it: "+ssh.Quote("agent-sessionizer", "net", "allow", s.Name, target))
	}
	if !s.Spec.Enforced {
		a.con.Say("%s", "this session has no gateway: root in the guest can bypass these rules")
	}
	return nil
}

// question parses HOST, HOST:PORT, ADDRESS:PORT or [ADDRESS]:PORT.
func question(target string) (policy.Question, error) {
	if ap, err := netip.ParseAddrPort(target); err == nil {
		return policy.Question{Addr: ap.Addr(), Port: ap.Port()}, nil
	}
	if addr, err := netip.ParseAddr(target); err == nil {
		return policy.Question{Addr: addr, Port: 443}, nil
	}
	if strings.Contains(target, "://") {
		return policy.Question{}, fail.New(fail.Usage, "target must be a host name, got URL %q", target)
	}
	name, portText, hasPort := strings.Cut(target, ":")
	canonical, err := policy.Canonical(name)
	if err != nil {
		return policy.Question{}, fail.New(fail.Usage, "target must be HOST[:PORT] or ADDRESS:PORT, got %q", target)
	}
	q := policy.Question{Name: canonical}
	if hasPort {
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil || port == 0 {
			return policy.Question{}, fail.New(fail.Usage, "port must be 1 to 65535, got %q", portText)
		}
		q.Port = uint16(port)
	}
	return q, nil
}

// netStatus is the JSON output of net status.
type netStatus struct {
	Enforced bool              `json:"enforced"`
	Gateway  *gateway.Status   `json:"gateway,omitempty"`
	Guest    guestproto.Status `json:"guest"`
}

func runNetStatus(ctx context.Context, a *app, o netOptions, what string) error {
	m, s, err := a.running(ctx, what)
	if err != nil {
		return err
	}
	st := netStatus{Enforced: s.Spec.Enforced}
	var gatewayErr error
	if s.Spec.Enforced {
		var g gateway.Status
		if g, gatewayErr = m.Gateway(s).Status(ctx); gatewayErr == nil {
			st.Gateway = &g
		}
	}
	err = a.inGuest(ctx, what, func(g guestclient.Guest, _ session.Session) error {
		st.Guest, err = g.Status(ctx)
		return err
	})
	if err != nil {
		return errors.Join(gatewayErr, err)
	}
	if o.json {
		return errors.Join(gatewayErr, a.con.JSON(st))
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
	a.pairs(append(
		pairs,
		[2]string{"guest firewall", firewall},
		[2]string{"guest mode", st.Guest.Policy.Mode},
		[2]string{"guest allowed", strconv.FormatInt(st.Guest.Counters.Allowed, 10)},
		[2]string{"guest denied", strconv.FormatInt(st.Guest.Counters.Denied, 10)},
	))
	return nil
}
