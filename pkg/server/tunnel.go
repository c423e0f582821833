package server

import (
	"context"
	"net/http"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

func (s *Server) tunnelRoute(api huma.API) {
	register(s, api, route{Spec: ops.Tunnel}, s.tunnel)
}

// tunnel relays a client's SSH connection to a guest. The guest's key stays on this host.
func (s *Server) tunnel(ctx context.Context, in *ops.SessionPath) (*bodyOutput, error) {
	v, err := s.engine.Session(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	if v.Phase != session.Ready && v.Status.Endpoint.Addr == "" {
		return nil, fail.New(fail.Conflict, "session %s is %s", v.Name, v.Phase).WithHint("agent-sessionizer start %s", v.Name)
	}
	req := requestOf(ctx)
	st, err := eventFeed{s}.newStream(req, "ssh", subject{id: v.ID}, 0)
	if err != nil {
		return nil, err
	}
	guest, err := session.Connections{Paths: s.tasks.Sessions.Config.Paths}.DialOwn(ctx, v)
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
		if err := guest.Tunnel(ctx, websocket.NetConn(ctx, c, websocket.MessageBinary)); err != nil {
			s.log.DebugContext(ctx, "tunnel ended", "session", v.ID, "error", err)
		}
	}}, nil
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
