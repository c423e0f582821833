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

// Log is how the program logs; zero fields are inherited.
type Log struct {
	Level    string         `yaml:"level,omitempty" json:"level"`       // auto, or the least that is logged
	Format   string         `yaml:"format,omitempty" json:"format"`     // of File and the standard error
	File     Dir            `yaml:"file,omitempty" json:"file"`         // "" for none
	Rotation logfile.Period `yaml:"rotation,omitempty" json:"rotation"` // of File
	MaxSize  Size           `yaml:"max_size,omitempty" json:"max_size"` // of File, bytes
	Keep     int            `yaml:"keep,omitempty" json:"keep"`         // old files
}

// Audit is how long the audit log is kept; zero fields are inherited.
type Audit struct {
	Retention Duration `yaml:"retention,omitempty" json:"retention"`
}

// Duration is a time.Duration that may be in days, and keeps its line for the error.
type Duration time.Duration

// UnmarshalYAML reads 36h or 90d.
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
		return at(n, "%q is not a time; write it like 36h or 90d", text)
	}
	*d = Duration(v)
	return nil
}

// String is the duration as UnmarshalYAML reads it.
func (d Duration) String() string {
	if day := Duration(24 * time.Hour); d != 0 && d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	return time.Duration(d).String()
}

// MarshalText is String.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// LevelAuto is warn for what people wait for, and info for what runs by itself.
const LevelAuto = "auto"

// logWords are the values of settings that are one of a few words.
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

// Audit is the audit log.
func (p Paths) Audit() string { return filepath.Join(p.State, "audit.jsonl") }

// KeeperLog is the log of a session's keeper.
func (p Paths) KeeperLog(id string) string { return filepath.Join(p.SessionDir(id), "keeper.log") }

// bare are names of environment variables without our prefix, which count where
// those with it are not set.
var bare = map[string]string{
	"log.level":    "LOG_LEVEL",
	"log.format":   "LOG_FORMAT",
	"log.file":     "LOG_FILE",
	"log.rotation": "LOG_FILE_ROTATION",
}

// bareOf is the variable of bare that counts for a key, "" for none. Other programs
// read it too: what means nothing to us is not meant for us.
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

// logPath is the path of a log; keepers do not stand where their starters do.
func logPath(value string) (string, error) {
	path, err := expandHome(value)
	if err == nil && path != "" && !filepath.IsAbs(path) {
		err = errors.New("a relative path")
	}
	return path, err
}

// scalars are the set values, as viper wants them.
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

// setLog reads how the program logs. Words may be in capitals, as in LOG_LEVEL=INFO.
func (c *Config) setLog(v *viper.Viper) error {
	word := func(key, unset string) (string, error) {
		w, known := strings.ToLower(cmp.Or(v.GetString(key), unset)), logWords[key]
		if !slices.Contains(known, w) {
			last := len(known) - 1
			return "", c.wrong(key, "%s is %q; it is %s or %s", key, v.GetString(key), strings.Join(known[:last], ", "), known[last])
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
		return c.wrong("log.file", "log.file is %q; it is an absolute path, or one that starts with ~/", v.GetString("log.file"))
	}
	c.Log.File = Dir(file)
	if err := c.Log.MaxSize.Set(cmp.Or(v.GetString("log.max_size"), "16MiB")); err != nil || c.Log.MaxSize < minLog {
		return c.wrong("log.max_size", "log.max_size is %q; it is a size from %v", v.GetString("log.max_size"), Size(minLog))
	}
	if c.Log.Keep, err = strconv.Atoi(cmp.Or(v.GetString("log.keep"), "7")); err != nil || c.Log.Keep < 1 || c.Log.Keep > maxLogFiles {
		return c.wrong("log.keep", "log.keep is %q; it is a number from 1 to %d", v.GetString("log.keep"), maxLogFiles)
	}
	const day = Duration(24 * time.Hour)
	if c.Audit.Retention = cmp.Or(Duration(v.GetDuration("audit.retention")), 90*day); c.Audit.Retention < day {
		return c.wrong("audit.retention", "audit.retention is %v; it is at least %v", c.Audit.Retention, day)
	}
	return nil
}

const (
	minLog      = 64 << 10 // some records must fit
	maxLogFiles = 1000     // they are looked through whenever a new one is begun
)
