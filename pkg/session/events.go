package session

import (
	"time"
)

// The kinds of events and the type of each one's data.
const (
	EventPhase     = "phase"     // PhaseChange
	EventStep      = "step"      // Step
	EventWarning   = "warning"   // Warning
	EventNet       = "net"       // NetChange
	EventFetch     = "fetch"     // FetchDone
	EventAttention = "attention" // *Attention; not every change of a guest that changes all the time
)

// PhaseChange tells that the phase or the wanted phase changed.
type PhaseChange struct {
	From   Phase  `json:"from,omitempty"`
	To     Phase  `json:"to"`
	Want   Phase  `json:"want,omitempty"`
	Code   string `json:"code,omitempty"` // of the error, when there was one
	Reason string `json:"reason,omitempty"`
	Hint   string `json:"hint,omitempty"`
}

// stepProgress is the state of a step whose detail is new; it may come from the guest.
const stepProgress = "progress"

// Step is one step of the work: State is start, progress, done, failed or skip.
type Step struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Detail    string `json:"detail,omitempty"`
	ElapsedMS int64  `json:"elapsed_ms"`
}

// Elapsed since the step began.
func (s Step) Elapsed() time.Duration { return time.Duration(s.ElapsedMS) * time.Millisecond }

// Warning is something a person should know that stops nothing.
type Warning struct {
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// NetChange is what was said of this session's network, as it was typed.
type NetChange struct {
	Allow        string `json:"allow,omitempty"`
	Deny         string `json:"deny,omitempty"`
	HostServices string `json:"host_services,omitempty"`
}

// FetchDone is work that was brought home.
type FetchDone struct {
	Refs    int `json:"refs"`
	Commits int `json:"commits"`
}
