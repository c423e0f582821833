package setupcmd

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/tmux"
)

type tmuxBindOptions struct{ print, force bool }

func NewTmuxCmd(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "tmux", Short: "Bind tmux keys to the picker",
		Example: `  agent-sessionizer tmux bind`,
		Args:    app.Usage(cobra.NoArgs),
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newTmuxBindCmd(a), newTmuxUnbindCmd())
	return cmd
}

func newTmuxBindCmd(a *app.App) *cobra.Command {
	var o tmuxBindOptions
	cmd := &cobra.Command{
		Use: "bind", Short: "Bind tmux keys to the picker and the next waiting agent",
		Long: `Bind keys on the running tmux server, until it ends: Alt+Shift+P and Alt+P open the
picker in a popup, Alt+N jumps to the next waiting agent. They also work in sessions of
agents, where every other key goes to the guest.`,
		Example: `  agent-sessionizer tmux bind
  agent-sessionizer tmux bind --print >>~/.tmux.conf   # permanently`,
		Args: app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return runTmuxBind(cmd.Context(), a, o) },
	}
	cmd.Flags().BoolVar(&o.print, "print", false, "print lines for tmux.conf, and bind nothing")
	cmd.Flags().BoolVarP(&o.force, "force", "f", false, "replace your own bindings of these keys")
	cmd.MarkFlagsMutuallyExclusive("print", "force")
	return cmd
}

func runTmuxBind(ctx context.Context, a *app.App, o tmuxBindOptions) error {
	self, err := app.Self()
	if err != nil {
		return err
	}
	b := tmux.Bindings{Pick: []string{self}, Next: []string{self, "next"}}
	if o.print {
		a.Printf("# agent-sessionizer: Alt+Shift+P and Alt+P open the picker, Alt+N jumps to the next waiting agent\n")
		for _, line := range b.Lines() {
			a.Printf("%s\n", line)
		}
		return nil
	}
	t := tmux.Client{}
	if err := t.Check(ctx); err != nil {
		return err
	}
	if err := t.Bind(ctx, b, o.force); err != nil {
		return err
	}
	a.Con.Say("Alt+Shift+P and Alt+P open the picker, Alt+N jumps to the next waiting agent, until this tmux ends; to make it permanent: agent-sessionizer tmux bind --print >>~/.tmux.conf")
	return nil
}

func newTmuxUnbindCmd() *cobra.Command {
	return &cobra.Command{
		Use: "unbind", Short: "Remove the key bindings of tmux bind",
		Long: `Remove the key bindings of "tmux bind" from the running tmux server. Bindings that --force
replaced return when your tmux.conf is read again.`,
		Example: `  agent-sessionizer tmux unbind`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return tmux.Client{}.Unbind(cmd.Context())
		},
	}
}
