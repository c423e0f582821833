package lifecycle

import "time"

// Result is how a command ended whose outcome a user recorded, such as a run of the tests.
type Result struct {
	Name        string    `json:"name"`              // what the user called it, or the command line
	Command     string    `json:"command,omitempty"` // its command line, shortened
	ExitCode    int       `json:"exit_code"`
	Commit      string    `json:"commit,omitempty"`      // that was checked out
	Uncommitted bool      `json:"uncommitted,omitempty"` // there were changes in no commit
	At          time.Time `json:"at"`                    // when it ended
}

// OK reports whether the command succeeded.
func (r Result) OK() bool { return r.ExitCode == 0 }
