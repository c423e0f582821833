package sessioncmd

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/notify"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// summary counts sessions by how urgently they need the user.
type summary struct {
	Blocked int      `json:"blocked"`
	Error   int      `json:"error"` // agents whose turn failed, and broken sessions
	Done    int      `json:"done"`  // since the user's last visit
	Working int      `json:"working"`
	Ready   int      `json:"ready"`   // all other running sessions
	Waiting []string `json:"waiting"` // sessions with blocked agents, the longest waiting first
	Ending  []string `json:"ending"`  // sessions that will soon be stopped

	Today *lifecycle.Usage `json:"today,omitempty"` // of all sessions and tasks; not in the pushed status
}

func summarise(all []session.View) summary {
	sum := summary{Waiting: []string{}, Ending: []string{}}
	for _, s := range queue(all) {
		if s.Attention.State == guestproto.AgentBlocked {
			sum.Waiting = append(sum.Waiting, s.DisplayName())
		}
	}
	for _, s := range all {
		if len(s.Ending) > 0 {
			sum.Ending = append(sum.Ending, s.DisplayName())
		}
		switch {
		case s.State == session.Broken:
			sum.Error++
		case s.State != session.Ready:
		case s.Attention == nil:
			sum.Ready++
		case s.Attention.State == guestproto.AgentBlocked:
			sum.Blocked++
		case s.Attention.State == guestproto.AgentError:
			sum.Error++
		case s.Attention.State == guestproto.AgentWorking:
			sum.Working++
		case s.NeedsAttention():
			sum.Done++
		default:
			sum.Ready++
		}
	}
	return sum
}

// queue returns the sessions that need attention, in the order to visit them.
func queue(all []session.View) []session.View {
	var waiting []session.View
	for _, s := range all {
		if s.NeedsAttention() {
			waiting = append(waiting, s)
		}
	}
	slices.SortStableFunc(waiting, func(a, b session.View) int {
		x, y := a.Attention, b.Attention
		return cmp.Or(x.State.Urgency()-y.State.Urgency(), x.Since.Compare(y.Since))
	})
	return waiting
}

// first returns the first of several names in parentheses.
func first(names []string) string {
	switch len(names) {
	case 0:
		return ""
	case 1:
		return " (" + names[0] + ")"
	}
	return " (" + names[0] + ", …)"
}

// text formats the summary on one line. style colours a text; its color is "red", "yellow",
// "green" or "" for none.
func (sum summary) text(style func(color, text string) string) string {
	var parts []string
	add := func(n int, color, word string) {
		if n > 0 {
			parts = append(parts, style(color, fmt.Sprintf("%d %s", n, word)))
		}
	}
	add(sum.Blocked, "yellow", "blocked"+first(sum.Waiting))
	add(sum.Error, "red", "failed")
	add(sum.Done, "green", "done")
	add(sum.Working, "", "working")
	add(sum.Ready, "", "ready")
	add(len(sum.Ending), "yellow", "ending soon"+first(sum.Ending))
	if sum.Today != nil {
		parts = append(parts, style("", sum.Today.Money()+" today"))
	}
	return strings.Join(parts, " · ")
}

// tmuxStyles set a background of their own. tmux's bar is green by default and dark for
// many users, and no single foreground is readable on both. The numbers are from the part
// of the palette that themes do not change.
var tmuxStyles = map[string]string{
	"yellow": "fg=colour16,bg=colour220",
	"red":    "fg=colour231,bg=colour160",
	"green":  "fg=colour16,bg=colour40",
}

// tmuxStyle formats coloured text for tmux.
func tmuxStyle(color, text string) string {
	if text = tmux.Plain(text); color == "" {
		return text
	}
	return "#[" + tmuxStyles[color] + "]" + text + "#[default]"
}

type statusOptions struct{ tmux, json bool }

func NewStatusCmd(a *app.App) *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use: "status", Short: "Summarize which agents need you",
		Long: `Show on one line how many agents are blocked, failed, done and working.

Every change is also pushed to tmux. To see it in your status line, add to tmux.conf:
    set -ag status-right ' #{` + tmux.StatusOption + `}'`,
		Example: `  agent-sessionizer status
  agent-sessionizer status --tmux    # with tmux's styles, for your own #(…)`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runStatus(cmd.Context(), a, o) },
	}
	cmd.Flags().BoolVar(&o.tmux, "tmux", false, "print the line with tmux's styles")
	cmd.Flags().BoolVar(&o.json, "json", false, "print the counts as JSON")
	cmd.MarkFlagsMutuallyExclusive("tmux", "json")
	return cmd
}

