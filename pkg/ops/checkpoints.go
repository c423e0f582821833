package ops

import (
	"cmp"
	"context"
	"net/http"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// CheckpointList is the answer of ListCheckpoints.
type CheckpointList struct {
	Checkpoints []session.Checkpoint `json:"checkpoints"`
}

// Operations on checkpoints.
var (
	ListCheckpoints = Operation[SessionPath, CheckpointList]{Spec{
		ID: "listCheckpoints", Method: http.MethodGet, Path: SessionsPath + "/{id}/checkpoints", Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "List the checkpoints of a session, oldest first",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (CheckpointList, error) {
		s, err := e.Session(ctx, r.ID)
		return CheckpointList{s.Checkpoints()}, err
	}}

	CreateCheckpoint = Operation[CheckpointRequest, session.Checkpoint]{Spec{
		ID: "createCheckpoint", Method: http.MethodPost, Path: SessionsPath + "/{id}/checkpoints", Tag: "sessions", Need: Admin, Status: http.StatusCreated, Errors: []int{404, 409},
		Summary: "Create a checkpoint of a running session",
		About:   "The session keeps running, after a pause that is usually shorter than a second. The answer comes once the checkpoint is complete.",
	}, func(ctx context.Context, e *Engine, r *CheckpointRequest) (session.Checkpoint, error) {
		s, err := e.ready(ctx, r.ID)
		if err != nil {
			return session.Checkpoint{}, err
		}
		return session.Checkpoints{Sessions: e.sessions()}.Create(ctx, s, r.Body.Name)
	}}

	RemoveCheckpoint = Operation[CheckpointPath, session.View]{Spec{
		ID: "removeCheckpoint", Method: http.MethodDelete, Path: SessionsPath + "/{id}/checkpoints/{name}", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
		Summary: "Remove a checkpoint",
		About:   "If the session is stopped, the space is freed when it starts again.",
	}, func(ctx context.Context, e *Engine, r *CheckpointPath) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Checkpoints{Sessions: e.sessions()}.Remove(ctx, s, r.Name)
		})
	}}

	RestoreCheckpoint = Operation[CheckpointPath, session.View]{Spec{
		ID: "restoreCheckpoint", Method: http.MethodPost, Path: SessionsPath + "/{id}/checkpoints/{name}/restore", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Return a session to a checkpoint",
		About:   "First, the current state is saved as the checkpoint `before-restore`; an older one is removed. The session has `restoring` until the restore completes, and `restore_error` if it failed.",
	}, func(ctx context.Context, e *Engine, r *CheckpointPath) (session.View, error) {
		return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
			return session.Checkpoints{Sessions: e.sessions()}.Restore(ctx, s, r.Name)
		})
	}}

	ForkSession = Operation[ForkRequest, SessionList]{Spec{
		ID: "forkSession", Method: http.MethodPost, Path: SessionsPath + "/{id}/fork", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Create sessions that continue from a checkpoint of a session",
		About:   "Without a checkpoint, the forks continue from the current state. The answer comes once that is saved; the events of the forks show their progress.",
	}, func(ctx context.Context, e *Engine, r *ForkRequest) (list SessionList, err error) {
		if r.Body.Label != "" && !validLabel(r.Body.Label) {
			return list, badLabel(r.Body.Label).WithHint("agent-sessionizer fork SESSION --label fix-login")
		}
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return list, err
		}
		if err := e.Preflight(ctx, s.Arch()); err != nil {
			return list, err
		}
		forks, err := session.Checkpoints{Sessions: e.sessions()}.Fork(ctx, s, r.Body.Checkpoint, r.Body.Label, cmp.Or(r.Body.Count, 1))
		for _, f := range forks {
			list.Sessions = append(list.Sessions, f.View())
		}
		return list, err
	}}
)
