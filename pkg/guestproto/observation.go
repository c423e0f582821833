package guestproto

import "time"

// AgentState is what a coding agent is doing, as far as its user needs to know.
type AgentState string

// These are the states, most urgent first.
const (
	AgentBlocked AgentState = "blocked" // waits for an answer; On says to what
	AgentError   AgentState = "error"   // its turn ended with an error; On says which
	AgentDone    AgentState = "done"    // finished its turn
	AgentWorking AgentState = "working"
	AgentIdle    AgentState = "idle" // runs, without a request so far
	AgentGone    AgentState = "gone" // its program ended
)

var byUrgency = []AgentState{AgentBlocked, AgentError, AgentDone, AgentWorking, AgentIdle, AgentGone}

// Urgency orders states: 0 is the most urgent, an unknown state the least.
func (s AgentState) Urgency() int {
	for i, known := range byUrgency {
		if s == known {
			return i
		}
	}
	return len(byUrgency)
}

func (s AgentState) known() bool { return s.Urgency() < len(byUrgency) }

// Agent is one coding agent that runs, or ran, in a guest.
type Agent struct {
	Name  string     `json:"name"` // of the program: "claude", "codex"; for others, of the window that rang
	PID   int        `json:"pid,omitempty"`
	State AgentState `json:"state"`
	On    string     `json:"on,omitempty"` // what it waits for, or the error
	Since time.Time  `json:"since"`        // by the guest's clock
}

// Observation is what the host sees of a guest: one line of `agent-guest watch`, sent whole
// whenever any part of it changes.
type Observation struct {
	Version int      `json:"version"`
	Agents  []Agent  `json:"agents,omitempty"` // most urgent first
	Window  string   `json:"window,omitempty"` // the window that the screen shows
	Screen  []string `json:"screen,omitempty"` // lines of text, without colours
	Changes *Changes `json:"changes,omitempty"`
	Machine *Machine `json:"machine,omitempty"`

	Questions []Question `json:"questions,omitempty"` // that wait for an answer, oldest first
	Taken     []string   `json:"taken,omitempty"`     // ids of questions whose answer from the host was taken, newest first
}

// Changes counts how the checkout differs from what was cloned.
type Changes struct {
	Branch     string `json:"branch,omitempty"`
	Commits    int    `json:"commits"` // on no remote branch
	Files      int    `json:"files"`   // that differ from the clone, including untracked ones
	Insertions int    `json:"insertions"`
	Deletions  int    `json:"deletions"`
}

// Machine holds the guest's resource use, in bytes, and the time of the last terminal input.
type Machine struct {
	Load      float64 `json:"load"` // average over the last minute
	MemUsed   int64   `json:"mem_used"`
	MemTotal  int64   `json:"mem_total"`
	DiskUsed  int64   `json:"disk_used"`
	DiskTotal int64   `json:"disk_total"`
	Input     int64   `json:"input,omitempty"` // Unix time by the guest's clock; 0 for none
}
