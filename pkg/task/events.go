package task

import (
	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
)

// These are the kinds of events, each with the type of its data.
const (
	EventPhase     = "phase"                // PhaseChange
	EventStep      = lifecycle.EventStep    // lifecycle.Step, of the task's own steps
	EventRetry     = "retry"                // Retrying
	EventWarning   = lifecycle.EventWarning // lifecycle.Warning
	EventTool      = agent.Tool             // agent.Change, like the three below
	EventMessage   = agent.Message
	EventResult    = agent.Result
	EventError     = agent.Failure
	EventOutcome   = "outcome"   // Outcome
	EventHeartbeat = "heartbeat" // Heartbeat
	EventHang      = "hang"      // Hang
	EventRestart   = "restart"   // Restart
	EventArtifacts = "artifacts" // Gathered
	EventSubtask   = "subtask"   // Submitted, of a task or session that submitted a subtask
)

// PhaseChange records that the phase or the desired state changed.
type PhaseChange struct {
	From    Phase        `json:"from,omitempty"`
	To      Phase        `json:"to"`
	Desired DesiredPhase `json:"desired,omitempty"`
	Session string       `json:"session,omitempty"`
	Outcome *Outcome     `json:"outcome,omitempty"`
	Reason  string       `json:"reason,omitempty"`
}

// Retrying records that a step failed and will be tried again.
type Retrying struct {
	Phase   Phase  `json:"phase"`
	Try     int    `json:"try"` // number of the next try, from 2
	Most    int    `json:"most"`
	DelayMS int64  `json:"delay_ms"`
	Error   string `json:"error"`
	Hint    string `json:"hint,omitempty"`
}

// Heartbeat is the state of a running agent. The values from the guest are only its
// claims.
type Heartbeat struct {
	Stdout      int64       `json:"stdout_bytes"`
	Stderr      int64       `json:"stderr_bytes"`
	CPUMillis   int64       `json:"cpu_ms"` // of the agent and all processes it started
	MemoryBytes int64       `json:"memory_bytes"`
	Usage       agent.Usage `json:"usage"`
}

// Hang records that a running agent shows a sign of being stuck.
type Hang struct {
	Sign    string `json:"sign"`   // no_output, low_cpu, no_progress, timeout
	Action  string `json:"action"` // "" for signs that are only reported
	SinceMS int64  `json:"since_ms"`
}

// Restart records that the agent or its VM is restarted, or that a new VM is created.
type Restart struct {
	What    string `json:"what"` // agent, vm, rebuild
	Attempt int    `json:"attempt"`
	Reason  string `json:"reason"`
}

// Submitted names a subtask that was submitted.
type Submitted struct {
	ID   string `json:"id"`
	Name string `json:"name"`
}

// Gathered counts what was collected.
type Gathered struct {
	Files   int   `json:"files"`
	Bytes   int64 `json:"bytes"`
	Skipped int   `json:"skipped,omitempty"`
	Commits int   `json:"commits,omitempty"` // that are now in the repository's mirror
}
