package servecmd

import (
	"context"
	"log/slog"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// maxMCPLine limits one message of a client, in bytes.
const maxMCPLine = 4 << 20

func NewMCPCmd(a *app.App) *cobra.Command {
	return &cobra.Command{
		Use: "mcp", Short: "Give an agent on this host tools for sessions and tasks",
		Long: `Give an agent on this host tools for sessions and tasks, over the Model Context
Protocol on standard input and output. The agent's program starts this command. The
tools run with your rights. Claude Code and Codex ask you before they use one, unless
you turn that off.`,
		Example: `  claude mcp add agent-sessionizer -- agent-sessionizer mcp`,
		Args:    app.Usage(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			h, err := a.Host(cmd.Context())
			if err != nil {
				return err
			}
			if e, ok := h.(ops.Engine); ok {
				go keepTended(cmd.Context(), e)
			}
			return mcpserver.New(h, app.Version).Run(cmd.Context(), &mcp.StdioTransport{MaxLineLength: maxMCPLine})
		},
	}
}

// tendEvery is how often this command starts missing keepers and waiting tasks.
const tendEvery = 5 * time.Second

// keepTended starts missing keepers and waiting tasks until ctx ends, as serve does. Other commands do it once,
// when they start; this one runs for as long as its agent.
func keepTended(ctx context.Context, e ops.Engine) {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := e.Tasks.ReconcileAll(ctx); err != nil && ctx.Err() == nil {
			slog.WarnContext(ctx, "failed to start missing keepers", "error", err)
		}
	}
}
