package netcmd

import (
	"context"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// deniedNames offers the names that the session's gateway denied, and the groups.
func deniedNames(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, args []string) []string {
		return append(recentlyDenied(a, cmd, args, func(e gateway.Entry) bool { return !e.Allowed }, "denied"), complete.GroupNames(a)...)
	}
}

// allowedNames offers the names that the session's gateway allowed, and the groups.
func allowedNames(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, args []string) []string {
		return append(recentlyDenied(a, cmd, args, func(e gateway.Entry) bool { return e.Allowed }, "allowed"), complete.GroupNames(a)...)
	}
}

// recentlyDeniedNames offers all names that the session asked for.
func recentlyDeniedNames(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, args []string) []string {
		return recentlyDenied(a, cmd, args, func(gateway.Entry) bool { return true }, "requested")
	}
}

// recentlyDenied returns names from a session's decision log, the latest first. The guest chooses
// these names, so only valid ones are offered to a shell.
func recentlyDenied(a *app.App, cmd *cobra.Command, args []string, match func(gateway.Entry) bool, what string) []string {
	m, s, ok := complete.First(a, cmd, args)
	if !ok || !s.Spec.Enforced {
		return nil
	}
	ctx, cancel := context.WithTimeout(complete.ContextOf(cmd), complete.CompletionTime)
	defer cancel()
	var names []string
	last := map[string]int{}
	for e, err := range gateway.Decisions(ctx, m.Gateway(s).Dir, false) {
		if err != nil || ctx.Err() != nil {
			break
		}
		name, err := policy.Canonical(e.Name)
		if err != nil || !match(e) {
			continue
		}
		if e.Kind != gateway.KindDNS && e.Port != 0 && e.Port != 443 {
			name += ":" + strconv.Itoa(int(e.Port))
		}
		if _, seen := last[name]; !seen {
			names = append(names, name)
		}
		last[name] = int(e.Seq)
	}
	slices.SortFunc(names, func(x, y string) int { return last[y] - last[x] })
	for i, name := range names {
		names[i] = name + "\t" + what
	}
	return names
}
