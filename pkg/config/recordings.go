package config

import (
	"fmt"
	"path/filepath"
)

// Recordings configures the recordings of terminals. Whether the terminals of a session are recorded is
// a setting of its profile.
type Recordings struct {
	Tasks Switch   `yaml:"tasks,omitempty" json:"tasks"` // whether the output of tasks is recorded
	Size  Size     `yaml:"size,omitempty" json:"size"`   // bytes on disk, for each session or task
	Keep  Duration `yaml:"keep,omitempty" json:"keep"`   // how long they are kept after they ended
}

// Switch turns something on or off. The zero Switch is inherited.
type Switch string

// The positions.
const (
	On  Switch = "on"
	Off Switch = "off"
)

// Set parses a position.
func (s *Switch) Set(text string) error {
	if *s = Switch(text); *s != On && *s != Off {
		return fmt.Errorf("must be on or off, got %q", text)
	}
	return nil
}

// Recordings returns the directory of the recordings of terminals.
func (p Paths) Recordings() string { return filepath.Join(p.State, "recordings") }
