package config

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"
	"github.com/spf13/viper"

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

// Duration is a time.Duration that can be written in days. Its parse errors contain the
// line.
type Duration time.Duration

// UnmarshalYAML parses a duration such as 36h or 90d.
func (d *Duration) UnmarshalYAML(n ast.Node) error {
	text, _ := scalar(n)
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.ParseUint(days, 10, 16); err == nil {
			*d = Duration(n) * Duration(24*time.Hour)
			return nil
		}
	}
	v, err := time.ParseDuration(text)
	if err != nil {
		return at(n, "must be a duration like 36h or 90d, got %q", text)
	}
	*d = Duration(v)
	return nil
}

// String formats the duration as UnmarshalYAML reads it.
func (d Duration) String() string {
	if day := Duration(24 * time.Hour); d != 0 && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	return time.Duration(d).String()
}

// MarshalText returns the same text as String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// LevelAuto means warn for commands that people wait for, and info for background
// processes.
const LevelAuto = "auto"

// logWords holds the allowed values of the settings that have a fixed set of values.
var logWords = map[string][]string{
	"log.level":    {LevelAuto, "trace", "debug", "info", "warn", "error"},
	"log.format":   {"pretty", "json", "compact"},
	"log.rotation": periods(),
}

func periods() (words []string) {
	for _, p := range logfile.Periods() {
		words = append(words, string(p))
	}
	return words
}

// Audit returns the path of the audit log.
func (p Paths) Audit() string { return filepath.Join(p.State, "audit.jsonl") }

// KeeperLog returns the path of the log of a session's keeper.
func (p Paths) KeeperLog(id string) string { return filepath.Join(p.SessionDir(id), "keeper.log") }

// bare maps settings to environment variables without our prefix. They apply only if the
// prefixed variable is not set.
var bare = map[string]string{
	"log.level":    "LOG_LEVEL",
	"log.format":   "LOG_FORMAT",
	"log.file":     "LOG_FILE",
	"log.rotation": "LOG_FILE_ROTATION",
}

// bareOf returns the variable in bare that applies to a key, or "". Other programs use
// these variables, too, so a value that we do not understand is ignored.
func bareOf(key string) string {
	value := os.Getenv(bare[key])
	ours := slices.Contains(logWords[key], strings.ToLower(value))
	if key == "log.file" {
		_, err := logPath(value)
		ours = err == nil
	}
	if !ours {
		return ""
	}
	return bare[key]
}

// logPath returns the path of a log. It must be absolute, because keepers do not run in the
// working directory of the command that starts them.
func logPath(value string) (string, error) {
	path, err := expandHome(value)
	if err == nil && path != "" && !filepath.IsAbs(path) {
		err = errors.New("a relative path")
	}
	return path, err
}

// scalars returns the values that are set, in the form that viper merges.
func (l Log) scalars(put func(m map[string]any, key, v string)) map[string]any {
	m := map[string]any{}
	put(m, "level", l.Level)
	put(m, "format", l.Format)
	put(m, "file", string(l.File))
	put(m, "rotation", string(l.Rotation))
	put(m, "max_size", strconv.FormatInt(int64(l.MaxSize), 10))
	put(m, "keep", strconv.Itoa(l.Keep))
	return m
}

func (a Audit) scalars(put func(m map[string]any, key, v string)) map[string]any {
	m := map[string]any{}
	put(m, "retention", strconv.FormatInt(int64(a.Retention), 10))
	return m
}

// setLog sets the log settings. Values are case-insensitive, as in LOG_LEVEL=INFO.
func (c *Config) setLog(v *viper.Viper) error {
	word := func(key, unset string) (string, error) {
		w, known := strings.ToLower(cmp.Or(v.GetString(key), unset)), logWords[key]
		if !slices.Contains(known, w) {
			last := len(known) - 1
			return "", c.settingError(key, "%s must be %s or %s, got %q", key, strings.Join(known[:last], ", "), known[last], v.GetString(key))
		}
		return w, nil
	}
	var err error
	if c.Log.Level, err = word("log.level", LevelAuto); err != nil {
		return err
	}
	if c.Log.Format, err = word("log.format", "pretty"); err != nil {
		return err
	}
	rotation, err := word("log.rotation", string(logfile.Daily))
	if err != nil {
		return err
	}
	c.Log.Rotation = logfile.Period(rotation)
	file, err := logPath(v.GetString("log.file"))
	if err != nil {
		return c.settingError("log.file", "log.file must be an absolute path or start with ~/, got %q", v.GetString("log.file"))
	}
	c.Log.File = Dir(file)
	if err := c.Log.MaxSize.Set(cmp.Or(v.GetString("log.max_size"), "16MiB")); err != nil || c.Log.MaxSize < minLog {
		return c.settingError("log.max_size", "log.max_size must be a size of at least %v, got %q", Size(minLog), v.GetString("log.max_size"))
	}
	if c.Log.Keep, err = strconv.Atoi(cmp.Or(v.GetString("log.keep"), "7")); err != nil || c.Log.Keep < 1 || c.Log.Keep > maxLogFiles {
		return c.settingError("log.keep", "log.keep must be 1 to %d, got %q", maxLogFiles, v.GetString("log.keep"))
	}
	const day = Duration(24 * time.Hour)
	if c.Audit.Retention = cmp.Or(Duration(v.GetDuration("audit.retention")), 90*day); c.Audit.Retention < day {
		return c.settingError("audit.retention", "audit.retention must be at least %v, got %v", day, c.Audit.Retention)
	}
	return nil
}

const (
	minLog      = 64 << 10 // bytes; a few records must fit
	maxLogFiles = 1000     // each rotation lists the old files
)
