package config

import (
	"fmt"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

// Log configures the program's logs. Zero fields are inherited.
type Log struct {
	Level    string         `yaml:"level,omitempty" json:"level"`       // auto, or the lowest level that is logged
	Format   string         `yaml:"format,omitempty" json:"format"`     // of File and stderr
	File     Dir            `yaml:"file,omitempty" json:"file"`         // "" for none
	Rotation logfile.Period `yaml:"rotation,omitempty" json:"rotation"` // of File
	MaxSize  Size           `yaml:"max_size,omitempty" json:"max_size"` // of File, bytes
	Keep     int            `yaml:"keep,omitempty" json:"keep"`         // number of old files
}

// Audit configures how long the audit log is kept. Zero fields are inherited.
type Audit struct {
	Retention Duration `yaml:"retention,omitempty" json:"retention"`
}

// Duration is a length of time, written as 36h or 90d.
type Duration = measure.Duration

func parseDuration(text string) (Duration, error) {
	d, err := measure.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%w, got %q", err, text)
	}
	return d, nil
}

// LevelAuto means warn for commands that people wait for, and info for background
// processes.
const LevelAuto = "auto"

// Audit returns the path of the audit log.
func (p Paths) Audit() string { return filepath.Join(p.State, "audit.jsonl") }

// KeeperLog returns the path of the log of a session's keeper.
func (p Paths) KeeperLog(id string) string { return filepath.Join(p.SessionDir(id), "keeper.log") }
