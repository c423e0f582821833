package server

import (
	"bytes"
	"context"
	"io"
	"net/http"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// mcpPath is where the API speaks the Model Context Protocol, as its streamable HTTP transport
// describes it.
const mcpPath = "/mcp"

// mcpHandler offers the operations as tools. It keeps nothing between two requests, so that a
// client may continue after a restart, and a removed token is refused at once. A request counts
// as a stream while it runs, because some tools wait.
func (s *Server) mcpHandler() http.Handler {
	tools := mcp.NewStreamableHTTPHandler(func(r *http.Request) *mcp.Server {
		return mcpserver.New(requestHost{s.engine.As(requestOf(r.Context()).who.Caller), r.Context()}, s.o.Version)
	}, &mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true, Logger: s.log})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req := requestOf(r.Context())
		body, err := io.ReadAll(r.Body) // middleware has read and bounded it
		if err != nil {
			req.w.fail(s.problemOf(r.Context(), err))
			return
		}
		// The library performs all calls of a batch at once, however many there are.
		if text := bytes.TrimLeft(body, " \t\r\n"); len(text) > 0 && text[0] == '[' {
			req.w.fail(problem(http.StatusBadRequest, codeInvalid, "send one message in each request", "batches are not supported"))
			return
		}
		st, err := eventFeed{s}.newStream(req, "mcp", subject{}, 0)
		if err != nil {
			req.w.fail(s.problemOf(r.Context(), err))
			return
		}
		defer st.close()
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		go s.watchAccess(ctx, cancel, req.who, ops.Read)
		r = r.WithContext(ctx)
		r.Body = io.NopCloser(bytes.NewReader(body))
		tools.ServeHTTP(w, r)
	})
}

// requestHost performs operations until a request ends. The library does not cancel a call
// whose client is gone, and waits for it.
type requestHost struct {
	ops.Host
	request context.Context //nolint:containedctx // it lives as long as the request
}

// Perform implements ops.Host.
func (h requestHost) Perform(ctx context.Context, c ops.Call) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.request, cancel)()
	return h.Host.Perform(ctx, c)
}
