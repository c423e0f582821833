package servecmd

import (
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
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
			return mcpserver.New(h, app.Version).Run(cmd.Context(), &mcp.StdioTransport{MaxLineLength: maxMCPLine})
		},
	}
}
