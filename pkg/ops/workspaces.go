package ops

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// WorkspacesPath is the path of all workspaces.
const WorkspacesPath = "/api/v1/workspaces"

// Workspace is a workspace as users see it.
type Workspace struct {
	Name        string    `json:"name"`
	Size        int64     `json:"size" doc:"Bytes, as a guest sees it from the next start on."`
	Used        int64     `json:"used" doc:"Bytes on the host."`
	CreatedAt   time.Time `json:"created_at"`
	Session     string    `json:"session,omitempty" doc:"Id of the session that has it."`
	SessionName string    `json:"session_name,omitempty"`
}

// WorkspaceList lists workspaces by name.
type WorkspaceList struct {
	Workspaces []Workspace `json:"workspaces" nullable:"false"`
}

// WorkspacePath is the part of a path that identifies a workspace.
type WorkspacePath struct {
	Name string `path:"name" maxLength:"40" doc:"Name of the workspace." example:"scratch"`
}

// Requests for operations on workspaces.
type (
	WorkspaceRequest struct {
		Body struct {
			Name string      `json:"name" maxLength:"40" example:"scratch"`
			Size config.Size `json:"size,omitempty" doc:"Size of the disk. Default: 80GiB."`
		}
	}
	AttachWorkspaceRequest struct {
		WorkspacePath
		Body struct {
			Session string `json:"session" maxLength:"12" doc:"Id of the stopped session that gets it."`
			Trust   bool   `json:"trust,omitempty" doc:"Run the hooks and settings that earlier sessions left in it."`
		}
	}
	ResizeWorkspaceRequest struct {
		WorkspacePath
		Body struct {
			Size config.Size `json:"size" doc:"The new size, which must be larger."`
		}
	}
	RebindWorkspaceRequest struct {
		WorkspacePath
		Body struct {
			Profile string `json:"profile,omitempty" maxLength:"255" doc:"Default: the old session's."`
			Trust   bool   `json:"trust,omitempty" doc:"Run the hooks and settings that earlier sessions left in it."`
		}
	}
)

