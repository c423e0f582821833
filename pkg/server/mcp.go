package server

import (
	"net/http"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
)

// mcpPath is where the API speaks the Model Context Protocol, as its streamable HTTP transport
// describes it.
const mcpPath = "/mcp"

// mcpHandler offers the operations as tools. It keeps nothing between two requests, so that a
// client may continue after a restart, and a removed token is refused at once.
func (s *Server) mcpHandler() http.Handler {
	return mcp.NewStreamableHTTPHandler(func(r *http.Request) *mcp.Server {
		return mcpserver.New(s.engine.As(requestOf(r.Context()).who.Caller), s.o.Version)
	}, &mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true, Logger: s.log})
}
