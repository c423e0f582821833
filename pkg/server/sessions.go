package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

const sessionsPath = "/api/v1/sessions"

// SessionList lists the existing sessions, oldest first.
type SessionList struct {
	Sessions []session.View `json:"sessions" nullable:"false"`
}

// SessionPath is the part of a path that identifies the session.
type SessionPath struct {
	ID string `path:"id" doc:"Full id of the session." example:"7be1c04d55aa"`
}

// ExecPath is the part of a path that identifies a command of a session.
type ExecPath struct {
	SessionPath
	Exec string `path:"exec" doc:"Id from the response of startExec."`
}

type (
	sessionOutput  struct{ Body session.View }
	sessionsOutput struct{ Body SessionList }

	execInput struct {
		SessionPath
		OnceInput
		RawBody []byte
		Body    ExecRequest
	}
	execLogsInput struct {
		ExecPath
		LogQuery
	}
	execOutput        struct{ Body Exec }
	execCreatedOutput struct {
		Location string `header:"Location"`
		Body     Exec
	}
)

func (s *Server) sessionRoutes(api huma.API) {
	register(s, api, route{
		id: "listSessions", method: http.MethodGet, path: sessionsPath, tag: "sessions", need: Read,
		summary: "List sessions that are not gone, oldest first",
	}, func(ctx context.Context, _ *struct{}) (*sessionsOutput, error) {
		all, err := s.tasks.Sessions.List(ctx)
		if err != nil {
			return nil, err
		}
		list := SessionList{Sessions: []session.View{}}
		for _, v := range all {
			list.Sessions = append(list.Sessions, v.View())
		}
		return &sessionsOutput{list}, nil
	})
	register(s, api, route{
		id: "getSession", method: http.MethodGet, path: sessionsPath + "/{id}", tag: "sessions", need: Read, more: []int{404},
		summary: "Get a session, even one that is gone",
	}, func(ctx context.Context, in *SessionPath) (*sessionOutput, error) {
		v, err := s.session(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		return &sessionOutput{v.View()}, nil
	})
	register(s, api, route{
		id: "startExec", method: http.MethodPost, path: sessionsPath + "/{id}/exec", tag: "sessions", need: Admin, ok: http.StatusAccepted, more: []int{404, 409},
		summary: "Run a command in a session",
		about: "Runs the command as the agent, with the session's secrets in the environment. The command belongs to this server: when the server ends, it ends the command; " +
			"when the server is killed, the command may continue in the guest, and its state here is `lost`. The command's events follow `last_event` in the session's events.",
		accepts: []string{"application/json"},
	}, func(ctx context.Context, in *execInput) (*execCreatedOutput, error) {
		v, err := s.session(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		req := requestOf(ctx)
		e, err := s.execs.start(ctx, v, in.Body, req.once(in.OnceInput, in.RawBody), req)
		if err != nil {
			return nil, err
		}
		return &execCreatedOutput{execPath(e), e}, nil
	})
	register(s, api, route{
		id: "getExec", method: http.MethodGet, path: sessionsPath + "/{id}/exec/{exec}", tag: "sessions", need: Read, more: []int{404},
		summary: "Get a running or ended command",
		about:   "Only the scope `admin` sees the command line.",
	}, func(ctx context.Context, in *ExecPath) (*execOutput, error) {
		e, err := s.execs.get(in.ID, in.Exec)
		return &execOutput{e.shownTo(requestOf(ctx).who)}, err
	})
	register(s, api, route{
		id: "cancelExec", method: http.MethodDelete, path: sessionsPath + "/{id}/exec/{exec}", tag: "sessions", need: Admin, ok: http.StatusAccepted, more: []int{404},
		summary: "End a command: SIGTERM, then SIGKILL",
	}, func(_ context.Context, in *ExecPath) (*execOutput, error) {
		e, err := s.execs.cancel(in.ID, in.Exec)
		return &execOutput{e}, err
	})
	register(s, api, route{
		id: "getExecLogs", method: http.MethodGet, path: sessionsPath + "/{id}/exec/{exec}/logs", tag: "sessions", need: Read, more: []int{404, 416}, ranges: true, content: "text/plain",
		summary: "Get a command's output",
		about:   "The output byte for byte, with the guest's secrets masked.",
	}, func(ctx context.Context, in *execLogsInput) (*bodyOutput, error) {
		if _, err := s.execs.get(in.ID, in.Exec); err != nil {
			return nil, err
		}
		over := func(context.Context) (bool, error) {
			e, err := s.execs.get(in.ID, in.Exec)
			return e.State != ExecRunning, err
		}
		dir := s.execs.dir(in.ID, in.Exec)
		return s.logs(ctx, subject{in.ID, over}, in.LogQuery, dir.stdout(), dir.stderr())
	})
}

func (s *Server) session(ctx context.Context, id string) (session.Session, error) {
	if !isID(id) {
		return session.Session{}, noSuch("session", id)
	}
	return s.tasks.Sessions.Get(ctx, id)
}
