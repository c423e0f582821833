package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	maxKeys  = 64 << 10 // of one message from the client
	maxCells = 1000     // width or height of a terminal
)

type terminalInput struct {
	ops.SessionPath
	Window string `query:"window" pattern:"^@[0-9]{1,9}$" doc:"Id of the window, from listWindows. Default: the current one."`
	Cols   int    `query:"cols" default:"80" minimum:"1" maximum:"1000"`
	Rows   int    `query:"rows" default:"24" minimum:"1" maximum:"1000"`
}

// TerminalEnd is the last message of a terminal.
type TerminalEnd struct {
	Type   string `json:"type" enum:"end"`
	Reason string `json:"reason"`
}

func (s *Server) terminalRoute(api huma.API) {
	register(s, api, route{Spec: ops.Terminal}, s.terminal)
	schemaOf[TerminalEnd](api)
}

// terminal connects a browser's terminal to a window of the guest's tmux.
func (s *Server) terminal(ctx context.Context, in *terminalInput) (*bodyOutput, error) {
	v, err := s.engine.Session(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	req := requestOf(ctx)
	st, err := eventFeed{s}.newStream(req, "terminal", subject{id: v.ID}, 0)
	if err != nil {
		return nil, err
	}
	guest, err := session.Connections{Paths: s.tasks.Sessions.Config.Paths}.Dial(ctx, v)
	if err != nil {
		st.close()
		return nil, err
	}
	command, err := v.Guest(guest).ShareWindow(in.Window, v.Status.Dir)
	if err != nil {
		st.close()
		return nil, errors.Join(err, guest.Close())
	}
	return &bodyOutput{func(huma.Context) {
		defer st.close()
		defer guest.Close()
		c, err := websocket.Accept(req.w, req.r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled, Subprotocols: []string{socketProtocol}})
		if err != nil {
			return // Accept has sent a response
		}
		req.w.status = http.StatusSwitchingProtocols
		defer func() { _ = c.CloseNow() }() // if anything is left open
		s.log.InfoContext(ctx, "terminal opened", "actor", req.who.Name, "session", v.ID)
		s.runTerminal(ctx, c, req.who, func(ctx context.Context, t ssh.Terminal) error {
			t.Width, t.Height = in.Cols, in.Rows
			return guest.Terminal(ctx, command, t)
		})
	}}, nil
}

// runTerminal calls run with a terminal whose other end is the client. It reports to the client
// why it ended, and closes the connection.
func (s *Server) runTerminal(ctx context.Context, c *websocket.Conn, who principal, run func(context.Context, ssh.Terminal) error) {
	running, cancel := context.WithCancelCause(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel(nil)
	keys, typed := io.Pipe()
	defer keys.Close()
	sizes := make(chan ssh.Size, 1)
	// The library closes the connection if a read or a write is cancelled. So they do not end
	// with running, but with the connection, after the last message.
	parts.Go(func() { cancel(readTerminal(ctx, c, typed, sizes)) })
	parts.Go(func() { s.watchAccess(running, func() { cancel(errNoAccess) }, who, ops.Admin) })
	parts.Go(func() { s.ping(ctx, running.Done(), c, cancel) })

	out := &terminalWriter{ctx: ctx, conn: c, patience: s.limits.Write}
	filter := termtext.NewScreenFilter(out, func([]byte) {}) // a guest must not write to the clipboard
	err := run(running, ssh.Terminal{In: keys, Out: filter, Resize: sizes})
	reason := "the window was closed"
	if cause := context.Cause(running); cause != nil {
		reason = cause.Error()
	} else if err != nil {
		reason += ": " + err.Error()
	}
	if text, err := json.Marshal(TerminalEnd{"end", bounded(reason)}); err == nil {
		_ = out.write(websocket.MessageText, text) // the client may be gone
	}
	_ = keys.Close() // the reader may wait for the guest
	_ = c.Close(websocket.StatusNormalClosure, "")
}

var errNoAccess = errors.New("the login or the token has ended, or serve is shutting down")

// ping detects a client that is gone without a word, until done is closed.
func (s *Server) ping(ctx context.Context, done <-chan struct{}, c *websocket.Conn, end context.CancelCauseFunc) {
	tick := time.NewTicker(s.limits.Beat)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		wait, cancel := context.WithTimeout(ctx, s.limits.Write)
		err := c.Ping(wait)
		cancel()
		if err != nil {
			end(errors.New("the client does not answer"))
			return
		}
	}
}

// readTerminal reads what the client types, and the sizes of its terminal. It waits while the
// guest does not read.
func readTerminal(ctx context.Context, c *websocket.Conn, typed *io.PipeWriter, sizes chan ssh.Size) error {
	c.SetReadLimit(maxKeys)
	for {
		kind, text, err := c.Read(ctx)
		if err != nil {
			return errors.New("the client has closed the connection")
		}
		if kind == websocket.MessageBinary {
			if _, err := typed.Write(text); err != nil {
				return err
			}
			continue
		}
		var size struct{ Cols, Rows int }
		if json.Unmarshal(text, &size) != nil || size.Cols < 1 || size.Rows < 1 || size.Cols > maxCells || size.Rows > maxCells {
			return errors.New(`a text message must be {"cols": 1 to 1000, "rows": 1 to 1000}`)
		}
		select { // only the latest size matters
		case <-sizes:
		default:
		}
		sizes <- ssh.Size{Width: size.Cols, Height: size.Rows}
	}
}

// terminalWriter sends the guest's output. A client that does not receive it for a while is
// disconnected; until then the guest waits.
type terminalWriter struct {
	ctx      context.Context
	conn     *websocket.Conn
	patience time.Duration
}

func (w *terminalWriter) Write(p []byte) (int, error) {
	if err := w.write(websocket.MessageBinary, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (w *terminalWriter) write(kind websocket.MessageType, p []byte) error {
	ctx, cancel := context.WithTimeout(w.ctx, w.patience)
	defer cancel()
	return w.conn.Write(ctx, kind, p)
}
