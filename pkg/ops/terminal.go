package ops

import (
	"context"
	"net/http"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// WindowList lists the windows of a guest's tmux.
type WindowList struct {
	Windows []guestclient.Window `json:"windows" nullable:"false"`
}

// ListWindows lists the windows that a terminal can show.
var ListWindows = Operation[SessionPath, WindowList]{Spec{
	ID: "listWindows", Method: http.MethodGet, Path: SessionsPath + "/{id}/windows", Tag: "sessions", Need: Read, Errors: []int{404, 409},
	Summary: "List the windows of a session's tmux",
	About:   "The texts come from the guest: they are safe to print, but must not be trusted.",
}, func(ctx context.Context, e *Engine, r *SessionPath) (l WindowList, err error) {
	l.Windows = []guestclient.Window{}
	s, err := e.ready(ctx, r.ID)
	if err != nil {
		return l, err
	}
	done, err := e.costly()
	if err != nil {
		return l, err
	}
	defer done()
	conn, err := session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
	if err != nil {
		return l, err
	}
	defer conn.Close()
	all, err := s.Guest(conn).Windows(ctx)
	l.Windows = append(l.Windows, all...)
	return l, err
}}

// Terminal is the part of the API that shows a window of a session's tmux in a browser.
var Terminal = Spec{
	ID: "openTerminal", Method: http.MethodGet, Path: "/ws/sessions/{id}/terminal", Tag: "sessions", Need: Admin,
	Status: http.StatusSwitchingProtocols, Errors: []int{404, 405, 409, 426},
	Summary: "Show a window of a session's tmux over WebSocket",
	About: "Binary messages carry the terminal's output and input, at most 64 KiB in each. The client may send the text message " +
		"`{\"cols\": 100, \"rows\": 30}` when its size changes. Before it closes the connection, the server sends " +
		"`{\"type\": \"end\", \"reason\": \"…\"}`. What other terminals show does not change.",
}
