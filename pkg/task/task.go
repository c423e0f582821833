// Package task is an unattended run of an agent: what was asked for (the
// manifest), the queue, the phases it goes through, and the work of each phase.
//
// A task has a session, its own or one that somebody opened, whose engine does all
// that is done to a VM: a task's keeper writes intents to the session and follows it, as a person's
// command does. Between the two stands the store only. Package session knows
// nothing of tasks but the id of the one that a session belongs to.
package task

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Phase is where a task is.
type Phase string

// The phases.
//
//	PENDING ─► STAGING ─► PROVISIONING ─► READY ─► RUNNING ─► COMPLETING ─► COMPLETED
//	                            ▲  ▲        ▲        │ │           │
//	                            │  │        └────────┘ │           ├──────► FAILED
//	                            │  │  agent again      │           │           ▲ its VM was removed
//	                            │  └───────────────────┘           ├──► FAILED_PRESERVED
//	                            │    VM again, or a new one        │
//	                            │                                  └──► CANCELLED
//	STAGING, PROVISIONING, READY ──► FAILED, FAILED_PRESERVED      (a step failed for good)
//	PENDING, STAGING, PROVISIONING, READY ──► CANCELLED            (from RUNNING by way of COMPLETING)
const (
	Pending         Phase = "PENDING"          // waits in the queue
	Staging         Phase = "STAGING"          // its directory and the repository are made ready on the host
	Provisioning    Phase = "PROVISIONING"     // its VM is made
	Ready           Phase = "READY"            // the VM can be logged in to; the agent is started
	Running         Phase = "RUNNING"          // the agent runs
	Completing      Phase = "COMPLETING"       // what it did is collected
	Completed       Phase = "COMPLETED"        // it succeeded; the VM is gone
	Failed          Phase = "FAILED"           // it did not; the VM is gone
	FailedPreserved Phase = "FAILED_PRESERVED" // it did not; the VM is kept for a while
	Cancelled       Phase = "CANCELLED"        // somebody called it off; the VM is gone
)

// next is the one table of transitions.
var next = map[Phase][]Phase{
	Pending:         {Staging, Cancelled},
	Staging:         {Provisioning, Failed, Cancelled},
	Provisioning:    {Ready, Failed, FailedPreserved, Cancelled},
	Ready:           {Running, Provisioning, Failed, FailedPreserved, Cancelled},
	Running:         {Ready, Provisioning, Completing},
	Completing:      {Completed, Failed, FailedPreserved, Cancelled},
	FailedPreserved: {Failed},
}

// Phases are all of them, in order.
func Phases() []Phase {
	return []Phase{Pending, Staging, Provisioning, Ready, Running, Completing, Completed, Failed, FailedPreserved, Cancelled}
}

// Over reports whether a task in that phase has ended: its outcome will not
// change any more.
func (p Phase) Over() bool {
	return p == Completed || p == Failed || p == FailedPreserved || p == Cancelled
}

// Active reports whether a task in that phase holds one of the queue's slots.
func (p Phase) Active() bool { return p != Pending && !p.Over() }

func (p Phase) canGo(to Phase) bool { return slices.Contains(next[p], to) }

// Want is what was asked for last.
type Want string

// The wants, each stronger than those before it: none is ever taken back.
const (
	Run       Want = "run"
	Cancel    Want = "cancel"
	Destroyed Want = "destroyed" // and that nothing of its VM is left
)

// AtRest reports whether a task needs no keeper. One that waits in the queue has
// none: whoever admits it starts it.
func AtRest(p Phase) bool { return p == Pending || p.Over() && p != FailedPreserved }

// Result is how a task ended.
type Result string

// The results.
const (
	Success   Result = "success"
	Failure   Result = "failure"   // of the agent, or of a step of ours; the error says which
	TimedOut  Result = "timeout"   // lifecycle.timeout
	Hung      Result = "hung"      // lifecycle.hang_timeout
	CrashLoop Result = "crashloop" // the VM did not stay up
	CalledOff Result = "cancelled"
)

// Outcome is what decided the end of a task. Once written it does not change.
type Outcome struct {
	Result   Result    `json:"result"`
	ExitCode *int      `json:"exit_code,omitempty"` // the agent's, when it ended by itself
	Signal   string    `json:"signal,omitempty"`    // that ended the agent
	Code     string    `json:"code,omitempty"`      // of the error
	Reason   string    `json:"reason,omitempty"`
	Hint     string    `json:"hint,omitempty"`
	At       time.Time `json:"at"`
	Preserve bool      `json:"preserve,omitempty"` // the VM is to be kept, whatever the manifest says
}

// ExitStatus is what a command that waited for the task ends with.
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

