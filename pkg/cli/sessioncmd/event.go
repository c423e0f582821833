package sessioncmd

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

// copyToClipboard passes what the guest copied to the local tmux, which passes it to the
// terminal. The guest can write the clipboard but never read it.
func copyToClipboard(ctx context.Context, name string) func([]byte) {
	return func(b []byte) {
		if os.Getenv("TMUX") == "" {
			return
		}
		if err := (tmux.Client{}).Copy(ctx, name, b); err != nil {
			slog.Debug("failed to copy to clipboard", "error", err)
		}
	}
}

// printEvent prints one event of a session's log.
func printEvent(a *app.App, ev store.Event, asJSON bool) error {
	if asJSON {
		return a.JsonLine(ev)
	}
	at := ev.At.Local().Format("15:04:05.000")
	switch ev.Kind {
	case session.EventPhase:
		var p session.PhaseChange
		if err := json.Unmarshal(ev.Data, &p); err != nil {
			return err
		}
		a.Printf("%s  %s → %s (desired: %s) %s\n", at, p.From, p.To, p.Desired, p.Reason)
	case session.EventStep:
		var st lifecycle.Step
		if err := json.Unmarshal(ev.Data, &st); err != nil {
			return err
		}
		a.Printf("%s  %6.1fs  %-8s %s  %s\n", at, st.Elapsed().Seconds(), st.State, st.Name, st.Detail)
	case session.EventWarning:
		var w lifecycle.Warning
		if err := json.Unmarshal(ev.Data, &w); err != nil {
			return err
		}
		a.Printf("%s  warning: %s\n", at, w.Message)
	case gateway.BudgetEvent:
		var n gateway.BudgetNote
		if err := json.Unmarshal(ev.Data, &n); err != nil {
			return err
		}
		a.Printf("%s  %s\n", at, budgetText(n))
	default:
		a.Printf("%s  %s %s\n", at, ev.Kind, ev.Data)
	}
	return nil
}
