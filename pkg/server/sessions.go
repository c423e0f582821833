package server

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

type execLogsInput struct {
	ops.ExecPath
	LogQuery
}

func (s *Server) sessionRoutes(api huma.API) {
	serve(s, api, ops.ListSessions)
	serve(s, api, ops.FindSession)
	serve(s, api, ops.GetSession)
	serve(s, api, ops.GetProgress)
	serve(s, api, ops.TendSession)
	created(s, api, ops.CreateSession)
	serve(s, api, ops.CheckSession)
	serve(s, api, ops.OpenSession)
	serve(s, api, ops.VisitSession)
	serve(s, api, ops.RenewLease)
	serve(s, api, ops.StartSession)
	serve(s, api, ops.StopSession)
	serve(s, api, ops.DestroySession)
	serve(s, api, ops.ListCheckpoints)
	serve(s, api, ops.CreateCheckpoint)
	serve(s, api, ops.RemoveCheckpoint)
	serve(s, api, ops.RestoreCheckpoint)
	serve(s, api, ops.ForkSession)
	serve(s, api, ops.ListWorkspaces)
	serve(s, api, ops.GetWorkspace)
	serve(s, api, ops.CreateWorkspace)
	serve(s, api, ops.AttachWorkspace)
	serve(s, api, ops.DetachWorkspace)
	serve(s, api, ops.ResizeWorkspace)
	serve(s, api, ops.RebindWorkspace)
	serve(s, api, ops.DeleteWorkspace)
	serve(s, api, ops.GetUnsaved)
	serve(s, api, ops.DiffSession)
	serve(s, api, ops.FetchSession)
	serve(s, api, ops.GetScreen)
	serve(s, api, ops.SendPrompt)
	serve(s, api, ops.RunCommand)
	serve(s, api, ops.RecordResult)
	serve(s, api, ops.ListWindows)
	serve(s, api, ops.LoginSession)
	s.terminalRoute(api)
	serve(s, api, ops.PublishPorts)
	serve(s, api, ops.UnpublishPort)

	serve(s, api, ops.GetNetwork)
	serve(s, api, ops.AllowNames)
	serve(s, api, ops.DenyNames)
	serve(s, api, ops.ReloadNetwork)
	serve(s, api, ops.ExplainName)
	serve(s, api, ops.ListDenials)
	serve(s, api, ops.ListDecisions)

	created(s, api, ops.StartExec)
	serve(s, api, ops.ListExecs)
	serve(s, api, ops.GetExec)
	serve(s, api, ops.CancelExec)
	register(s, api, route{
		Spec: ops.Spec{
			ID: "getExecLogs", Method: http.MethodGet, Path: ops.SessionsPath + "/{id}/exec/{exec}/logs", Tag: "sessions", Need: ops.Read, Errors: []int{404, 416},
			Summary: "Get a command's output",
			About:   "The output byte for byte, with the guest's secrets masked.",
		},
		ranges: true, content: "text/plain",
	}, func(ctx context.Context, in *execLogsInput) (*bodyOutput, error) {
		if _, err := s.execs.Get(in.ID, in.Exec); err != nil {
			return nil, err
		}
		over := func(context.Context) (bool, error) {
			e, err := s.execs.Get(in.ID, in.Exec)
			return e.State != ops.ExecRunning, err
		}
		dir := s.execs.dir(in.ID, in.Exec)
		return eventFeed{s}.logs(ctx, subject{in.ID, over}, in.LogQuery, dir.stdout(), dir.stderr())
	})
}
