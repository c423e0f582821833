package netcmd

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

func runNetLog(ctx context.Context, a *app.App, o netOptions, what string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	if !s.Enforced {
		return runGuestLog(ctx, a, o, what)
	}
	m, v, err := a.Local(ctx, h, s)
	if err != nil {
		return err
	}
	dir := m.Gateway(v).Dir
	var past []gateway.Entry
	var seen int64
	for e, err := range gateway.Decisions(ctx, dir, false) {
		if err != nil {
			return err
		}
		past, seen = append(past, e), e.Seq
	}
	if !o.json {
		// An aggregated entry is written to the decision log after entries of the time that
		// it covers.
		slices.SortStableFunc(past, func(a, b gateway.Entry) int { return a.Time.Compare(b.Time) })
	}
	if o.last > 0 {
		past = past[max(0, len(past)-o.last):]
	}
	if o.json && !o.follow {
		return a.Con.JSON(append([]gateway.Entry{}, past...))
	}
	var shown time.Time
	show := func(e gateway.Entry) error {
		if o.json {
			return a.JsonLine(e)
		}
		if e.Time.Before(shown) { // an aggregated entry, which counts up to now
			e.Time = shown
		}
		shown = e.Time
		a.Printf("%s\n", entryLine(e))
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
	for e, err := range gateway.Decisions(ctx, dir, true) {
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

// entryLine formats a decision for people.
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
		asked.Port = 0 // it is the port of the resolver
	}
	why := e.Reason
	switch {
	case e.End && e.Kind != gateway.KindLink && (why == "" || e.BytesOut+e.BytesIn > 0):
		// For a connection that transferred nothing, show only the reason.
		why = fmt.Sprintf("%s out, %s in, %v", measure.Size(e.BytesOut).Human(), measure.Size(e.BytesIn).Human(), e.Elapsed.Round(time.Millisecond))
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
	return fmt.Sprintf("%s  %-7s  %-5s %s  %s", e.Time.Local().Format("15:04:05"), verdict, kind, termtext.Line(asked.Target()), termtext.Line(why))
}

// runGuestLog shows the guest's own log, which is the only one if there is no egress
// gateway.
func runGuestLog(ctx context.Context, a *app.App, o netOptions, what string) error {
	return inGuest(ctx, a, what, func(g guestclient.Guest) error {
		all := []guestproto.Query{}
		err := g.Queries(ctx, 0, o.last, o.follow, func(q guestproto.Query) error {
			if o.json && !o.follow {
				all = append(all, q)
				return nil
			}
			if o.json {
				return a.JsonLine(q)
			}
			verdict := "allowed"
			if !q.Allowed {
				verdict = "denied "
			}
			why := q.Reason
			if q.Rule != "" {
				why = q.Rule
			}
			a.Printf("%s  %s  %-5s %s  %s\n", q.Time.Local().Format("15:04:05"), verdict, q.Type, q.Name, why)
			return nil
		})
		if err == nil && o.json && !o.follow {
			return a.Con.JSON(all)
		}
		return err
	})
}

// denial is a denial as net denied shows it.
type denial struct {
	gateway.Denial
	Process string `json:"process,omitempty"` // the first to ask, as reported by the guest
}

func runNetDenied(ctx context.Context, a *app.App, o netOptions, what string) error {
	h, s, err := app.Named(ctx, a, what)
	if err != nil {
		return err
	}
	denials := []denial{}
	heard, count, err := guestDenials(ctx, h, s)
	if s.Enforced {
		if err != nil {
			a.Con.Say("the guest did not report which programs made the requests: %v", err)
		}
		found, err := ops.ListDenials.On(ctx, h, ops.DenialQuery{SessionPath: ops.SessionPath{ID: s.ID}})
		if err != nil {
			return err
		}
		for _, d := range found.Denials {
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
		return a.Con.JSON(denials)
	}
	if len(denials) == 0 {
		a.Con.Say("%s", "nothing was denied")
		return nil
	}
	header, rows := []string{"COUNT", "WHAT", "WHY", "FIRST REQUESTED BY (reported by the guest)"}, [][]string{}
	allowable := ""
	for _, d := range denials {
		rows = append(rows, []string{strconv.FormatInt(d.Count, 10), termtext.Line(d.Target()), termtext.Line(d.Reason), d.Process})
		if allowable == "" && d.Name != "" && !strings.Contains(d.Reason, "agent-sessionizer ") { // otherwise the reason has the command
			allowable = d.Target()
		}
	}
	a.Con.Table(header, rows)
	if allowable != "" {
		// The guest chooses the name, so the command offered for pasting is quoted.
		a.Con.Say("%s", "allow one: "+ssh.Quote("agent-sessionizer", "net", "allow", s.Name, allowable))
	}
	return nil
}

// guestDenials returns what a running guest reports about the names it denied.
func guestDenials(ctx context.Context, h ops.Host, s session.View) (first map[string]guestproto.Query, count map[string]int64, err error) {
	first, count = map[string]guestproto.Query{}, map[string]int64{}
	if s.State != session.Ready {
		if s.Enforced {
			return first, count, nil
		}
		return first, count, fail.New(fail.Conflict, "session %s is %s: without a gateway, only its running guest reports decisions", s.Name, s.State).WithHint("agent-sessionizer start %s", s.Name)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := h.Dial(ctx, s.ID, true)
	if err != nil {
		return first, count, err
	}
	defer conn.Close()
	err = guestclient.Guest{SSH: conn, Root: s.Root}.Queries(ctx, 0, 0, false, func(q guestproto.Query) error {
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
