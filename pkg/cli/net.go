package cli

import (
	"context"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

func newNetCmd(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "See and change what a session may reach",
		Long: `See and change what a session may reach. The log comes from the guest, whose root
can forge it; see docs/security-model.md for what is a wall and what a guard rail.`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var o netOptions
	log := &cobra.Command{
		Use: "log SESSION", Short: "The names that were asked for, and the decisions",
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetLog(cmd.Context(), a, o, args[0]) },
	}
	log.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on as names are asked for")
	log.Flags().IntVarP(&o.last, "last", "n", 0, "only the last `N`")
	denied := &cobra.Command{
		Use: "denied SESSION", Short: "The names that were denied, with counts",
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetDenied(cmd.Context(), a, o, args[0]) },
	}
	allow := &cobra.Command{
		Use: "allow SESSION NAME…", Short: "Allow names on this session, at once",
		Example: `  agent-sessionizer net allow repo files.example.org '*.example.net'`,
		Args:    usage(cobra.MinimumNArgs(2)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error {
			return runNetAllow(cmd.Context(), a, args[0], args[1:])
		},
	}
	reload := &cobra.Command{
		Use: "reload SESSION", Short: "Bring a running session to what the settings files say now",
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error {
			m, s, err := a.running(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return m.ApplyPolicy(cmd.Context(), s)
		},
	}
	status := &cobra.Command{
		Use: "status SESSION", Short: "How the guest's guard is: firewall, DNS proxy, counters",
		Args: usage(cobra.ExactArgs(1)), ValidArgsFunction: a.completeSessions,
		RunE: func(cmd *cobra.Command, args []string) error { return runNetStatus(cmd.Context(), a, o, args[0]) },
	}
	for _, c := range []*cobra.Command{log, denied, status} {
		c.Flags().BoolVar(&o.json, "json", false, "print JSON")
	}
	cmd.AddCommand(log, denied, allow, reload, status)
	return cmd
}

type netOptions struct {
	json   bool
	follow bool
	last   int
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

// denial is a name that was denied, as net denied shows it.
type denial struct {
	Name   string `json:"name"`
	Count  int    `json:"count"`
	Reason string `json:"reason"`
}

func runNetDenied(ctx context.Context, a *app, o netOptions, what string) error {
	return a.inGuest(ctx, what, func(g guest.Guest, s session.Session) error {
		index := map[string]int{}
		denials := []denial{}
		err := g.Queries(ctx, 0, 0, false, func(q wire.Query) error {
			if q.Allowed {
				return nil
			}
			i, ok := index[q.Name]
			if !ok {
				i = len(denials)
				index[q.Name] = i
				denials = append(denials, denial{Name: q.Name, Reason: q.Reason})
			}
			denials[i].Count++
			return nil
		})
		if err != nil {
			return err
		}
		slices.SortStableFunc(denials, func(x, y denial) int { return y.Count - x.Count })
		if o.json {
			return a.con.JSON(denials)
		}
		if len(denials) == 0 {
			a.con.Say("%s", "nothing was denied")
			return nil
		}
		header, rows := []string{"COUNT", "NAME", "WHY"}, [][]string{}
		for _, d := range denials {
			rows = append(rows, []string{strconv.Itoa(d.Count), d.Name, d.Reason})
		}
		a.con.Table(header, rows)
		// The guest chooses the name, so what is offered for pasting is quoted.
		a.con.Say("%s", "allow one: "+ssh.Quote("agent-sessionizer", "net", "allow", s.Name, denials[0].Name))
		return nil
	})
}

func runNetAllow(ctx context.Context, a *app, what string, names []string) error {
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	s, err := m.Find(ctx, what)
	if err != nil {
		return err
	}
	if s, err = m.Allow(ctx, s, names); err != nil {
		return err
	}
	if s.Phase != session.Ready {
		a.con.Say("%s", "noted; it counts when the session runs again")
	}
	return nil
}

func runNetStatus(ctx context.Context, a *app, o netOptions, what string) error {
	return a.inGuest(ctx, what, func(g guest.Guest, _ session.Session) error {
		st, err := g.Status(ctx)
		if err != nil {
			return err
		}
		if o.json {
			return a.con.JSON(st)
		}
		stands := "stands"
		if !st.Ready() {
			stands = "DOES NOT STAND " + st.Firewall.Error + " " + st.DNS.Error
		}
		a.pairs([][2]string{
			{"guard", stands},
			{"mode", st.Policy.Mode},
			{"names", strconv.Itoa(st.Policy.Names)},
			{"allowed", strconv.FormatInt(st.Counters.Allowed, 10)},
			{"denied", strconv.FormatInt(st.Counters.Denied, 10)},
		})
		return nil
	})
}
