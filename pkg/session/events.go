package session

import "github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"

// These are the kinds of events, each with the type of its data.
const (
	EventPhase     = "phase"                // PhaseChange
	EventStep      = lifecycle.EventStep    // lifecycle.Step
	EventWarning   = lifecycle.EventWarning // lifecycle.Warning
	EventNet       = "net"                  // NetChange
	EventFetch     = "fetch"                // FetchDone
	EventResult    = "result"               // lifecycle.Result
	EventQuestion  = "question"             // QuestionChange
	EventLease     = "lease"                // LeaseRenewed
	EventWorkspace = "workspace"            // WorkspaceChange
	EventAttention = "attention"            // *Attention; limited in rate, so not every change of a guest has one
)

// PhaseChange records that the phase or the desired phase changed.
type PhaseChange struct {
	From    Phase  `json:"from,omitempty"`
	To      Phase  `json:"to"`
	Desired Phase  `json:"desired,omitempty"`
	Code    string `json:"code,omitempty"` // of the error, if one occurred
	Reason  string `json:"reason,omitempty"`
	Hint    string `json:"hint,omitempty"`
}

// NetChange is a change to the session's own network rules, as the user typed it.
type NetChange struct {
	Allow        string `json:"allow,omitempty"`
	Deny         string `json:"deny,omitempty"`
	HostServices string `json:"host_services,omitempty"`
}

// FetchDone counts the work that a fetch collected.
type FetchDone struct {
	Refs    int `json:"refs"`
	Commits int `json:"commits"`
}