// Operations on workspaces.
var (
	ListWorkspaces = Operation[struct{}, WorkspaceList]{Spec{
		ID: "listWorkspaces", Method: http.MethodGet, Path: WorkspacesPath, Tag: "workspaces", Need: Read,
		Summary: "List workspaces by name",
	}, func(ctx context.Context, e *Engine, _ *struct{}) (WorkspaceList, error) {
		list := WorkspaceList{Workspaces: []Workspace{}}
		all, err := e.workspaces().List()
		for _, ws := range all {
			v, verr := e.workspace(ctx, ws)
			if err = errors.Join(err, verr); verr == nil {
				list.Workspaces = append(list.Workspaces, v)
			}
		}
		return list, err
	}}

	GetWorkspace = Operation[WorkspacePath, Workspace]{Spec{
		ID: "getWorkspace", Method: http.MethodGet, Path: WorkspacesPath + "/{name}", Tag: "workspaces", Need: Read, Errors: []int{404},
		Summary: "Get a workspace",
	}, func(ctx context.Context, e *Engine, r *WorkspacePath) (Workspace, error) {
		return e.withWorkspace(ctx, r.Name, func() error { return nil })
	}}

	CreateWorkspace = Operation[WorkspaceRequest, Workspace]{Spec{
		ID: "createWorkspace", Method: http.MethodPost, Path: WorkspacesPath, Tag: "workspaces", Need: Admin, Status: http.StatusCreated, Errors: []int{409},
		Summary: "Create a workspace",
		About:   "Its disk is created when a session first starts with it.",
	}, func(ctx context.Context, e *Engine, r *WorkspaceRequest) (Workspace, error) {
		size := int64(r.Body.Size)
		if size == 0 {
			size = session.DefaultWorkspace
		}
		return e.withWorkspace(ctx, r.Body.Name, func() error {
			_, err := e.workspaces().Create(ctx, r.Body.Name, size)
			return err
		})
	}}

	AttachWorkspace = Operation[AttachWorkspaceRequest, Workspace]{Spec{
		ID: "attachWorkspace", Method: http.MethodPost, Path: WorkspacesPath + "/{name}/attach", Tag: "workspaces", Need: Admin, Errors: []int{404, 409},
		Summary: "Attach a workspace to a stopped session",
		About:   "The session has it at /work from its next start on.",
	}, func(ctx context.Context, e *Engine, r *AttachWorkspaceRequest) (Workspace, error) {
		s, err := e.Session(ctx, r.Body.Session)
		if err != nil {
			return Workspace{}, err
		}
		return e.withWorkspace(ctx, r.Name, func() error {
			_, err := e.workspaces().Attach(ctx, r.Name, s, r.Body.Trust)
			return err
		})
	}}

	DetachWorkspace = Operation[WorkspacePath, Workspace]{Spec{
		ID: "detachWorkspace", Method: http.MethodPost, Path: WorkspacesPath + "/{name}/detach", Tag: "workspaces", Need: Admin, Errors: []int{404, 409},
		Summary: "Detach a workspace from its session, which must be stopped",
	}, func(ctx context.Context, e *Engine, r *WorkspacePath) (Workspace, error) {
		return e.withWorkspace(ctx, r.Name, func() error { return e.workspaces().Detach(ctx, r.Name) })
	}}

	ResizeWorkspace = Operation[ResizeWorkspaceRequest, Workspace]{Spec{
		ID: "resizeWorkspace", Method: http.MethodPost, Path: WorkspacesPath + "/{name}/resize", Tag: "workspaces", Need: Admin, Errors: []int{404, 409},
		Summary: "Make a workspace larger",
		About:   "Its file system grows when a session next starts with it.",
	}, func(ctx context.Context, e *Engine, r *ResizeWorkspaceRequest) (Workspace, error) {
		return e.withWorkspace(ctx, r.Name, func() error {
			_, err := e.workspaces().Resize(ctx, r.Name, int64(r.Body.Size))
			return err
		})
	}}

	RebindWorkspace = Operation[RebindWorkspaceRequest, SessionAnswer]{Spec{
		ID: "rebindWorkspace", Method: http.MethodPost, Path: WorkspacesPath + "/{name}/rebind", Tag: "workspaces", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Replace the session that has a workspace by a new one",
		About:   "The old session is destroyed with everything outside the workspace. The answer comes once that is done; the events of the new session show its progress.",
	}, func(ctx context.Context, e *Engine, r *RebindWorkspaceRequest) (SessionAnswer, error) {
		old, held, err := e.workspaces().Holder(ctx, r.Name)
		if err != nil {
			return SessionAnswer{}, err
		}
		if err := e.Preflight(ctx, old.Arch()); err != nil {
			return SessionAnswer{}, err
		}
		if held {
			if tasks, err := e.Tasks.In(ctx, old.ID); err != nil {
				return SessionAnswer{}, err
			} else if len(tasks) > 0 {
				return SessionAnswer{}, fail.New(fail.Conflict, "task %s runs in session %s", tasks[0].ID, old.Name).WithHint("agent-sessionizer task cancel --wait %s", tasks[0].ID)
			}
		}
		s, notices, err := e.workspaces().Rebind(ctx, r.Name, r.Body.Profile, r.Body.Trust)
		err = errors.Join(err, e.schedule(ctx)) // subtasks of the old session end with it
		return SessionAnswer{View: s.View(), Created: err == nil, Notices: notices}, err
	}}

	DeleteWorkspace = Operation[WorkspacePath, struct{}]{Spec{
		ID: "deleteWorkspace", Method: http.MethodDelete, Path: WorkspacesPath + "/{name}", Tag: "workspaces", Need: Admin, Errors: []int{404, 409},
		Summary: "Delete a workspace and everything in it",
	}, func(ctx context.Context, e *Engine, r *WorkspacePath) (struct{}, error) {
		driver, err := e.Driver()
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, e.workspaces().Delete(ctx, driver, r.Name)
	}}
)

func (e *Engine) workspaces() session.Workspaces { return session.Workspaces{Sessions: e.sessions()} }

// withWorkspace calls f, and returns the workspace as it is then.
func (e *Engine) withWorkspace(ctx context.Context, name string, f func() error) (Workspace, error) {
	if err := f(); err != nil {
		return Workspace{}, err
	}
	ws, err := e.workspaces().Get(name)
	if err != nil {
		return Workspace{}, err
	}
	return e.workspace(ctx, ws)
}

// workspace adds what the driver and the sessions know of a workspace.
func (e *Engine) workspace(ctx context.Context, ws session.Workspace) (Workspace, error) {
	v := Workspace{Name: ws.Name, Size: ws.Size, CreatedAt: ws.CreatedAt}
	s, held, err := e.workspaces().Holder(ctx, ws.Name)
	if err != nil {
		return v, err
	}
	if held {
		v.Session, v.SessionName = s.ID, s.Name
	}
	driver, err := e.Driver()
	if err != nil {
		return v, err
	}
	disks, ok := driver.(vm.DataDisks)
	if !ok {
		return v, nil
	}
	is, err := disks.InspectDataDisk(ctx, ws.Name)
	if errors.Is(err, vm.ErrNotFound) {
		return v, nil
	}
	v.Used = is.Used
	return v, err
}