// Facts are what became of a task, as far as its next keeper has to know.
type Facts struct {
	RetryOf string `json:"retry_of,omitempty"` // the task of which this is another try
	Actor   string `json:"actor,omitempty"`    // who submitted it
	Trace   string `json:"trace_id,omitempty"`

	// Submitted by a client below admin: its repository must be on a public host, and
	// its session gets nothing of the user's home directory.
	Restricted bool `json:"restricted,omitempty"`

	// Of a task in a session that was there.
	Repository string     `json:"repository,omitempty"` // of the session
	Base       *repo.Base `json:"base,omitempty"`       // what was checked out when the agent began

	// Of the phase it is in; forgotten with it.
	Tries   int       `json:"tries,omitempty"`
	NextTry time.Time `json:"next_try,omitzero"`
	Spent   Spent     `json:"spent,omitzero"`

	Attempt  int           `json:"attempt,omitempty"`  // of the agent in the guest, from 1; each has a directory there
	Ran      time.Duration `json:"ran,omitempty"`      // nanoseconds, in the attempts before this one
	Restarts []time.Time   `json:"restarts,omitempty"` // of the VM while the agent ran
	Rebuilds int           `json:"rebuilds,omitempty"`

	Started  time.Time      `json:"started_at,omitzero"` // the agent, the first time
	Ended    time.Time      `json:"ended_at,omitzero"`   // the agent, the last time
	Quiet    time.Duration  `json:"quiet,omitempty"`     // nanoseconds since it printed something, when Spent was noted
	Progress agent.Progress `json:"progress,omitzero"`
	LogBase  Offsets        `json:"log_base,omitzero"` // lengths of the logs when this attempt began

	Events store.Budget `json:"events,omitzero"` // that the running agent caused

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

// Spent is how long a phase has taken: For, until At. A keeper notes it when it
// takes the phase up, and every half a minute while the agent runs, and counts by
// the clock that does not jump. What lies between its last note and the keeper after
// it is counted by the clock on the wall, and as nothing if that went back.
type Spent struct {
	For time.Duration `json:"for,omitempty"` // nanoseconds
	At  time.Time     `json:"at,omitzero"`
}

// Artifact is a file that a task brought home.
type Artifact struct {
	Name   string `json:"name"` // its path below the task's artifacts, with slashes
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// Skipped is a file that was not brought home, and why.
type Skipped struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

// Task is a row with its JSON read.
type Task struct {
	store.Task
	Phase    Phase
	Want     Want
	Manifest *manifest.Task
	Facts    Facts
}

func read(row store.Task) (Task, error) {
	t := Task{Task: row, Phase: Phase(row.Phase), Want: Want(row.Want)}
	var err error
	if t.Manifest, err = manifest.Decode(row.Manifest); err != nil {
		return t, fmt.Errorf("read the manifest of task %s: %w", row.ID, err)
	}
	if err := json.Unmarshal(row.Facts, &t.Facts); err != nil {
		return t, fmt.Errorf("read the facts of task %s: %w", row.ID, err)
	}
	return t, nil
}

// View is a task as --json and the API show it. Fields are only ever added.
type View struct {
	ID             string            `json:"id"`
	Name           string            `json:"name"`
	State          Phase             `json:"state"`
	Want           Want              `json:"want"`
	Priority       int               `json:"priority"`
	Labels         map[string]string `json:"labels,omitempty"`
	Repository     string            `json:"repository"`
	Agent          string            `json:"agent"`
	Model          string            `json:"model,omitempty"`
	Session        string            `json:"session,omitempty"`    // the id of its session
	InSession      bool              `json:"in_session,omitempty"` // which was there before, and stays
	CreatedAt      time.Time         `json:"created_at"`
	StateChangedAt time.Time         `json:"state_changed_at"`
	StartedAt      *time.Time        `json:"started_at,omitempty"` // the agent
	EndedAt        *time.Time        `json:"ended_at,omitempty"`   // the agent
	Attempt        int               `json:"attempt,omitempty"`
	Progress       *ViewProgress     `json:"progress,omitempty"`
	Outcome        *Outcome          `json:"outcome,omitempty"`
	Error          *ViewError        `json:"error,omitempty"`
	PreservedUntil *time.Time        `json:"preserved_until,omitempty"`
	Artifacts      int               `json:"artifacts,omitempty"`      // how many
	EventsDropped  int64             `json:"events_dropped,omitempty"` // of the agent's, that were counted and not stored
	RetryOf        string            `json:"retry_of,omitempty"`
	Actor          string            `json:"actor,omitempty"`
	TraceID        string            `json:"trace_id,omitempty"`
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

// ViewError is the last failure.
type ViewError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// View of t.
func (t Task) View() View {
	v := View{
		ID: t.ID, Name: t.Name, State: t.Phase, Want: t.Want, Priority: t.Priority, Labels: t.Labels,
		Repository: t.repository(), Agent: string(t.Manifest.Agent.Kind), Model: t.Manifest.Agent.Model,
		Session: t.SessionID, InSession: t.Given(), CreatedAt: t.CreatedAt, StateChangedAt: t.StateChangedAt,
		StartedAt: optional(t.Facts.Started), EndedAt: optional(t.Facts.Ended), Attempt: t.Facts.Attempt,
		Outcome: t.Facts.Outcome, PreservedUntil: optional(t.Facts.Until), Artifacts: len(t.Facts.Artifacts),
		RetryOf: t.Facts.RetryOf, Actor: t.Facts.Actor, TraceID: t.Facts.Trace, EventsDropped: t.Facts.Events.Dropped,
	}
	if !t.Facts.Started.IsZero() {
		p := t.Facts.Progress
		v.Progress = &ViewProgress{p.Usage, p.ToolCalls, p.CurrentTool, p.Model, p.Thread, p.Result, p.Error, p.Offset, p.Skipped}
	}
	if t.ErrorCode != "" {
		v.Error = &ViewError{t.ErrorCode, t.ErrorMessage, t.ErrorHint}
	}
	return v
}

func optional(at time.Time) *time.Time {
	if at.IsZero() {
		return nil
	}
	return &at
}
