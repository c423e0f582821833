package mcpserver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// idleHost is a Host whose tasks never end.
type idleHost struct{ ops.Host }

func (idleHost) Perform(context.Context, ops.Call) error { return nil }

// TestGuestsWaitForTheirTime checks that a guest cannot hold a call for longer than its server
// allows.
func TestGuestsWaitForTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const longest = 3 * time.Second
		s := NewForGuest("test", longest, func(context.Context) (ops.Host, error) { return idleHost{}, nil }, func(err error) error { return err })
		near, far := mcp.NewInMemoryTransports()
		server, err := s.Connect(t.Context(), near, nil)
		if err != nil {
			t.Fatal(err)
		}
		c, err := mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), far, nil)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "watch_task", Arguments: map[string]any{"task": "a", "seconds": 600}})
		if took := time.Since(start); err != nil || r.IsError || took > longest+time.Second {
			t.Errorf("watch_task = %+v, %v after %v, want an answer after %v", r, err, took, longest)
		}
		_ = c.Close()
		_ = server.Wait()
	})
}
