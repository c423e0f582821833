package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func (s *Server) tunnelRoute(api huma.API) {
	register(s, api, route{Spec: ops.Tunnel}, s.tunnel)
}

// tunnel carries the bytes of a client's SSH connection to a guest. They are encrypted between the
// two.
func (s *Server) tunnel(ctx context.Context, in *ops.SessionPath) (*bodyOutput, error) {
	req := requestOf(ctx)
	v, err := s.engine.As(req.who.Caller).Reachable(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	st, err := eventFeed{s}.newStream(req, "ssh", subject{id: v.ID}, 0)
	if err != nil {
		return nil, err
	}
	guest, err := session.Connections{Paths: s.tasks.Sessions.Config.Paths}.Connect(ctx, v)
	if err != nil {
		st.close()
		return nil, err
	}
	return &bodyOutput{func(huma.Context) {
		defer st.close()
		defer guest.Close()
		c, err := websocket.Accept(req.w, req.r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled, Subprotocols: []string{socketProtocol}})
		if err != nil {
			return // Accept has sent a response
		}
		req.w.status = http.StatusSwitchingProtocols
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go s.watchAccess(ctx, cancel, req.who, ops.Admin)
		s.carry(ctx, cancel, c, guest)
	}}, nil
}

// carry moves bytes between a client and a guest until one of them ends, does not read for a
// while, or ctx is done. Then it cancels ctx, and closes both.
func (s *Server) carry(ctx context.Context, cancel func(), c *websocket.Conn, guest net.Conn) {
	defer context.AfterFunc(ctx, func() {
		_ = c.CloseNow()
		_ = guest.Close()
	})()
	client := websocket.NetConn(ctx, c, websocket.MessageBinary)
	var ways sync.WaitGroup
	defer ways.Wait()
	ways.Go(func() {
		defer cancel()
		_ = pipe.Copy(patientConn{guest, s.limits.Tunnel}, client) // either end may close at any time
	})
	ways.Go(func() {
		defer cancel()
		if pipe.Copy(patientConn{client, s.limits.Tunnel}, guest) == nil {
			_ = c.Close(websocket.StatusNormalClosure, "") // after everything that the guest sent
		}
	})
}

// patientConn bounds how long the other end may take to read each part of what is written.
type patientConn struct {
	net.Conn
	patience time.Duration
}

func (c patientConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	n, err := c.Conn.Write(p)
	return n, errors.Join(err, c.SetWriteDeadline(time.Time{})) // a WebSocket also ends at a deadline between two writes
}

// watchAccess calls cancel when who no longer has the scope need, or the server ends: a token
// may be removed, and a dashboard's user may log out. It ends with ctx.
func (s *Server) watchAccess(ctx context.Context, cancel func(), who principal, need ops.Scope) {
	tick := time.NewTicker(s.limits.Beat)
	defer tick.Stop()
	for s.stillAllowed(who, need) {
		select {
		case <-tick.C:
			continue
		case <-s.closing:
		case <-ctx.Done():
		}
		break
	}
	cancel()
}
