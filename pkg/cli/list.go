package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

type listOptions struct{ json bool }

func newListCmd(a *app) *cobra.Command {
	var o listOptions
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List sessions",
		Example: `  agent-sessionizer list
  agent-sessionizer list --json | jq -r '.[] | select(.state == "broken").name'`,
		Args: usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runList(cmd.Context(), a, o) },
	}
	cmd.Flags().BoolVar(&o.json, "json", false, "print a JSON array of sessions")
	return cmd
}

func runList(ctx context.Context, a *app, o listOptions) error {
	m, err := a.manager(ctx)
	if err != nil {
		return err
	}
	all, err := m.List(ctx)
	if err != nil {
		return err
	}
	if o.json {
		views := make([]session.View, 0, len(all))
		for _, s := range all {
			views = append(views, s.View())
		}
		return a.con.JSON(views)
	}
	if len(all) == 0 {
		a.con.Say("%s", "no sessions; create one with: agent-sessionizer open owner/repo")
		return nil
	}
	header, rows := []string{"NAME", "STATE", "FOR", "REPO", "SIZE", "NOTE"}, [][]string{}
	for _, s := range all {
		note := s.ErrorMessage
		if at := s.View().Attention; at != nil && note == "" {
			note = strings.TrimSpace(fmt.Sprintf("%s %s  %s", at.Agent, at.State, at.On))
		}
		if s.Task != "" {
			note = strings.TrimSpace("task " + s.Task + "  " + note)
		}
		if note == "" && s.Phase != s.Desired {
			note = "→ " + string(s.Desired)
		}
		if !s.Spec.Enforced {
			note = strings.TrimSpace("no gateway  " + note)
		}
		r := s.Spec.Resources
		rows = append(rows, []string{
			s.Name, string(s.Phase), ago(s.StateChangedAt), s.DisplayName(),
			fmt.Sprintf("%d CPU %v %v", r.CPUs, r.Memory, r.Disk), note,
		})
	}
	a.con.Table(header, rows, console.Tint{Column: "STATE", Of: func(cell string) console.Tone { return toneOf(session.Phase(cell)) }})
	return nil
}

// toneOf returns the colour of a session's state.
func toneOf(p session.Phase) console.Tone {
	switch p {
	case session.Ready:
		return console.Good
	case session.Broken:
		return console.Bad
	case session.Creating, session.Starting, session.Stopping, session.Destroying:
		return console.Notice
	case session.Stopped, session.Gone:
		return console.Faint
	}
	return console.Plain
}

// ago formats the time since t in one unit.
func ago(t time.Time) string {
	d := time.Since(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
