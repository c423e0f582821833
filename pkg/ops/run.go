package ops

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Bounds of a command whose caller waits for it.
const (
	runTime    = 2 * time.Minute
	maxRunTime = 10 * time.Minute
	maxRunText = 64 << 10 // of each output, in bytes
)

// RunRequest asks for a short command in a session.
type RunRequest struct {
	SessionPath
	Body struct {
		Command string `json:"command" minLength:"1" maxLength:"65536" doc:"A line for sh, in the repository's directory."`
		Seconds int    `json:"seconds,omitempty" minimum:"0" maximum:"600" doc:"Time limit; 120 if absent."`
	}
}

// RunResult is how a command ended, and what it wrote.
type RunResult struct {
	ExitCode  *int   `json:"exit_code,omitempty" doc:"Absent if a signal or the time limit ended it."`
	Signal    string `json:"signal,omitempty"`
	TimedOut  bool   `json:"timed_out,omitempty"`
	Stdout    string `json:"stdout" doc:"The first 64 KiB, with the guest's secrets masked."`
	Stderr    string `json:"stderr"`
	Truncated bool   `json:"truncated,omitempty" doc:"More was written, and discarded."`
}

// RunCommand runs a command and waits for its end.
var RunCommand = Operation[RunRequest, RunResult]{Spec{
	ID: "runCommand", Method: http.MethodPost, Path: SessionsPath + "/{id}/run", Tag: "sessions", Need: Admin, Errors: []int{404, 409},
	Summary: "Run a short command in a session, and wait for its output",
	About:   "Nothing of it is kept: startExec is for commands that take long or write much.",
}, func(ctx context.Context, e *Engine, r *RunRequest) (out RunResult, err error) {
	if strings.TrimSpace(r.Body.Command) == "" {
		return out, fail.New(fail.Usage, "the command must not be empty").WithHint("agent-sessionizer exec %s -- COMMAND", r.ID)
	}
	limit := runTime
	if r.Body.Seconds > 0 {
		limit = min(time.Duration(r.Body.Seconds)*time.Second, maxRunTime)
	}
	s, err := e.ready(ctx, r.ID)
	if err != nil {
		return out, err
	}
	done, err := e.costly()
	if err != nil {
		return out, err
	}
	defer done()
	e.audit(ctx, audit.Record{
		Type: audit.ExecStarted, Actor: e.Caller.Name, Resource: "session:" + s.ID, Outcome: audit.Success, Details: map[string]any{"command": r.Body.Command},
	})
	line := ssh.Quote("sh", "-c", r.Body.Command)
	if s.Status.Dir != "" {
		line = "cd " + ssh.Quote(s.Status.Dir) + " && " + line
	}
	full := func() { out.Truncated = true }
	stdout, stderr := pipe.Buffer{Limit: maxRunText, Full: full}, pipe.Buffer{Limit: maxRunText}
	run, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = session.Connections{Paths: e.sessions().Config.Paths}.RunMasked(run, s, line, &stdout, &stderr)
	out.Stdout, out.Stderr = strings.ToValidUTF8(stdout.String(), "\ufffd"), strings.ToValidUTF8(stderr.String(), "\ufffd")
	exit, exited := errors.AsType[*ssh.ExitError](err)
	switch {
	case exited && exit.Signal != "":
		out.Signal = exit.Signal
	case exited:
		out.ExitCode = &exit.Code
	case ctx.Err() == nil && run.Err() != nil:
		out.TimedOut = true
	case err != nil:
		return RunResult{}, err
	default:
		out.ExitCode = new(int)
	}
	return out, nil
}}
