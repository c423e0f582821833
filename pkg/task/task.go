// Package task manages unattended runs of agents: what was asked for (the manifest),
// the queue, the phases a task goes through, and the work of each phase.
//
// A task has a session, its own or one that a user opened. The session's keeper does
// all work on the VM. A task's keeper writes desired phases to the session and follows
// it, as a user's command does; the two communicate only through the store. Package
// session knows nothing of tasks except the id of the task that owns a session.
package task

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Phase is where a task is in its life.
type Phase string

// The phases of a task.
//
//	PENDING ─► STAGING ─► PROVISIONING ─► READY ─► RUNNING ─► COMPLETING ─► COMPLETED
//	                            ▲  ▲        ▲        │ │           │
//	                            │  │        └────────┘ │           ├──────► FAILED
//	                            │  │  agent again      │           │           ▲ its VM was removed
//	                            │  └───────────────────┘           ├──► FAILED_PRESERVED
//	                            │    VM again, or a new one        │
//	                            │                                  └──► CANCELLED
//	STAGING, PROVISIONING, READY ──► FAILED, FAILED_PRESERVED      (a step failed for good)
//	PENDING, STAGING, PROVISIONING, READY ──► CANCELLED            (from RUNNING through COMPLETING)
const (
	Pending         Phase = "PENDING"          // waits in the queue
	Staging         Phase = "STAGING"          // its directory and the repository are prepared on the host
	Provisioning    Phase = "PROVISIONING"     // its VM is created
	Ready           Phase = "READY"            // the VM accepts logins; the agent is started
	Running         Phase = "RUNNING"          // the agent runs
	Completing      Phase = "COMPLETING"       // what the agent did is collected
	Completed       Phase = "COMPLETED"        // it succeeded; the VM is gone
	Failed          Phase = "FAILED"           // it failed; the VM is gone
	FailedPreserved Phase = "FAILED_PRESERVED" // it failed; the VM is kept for a while
	Cancelled       Phase = "CANCELLED"        // it was cancelled; the VM is gone
)

// next is the only table of transitions.
var next = lifecycle.Transitions[Phase]{
	Pending:         {Staging, Cancelled},
	Staging:         {Provisioning, Failed, Cancelled},
	Provisioning:    {Ready, Failed, FailedPreserved, Cancelled},
	Ready:           {Running, Provisioning, Failed, FailedPreserved, Cancelled},
	Running:         {Ready, Provisioning, Completing},
	Completing:      {Completed, Failed, FailedPreserved, Cancelled},
	FailedPreserved: {Failed},
}

// Phases returns all phases, in order.
func Phases() []Phase {
	return []Phase{Pending, Staging, Provisioning, Ready, Running, Completing, Completed, Failed, FailedPreserved, Cancelled}
}

// Over reports whether a task in that phase has ended: its outcome is final.
func (p Phase) Over() bool {
	return p == Completed || p == Failed || p == FailedPreserved || p == Cancelled
}

// Unended returns the phases of tasks that have not ended.
func Unended() []string { return phasesThat(func(p Phase) bool { return !p.Over() }) }

// Active reports whether a task in that phase holds one of the queue's slots.
func (p Phase) Active() bool { return p != Pending && !p.Over() }

// DesiredPhase is the desired state of a task.
type DesiredPhase string

// These are the desired states, each stronger than those before it. None is ever
// revoked.
const (
	Run       DesiredPhase = "run"
	Cancel    DesiredPhase = "cancel"
	Destroyed DesiredPhase = "destroyed" // cancelled, and nothing of its VM is left
)

// AtRest reports whether a task needs no keeper. A queued task has none: the process
// that admits it starts one.
func AtRest(p Phase) bool { return p == Pending || p.Over() && p != FailedPreserved }

// Result is how a task ended.
type Result string

// The possible results.
const (
	Success         Result = "success"
	Failure         Result = "failure"   // of the agent, or of a step of ours; the error says which
	TimedOut        Result = "timeout"   // lifecycle.timeout
	Hung            Result = "hung"      // lifecycle.hang_timeout
	CrashLoop       Result = "crashloop" // the VM did not stay up
	CancelledByUser Result = "cancelled"
)

// Outcome records what decided the end of a task. Once written it does not change.
type Outcome struct {
	Result   Result    `json:"result"`
	ExitCode *int      `json:"exit_code,omitempty"` // the agent's, if no signal ended it
	Signal   string    `json:"signal,omitempty"`    // the signal that ended the agent
	Code     string    `json:"code,omitempty"`      // of the error
	Reason   string    `json:"reason,omitempty"`
	Hint     string    `json:"hint,omitempty"`
	At       time.Time `json:"at"`
	Preserve bool      `json:"preserve,omitempty"` // keep the VM, regardless of the manifest
}

