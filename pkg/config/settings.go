package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/viper"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
)

// setting is a setting of config.yaml that has one value for the whole program. Its row is
// the only place that knows its key, its variables, its default and its bounds.
type setting struct {
	key   string
	env   string // the environment variable that sets it; "" for none
	alias string // a variable without our prefix, which only the original specification requires; see aliasOf
	about string // what the variable sets, for help
	unset string // the value if nothing sets it
	kind
}

// kind is how a setting is read and shown.
type kind struct {
	set   func(*Config, string) error // parses and checks a text
	value func(*Config) any
}

// settings holds the rows in the order of config.yaml.
var settings = []setting{
	{"image", "AGENT_SESSIONIZER_IMAGE", "", "guest image", "", kind{setImage, func(c *Config) any { return c.Image }}},
	{"prepare", "AGENT_SESSIONIZER_PREPARE", "", "what to prepare for faster starts", string(PrepareNone), kind{setPrepare, func(c *Config) any { return c.Prepare }}},
	{"pool", "AGENT_SESSIONIZER_POOL", "", "number of standby VMs", "0", number(0, maxPool, func(c *Config) *int { return &c.Pool })},
	{"profile", "AGENT_SESSIONIZER_PROFILE", "", "default profile", "", kind{setProfile, func(c *Config) any { return c.profile }}},
	{"editor", "AGENT_SESSIONIZER_EDITOR", "", "editor that code opens", "", kind{func(c *Config, text string) error { c.Editor = text; return nil }, func(c *Config) any { return c.Editor }}},
	{"lima_home", "AGENT_SESSIONIZER_LIMA_HOME", "", "directory of the VMs", "", kind{setLimaHome, func(c *Config) any { return c.Paths.LimaHome }}},
	{"limits.running", "AGENT_SESSIONIZER_LIMITS_RUNNING", "", "maximum number of running VMs", "", number(1, 0, func(c *Config) *int { return &c.Limits.Running })},
	{"limits.memory_reserve", "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE", "", "host memory that stays free", "", size(1, func(c *Config) *Size { return &c.Limits.MemoryReserve })},
	{"limits.disk_reserve", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE", "", "host disk space that stays free", "", size(1, func(c *Config) *Size { return &c.Limits.DiskReserve })},
	{"limits.saved_home", "", "", "", "256MiB", size(1, func(c *Config) *Size { return &c.Limits.SavedHome })},
	{"limits.mirror_size", "", "", "", "20GiB", size(1, func(c *Config) *Size { return &c.Limits.MirrorSize })},
	{"limits.mirror_refs", "", "", "", "50000", number(1, 0, func(c *Config) *int { return &c.Limits.MirrorRefs })},
	{"limits.mirror_time", "", "", "", "2h", duration(time.Second, func(c *Config) *time.Duration { return &c.Limits.MirrorTime })},
	{"tasks.slots", "AGENT_SESSIONIZER_TASKS_SLOTS", "", "number of tasks that run at once", "2", number(1, 0, func(c *Config) *int { return &c.Tasks.Slots })},
	{"tasks.cleanup_ttl", "", "", "", "360h", duration(time.Hour, func(c *Config) *time.Duration { return &c.Tasks.CleanupTTL })},
	{"cluster.url", "", "", "", "", kind{func(c *Config, text string) error { c.Cluster.URL = text; return nil }, func(c *Config) any { return c.Cluster.URL }}},
	{"cluster.domain", "", "", "", "", kind{func(c *Config, text string) error { c.Cluster.Domain = text; return nil }, func(c *Config) any { return c.Cluster.Domain }}},
	{"cluster.credentials", "", "", "", "", file(func(c *Config) *Dir { return &c.Cluster.Credentials })},
	{"cluster.ca", "", "", "", "", file(func(c *Config) *Dir { return &c.Cluster.CA })},
	{"log.level", "AGENT_SESSIONIZER_LOG_LEVEL", "LOG_LEVEL", "lowest level of the program's own log", LevelAuto, word(func(c *Config) *string { return &c.Log.Level }, LevelAuto, "trace", "debug", "info", "warn", "error")},
	{"log.format", "AGENT_SESSIONIZER_LOG_FORMAT", "LOG_FORMAT", "format of the program's own log", "pretty", word(func(c *Config) *string { return &c.Log.Format }, "pretty", "json", "compact")},
	{"log.file", "AGENT_SESSIONIZER_LOG_FILE", "LOG_FILE", "file of the program's own log", "", file(func(c *Config) *Dir { return &c.Log.File })},
	{"log.rotation", "AGENT_SESSIONIZER_LOG_FILE_ROTATION", "LOG_FILE_ROTATION", "how often that file is rotated", string(logfile.Daily), word(func(c *Config) *logfile.Period { return &c.Log.Rotation }, logfile.Periods()...)},
	{"log.max_size", "", "", "", "16MiB", size(minLog, func(c *Config) *Size { return &c.Log.MaxSize })},
	{"log.keep", "", "", "", "7", number(1, maxLogFiles, func(c *Config) *int { return &c.Log.Keep })},
	{"audit.retention", "", "", "", "90d", duration(day, func(c *Config) *Duration { return &c.Audit.Retention })},
	{"recordings.tasks", "", "", "", string(On), word(func(c *Config) *Switch { return &c.Recordings.Tasks }, On, Off)},
	{"recordings.size", "", "", "", "64MiB", size(minRecordings, func(c *Config) *Size { return &c.Recordings.Size })},
	{"recordings.keep", "", "", "", "30d", duration(time.Hour, func(c *Config) *Duration { return &c.Recordings.Keep })},
}

const (
	day = 24 * time.Hour

	minRecordings = 1 << 20 // bytes

	minLog      = 64 << 10 // bytes; a few records must fit
	maxLogFiles = 1000     // each rotation lists the old files
)

// number returns the kind of a number from least to most. If most is 0, there is no bound above.
func number(least, most int, field func(*Config) *int) kind {
	return kind{func(c *Config, text string) error {
		n, err := strconv.Atoi(text)
		switch {
		case most == 0 && (err != nil || n < least):
			return fail.New(fail.Usage, "must be a whole number of at least %d, got %q", least, text)
		case err != nil || n < least || most != 0 && n > most:
			return fail.New(fail.Usage, "must be %d to %d, got %q", least, most, text)
		}
		*field(c) = n
		return nil
	}, func(c *Config) any { return *field(c) }}
}

func size(least Size, field func(*Config) *Size) kind {
	return kind{func(c *Config, text string) error {
		n, err := ParseSize(text)
		if err == nil && n < least {
			err = fail.New(fail.Usage, "must be a size of at least %v, got %q", least, text)
		}
		*field(c) = n
		return err
	}, func(c *Config) any { return *field(c) }}
}

func duration[D ~int64](least time.Duration, field func(*Config) *D) kind {
	return kind{func(c *Config, text string) error {
		d, err := parseDuration(text)
		if err == nil && d < Duration(least) {
			err = fail.New(fail.Usage, "must be at least %v, got %v", Duration(least), d)
		}
		*field(c) = D(d)
		return err
	}, func(c *Config) any { return fmt.Sprint(*field(c)) }}
}

// word returns the kind of one of a few words, in any case, as in LOG_LEVEL=INFO.
func word[S ~string](field func(*Config) *S, known ...S) kind {
	return kind{func(c *Config, text string) error {
		w := S(strings.ToLower(text))
		if !slices.Contains(known, w) {
			last := len(known) - 1
			return fail.New(fail.Usage, "must be %s or %s, got %q", strings.Trim(strings.ReplaceAll(fmt.Sprint(known[:last]), " ", ", "), "[]"), known[last], text)
		}
		*field(c) = w
		return nil
	}, func(c *Config) any { return *field(c) }}
}

// file returns the kind of an absolute path: keepers do not run in the working directory of the command that
// starts them.
func file(field func(*Config) *Dir) kind {
	return kind{func(c *Config, text string) error { return field(c).Set(text) }, func(c *Config) any { return *field(c) }}
}

func setImage(c *Config, text string) (err error) {
	var ref ImageRef
	if text != "" {
		ref, err = ParseImageRef(text, "")
	}
	c.Image = ref.String()
	return err
}

func setPrepare(c *Config, text string) (err error) {
	c.Prepare, err = ParsePrepare(text)
	return err
}

func setProfile(c *Config, text string) error {
	c.profile = text
	return nil
}

func setLimaHome(c *Config, text string) error {
	if text == "" {
		return nil
	}
	if !filepath.IsAbs(text) {
		return fail.New(fail.Usage, "must be an absolute path, got %q", text)
	}
	c.Paths.LimaHome = filepath.Clean(text)
	return nil
}

// Variable is an environment variable that sets a setting.
type Variable struct {
	Name  string
	Alias string // a variable that counts if Name is not set; "" for none
	Key   string // the setting, as in config.yaml
	About string
}

// Variables returns the environment variables that are settings.
func Variables() (all []Variable) {
	for _, s := range settings {
		if s.env != "" {
			all = append(all, Variable{s.env, s.alias, s.key, s.about})
		}
	}
	return all
}

// aliasOf returns the setting's variable without our prefix, or "". The names are those of
// other programs, too, so a value that we do not understand does not count.
func (s setting) aliasOf() string {
	if value := os.Getenv(s.alias); s.alias == "" || value == "" || s.set(&Config{}, value) != nil {
		return ""
	}
	return s.alias
}

// variable returns the environment variable that sets the setting now, or "".
func (s setting) variable() string {
	if s.env != "" && os.Getenv(s.env) != "" {
		return s.env
	}
	return s.aliasOf()
}

// setScalars sets the settings of the table: by variables, by the last file that has a value,
// or by the default.
func (c *Config) setScalars() error {
	v := viper.New()
	places := c.settingPlaces("", "")
	for _, s := range settings {
		v.SetDefault(s.key, s.unset)
		for _, p := range places {
			if found := p.find(strings.ReplaceAll(s.key, ".", step)); found != nil {
				v.SetDefault(s.key, found.Text)
			}
		}
		if name := s.variable(); name != "" {
			if err := v.BindEnv(s.key, name); err != nil {
				return err
			}
		}
		if err := s.set(c, v.GetString(s.key)); err != nil {
			if !strings.HasPrefix(err.Error(), s.key) {
				err = fmt.Errorf("%s %w", s.key, err)
			}
			return c.settingError(s.key, err)
		}
	}
	return nil
}

// settingError returns an error about the value of a key. The error names the file or variable
// that the value came from.
func (c *Config) settingError(key string, err error) error {
	err = fail.New(fail.Usage, "%w", err)
	from := origin(c.settingPlaces("", ""), strings.ReplaceAll(key, ".", step))
	switch {
	case from.Name != "":
		return fail.New(fail.Usage, "%v: %w", from, err).WithHint("unset %s", from.Name)
	case from.File != "":
		return c.withHint(from.File, fail.New(fail.Usage, "%v: %w", from, err))
	}
	return err
}