func runStatus(ctx context.Context, a *app.App, o statusOptions) error {
	h, err := a.QuietHost(ctx)
	if err != nil {
		return err
	}
	all, err := interactiveSessions(ctx, h)
	if err != nil {
		return err
	}
	today, err := ops.GetUsage.On(ctx, h, ops.UsageRequest{By: "day", Since: ops.Midnight()})
	if err != nil {
		return err
	}
	sum := summarise(all)
	sum.Today = today.Total
	if o.json {
		return a.Con.JSON(sum)
	}
	style := func(_, text string) string { return text }
	if o.tmux {
		style = tmuxStyle
	}
	text := sum.text(style)
	if text == "" && !o.tmux {
		text = "no session is running"
	}
	a.Printf("%s\n", text)
	return nil
}

// interactiveSessions returns the sessions that people work in, not those of tasks.
func interactiveSessions(ctx context.Context, h ops.Host) ([]session.View, error) {
	list, err := ops.ListSessions.On(ctx, h, struct{}{})
	return slices.DeleteFunc(list.Sessions, func(s session.View) bool { return s.Task != "" }), err
}

// PushStatus updates the status line of every tmux server that shows a session to the state
// in the store. The sockets of another host's tmux servers mean nothing here.
func PushStatus(ctx context.Context, h ops.Host) {
	if _, here := h.(ops.Engine); !here {
		return
	}
	for range 3 { // another keeper may push what it read before our change
		all, err := interactiveSessions(ctx, h)
		if err != nil {
			slog.WarnContext(ctx, "failed to push status", "error", err)
			return
		}
		text := summarise(all).text(tmuxStyle)
		var sockets []string
		for _, s := range all {
			if s.Tmux != "" && !slices.Contains(sockets, s.Tmux) {
				sockets = append(sockets, s.Tmux)
			}
		}
		changed := false
		for _, socket := range sockets {
			set, err := (tmux.Client{Socket: socket}).SetStatus(ctx, text)
			if err != nil {
				slog.WarnContext(ctx, "failed to push status", "error", err)
			}
			changed = changed || set
		}
		if !changed {
			return
		}
	}
}

// Notify informs the user, who may be looking elsewhere, of an agent's new state.
func Notify(ctx context.Context, m *session.Manager, s session.Session) {
	at := s.View().Attention
	if at == nil {
		return
	}
	set := m.Config.Attention
	if set.Command != "" {
		err := notify.Command(ctx, set.Command, map[string]string{
			"AGENT_SESSION": s.Name, "AGENT_REPO": s.RepoName(), "AGENT_LABEL": s.Label, "AGENT_STATE": string(at.State), "AGENT_NAME": at.Agent, "AGENT_ON": at.On,
		})
		if err != nil {
			slog.WarnContext(ctx, "attention.command failed", "error", err)
		}
	}
	switch at.State {
	case guestproto.AgentBlocked, guestproto.AgentError, guestproto.AgentDone:
	default:
		return
	}
	body := at.Agent + ": " + string(at.State)
	if at.On != "" {
		body += ": " + at.On
	}
	notifyDesktop(ctx, set, s.DisplayName(), body)
}

// NotifyBudget informs the user how much of a budget is used.
func NotifyBudget(ctx context.Context, m *session.Manager, s session.Session, n gateway.BudgetNote) {
	notifyOf(ctx, m, s, "budget", budgetText(n))
}

// NotifyLifetime informs the user that the session will be stopped, or was.
func NotifyLifetime(ctx context.Context, m *session.Manager, s session.Session, text string) {
	notifyOf(ctx, m, s, "lifetime", text)
}

// notifyOf informs the user of something about the session that is not an agent's state.
func notifyOf(ctx context.Context, m *session.Manager, s session.Session, what, text string) {
	set := m.Config.Attention
	if set.Command != "" {
		err := notify.Command(ctx, set.Command, map[string]string{
			"AGENT_SESSION": s.Name, "AGENT_REPO": s.RepoName(), "AGENT_LABEL": s.Label, "AGENT_STATE": what, "AGENT_NAME": "", "AGENT_ON": text,
		})
		if err != nil {
			slog.WarnContext(ctx, "attention.command failed", "error", err)
		}
	}
	notifyDesktop(ctx, set, s.DisplayName(), text)
}