// ExitStatus returns the exit status of a command that waited for the task.
func (o *Outcome) ExitStatus(p Phase) fail.Code {
	switch {
	case o == nil || o.Result == Success && p == Completed:
		return 0
	case o.Result == TimedOut:
		return fail.Timeout
	case p == FailedPreserved:
		return fail.Preserved
	}
	return fail.Failure
}

// Status is the state of a task that its next keeper has to know.
type Status struct {
	RetryOf string `json:"retry_of,omitempty"` // the task that this one retries
	Actor   string `json:"actor,omitempty"`    // who submitted it
	Trace   string `json:"trace_id,omitempty"`

	// A client below admin submitted it: its repository must be on a public host, and
	// its session gets nothing from the user's home directory.
	Restricted bool `json:"restricted,omitempty"`

	Subtask *Subtask `json:"subtask,omitempty"` // nil unless it is a subtask

	// These are for a task in a session that existed before.
	Repository string     `json:"repository,omitempty"` // of the session
	Base       *repo.Base `json:"base,omitempty"`       // what was checked out when the agent started

	// These belong to the current phase, and are reset with it.
	Tries   int       `json:"tries,omitempty"`
	NextTry time.Time `json:"next_try,omitzero"`
	Spent   Spent     `json:"spent,omitzero"`

	Attempt  int           `json:"attempt,omitempty"`  // of the agent in the guest, from 1; each has a directory there
	Ran      time.Duration `json:"ran,omitempty"`      // nanoseconds, in previous attempts
	Restarts []time.Time   `json:"restarts,omitempty"` // of the VM while the agent ran
	Rebuilds int           `json:"rebuilds,omitempty"`

	Started  time.Time      `json:"started_at,omitzero"` // when the agent started, the first time
	Ended    time.Time      `json:"ended_at,omitzero"`   // when the agent ended, the last time
	Quiet    time.Duration  `json:"quiet,omitempty"`     // nanoseconds since the last output, when Spent was recorded
	Progress agent.Progress `json:"progress,omitzero"`
	LogBase  Offsets        `json:"log_base,omitzero"` // lengths of the logs when this attempt began

	Events store.Budget `json:"events,omitzero"` // the events that the running agent caused

	Outcome   *Outcome   `json:"outcome,omitempty"`
	Collected bool       `json:"collected,omitempty"`
	Artifacts []Artifact `json:"artifacts,omitempty"`
	Skipped   []Skipped  `json:"skipped,omitempty"`
	Until     time.Time  `json:"preserved_until,omitzero"`
}

// Offsets are positions in the two logs of a task, in bytes.
type Offsets struct {
	Stdout int64 `json:"stdout"`
	Stderr int64 `json:"stderr"`
}

// Spent records how long a phase has taken: For, until At. A keeper records it when
// it takes up the phase, and every half minute while the agent runs; it measures with
// the monotonic clock. The time from the last record to the next keeper is measured
// with the wall clock, and counts as zero if that clock went back.
type Spent struct {
	For time.Duration `json:"for,omitempty"` // nanoseconds
	At  time.Time     `json:"at,omitzero"`
}

