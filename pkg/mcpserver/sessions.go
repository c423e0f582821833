package mcpserver

import (
	"context"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
)

// Inputs of tools.
type (
	noInput      struct{}
	sessionInput struct {
		Session string `json:"session" jsonschema:"owner/repo, a session's name, or its id"`
	}
	openInput struct {
		Repo  string `json:"repo" jsonschema:"owner/repo, owner/repo@branch, a git URL, or the absolute path of a local clone"`
		New   bool   `json:"new,omitempty" jsonschema:"create another session, even if the repository has one"`
		Label string `json:"label,omitempty" jsonschema:"label of the new session: it is owner/repo@LABEL"`
	}
	execInput struct {
		sessionInput
		Command string `json:"command" jsonschema:"line for sh, in the repository's directory"`
		Seconds int    `json:"seconds,omitempty" jsonschema:"time limit, at most 600; 120 if absent"`
	}
	promptInput struct {
		sessionInput
		Text string `json:"text" jsonschema:"the prompt for the agent in the session"`
	}
	destroyInput struct {
		sessionInput
		Force bool `json:"force,omitempty" jsonschema:"destroy it even if work would be lost"`
	}
)

// sessionTools adds the tools for sessions.
func sessionTools(s *mcp.Server, h ops.Host) {
	// onSession returns a function for a tool that performs an operation on a session.
	named := func(ctx context.Context, in sessionInput) (ops.SessionPath, error) {
		v, err := ops.FindSession.On(ctx, h, ops.FindRequest{Name: in.Session})
		return ops.SessionPath{ID: v.ID}, err
	}
	addTool(s, reads, "list_sessions", "List sessions", "List the sessions with their state and what their agents wait for.", func(ctx context.Context, _ noInput) (any, error) {
		return ops.ListSessions.On(ctx, h, struct{}{})
	})
	addTool(s, adds, "open_session", "Open a session", "Create a session of a repository, or start the existing one, and wait until it is ready.", func(ctx context.Context, in openInput) (any, error) {
		a, err := ops.CreateSession.On(ctx, h, ops.CreateRequest{Body: ops.NewSession{Repo: in.Repo, New: in.New, Label: in.Label}})
		if err != nil {
			return nil, err
		}
		return awaitReady(ctx, h, a.View)
	})
	addTool(s, destroys, "exec", "Run a command in a session", "Run a command in a session and return its output and exit status.", func(ctx context.Context, in execInput) (any, error) {
		at, err := named(ctx, in.sessionInput)
		if err != nil {
			return nil, err
		}
		r := ops.RunRequest{SessionPath: at}
		r.Body.Command, r.Body.Seconds = in.Command, in.Seconds
		return ops.RunCommand.On(ctx, h, r)
	})
	addTool(s, reads, "read_screen", "Read the agent's screen", "Read the screen of a session's agent, and the state of all its agents.", func(ctx context.Context, in sessionInput) (any, error) {
		at, err := named(ctx, in)
		if err != nil {
			return nil, err
		}
		return ops.GetScreen.On(ctx, h, at)
	})
	addTool(s, adds, "send_prompt", "Send a prompt to the agent", "Type a prompt into the agent that runs in a session, and send it.", func(ctx context.Context, in promptInput) (any, error) {
		at, err := named(ctx, in.sessionInput)
		if err != nil {
			return nil, err
		}
		r := ops.PromptRequest{SessionPath: at}
		r.Body.Text = in.Text
		_, err = ops.SendPrompt.On(ctx, h, r)
		return "sent", err
	})
	addTool(s, reads, "diff", "Show a session's changes", "Show what the agent changed since the clone, as a patch.", func(ctx context.Context, in sessionInput) (any, error) {
		at, err := named(ctx, in)
		if err != nil {
			return nil, err
		}
		return ops.DiffSession.On(ctx, h, at)
	})
	addTool(s, adds, "fetch", "Fetch a session's commits", "Fetch the agent's commits into the repository's mirror on the host.", func(ctx context.Context, in sessionInput) (any, error) {
		at, err := named(ctx, in)
		if err != nil {
			return nil, err
		}
		return ops.FetchSession.On(ctx, h, at)
	})
	addTool(s, adds, "stop_session", "Stop a session", "Stop a session's VM. Its disk is kept.", func(ctx context.Context, in sessionInput) (any, error) {
		at, err := named(ctx, in)
		if err != nil {
			return nil, err
		}
		return ops.StopSession.On(ctx, h, ops.StopRequest{SessionPath: at})
	})
	addTool(s, destroys, "destroy_session", "Destroy a session", "Destroy a session and its VM. It is refused if work would be lost, unless force is set.", func(ctx context.Context, in destroyInput) (any, error) {
		v, err := ops.FindSession.On(ctx, h, ops.FindRequest{Name: in.Session, Gone: true})
		if err != nil || v.State == session.Gone {
			return v, err
		}
		return ops.DestroySession.On(ctx, h, ops.DestroyRequest{SessionPath: ops.SessionPath{ID: v.ID}, Force: in.Force})
	})
}

// awaitReady waits until a session is ready or cannot become so.
func awaitReady(ctx context.Context, h ops.Host, v session.View) (session.View, error) {
	for v.State != session.Ready {
		if v.State == session.Broken {
			return v, fail.New(fail.Failure, "session %s is broken: %s", v.Name, v.Message()).WithHint("agent-sessionizer logs %s", v.Name)
		}
		if v.Desired != session.Ready {
			return v, fail.New(fail.Conflict, "session %s is now to become %s", v.Name, v.Desired)
		}
		select {
		case <-ctx.Done():
			return v, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
		var err error
		if v, err = ops.GetSession.On(ctx, h, ops.SessionPath{ID: v.ID}); err != nil {
			return v, err
		}
	}
	return v, nil
}
