package wire

import "time"

// AgentState is what a coding agent does, as far as its user must know.
type AgentState string

// The states, most urgent first.
const (
	AgentBlocked AgentState = "blocked" // waits for an answer; On says to what
	AgentError   AgentState = "error"   // its turn ended with an error; On says which
	AgentDone    AgentState = "done"    // finished its turn
	AgentWorking AgentState = "working"
	AgentIdle    AgentState = "idle" // runs, and nothing was asked of it yet
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
	Name  string     `json:"name"` // of the program: "claude", "codex"; of the window that rang, for others
	PID   int        `json:"pid,omitempty"`
	State AgentState `json:"state"`
	On    string     `json:"on,omitempty"` // what it waits for, or the error
	Since time.Time  `json:"since"`        // by the guest's clock
}

// Glance is what a person would see who looked in on a guest: one line of
// `agent-guest watch`, whole each time that something of it changed.
type Glance struct {
	Version int      `json:"version"`
	Agents  []Agent  `json:"agents,omitempty"` // most urgent first
	Window  string   `json:"window,omitempty"` // whose screen it is
	Screen  []string `json:"screen,omitempty"` // lines of text, without colours
	Changes *Changes `json:"changes,omitempty"`
	Machine *Machine `json:"machine,omitempty"`
}

// Changes is what the checkout has over what was cloned.
type Changes struct {
	Branch     string `json:"branch,omitempty"`
	Commits    int    `json:"commits"` // that are on no remote branch
	Files      int    `json:"files"`   // that differ from the clone, untracked ones included
	Insertions int    `json:"insertions"`
	Deletions  int    `json:"deletions"`
}

// Machine is what the guest has in use; bytes.
type Machine struct {
	Load      float64 `json:"load"` // of the last minute
	MemUsed   int64   `json:"mem_used"`
	MemTotal  int64   `json:"mem_total"`
	DiskUsed  int64   `json:"disk_used"`
	DiskTotal int64   `json:"disk_total"`
}
