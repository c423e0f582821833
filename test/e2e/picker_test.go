//go:build e2e

package e2e

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestPicker uses the hotkey as on a normal day: it creates two sessions and switches
// between them, one rings, and one is destroyed. make pictures keeps the screens.
func TestPicker(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("api")
	b.Repo("web")
	b.Write(".config/agent-sessionizer/resources.yaml", "defaults: {cpus: "+realvm.CPUs+", memory: "+realvm.Memory+", disk: 8GiB}\n")
	b.Write(".config/agent-sessionizer/repos.txt", b.Home+"/web\n")
	u := newTerminal(t, b)
	state := func(repo string) string {
		for _, s := range b.List() {
			if s.Repo == repo {
				return s.State
			}
		}
		return ""
	}
	t.Cleanup(func() { b.Run("tmux", "kill-server") })
	u.typed("unset TMUX; exec tmux -f /dev/null new-session -s mine sh", "Enter")
	testenv.WaitFor(t, "the user's tmux", func() bool { return b.Run("tmux", "has-session", "-t", "=mine").Code == 0 })
	b.Run("tmux", "set-option", "-g", "status-right", "#{@agent_status} ")
	b.Asz("tmux", "bind")

	// typed text that matches no row is a repository; the popup closes immediately
	u.typed("M-p")
	u.sees("owner/repo, a git URL")
	u.typed("./api", "Enter")
	u.sees("✓ boot the VM")
	u.sees("apply the network policy")
	u.picture("creating")
	closed := func(screen string) bool { return !strings.Contains(screen, "a git URL") }
	u.until("the picker's end", closed)
	u.sees("scratch") // the guest's windows
	api := b.List()[0].Name
	// from there, a row of the list
	u.typed("M-p")
	u.sees("api")
	u.sees("web")
	u.typed("web")
	u.sees("no session; Enter creates one") // the preview of web's row
	u.typed("Enter")
	testenv.WaitFor(t, "the second session", func() bool { return state("web") == "ready" })
	u.sees("scratch")
	web := b.List()[1].Name
	u.typed("C-b", "5")
	u.typed("clear; echo in-$(hostname)", "Enter")
	u.sees("in-lima-" + web)

	// back through the picker; meanwhile the other one rings
	u.typed("M-p")
	u.sees("api")
	u.picks("lima-"+api, "api", "Enter")
	b.In(web, "tmux send-keys -t =agent:server \"printf '\\a'\" Enter")
	testenv.WaitFor(t, "the bell in the list", func() bool {
		return strings.Contains(b.Asz("list"), "bell in window server")
	})
	testenv.WaitFor(t, "the bell on the status line", func() bool {
		return strings.Contains(b.Run("tmux", "show-options", "-gv", "@agent_status").Stdout, "1 blocked (web)")
	})
	client := strings.TrimSpace(b.Run("tmux", "list-clients", "-F", "#{client_name}").Stdout)
	b.Run("tmux", "switch-client", "-c", client, "-t", "=mine:")
	u.sees("1 blocked (web) · 1 ready")
	u.picture("status")
	u.typed("M-p")
	u.sees("bell in window")
	u.typed("Escape")
	u.until("the picker's end", closed) // an Escape followed by a key would be another key
	u.typed("M-n")
	u.sees("in-lima-" + web)

	// destroy the first session
	u.typed("M-p")
	u.sees("api")
	u.picks("Destroy "+api, "api", "C-x")
	u.typed("y", "Enter")
	testenv.WaitFor(t, "the end of it", func() bool { return state("api") == "" })
	u.typed("Escape")
	u.sees("in-lima-" + web)
	b.Asz("destroy", "--force", web)
}
