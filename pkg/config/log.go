package config

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
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

// Duration is a time.Duration that can be written in days.
type Duration time.Duration

func parseDuration(text string) (Duration, error) {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseUint(days, 10, 16); err == nil {
			return Duration(n) * Duration(24*time.Hour), nil
		}
	}
	v, err := time.ParseDuration(text)
	if err != nil || v < 0 {
		return 0, fmt.Errorf("must be a duration like 36h or 90d, got %q", text)
	}
	return Duration(v), nil
}

// String formats the duration as Set reads it.
func (d Duration) String() string {
	if day := Duration(24 * time.Hour); d != 0 && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	return time.Duration(d).String()
}

// Set implements pflag.Value.
func (d *Duration) Set(text string) (err error) {
	*d, err = parseDuration(text)
	return err
}

// Type implements pflag.Value.
func (*Duration) Type() string { return "time" }

// MarshalText returns the same text as String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// LevelAuto means warn for commands that people wait for, and info for background
// processes.
const LevelAuto = "auto"

// Audit returns the path of the audit log.
func (p Paths) Audit() string { return filepath.Join(p.State, "audit.jsonl") }

// KeeperLog returns the path of the log of a session's keeper.
func (p Paths) KeeperLog(id string) string { return filepath.Join(p.SessionDir(id), "keeper.log") }
