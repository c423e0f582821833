package setupcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
)

type auditOptions struct {
	since moment
	types auditTypes
	json  bool
}

func NewAuditCmd(a *app.App) *cobra.Command {
	var o auditOptions
	cmd := &cobra.Command{
		Use: "audit", Short: "Show who did what to sessions and tasks",
		Long: `Show who did what to sessions and tasks: VMs created and removed, secrets resolved (by
name), tasks submitted and ended, keepers replaced after a crash. Records are
kept for the time that audit.retention sets. After a crash, a record may appear twice.`,
		Example: `  agent-sessionizer audit --since 24h
  agent-sessionizer audit --type secret_accessed --type vm_destroyed
  agent-sessionizer audit --since 2026-01-31 --json | jq -r 'select(.outcome == "failure")'`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runAudit(cmd.Context(), a, o) },
	}
	cmd.Flags().Var(&o.since, "since", "earliest `TIME` to show: 24h or 7d ago, 2026-01-31 or 2026-01-31T12:00:00Z")
	cmd.Flags().Var(&o.types, "type", "record `TYPE` to show, as printed; repeatable")
	cmd.Flags().BoolVar(&o.json, "json", false, "print JSON, one record per line")
	return cmd
}

func runAudit(ctx context.Context, a *app.App, o auditOptions) error {
	cfg, err := a.Settings()
	if err != nil {
		return err
	}
	header, rows := []string{"TIME", "TYPE", "ACTOR", "RESOURCE", "OUTCOME", "DETAILS"}, [][]string{}
	for r, err := range a.AuditLog(cfg).Records() {
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r.Time.Before(time.Time(o.since)) || len(o.types) > 0 && !slices.Contains(o.types, r.Type) {
			continue
		}
		if o.json {
			if err := a.JsonLine(r); err != nil {
				return err
			}
			continue
		}
		details := ""
		if len(r.Details) > 0 {
			text, err := json.Marshal(r.Details)
			if err != nil {
				return err
			}
			details = string(text)
		}
		rows = append(rows, []string{r.Time.Local().Format(time.DateTime), string(r.Type), r.Actor, r.Resource, string(r.Outcome), details})
	}
	switch {
	case o.json:
	case len(rows) == 0:
		a.Con.Say("%s", "no records")
	default:
		a.Con.Table(header, rows, console.Tint{Column: "OUTCOME", Of: func(cell string) console.Tone {
			if cell == string(audit.Failure) {
				return console.Bad
			}
			return console.Plain
		}})
	}
	return nil
}

// moment is a flag value: a point in time.
type moment time.Time

func (m *moment) Set(text string) error {
	var ago config.Duration
	if err := ago.Set(text); err == nil {
		*m = moment(time.Now().Add(-time.Duration(ago)))
		return nil
	}
	for _, layout := range []string{time.RFC3339, time.DateTime, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			*m = moment(t)
			return nil
		}
	}
	return fmt.Errorf("must be a time such as 24h, 7d, 2026-01-31 or 2026-01-31T12:00:00Z, got %q", text)
}

func (m *moment) String() string {
	if t := time.Time(*m); !t.IsZero() {
		return t.Format(time.RFC3339)
	}
	return ""
}

func (*moment) Type() string { return "time" }

// auditTypes is a flag value: a list of record types.
type auditTypes []audit.Type

func (l *auditTypes) Set(text string) error {
	if !slices.Contains(audit.Types(), audit.Type(text)) {
		var all []string
		for _, t := range audit.Types() {
			all = append(all, string(t))
		}
		return fmt.Errorf("unknown type %q: must be one of %s", text, strings.Join(all, ", "))
	}
	*l = append(*l, audit.Type(text))
	return nil
}

func (l *auditTypes) String() string {
	var all []string
	for _, t := range *l {
		all = append(all, string(t))
	}
	return strings.Join(all, ",")
}

func (*auditTypes) Type() string { return "type" }
