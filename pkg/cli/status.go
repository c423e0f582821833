package cli

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/notify"
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
}

func summarise(all []session.Session) summary {
	sum := summary{Waiting: []string{}}
	for _, s := range queue(all) {
		if s.Status.Attention.State == guestproto.AgentBlocked {
			sum.Waiting = append(sum.Waiting, s.DisplayName())
		}
	}
	for _, s := range all {
		switch {
		case s.Phase == session.Broken:
			sum.Error++
		case s.Phase != session.Ready:
		case s.Status.Attention == nil:
			sum.Ready++
		case s.Status.Attention.State == guestproto.AgentBlocked:
			sum.Blocked++
		case s.Status.Attention.State == guestproto.AgentError:
			sum.Error++
		case s.Status.Attention.State == guestproto.AgentWorking:
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
func queue(all []session.Session) []session.Session {
	var waiting []session.Session
	for _, s := range all {
		if s.NeedsAttention() {
			waiting = append(waiting, s)
		}
	}
	slices.SortStableFunc(waiting, func(a, b session.Session) int {
		x, y := a.Status.Attention, b.Status.Attention
		return cmp.Or(x.State.Urgency()-y.State.Urgency(), x.Since.Compare(y.Since))
	})
	return waiting
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
	word := "blocked"
	if len(sum.Waiting) > 0 {
		word += " (" + sum.Waiting[0]
		if len(sum.Waiting) > 1 {
			word += ", …"
		}
		word += ")"
	}
	add(sum.Blocked, "yellow", word)
	add(sum.Error, "red", "failed")
	add(sum.Done, "green", "done")
	add(sum.Working, "", "working")
	add(sum.Ready, "", "ready")
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

func newStatusCmd(a *app) *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use: "status", Short: "Summarize which agents need you",
		Long: `Show on one line how many agents are blocked, failed, done and working.

Every change is also pushed to tmux. To see it in your status line, add to tmux.conf:
    set -ag status-right ' #{` + tmux.StatusOption + `}'`,
		Example: `  agent-sessionizer status
  agent-sessionizer status --tmux    # with tmux's styles, for your own #(…)`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runStatus(cmd.Context(), a, o) },
	}
	cmd.Flags().BoolVar(&o.tmux, "tmux", false, "print the line with tmux's styles")
	cmd.Flags().BoolVar(&o.json, "json", false, "print the counts as JSON")
	cmd.MarkFlagsMutuallyExclusive("tmux", "json")
	return cmd
}

func runStatus(ctx context.Context, a *app, o statusOptions) error {
	m, err := a.plainManager(ctx)
	if err != nil {
		return err
	}
	all, err := m.Interactive(ctx)
	if err != nil {
		return err
	}
	sum := summarise(all)
	if o.json {
		return a.con.JSON(sum)
	}
	style := func(_, text string) string { return text }
	if o.tmux {
		style = tmuxStyle
	}
	text := sum.text(style)
	if text == "" && !o.tmux {
		text = "no session is running"
	}
	a.printf("%s\n", text)
	return nil
}

// pushStatus updates the status line of every tmux server that shows a session to the state
// in the store.
func (a *app) pushStatus(ctx context.Context, m *session.Manager) {
	for range 3 { // another keeper may push what it read before our change
		all, err := m.Interactive(ctx)
		if err != nil {
			slog.WarnContext(ctx, "failed to push status", "error", err)
			return
		}
		text := summarise(all).text(tmuxStyle)
		var sockets []string
		for _, s := range all {
			if s.Status.Tmux != "" && !slices.Contains(sockets, s.Status.Tmux) {
				sockets = append(sockets, s.Status.Tmux)
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

// notify informs the user, who may be looking elsewhere, of an agent's new state.
func (a *app) notify(ctx context.Context, m *session.Manager, s session.Session) {
	at := s.Status.Attention
	if at == nil {
		return
	}
	set := m.Config.Attention
	if set.Command != "" {
		err := notify.Command(ctx, set.Command, map[string]string{
			"AGENT_SESSION": s.Name, "AGENT_REPO": s.DisplayName(), "AGENT_STATE": string(at.State), "AGENT_NAME": at.Agent, "AGENT_ON": at.On,
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
	if set.Desktop == config.DesktopOff || set.Desktop == config.DesktopAuto && !notify.HasDesktop(os.Getenv) {
		return
	}
	body := at.Agent + ": " + string(at.State)
	if at.On != "" {
		body += ": " + at.On
	}
	if err := notify.Desktop(ctx, s.DisplayName(), body); err != nil {
		slog.WarnContext(ctx, "failed to notify desktop", "error", err)
	}
}

func newNextCmd(a *app) *cobra.Command {
	var client string
	cmd := &cobra.Command{
		Use: "next", Short: "Jump to the agent that has been waiting longest",
		Long: `Jump to the session that needs you most. Blocked agents come first, then those that have
failed, then those that have finished since your last visit; among equals, the one that
has waited longest. If you are in one of these sessions already, jump to the next one.`,
		Example: `  agent-sessionizer next`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.goTo(cmd.Context(), client, next)
		},
	}
	addClient(cmd, &client)
	return cmd
}

// next returns the session to visit after the current one, or the reason why there is none.
func next(all []session.Session, current string) (s session.Session, none string) {
	waiting := queue(all)
	i := slices.IndexFunc(waiting, func(s session.Session) bool { return s.ID == current })
	switch {
	case len(waiting) == 0:
		return session.Session{}, "no agent is waiting for you"
	case i >= 0 && len(waiting) == 1:
		return session.Session{}, "no other agent is waiting for you"
	}
	return waiting[(i+1)%len(waiting)], ""
}

func newLastCmd(a *app) *cobra.Command {
	var client string
	cmd := &cobra.Command{
		Use: "last", Short: "Go back to the previous session",
		Example: `  agent-sessionizer last`,
		Args:    usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.goTo(cmd.Context(), client, func(all []session.Session, current string) (session.Session, string) {
				var last session.Session
				for _, s := range all {
					if s.ID != current && s.Phase == session.Ready && s.Status.Attached.After(last.Status.Attached) {
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
	addClient(cmd, &client)
	return cmd
}

// addClient adds the flag by which a key binding names the tmux client it was pressed in.
func addClient(cmd *cobra.Command, client *string) {
	cmd.Flags().StringVar(client, "client", "", "tmux client to switch")
	if err := cmd.Flags().MarkHidden("client"); err != nil {
		panic(err) // the flag was added just above
	}
}

// goTo attaches to the session that pick chooses, given the one that is shown now. If there
// is none, it shows the reason.
func (a *app) goTo(ctx context.Context, client string, pick func(all []session.Session, current string) (s session.Session, none string)) error {
	if client == "" && !interactive() {
		return fail.New(fail.Usage, "switch session: no terminal").WithHint("agent-sessionizer status --json")
	}
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	all, err := m.Interactive(ctx)
	if err != nil {
		return err
	}
	current, err := (tmux.Client{}).Current(ctx, client)
	if err != nil {
		return err
	}
	s, none := pick(all, current)
	if none == "" {
		return a.attach(ctx, m, s, client)
	}
	if client == "" {
		return fail.New(fail.NotFound, "%s", none).WithHint("agent-sessionizer list")
	}
	return (tmux.Client{}).ShowMessage(ctx, client, none) // an error from a key binding would fill the screen
}
