package sessioncmd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// ListOptions are the flags of list.
type ListOptions struct{ JSON bool }

func NewListCmd(a *app.App) *cobra.Command {
	var o ListOptions
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List sessions",
		Long: `List sessions. A host that belongs to a cluster also lists those of the other hosts,
while its serve runs.`,
		Example: `  agent-sessionizer list
  agent-sessionizer list --json | jq -r '.[] | select(.state == "broken").name'`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return RunList(cmd.Context(), a, o) },
	}
	cmd.Flags().BoolVar(&o.JSON, "json", false, "print a JSON array of sessions")
	return cmd
}

// RunList lists the sessions.
func RunList(ctx context.Context, a *app.App, o ListOptions) error {
	h, err := a.Host(ctx)
	if err != nil {
		return err
	}
	all, clustered, err := a.Sessions(ctx, h)
	if err != nil {
		return err
	}
	if o.JSON {
		return a.Con.JSON(all)
	}
	if len(all) == 0 {
		a.Con.Say("%s", "no sessions; create one with: agent-sessionizer open owner/repo")
		return nil
	}
	header, rows := []string{"NAME", "STATE", "FOR", "REPO", "SIZE", "USED", "NOTE"}, [][]string{}
	for _, s := range all {
		note := s.Message()
		if at := s.Attention; at != nil && note == "" {
			note = strings.TrimSpace(fmt.Sprintf("%s %s  %s", at.Agent, at.State, at.On))
		}
		if s.Task != "" {
			note = strings.TrimSpace("task " + s.Task + "  " + note)
		}
		if note == "" && s.State != s.Desired {
			note = "→ " + string(s.Desired)
		}
		note = strings.TrimSpace(strings.Join(s.Notes(), "  ") + "  " + note)
		if !s.Enforced {
			note = strings.TrimSpace("no gateway  " + note)
		}
		r := s.Resources
		row := []string{
			s.Name, string(s.State), console.Ago(s.StateChangedAt), s.DisplayName(),
			fmt.Sprintf("%d CPU %v %v", r.CPUs, r.Memory, r.Disk), s.Usage.Money(), note,
		}
		if clustered {
			row = slices.Insert(row, 1, s.Host)
		}
		rows = append(rows, row)
	}
	if clustered {
		header = slices.Insert(header, 1, "HOST")
	}
	a.Con.Table(header, rows, console.Tint{Column: "STATE", Of: func(cell string) console.Tone { return toneOf(session.Phase(cell)) }})
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
