package sessioncmd

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/complete"
)

// completeCopy completes a local path, or SESSION: followed by a path in its guest.
func completeCopy(a *app.App) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 1 || strings.Contains(typed, ":") {
			return nil, cobra.ShellCompDirectiveNoFileComp // only the guest knows its files
		}
		if _, _, inGuest := guestPath(append(args, "")[0], func(string) bool { return false }); inGuest || strings.ContainsAny(typed, "./") {
			return nil, cobra.ShellCompDirectiveDefault
		}
		var offer []string
		for _, s := range complete.InStore(a, cmd) {
			if strings.HasPrefix(s.Name, typed) {
				offer = append(offer, s.Name+":\t"+string(s.Phase)+" "+s.DisplayName())
			}
		}
		if len(offer) == 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return offer, cobra.ShellCompDirectiveNoSpace
	}
}

// publishedPorts offers the published ports for --close.
func publishedPorts(a *app.App) complete.Lister {
	return func(cmd *cobra.Command, args []string) []string {
		_, s, ok := complete.First(a, cmd, args)
		if taking, _ := cmd.Flags().GetBool("close"); !ok || !taking {
			return nil // only the guest knows which other ports are listened on
		}
		var offer []string
		for _, p := range s.Status.Ports {
			offer = append(offer, strconv.Itoa(int(p.Guest)))
		}
		return offer
	}
}
