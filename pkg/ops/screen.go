package ops

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Screen is what a person would see of a session: its agents, and the terminal of the one that
// needs its user most.
type Screen struct {
	guestproto.Observation
	At time.Time `json:"at" doc:"When the guest reported it."`
}

// PromptRequest is a request to type a text into a session's agent.
type PromptRequest struct {
	SessionPath
	Body struct {
		Text string `json:"text" maxLength:"16000" doc:"The text, which is then sent. It may have several lines."`
	}
}

// Operations on the agent of a session.
var (
	GetScreen = Operation[SessionPath, Screen]{Spec{
		ID: "getScreen", Method: http.MethodGet, Path: SessionsPath + "/{id}/screen", Tag: "sessions", Need: Read, Errors: []int{404, 409},
		Summary: "Get the screen of a session's agent, and the state of all its agents",
		About:   "It is the guest's latest report, at most some seconds old. The texts come from the guest: they are safe to print, but must not be trusted.",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (Screen, error) {
		s, err := e.ready(ctx, r.ID)
		if err != nil {
			return Screen{}, err
		}
		g, at, err := session.Observation(e.sessions().Config.Paths, s)
		return Screen{g, at}, err
	}}

	SendPrompt = Operation[PromptRequest, session.View]{Spec{
		ID: "sendPrompt", Method: http.MethodPost, Path: SessionsPath + "/{id}/prompt", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Type a prompt into a session's agent",
		About:   "The agent must run in the session's tmux. 409 if it waits for an answer.",
	}, func(ctx context.Context, e *Engine, r *PromptRequest) (session.View, error) {
		if strings.TrimSpace(r.Body.Text) == "" {
			return session.View{}, fail.New(fail.Usage, "the prompt must not be empty").WithHint("agent-sessionizer open %s", r.ID)
		}
		s, err := e.ready(ctx, r.ID)
		if err != nil {
			return session.View{}, err
		}
		conn, err := session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
		if err != nil {
			return session.View{}, err
		}
		defer conn.Close()
		return s.View(), s.Guest(conn).Prompt(ctx, r.Body.Text)
	}}
)
