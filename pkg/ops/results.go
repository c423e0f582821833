package ops

import (
	"cmp"
	"context"
	"net/http"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Limits of a result's texts, in bytes.
const (
	MaxResultName    = 100
	MaxResultCommand = 1000
)

// ResultRequest records how a command in a session ended.
type ResultRequest struct {
	SessionPath
	Body struct {
		Name     string `json:"name,omitempty" maxLength:"100" doc:"What it is called; the command's beginning if absent. It replaces an earlier result of the same name."`
		Command  string `json:"command,omitempty" maxLength:"1000" doc:"The command line."`
		ExitCode int    `json:"exit_code" minimum:"0" maximum:"255"`
	}
}

// RecordResult records how a command ended.
var RecordResult = Operation[ResultRequest, session.View]{Spec{
	ID: "recordResult", Method: http.MethodPost, Path: SessionsPath + "/{id}/results", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
	Summary: "Record how a command in a session ended, such as its tests",
	About:   "The commit that is checked out is recorded with it. Reviews show the results.",
}, func(ctx context.Context, e *Engine, r *ResultRequest) (session.View, error) {
	name := termtext.Line(cmp.Or(r.Body.Name, r.Body.Command))
	if strings.TrimSpace(name) == "" {
		return session.View{}, fail.New(fail.Usage, "a result needs a name or a command").WithHint("agent-sessionizer exec --record=tests %s -- COMMAND", r.ID)
	}
	s, err := e.ready(ctx, r.ID)
	if err != nil {
		return session.View{}, err
	}
	if s.Status.Base == nil {
		return session.View{}, NotCloned(s.View())
	}
	conn, err := session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
	if err != nil {
		return session.View{}, err
	}
	defer conn.Close()
	s, err = e.sessions().RecordResult(ctx, s, conn, lifecycle.Result{
		Name: e.Redact.Redact(termtext.Head(name, MaxResultName)), Command: e.Redact.Redact(termtext.Line(r.Body.Command)), ExitCode: r.Body.ExitCode,
	})
	return s.View(), err
}}
