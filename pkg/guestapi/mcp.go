package guestapi

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/time/rate"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/mcpserver"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

const (
	maxMessage = maxManifest // bytes of a message from the guest
	maxCalls   = 4           // of a connection, at once
	maxWrite   = 30 * time.Second
)

// mcp turns the connection into one for the Model Context Protocol.
func (s *Server) mcp(w http.ResponseWriter, r *http.Request, _ ops.Engine) error {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: mcp\r\n\r\n"); err != nil {
		return nil //nolint:nilerr // the guest is gone
	}
	token := r.Header.Get("Authorization")
	server := mcpserver.NewForGuest(s.Version, maxWait, func(ctx context.Context) (ops.Host, error) { return s.engine(ctx, token) }, s.public)
	m := newMessages(conn, buffered.Reader, s.limiter())
	stop := context.AfterFunc(r.Context(), func() { _ = m.Close() }) // Run would first wait for the calls
	defer stop()
	// It ends with the connection. The caller cannot answer any more.
	err = server.Run(r.Context(), m)
	s.Log.Debug("MCP connection ended", "error", err)
	return nil
}

// messages is a connection whose messages are lines. The library reads as fast as the guest
// sends, and keeps all calls until they are answered. So messages limits these: a call is not
// passed on while maxCalls others are unanswered, and nothing beyond the limit of requests. It
// refuses batches, because the library keeps their answers until the last one.
type messages struct {
	net.Conn
	lines *bufio.Reader
	limit *rate.Limiter
	calls chan struct{} // an element for each unanswered call

	closed func() // ends what waits
	done   context.Context
	write  sync.Mutex
}

func newMessages(conn net.Conn, r io.Reader, limit *rate.Limiter) *messages {
	m := &messages{Conn: conn, lines: bufio.NewReaderSize(r, maxMessage), limit: limit, calls: make(chan struct{}, maxCalls)}
	m.done, m.closed = context.WithCancel(context.Background())
	return m
}

// Connect implements mcp.Transport.
func (m *messages) Connect(context.Context) (mcp.Connection, error) { return m, nil }

// SessionID implements mcp.Connection.
func (m *messages) SessionID() string { return "" }

// Read implements mcp.Connection.
func (m *messages) Read(ctx context.Context) (jsonrpc.Message, error) {
	line, err := m.lines.ReadSlice('\n')
	if err != nil {
		return nil, fmt.Errorf("read a message: %w", err)
	}
	msg, err := jsonrpc.DecodeMessage(bytes.Clone(line)) // no batch: it must be an object
	if err != nil {
		return nil, err
	}
	if err := m.limit.Wait(m.done); err != nil {
		return nil, err
	}
	if r, ok := msg.(*jsonrpc.Request); ok && r.IsCall() {
		select {
		case m.calls <- struct{}{}:
		case <-m.done.Done():
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return msg, nil
}

// Write implements mcp.Connection. A guest that does not read loses the connection.
func (m *messages) Write(_ context.Context, msg jsonrpc.Message) error {
	text, err := jsonrpc.EncodeMessage(msg)
	if err != nil {
		return err
	}
	m.write.Lock()
	defer m.write.Unlock()
	_ = m.SetWriteDeadline(time.Now().Add(maxWrite))
	if _, err := m.Conn.Write(append(text, '\n')); err != nil {
		_ = m.Close()
		return err
	}
	if _, ok := msg.(*jsonrpc.Response); ok {
		select {
		case <-m.calls:
		default:
		}
	}
	return nil
}

// Close implements mcp.Connection.
func (m *messages) Close() error {
	m.closed()
	return m.Conn.Close()
}