// Artifact is a file that was collected from a task.
type Artifact struct {
	Name   string `json:"name"` // its path below the task's artifacts, with slashes
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// Skipped is a file that was not collected, with the reason.
type Skipped struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Task is a store row with its JSON decoded.
type Task struct {
	store.Task
	Phase    Phase
	Desired  DesiredPhase
	Manifest *manifest.Task
	Status   Status
}

func read(row store.Task, err error) (Task, error) {
	if err != nil {
		return Task{}, err
	}
	t := Task{Task: row, Phase: Phase(row.Phase), Desired: DesiredPhase(row.Desired)}
	if t.Manifest, err = manifest.Decode(row.Manifest); err != nil {
		return t, fmt.Errorf("read manifest of task %s: %w", row.ID, err)
	}
	if err := json.Unmarshal(row.Status, &t.Status); err != nil {
		return t, fmt.Errorf("read status of task %s: %w", row.ID, err)
	}
	return t, nil
}

// View is a task as --json and the API show it. Fields are only ever added.
type View struct {
	ID             string               `json:"id"`
	Name           string               `json:"name"`
	State          Phase                `json:"state"`
	Desired        DesiredPhase         `json:"desired"`
	Priority       int                  `json:"priority"`
	Labels         map[string]string    `json:"labels,omitempty"`
	Repository     string               `json:"repository"`
	Agent          string               `json:"agent"`
	Model          string               `json:"model,omitempty"`
	Host           string               `json:"host,omitempty"`       // another host of the cluster, that has the task
	Session        string               `json:"session,omitempty"`    // the id of its session
	InSession      bool                 `json:"in_session,omitempty"` // the session existed before and stays
	CreatedAt      time.Time            `json:"created_at"`
	StateChangedAt time.Time            `json:"state_changed_at"`
	StartedAt      *time.Time           `json:"started_at,omitempty"` // of the agent
	EndedAt        *time.Time           `json:"ended_at,omitempty"`   // of the agent
	Attempt        int                  `json:"attempt,omitempty"`
	Progress       *ViewProgress        `json:"progress,omitempty"`
	Outcome        *Outcome             `json:"outcome,omitempty"`
	Error          *lifecycle.ViewError `json:"error,omitempty"`
	PreservedUntil *time.Time           `json:"preserved_until,omitempty"`
	Artifacts      int                  `json:"artifacts,omitempty"`      // their number
	EventsDropped  int64                `json:"events_dropped,omitempty"` // of the agent's events that were counted and not stored
	Parent         string               `json:"parent,omitempty"`         // of a subtask: the task or session that submitted it
	Root           string               `json:"root,omitempty"`           // of a subtask: the task or session at the top
	Depth          int                  `json:"depth,omitempty"`          // 1 for a subtask of the root
	Branch         string               `json:"branch,omitempty"`         // of a subtask: the branch that it works on
	Subtasks       []string             `json:"subtasks,omitempty"`       // ids of the tasks that it submitted; only for one task
	RetryOf        string               `json:"retry_of,omitempty"`
	Actor          string               `json:"actor,omitempty"`
	TraceID        string               `json:"trace_id,omitempty"`
	Usage          *lifecycle.Usage     `json:"usage,omitempty"` // of models, as the gateway counted it; only for one task
}

// ViewProgress is an agent.Progress without what only its parser needs.
type ViewProgress struct {
	agent.Usage

	ToolCalls   int    `json:"tool_calls"`
	CurrentTool string `json:"current_tool,omitempty"`
	Model       string `json:"model,omitempty"`
	Thread      string `json:"thread,omitempty"` // the agent's own id of its conversation
	Result      string `json:"result,omitempty"` // its last answer
	Error       string `json:"error,omitempty"`  // why it gave up
	Offset      int64  `json:"offset"`           // bytes of the output that were read as whole lines
	Skipped     int64  `json:"skipped,omitempty"`
}

// View returns t as --json and the API show it.
func (t Task) View() View {
	v := View{
		Error: lifecycle.LastError(t.ErrorCode, t.ErrorMessage, t.ErrorHint),
		ID:    t.ID, Name: t.Name, State: t.Phase, Desired: t.Desired, Priority: t.Priority, Labels: t.Labels,
		Repository: t.repository(), Agent: string(t.Manifest.Agent.Kind), Model: t.Manifest.Agent.Model,
		Session: t.SessionID, InSession: t.InSession(), CreatedAt: t.CreatedAt, StateChangedAt: t.StateChangedAt,
		StartedAt: optional(t.Status.Started), EndedAt: optional(t.Status.Ended), Attempt: t.Status.Attempt,
		Outcome: t.Status.Outcome, PreservedUntil: optional(t.Status.Until), Artifacts: len(t.Status.Artifacts),
		RetryOf: t.Status.RetryOf, Actor: t.Status.Actor, TraceID: t.Status.Trace, EventsDropped: t.Status.Events.Dropped,
	}
	if t.Host != store.Waiting {
		v.Host = t.Host
	}
	if t.Parent != "" {
		v.Parent, v.Root, v.Depth, v.Branch = t.Parent, t.Root, t.Depth, t.Branch()
	}
	if !t.Status.Started.IsZero() {
		p := t.Status.Progress
		v.Progress = &ViewProgress{p.Usage, p.ToolCalls, p.CurrentTool, p.Model, p.Thread, p.Result, p.Error, p.Offset, p.Skipped}
	}
	return v
}

func optional(at time.Time) *time.Time {
	if at.IsZero() {
		return nil
	}
	return &at
}
