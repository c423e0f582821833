package ops

import (
	"context"
	"net/http"
	"path"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// ExecRequest is a request to run a command in a session.
type ExecRequest struct {
	Argv    []string          `json:"argv,omitempty" minItems:"1" maxItems:"256" nullable:"false" doc:"Program and arguments, no shell. Either this or command."`
	Command string            `json:"command,omitempty" minLength:"1" maxLength:"65536" doc:"A line for sh. Either this or argv."`
	Cwd     string            `json:"cwd,omitempty" maxLength:"4096" doc:"Directory, relative to the repository's. Default: the repository's directory."`
	Env     map[string]string `json:"env,omitempty" doc:"Additional environment variables, at most 64. They appear on a command line in the guest; the host does not store their values."`
	Timeout string            `json:"timeout,omitempty" default:"10m" example:"90s" doc:"Time limit of the command, at most 24h."`
}

// ExecState is the state of a command.
type ExecState string

// States of a command.
const (
	ExecRunning   ExecState = "running"
	ExecExited    ExecState = "exited" // see exit_code or signal
	ExecTimeout   ExecState = "timeout"
	ExecCancelled ExecState = "cancelled"
	ExecFailed    ExecState = "failed" // it could not be run, or the connection was lost; see error
	ExecLost      ExecState = "lost"   // the server that ran it was killed
)

// Exec is a command in a session.
type Exec struct {
	ID        string               `json:"id"`
	Session   string               `json:"session"`
	State     ExecState            `json:"state" enum:"running,exited,timeout,cancelled,failed,lost"`
	Argv      []string             `json:"argv,omitempty" doc:"Visible only to the scope admin, like command, cwd and env."`
	Command   string               `json:"command,omitempty"`
	Cwd       string               `json:"cwd,omitempty"`
	Env       []string             `json:"env,omitempty" doc:"Names only."`
	ExitCode  *int                 `json:"exit_code,omitempty"`
	Signal    string               `json:"signal,omitempty" doc:"Signal that ended the command."`
	Error     *lifecycle.ViewError `json:"error,omitempty"`
	StartedAt time.Time            `json:"started_at"`
	EndedAt   *time.Time           `json:"ended_at,omitempty"`
	Stdout    ExecOutput           `json:"stdout"`
	Stderr    ExecOutput           `json:"stderr"`
	LastEvent string               `json:"last_event" doc:"Id of one of the session's events. All later events of the command follow it."`
	Actor     string               `json:"actor"`
	TraceID   string               `json:"trace_id"`
}

// ExecOutput describes one of a command's two outputs.
type ExecOutput struct {
	Bytes     int64 `json:"bytes" doc:"Size of the log."`
	Truncated bool  `json:"truncated" doc:"There was more output, which was discarded."`
}

// Location returns the path of the command.
func (e Exec) Location() string { return path.Join(SessionsPath, e.Session, "exec", e.ID) }

// shownTo returns e as a client may see it: only admins see command lines.
func (e Exec) shownTo(c Caller) Exec {
	if !c.Scope.Allows(Admin) {
		e.Argv, e.Command, e.Cwd, e.Env = nil, "", "", nil
	}
	return e
}

// ExecList lists the commands of a session, the newest first.
type ExecList struct {
	Execs []Exec `json:"execs" nullable:"false"`
}

// ExecPath is the part of a path that identifies a command of a session.
type ExecPath struct {
	SessionPath
	Exec string `path:"exec" doc:"Id from the response of startExec."`
}

// StartExecRequest asks for a command.
type StartExecRequest struct {
	SessionPath
	Once
	RawBody []byte
	Body    ExecRequest
}

// Execs runs commands in guests for clients of the API, and keeps their results.
type Execs interface {
	// Start starts a command, and returns once the request is recorded.
	Start(ctx context.Context, c Caller, s session.Session, r ExecRequest, once *task.Once) (Exec, error)
	Get(session, id string) (Exec, error)
	// List returns the commands of a session, the newest first.
	List(session string) ([]Exec, error)
	// Cancel ends a running command. It does not change one that has ended.
	Cancel(session, id string) (Exec, error)
}

const execPath = SessionsPath + "/{id}/exec"

// Operations on commands in sessions.
var (
	StartExec = Operation[StartExecRequest, Exec]{Spec{
		ID: "startExec", Method: http.MethodPost, Path: execPath, Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404, 409},
		Summary: "Run a command in a session",
		About: "Runs the command as the agent, with the session's secrets in the environment. The command belongs to this server: when the server ends, it ends the command; " +
			"when the server is killed, the command may continue in the guest, and its state here is `lost`. The command's events follow `last_event` in the session's events.",
	}, func(ctx context.Context, e *Engine, r *StartExecRequest) (Exec, error) {
		s, err := e.Session(ctx, r.ID)
		if err != nil {
			return Exec{}, err
		}
		return e.Execs.Start(ctx, e.Caller, s, r.Body, r.Once.task(SessionsPath+"/"+r.ID+"/exec", r.RawBody))
	}}

	ListExecs = Operation[SessionPath, ExecList]{Spec{
		ID: "listExecs", Method: http.MethodGet, Path: execPath, Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "List the commands of a session, the newest first",
		About:   "Only the scope `admin` sees command lines.",
	}, func(ctx context.Context, e *Engine, r *SessionPath) (ExecList, error) {
		list := ExecList{Execs: []Exec{}}
		if _, err := e.Session(ctx, r.ID); err != nil {
			return list, err
		}
		all, err := e.Execs.List(r.ID)
		for _, x := range all {
			list.Execs = append(list.Execs, x.shownTo(e.Caller))
		}
		return list, err
	}}

	GetExec = Operation[ExecPath, Exec]{Spec{
		ID: "getExec", Method: http.MethodGet, Path: execPath + "/{exec}", Tag: "sessions", Need: Read, Errors: []int{404},
		Summary: "Get a running or ended command",
		About:   "Only the scope `admin` sees the command line.",
	}, func(_ context.Context, e *Engine, r *ExecPath) (Exec, error) {
		x, err := e.Execs.Get(r.ID, r.Exec)
		return x.shownTo(e.Caller), err
	}}

	CancelExec = Operation[ExecPath, Exec]{Spec{
		ID: "cancelExec", Method: http.MethodDelete, Path: execPath + "/{exec}", Tag: "sessions", Need: Admin, Status: http.StatusAccepted, Errors: []int{404},
		Summary: "End a command: SIGTERM, then SIGKILL",
	}, func(_ context.Context, e *Engine, r *ExecPath) (Exec, error) { return e.Execs.Cancel(r.ID, r.Exec) }}
)