// budgetText returns a note as people read it.
func budgetText(n gateway.BudgetNote) string {
	used, of := measure.USD(n.Used.Cost).String(), measure.USD(n.Budget.Session).String()
	whose := "the session's budget"
	switch n.Limit {
	case gateway.LimitDay:
		of, whose = measure.USD(n.Budget.Day).String(), "today's budget"
	case gateway.LimitShared:
		of, whose = "what it shares", "the budget of a subtask's tree"
	case gateway.LimitTokens:
		used, of = lifecycle.Tokens(n.Used.Tokens), lifecycle.Tokens(n.Budget.Tokens)+" tokens"
	}
	if n.Percent >= 100 {
		return fmt.Sprintf("%s of %s is used up (%s)", whose, of, used)
	}
	return fmt.Sprintf("%d %% of %s of %s is used (%s)", n.Percent, whose, of, used)
}

func notifyDesktop(ctx context.Context, set config.Attention, title, body string) {
	if set.Desktop == config.DesktopOff || set.Desktop == config.DesktopAuto && !notify.HasDesktop(os.Getenv) {
		return
	}
	if err := notify.Desktop(ctx, title, body); err != nil {
		slog.WarnContext(ctx, "failed to notify desktop", "error", err)
	}
}

func NewNextCmd(a *app.App) *cobra.Command {
	var client string
	cmd := &cobra.Command{
		Use: "next", Short: "Jump to the agent that has been waiting longest",
		Long: `Jump to the session that needs you most. Blocked agents come first, then those that have
failed, then those that have finished since your last visit; among equals, the one that
has waited longest. If you are in one of these sessions already, jump to the next one.
Sessions of other hosts of the cluster count, too.`,
		Example: `  agent-sessionizer next`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return goTo(cmd.Context(), a, client, next)
		},
	}
	AddClient(cmd, &client)
	return cmd
}

// next returns the session to visit after the current one, or the reason why there is none.
func next(all []session.View, current string) (s session.View, none string) {
	waiting := queue(all)
	i := slices.IndexFunc(waiting, func(s session.View) bool { return s.ID == current })
	switch {
	case len(waiting) == 0:
		return session.View{}, "no agent is waiting for you"
	case i >= 0 && len(waiting) == 1:
		return session.View{}, "no other agent is waiting for you"
	}
	return waiting[(i+1)%len(waiting)], ""
}

func NewLastCmd(a *app.App) *cobra.Command {
	var client string
	cmd := &cobra.Command{
		Use: "last", Short: "Go back to the previous session",
		Example: `  agent-sessionizer last`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return goTo(cmd.Context(), a, client, func(all []session.View, current string) (session.View, string) {
				var last session.View
				for _, s := range all {
					if s.ID != current && s.State == session.Ready && s.VisitedAt.After(last.VisitedAt) {
						last = s
					}
				}
				if last.ID == "" {
					return last, "no previous session"
				}
				return last, ""
			})
		},
	}
	AddClient(cmd, &client)
	return cmd
}

// AddClient adds the flag by which a key binding names the tmux client it was pressed in.
func AddClient(cmd *cobra.Command, client *string) {
	cmd.Flags().StringVar(client, "client", "", "tmux client to switch")
	if err := cmd.Flags().MarkHidden("client"); err != nil {
		panic(err) // the flag was added just above
	}
}

// goTo attaches to the session that pick chooses, given the one that is shown now. If there
// is none, it shows the reason.
func goTo(ctx context.Context, a *app.App, client string, pick func(all []session.View, current string) (s session.View, none string)) error {
	if client == "" && !app.Interactive() {
		return fail.New(fail.Usage, "switch session: no terminal").WithHint("agent-sessionizer status --json")
	}
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	found, _, err := a.Sessions(ctx, h)
	if err != nil {
		return err
	}
	var all []session.View
	on := map[string]ops.Host{}
	for _, s := range found {
		if _, seen := on[s.ID]; s.Task == "" && !seen { // this host's own come first
			all, on[s.ID] = append(all, s.View), s.At
		}
	}
	server, err := tmux.Client{}.ReadState(ctx)
	if err != nil {
		return err
	}
	s, none := pick(all, server.Current(client))
	if none == "" {
		return attachLocal(ctx, a, on[s.ID], s, client)
	}
	if client == "" {
		return fail.New(fail.NotFound, "%s", none).WithHint("agent-sessionizer list")
	}
	return (tmux.Client{}).ShowMessage(ctx, client, none) // an error from a key binding would fill the screen
}
