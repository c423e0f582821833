package cli

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

func newNetCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "See and change what a session may reach",
		Long: `See and change what a session may reach.

The decisions are those of the session's gateway, a process on this host that root in
the guest cannot get round. A session without a wall has only its guest's word for them;
docs/security-model.md says what is a wall and what a guard rail.`,
		Example: `  agent-sessionizer net denied repo
  agent-sessionizer net allow repo files.example.org
  agent-sessionizer net explain repo github.com`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o netOptions
	log := &cobra.Command{
		Use: "log SESSION", Short: "Show the decisions: names, connections, bytes",
		Example: `  agent-sessionizer net log -f repo
  agent-sessionizer net log --json -n 100 repo`,
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetLog(cmd.Context(), a, o, args[0]) },
	}
	log.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on as decisions are made")
	log.Flags().IntVarP(&o.last, "last", "n", 0, "only the last `N`")
	denied := &cobra.Command{
		Use: "denied SESSION", Short: "Show what was denied, how often, and how to allow it",
		Example: `  agent-sessionizer net denied repo`,
		Args:    usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetDenied(cmd.Context(), a, o, args[0]) },
	}
	allow := &cobra.Command{
		Use: "allow SESSION NAME[:PORT]…", Short: "Allow names, or @groups of them, on this session, at once",
		Example: `  agent-sessionizer net allow repo files.example.org '*.example.net' db.example.org:5432
  agent-sessionizer net allow repo @pypi`,
		Args: usage(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeMany(a.sessions(), a.deniedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], (*session.Manager).Allow)
		},
	}
	deny := &cobra.Command{
		Use: "deny SESSION NAME[:PORT]…", Short: "Deny names on this session, at once, whatever else allows them",
		Example: `  agent-sessionizer net deny repo gist.github.com`,
		Args:    usage(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeMany(a.sessions(), a.allowedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetChange(cmd.Context(), a, args[0], args[1:], (*session.Manager).Deny)
		},
	}
	explain := &cobra.Command{
		Use: "explain SESSION HOST[:PORT]", Short: "Say whether a name or an address may be reached, and why",
		Example: `  agent-sessionizer net explain repo github.com
  agent-sessionizer net explain repo 192.168.1.10:5432`,
		Args: usage(cobra.ExactArgs(2)), ValidArgsFunction: a.completeArgs(a.sessions(), a.askedNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetExplain(cmd.Context(), a, o, args[0], args[1])
		},
	}
	reload := &cobra.Command{
		Use: "reload SESSION", Short: "Bring a running session to what the settings files say now",
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
		Use: "status SESSION", Short: "Show how the wall and the guest's own guard are",
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

// named finds the session for commands that need no running VM.
func (a *app) named(ctx context.Context, what string) (*session.Manager, session.Session, error) {
	m, err := a.manager(ctx)
	if err != nil {
		return nil, session.Session{}, err
	}
	s, err := find(ctx, m, what)
	return m, s, err
}

// inGuest calls f with the guest of a running session.
func (a *app) inGuest(ctx context.Context, what string, f func(guest.Guest, session.Session) error) error {
	m, s, err := a.running(ctx, what)
	if err != nil {
		return err
	}
	conn, err := m.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	return f(guest.Guest{SSH: conn, Root: s.Facts.Root}, s)
}

func runNetLog(ctx context.Context, a *app, o netOptions, what string) error {
	m, s, err := a.named(ctx, what)
	if err != nil {
		return err
	}
	if !s.Spec.Walled {
		return runGuestLog(ctx, a, o, what)
	}
	dir := m.Gateway(s).Dir
	var past []gateway.Entry
	var seen int64
	for e, err := range gateway.Journal(ctx, dir, false) {
		if err != nil {
			return err
		}
		past, seen = append(past, e), e.Seq
	}
	if !o.json {
		// What was counted stands in the journal after what was decided meanwhile.
		slices.SortStableFunc(past, func(a, b gateway.Entry) int { return a.Time.Compare(b.Time) })
	}
	if o.last > 0 {
		past = past[max(0, len(past)-o.last):]
	}
	if o.json && !o.follow {
		return a.con.JSON(append([]gateway.Entry{}, past...))
	}
	var shown time.Time
	show := func(e gateway.Entry) error {
		if o.json {
			return a.jsonLine(e)
		}
		if e.Time.Before(shown) { // counted until now
			e.Time = shown
		}
		shown = e.Time
		a.printf("%s\n", entryLine(e))
		return nil
	}
	for _, e := range past {
		if err := show(e); err != nil {
			return err
		}
	}
	if !o.follow {
		return nil
	}
	for e, err := range gateway.Journal(ctx, dir, true) {
		if err != nil {
			return err
		}
		if e.Seq <= seen {
			continue
		}
		if err := show(e); err != nil {
			return err
		}
	}
	return nil
}

// entryLine is a decision for people.
func entryLine(e gateway.Entry) string {
	verdict := "allowed"
	switch {
	case !e.Allowed:
		verdict = "denied"
	case e.End:
		verdict = "closed"
	}
	kind := e.Kind
	if e.Proto != "" {
		kind = e.Proto
	}
	asked := gateway.Denial{Name: e.Name, Addr: e.Addr, Port: e.Port}
	if e.Kind == gateway.KindDNS {
		asked.Port = 0 // the resolver's
	}
	why := e.Reason
	switch {
	case e.End && e.Kind != gateway.KindLink && (why == "" || e.BytesOut+e.BytesIn > 0):
		// Of one that came to nothing, only why.
		why = fmt.Sprintf("%s out, %s in, %v", units.BytesSize(float64(e.BytesOut)), units.BytesSize(float64(e.BytesIn)), e.Elapsed.Round(time.Millisecond))
		if e.Reason != "" {
			why += ": " + e.Reason
		}
	case !e.End && e.Allowed && e.Rule != "":
		why = e.Rule
		if e.Source != "" {
			why += " (" + e.Source + ")"
		}
	}
	if n := e.Times(); n > 1 {
		why += fmt.Sprintf(" ×%d", n)
	}
	return fmt.Sprintf("%s  %-7s  %-5s %s  %s", e.Time.Local().Format("15:04:05"), verdict, kind, ssh.Clean(asked.Target()), ssh.Clean(why))
}

// runGuestLog is the guest's own word, all there is without a wall.
func runGuestLog(ctx context.Context, a *app, o netOptions, what string) error {
	return a.inGuest(ctx, what, func(g guest.Guest, _ session.Session) error {
		all := []wire.Query{}
		err := g.Queries(ctx, 0, o.last, o.follow, func(q wire.Query) error {
			if o.json && !o.follow {
				all = append(all, q)
				return nil
			}
			if o.json {
				return a.jsonLine(q)
			}
			verdict := "allowed"
			if !q.Allowed {
				verdict = "denied "
			}
			why := q.Reason
			if q.Rule != "" {
				why = q.Rule
			}
			a.printf("%s  %s  %-5s %s  %s\n", q.Time.Local().Format("15:04:05"), verdict, q.Type, q.Name, why)
			return nil
		})
		if err == nil && o.json && !o.follow {
			return a.con.JSON(all)
		}
		return err
	})
}

// denial is what was denied, as net denied shows it.
type denial struct {
	gateway.Denial
	Process string `json:"process,omitempty"` // that asked first, as the guest says
}

func runNetDenied(ctx context.Context, a *app, o netOptions, what string) error {
	m, s, err := a.named(ctx, what)
	if err != nil {
		return err
	}
	denials := []denial{}
	heard, count, err := a.hearsay(ctx, m, s)
	if s.Spec.Walled {
		if err != nil {
			a.con.Say("the guest does not say which program asked: %v", err)
		}
		found, err := gateway.Denials(ctx, m.Gateway(s).Dir, time.Time{})
		if err != nil {
			return err
		}
		for _, d := range found {
			denials = append(denials, denial{Denial: d, Process: heard[d.Name].Process})
		}
	} else {
		if err != nil {
			return err
		}
		for name, q := range heard {
			denials = append(denials, denial{Denial: gateway.Denial{Name: name, Reason: q.Reason, Count: count[name], Last: q.Time}, Process: q.Process})
		}
	}
	if o.json {
		return a.con.JSON(denials)
	}
	if len(denials) == 0 {
		a.con.Say("%s", "nothing was denied")
		return nil
	}
	header, rows := []string{"COUNT", "WHAT", "WHY", "FIRST ASKED BY (the guest says)"}, [][]string{}
	allowable := ""
	for _, d := range denials {
		rows = append(rows, []string{strconv.FormatInt(d.Count, 10), ssh.Clean(d.Target()), ssh.Clean(d.Reason), d.Process})
		if allowable == "" && d.Name != "" {
			allowable = d.Target()
		}
	}
	a.con.Table(header, rows)
	if allowable != "" {
		// The guest chooses the name, so what is offered for pasting is quoted.
		a.con.Say("%s", "allow one: "+ssh.Quote("agent-sessionizer", "net", "allow", s.Name, allowable))
	}
	return nil
}

// hearsay is what a running guest says of the names it denied.
func (a *app) hearsay(ctx context.Context, m *session.Manager, s session.Session) (first map[string]wire.Query, count map[string]int64, err error) {
	first, count = map[string]wire.Query{}, map[string]int64{}
	if s.Phase != session.Ready {
		if s.Spec.Walled {
			return first, count, nil
		}
		return first, count, fail.New(fail.Conflict, "session %s is %s; without a wall only its guest knows", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := m.Dial(ctx, s)
	if err != nil {
		return first, count, err
	}
	defer conn.Close()
	err = guest.Guest{SSH: conn, Root: s.Facts.Root}.Queries(ctx, 0, 0, false, func(q wire.Query) error {
		if q.Allowed {
			return nil
		}
		if f, ok := first[q.Name]; !ok || f.Process == "" && q.Process != "" {
			first[q.Name] = q
		}
		count[q.Name]++
		return nil
	})
	return first, count, err
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
		a.con.Say("%s", "noted; it counts when the session runs again")
	}
	return nil
}

// explanation is what net explain --json prints.
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
	if !s.Spec.Walled {
		a.con.Say("%s", "this session has no wall: root in the guest can do otherwise")
	}
	return nil
}

// question reads HOST, HOST:PORT, ADDRESS:PORT or [ADDRESS]:PORT.
func question(target string) (policy.Question, error) {
	if ap, err := netip.ParseAddrPort(target); err == nil {
		return policy.Question{Addr: ap.Addr(), Port: ap.Port()}, nil
	}
	if addr, err := netip.ParseAddr(target); err == nil {
		return policy.Question{Addr: addr, Port: 443}, nil
	}
	if strings.Contains(target, "://") {
		return policy.Question{}, fail.New(fail.Usage, "%q is a URL; write only its host name", target)
	}
	name, portText, hasPort := strings.Cut(target, ":")
	canonical, err := policy.Canonical(name)
	if err != nil {
		return policy.Question{}, fail.New(fail.Usage, "%q is neither HOST[:PORT] nor ADDRESS:PORT", target)
	}
	q := policy.Question{Name: canonical}
	if hasPort {
		port, err := strconv.ParseUint(portText, 10, 16)
		if err != nil || port == 0 {
			return policy.Question{}, fail.New(fail.Usage, "%q is not a port from 1 to 65535", portText)
		}
		q.Port = uint16(port)
	}
	return q, nil
}

// netStatus is what net status --json prints.
type netStatus struct {
	Walled  bool            `json:"walled"`
	Gateway *gateway.Status `json:"gateway,omitempty"`
	Guest   wire.Status     `json:"guest"`
}

func runNetStatus(ctx context.Context, a *app, o netOptions, what string) error {
	m, s, err := a.running(ctx, what)
	if err != nil {
		return err
	}
	st := netStatus{Walled: s.Spec.Walled}
	var gatewayErr error
	if s.Spec.Walled {
		var g gateway.Status
		if g, gatewayErr = m.Gateway(s).Status(ctx); gatewayErr == nil {
			st.Gateway = &g
		}
	}
	err = a.inGuest(ctx, what, func(g guest.Guest, _ session.Session) error {
		st.Guest, err = g.Status(ctx)
		return err
	})
	if err != nil {
		return errors.Join(gatewayErr, err)
	}
	if o.json {
		return errors.Join(gatewayErr, a.con.JSON(st))
	}
	wall := "NONE (network.wall was false when the session was made)"
	switch {
	case gatewayErr != nil:
		wall = "DOES NOT STAND: " + gatewayErr.Error()
	case st.Gateway != nil && st.Gateway.PolicyError != "":
		wall = "stands and lets nothing out: " + st.Gateway.PolicyError
	case st.Gateway != nil:
		wall = "stands"
	}
	guard := "stands"
	if !st.Guest.Ready() {
		guard = "DOES NOT STAND " + st.Guest.Firewall.Error + " " + st.Guest.DNS.Error
	}
	pairs := [][2]string{{"wall", wall}}
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
		[2]string{"guest's guard", guard},
		[2]string{"its mode", st.Guest.Policy.Mode},
		[2]string{"it allowed", strconv.FormatInt(st.Guest.Counters.Allowed, 10)},
		[2]string{"it denied", strconv.FormatInt(st.Guest.Counters.Denied, 10)},
	))
	return nil
}
