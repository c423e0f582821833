package session

import (
	"time"
)

// These are the kinds of events, each with the type of its data.
const (
	EventPhase     = "phase"     // PhaseChange
	EventStep      = "step"      // Step
	EventWarning   = "warning"   // Warning
	EventNet       = "net"       // NetChange
	EventFetch     = "fetch"     // FetchDone
	EventAttention = "attention" // *Attention; limited in rate, so not every change of a guest has one
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

// stepProgress is the state of a step whose detail changed. The detail may come from
// the guest.
const stepProgress = "progress"

// Step is one step of the work: State is start, progress, done, failed or skip.
type Step struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Detail    string `json:"detail,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Elapsed returns the time since the step began.
func (s Step) Elapsed() time.Duration { return time.Duration(s.ElapsedMS) * time.Millisecond }

// Warning is a problem that the user should know about and that does not stop the
// work.
type Warning struct {
	Message string `json:"message"`
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
