package ops

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Unsaved describes what destroying a session would lose or end.
type Unsaved struct {
	What string `json:"what" doc:"Empty if nothing would be lost."`
	Hint string `json:"hint,omitempty" doc:"The command that saves it, or that finds out more."`
}

// GetUnsaved tells what destroying a session would lose.
var GetUnsaved = Operation[SessionPath, Unsaved]{Spec{
	ID: "getUnsaved", Method: http.MethodGet, Path: SessionsPath + "/{id}/unsaved", Tag: "sessions", Need: Read, Errors: []int{404},
	Summary: "Get what destroying a session would lose",
}, func(ctx context.Context, e *Engine, r *SessionPath) (Unsaved, error) {
	s, err := e.Session(ctx, r.ID)
	if err != nil {
		return Unsaved{}, err
	}
	return e.unsaved(ctx, s), nil
}}

func destroySession(ctx context.Context, e *Engine, r *DestroyRequest) (session.View, error) {
	return e.withSession(ctx, r.ID, func(s session.Session) (session.Session, error) {
		if !r.Force {
			if lost := e.unsaved(ctx, s); lost.What != "" {
				return s, fail.New(fail.Conflict, "destroying %s would lose work: %s", s.Name, lost.What).
					WithHint("%s, or: agent-sessionizer destroy --force %s", lost.Hint, s.Name)
			}
		}
		s, err := e.sessions().SetDesired(ctx, s, session.Gone)
		if err == nil {
			err = e.schedule(ctx) // its subtasks end with it
		}
		return s, err
	})
}

func (e *Engine) unsaved(ctx context.Context, s session.Session) Unsaved {
	if s.Phase == session.Gone || s.Phase == session.Destroying {
		return Unsaved{}
	}
	tasks, err := e.Tasks.In(ctx, s.ID)
	if err != nil {
		return Unsaved{fmt.Sprintf("its tasks cannot be determined (%v)", err), "agent-sessionizer task list"}
	}
	forked, err := e.sessions().IsBeingForked(ctx, s)
	if err != nil {
		return Unsaved{fmt.Sprintf("its forks cannot be determined (%v)", err), "agent-sessionizer list"}
	}
	if forked {
		return Unsaved{"forks of it are being created, and still need it", "agent-sessionizer list"}
	}
	work := e.unsavedWork(ctx, s)
	if len(tasks) == 0 {
		return work
	}
	var ids []string
	for _, t := range tasks {
		ids = append(ids, t.ID)
	}
	what := "the work of a task that has not ended, " + ids[0]
	if len(ids) > 1 {
		what = "the work of tasks that have not ended, " + strings.Join(ids, ", ")
	}
	if work.What != "" {
		what += "; and " + work.What
	}
	return Unsaved{what, "agent-sessionizer task cancel --wait " + strings.Join(ids, " ")}
}

// unsavedWork returns the work that exists only in a guest.
func (e *Engine) unsavedWork(ctx context.Context, s session.Session) Unsaved {
	if s.Status.Base == nil {
		return Unsaved{} // no repository was ever cloned into it
	}
	start := "agent-sessionizer start " + s.Name
	work := s.Status.Work
	switch s.Phase {
	case session.Ready, session.Broken, session.Starting, session.Creating:
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		w, err := e.work(ctx, s)
		if err != nil {
			hint := "once it answers: agent-sessionizer destroy " + s.Name
			if s.Phase == session.Broken {
				hint = start
			}
			return Unsaved{fmt.Sprintf("its unsaved work cannot be determined (%v)", err), hint}
		}
		work = &w
	}
	switch {
	case work == nil && s.Phase == session.Stopping:
		return Unsaved{"its unsaved work cannot be determined while it is stopping", "agent-sessionizer stop " + s.Name}
	case work == nil && s.Status.Resumes != "":
		return Unsaved{"it is suspended; its work can be checked once it is started", start}
	case work == nil:
		return Unsaved{"its unsaved work cannot be determined: it did not stop cleanly", start}
	case work.Clean():
		return Unsaved{}
	}
	hint := saving(s.Name, *work)
	if s.Phase == session.Stopped {
		hint = start + " && " + hint
	}
	return Unsaved{work.Summary(), hint}
}

// saving returns the command that brings a guest's work to the user's host.
func saving(name string, w repo.WorkState) string {
	fetch := "agent-sessionizer fetch " + name
	switch {
	case len(w.InProgress) > 0 || w.Submodules > 0: // only the user can finish and push this
		return "agent-sessionizer ssh " + name
	case w.Dirty > 0 || w.Untracked > 0: // fetch takes stashes, but not files
		return "agent-sessionizer exec " + name + " -- git stash -u && " + fetch
	}
	return fetch
}

func (e *Engine) work(ctx context.Context, s session.Session) (repo.WorkState, error) {
	done, err := e.costly()
	if err != nil {
		return repo.WorkState{}, err
	}
	defer done()
	conn, err := session.Connections{Paths: e.sessions().Config.Paths}.Dial(ctx, s)
	if err != nil {
		return repo.WorkState{}, err
	}
	defer conn.Close()
	return session.Work{Sessions: e.sessions()}.Unsaved(ctx, s, conn)
}
