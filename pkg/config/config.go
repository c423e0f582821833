package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/spf13/viper"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// Config holds the settings of one invocation.
type Config struct {
	Paths   Paths
	Image   string  // the guest image, in the syntax of ParseImageRef
	Prepare Prepare // what is prepared in advance
	Pool    int     // number of standby VMs, where VMs cannot be saved
	Limits  Limits
	Tasks   Tasks
	Log     Log
	Audit   Audit
	Files   []string // the files that were read, in order

	Dotfiles string // the user's dotfiles, a directory on the host; "" for none

	Attention Attention // how the user learns that an agent needs attention
	Roots     []string  // directories under which the picker looks for local clones

	defaults fs.FS
	sources  []source          // the YAML files that were read
	listed   map[string]Origin // origins of the lists of names, by file name
	instead  map[string][]byte // content that Check substitutes for a file, by path

	profile   string // name of the default profile
	base      Profile
	profiles  map[string]Profile
	repos     map[RepoKey]Repo
	overrides map[RepoKey]Resources
	groups    policy.Groups
	allowlist []policy.Rule
}

// Prepare selects how much is prepared in advance to make sessions start faster.
type Prepare string

// The values of Prepare. Each level includes those before it.
const (
	PrepareNone   Prepare = "none"   // sessions boot the image and provision it
	PrepareGolden Prepare = "golden" // sessions clone a disk that is already provisioned
	PrepareWarm   Prepare = "warm"   // sessions resume the saved memory of a clone, or take a standby VM
	PreparePool   Prepare = "pool"   // sessions take a standby VM, even where VMs can be saved
)

// maxPool limits the number of standby VMs, because each uses memory.
const maxPool = 8

// ParsePrepare parses a value of Prepare.
func ParsePrepare(s string) (Prepare, error) {
	p := Prepare(s)
	if !slices.Contains([]Prepare{PrepareNone, PrepareGolden, PrepareWarm, PreparePool}, p) {
		return "", fail.New(fail.Usage, "prepare must be %s, %s, %s or %s, got %q", PrepareNone, PrepareGolden, PrepareWarm, PreparePool, s)
	}
	return p, nil
}

// env maps the scalar settings that the environment can set to their variables.
var env = map[string]string{
	"image":                 "AGENT_SESSIONIZER_IMAGE",
	"prepare":               "AGENT_SESSIONIZER_PREPARE",
	"pool":                  "AGENT_SESSIONIZER_POOL",
	"profile":               "AGENT_SESSIONIZER_PROFILE",
	"lima_home":             "AGENT_SESSIONIZER_LIMA_HOME",
	"limits.running":        "AGENT_SESSIONIZER_LIMITS_RUNNING",
	"limits.memory_reserve": "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE",
	"limits.disk_reserve":   "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE",
	"tasks.slots":           "AGENT_SESSIONIZER_TASKS_SLOTS",
	"log.level":             "AGENT_SESSIONIZER_LOG_LEVEL",
	"log.format":            "AGENT_SESSIONIZER_LOG_FORMAT",
	"log.file":              "AGENT_SESSIONIZER_LOG_FILE",
	"log.rotation":          "AGENT_SESSIONIZER_LOG_FILE_ROTATION",
}

// Variables returns the names of the environment variables that are settings.
func Variables() []string {
	return slices.Concat(slices.Sorted(maps.Values(env)), slices.Sorted(maps.Values(bare)))
}

// Load reads all settings. defaults is the shipped config directory.
func Load(paths Paths, defaults fs.FS) (*Config, error) { return load(paths, defaults, nil) }

// Check loads all settings as if the user's file of that name had the given text, and
// returns the error. The name may be that of a group's file.
func Check(paths Paths, defaults fs.FS, name string, text []byte) error {
	_, err := load(paths, defaults, map[string][]byte{filepath.Join(paths.Config, name): text})
	return err
}

func load(paths Paths, defaults fs.FS, instead map[string][]byte) (*Config, error) {
	c := &Config{
		Paths: paths, defaults: defaults, instead: instead, listed: map[string]Origin{},
		profiles: map[string]Profile{}, repos: map[RepoKey]Repo{}, overrides: map[RepoKey]Resources{},
	}
	scalars := viper.New()
	for key, name := range env {
		names := []string{key, name}
		if also := bareOf(key); also != "" {
			names = append(names, also) // the first variable that is set wins
		}
		if err := scalars.BindEnv(names...); err != nil {
			return nil, err
		}
	}
	if err := c.loadGroups(); err != nil {
		return nil, err
	}
	err := c.eachFile(defaults, "config.yaml", func(file string, text []byte) error {
		var d document
		if err := decode(file, text, &d); err != nil {
			return err
		}
		if err := c.checkGroups(file, d); err != nil {
			return err
		}
		c.base = Profile{Network: d.Network, Secrets: d.Secrets, Persist: d.Persist}.mergeOver(c.base)
		if err := c.setDotfiles(file, d.Dotfiles); err != nil {
			return err
		}
		c.Attention = d.Attention.mergeOver(c.Attention)
		if d.Roots != nil { // a later list replaces an earlier one, so that the user can clear it
			c.Roots = nil
			for _, r := range d.Roots {
				if r != "" {
					c.Roots = append(c.Roots, string(r))
				}
			}
		}
		maps.Copy(c.profiles, d.Profiles)
		maps.Copy(c.repos, d.Repos)
		return scalars.MergeConfigMap(d.scalars())
	})
	if err != nil {
		return nil, err
	}
	err = c.eachFile(defaults, "resources.yaml", func(file string, text []byte) error {
		var r resourcesFile
		if err := decode(file, text, &r); err != nil {
			return err
		}
		c.base.Resources = r.Defaults.Over(c.base.Resources)
		maps.Copy(c.overrides, r.Overrides)
		return nil
	})
	if err != nil {
		return nil, err
	}
	// Only the last existing allowlist counts, so that a user can choose to allow less than
	// the shipped list.
	err = c.eachFile(defaults, "network-allowlist.txt", func(file string, text []byte) error {
		c.allowlist, err = policy.Parse(bytes.NewReader(text), file, c.groups)
		if err != nil {
			return fail.New(fail.Usage, "%w", err)
		}
		c.listed["network-allowlist.txt"] = Origin{Layer: c.layerOf(file), File: file}
		return nil
	})
	if err != nil {
		return nil, err
	}
	c.findDotfiles()
	return c, c.setScalars(scalars)
}

// Reload reads all settings again, as Load did.
func (c *Config) Reload() (*Config, error) { return Load(c.Paths, c.defaults) }

// Stamp returns a text that changes when a settings file changes. It contains the size and
// modification time of each file.
func (c *Config) Stamp() string {
	var b strings.Builder
	for _, dir := range []string{c.Paths.System, c.Paths.Config} {
		names := settingsFiles()
		// Load reports a directory that cannot be read.
		groups, _ := groupFiles(os.DirFS(dir))
		for _, name := range groups {
			names = append(names, filepath.Join(groupsDir, name))
		}
		for _, name := range names {
			if st, err := os.Stat(filepath.Join(dir, name)); err == nil {
				fmt.Fprintf(&b, "%s/%s %d %d\n", dir, name, st.Size(), st.ModTime().UnixNano())
			}
		}
	}
	return b.String()
}

// settingsFiles returns the names of the files in each settings directory, besides the
// groups.
func settingsFiles() []string {
	return []string{"config.yaml", "resources.yaml", "network-allowlist.txt"}
}

// eachFile calls f with the shipped, the system's and the user's file of that name, in this
// order. A file that does not exist is skipped.
func (c *Config) eachFile(defaults fs.FS, name string, f func(file string, text []byte) error) error {
	text, err := fs.ReadFile(defaults, name)
	if err != nil {
		return fmt.Errorf("read shipped %s: %w", name, err)
	}
	if err := f(shipped(name), text); err != nil {
		return err
	}
	c.sources = append(c.sources, source{layerDefault, name, shipped(name), text})
	for _, dir := range []string{c.Paths.System, c.Paths.Config} {
		file := filepath.Join(dir, name)
		text, err := c.read(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fail.New(fail.Usage, "read settings: %w", err)
		}
		if err := f(file, text); err != nil {
			return c.withHint(file, err)
		}
		c.Files = append(c.Files, file)
		c.sources = append(c.sources, source{c.layerOf(file), name, file, text})
	}
	return nil
}

func (c *Config) read(file string) ([]byte, error) {
	if text, ok := c.instead[file]; ok {
		return text, nil
	}
	return os.ReadFile(file)
}

func (c *Config) layerOf(file string) string {
	switch {
	case strings.HasPrefix(file, c.Paths.Config+string(filepath.Separator)):
		return layerUser
	case strings.HasPrefix(file, c.Paths.System+string(filepath.Separator)):
		return layerSystem
	}
	return layerDefault
}

// withHint adds a hint that edits the file.
func (c *Config) withHint(file string, err error) error {
	e := fail.New(fail.Usage, "%w", err)
	switch c.layerOf(file) {
	case layerUser:
		name, _ := filepath.Rel(c.Paths.Config, file)
		return e.WithHint("agent-sessionizer config edit %s", name)
	case layerSystem:
		return e.WithHint("sudoedit %s", file)
	}
	return e
}

// scalars returns the scalar settings that d sets, in the form that viper merges.
func (d document) scalars() map[string]any {
	m := map[string]any{}
	put := func(m map[string]any, key, v string) {
		if v != "" && v != "0" {
			m[key] = v
		}
	}
	put(m, "image", d.Image)
	put(m, "prepare", d.Prepare)
	if d.Pool != nil {
		m["pool"] = *d.Pool
	}
	put(m, "profile", d.Profile)
	put(m, "lima_home", d.LimaHome)
	limits := map[string]any{}
	put(limits, "running", fmt.Sprint(d.Limits.Running))
	put(limits, "memory_reserve", fmt.Sprint(int64(d.Limits.MemoryReserve)))
	put(limits, "disk_reserve", fmt.Sprint(int64(d.Limits.DiskReserve)))
	put(limits, "saved_home", fmt.Sprint(int64(d.Limits.SavedHome)))
	put(limits, "mirror_size", fmt.Sprint(int64(d.Limits.MirrorSize)))
	put(limits, "mirror_refs", fmt.Sprint(d.Limits.MirrorRefs))
	put(limits, "mirror_time", fmt.Sprint(int64(d.Limits.MirrorTime)))
	m["limits"] = limits
	tasks := map[string]any{}
	put(tasks, "slots", fmt.Sprint(d.Tasks.Slots))
	put(tasks, "cleanup_ttl", fmt.Sprint(int64(d.Tasks.CleanupTTL)))
	m["tasks"] = tasks
	m["log"], m["audit"] = d.Log.scalars(put), d.Audit.scalars(put)
	return m
}

func (c *Config) setScalars(v *viper.Viper) error {
	c.Image, c.profile = v.GetString("image"), v.GetString("profile")
	if c.Image != "" {
		ref, err := ParseImageRef(c.Image, "")
		if err != nil {
			return c.settingError("image", "%w", err)
		}
		c.Image = ref.String()
	}
	if home := v.GetString("lima_home"); home != "" {
		if !filepath.IsAbs(home) {
			return c.settingError("lima_home", "lima_home must be an absolute path, got %q", home)
		}
		c.Paths.LimaHome = filepath.Clean(home)
	}
	var err error
	if c.Prepare, err = ParsePrepare(cmp.Or(v.GetString("prepare"), string(PrepareNone))); err != nil {
		return c.settingError("prepare", "%w", err)
	}
	if c.Pool, err = strconv.Atoi(cmp.Or(v.GetString("pool"), "0")); err != nil || c.Pool < 0 || c.Pool > maxPool {
		return c.settingError("pool", "pool must be 0 to %d, got %q", maxPool, v.GetString("pool"))
	}
	c.Limits.Running = v.GetInt("limits.running")
	if c.Limits.Running < 1 {
		return c.settingError("limits.running", "limits.running must be at least 1, got %q", v.GetString("limits.running"))
	}
	for key, into := range map[string]*Size{"limits.memory_reserve": &c.Limits.MemoryReserve, "limits.disk_reserve": &c.Limits.DiskReserve} {
		if err := into.Set(v.GetString(key)); err != nil {
			return c.settingError(key, "%s: %w", key, err)
		}
	}
	if err := c.Limits.SavedHome.Set(cmp.Or(v.GetString("limits.saved_home"), "256MiB")); err != nil {
		return c.settingError("limits.saved_home", "limits.saved_home: %w", err)
	}
	if err := c.setMirrorLimits(v); err != nil {
		return err
	}
	c.Tasks = Tasks{Slots: 2, CleanupTTL: 360 * time.Hour}
	if v.IsSet("tasks.slots") {
		if c.Tasks.Slots = v.GetInt("tasks.slots"); c.Tasks.Slots < 1 {
			return c.settingError("tasks.slots", "tasks.slots must be at least 1, got %q", v.GetString("tasks.slots"))
		}
	}
	if v.IsSet("tasks.cleanup_ttl") {
		if c.Tasks.CleanupTTL = v.GetDuration("tasks.cleanup_ttl"); c.Tasks.CleanupTTL < time.Hour {
			return c.settingError("tasks.cleanup_ttl", "tasks.cleanup_ttl must be at least 1h, got %v", c.Tasks.CleanupTTL)
		}
	}
	return c.setLog(v)
}

// setMirrorLimits reads the limits on what a remote can make its mirror take.
func (c *Config) setMirrorLimits(v *viper.Viper) error {
	l := &c.Limits
	l.MirrorRefs, l.MirrorTime = 50_000, 2*time.Hour
	if err := l.MirrorSize.Set(cmp.Or(v.GetString("limits.mirror_size"), "20GiB")); err != nil {
		return c.settingError("limits.mirror_size", "limits.mirror_size: %w", err)
	}
	if v.IsSet("limits.mirror_refs") {
		if l.MirrorRefs = v.GetInt("limits.mirror_refs"); l.MirrorRefs < 1 {
			return c.settingError("limits.mirror_refs", "limits.mirror_refs must be at least 1, got %q", v.GetString("limits.mirror_refs"))
		}
	}
	if v.IsSet("limits.mirror_time") {
		if l.MirrorTime = v.GetDuration("limits.mirror_time"); l.MirrorTime < time.Second {
			return c.settingError("limits.mirror_time", "limits.mirror_time must be at least 1s, got %v", l.MirrorTime)
		}
	}
	return nil
}

// settingError returns an error about the value of a key. The error names the file or variable
// that the value came from.
func (c *Config) settingError(key, format string, args ...any) error {
	err := fail.New(fail.Usage, format, args...)
	from := origin(c.settingPlaces("", ""), strings.ReplaceAll(key, ".", step))
	switch {
	case from.Name != "":
		return fail.New(fail.Usage, "%v: %w", from, err).WithHint("unset %s", from.Name)
	case from.File != "":
		return c.withHint(from.File, fail.New(fail.Usage, "%v: %w", from, err))
	}
	return err
}

// Text formats settings as YAML for people.
func Text(v any) ([]byte, error) { return yaml.Marshal(v) }

// Settings are what one session gets, before flags and the repository's own file apply.
type Settings struct {
	Profile   string            `json:"profile,omitempty"`
	Resources Resources         `json:"resources"`
	Network   Network           `json:"network"`
	Secrets   map[string]string `json:"secrets,omitempty"` // name → reference
	Persist   Persist           `json:"persist,omitempty"`
}

// For returns the settings of a repository. The key "" stands for a repository that no file
// mentions. If profile is "", the repository's own or the default profile applies.
func (c *Config) For(repo RepoKey, profile string) (Settings, error) {
	entry := c.repos[repo]
	for _, name := range []string{entry.Profile, c.profile} {
		if profile == "" {
			profile = name
		}
	}
	p := c.base
	p.Resources = c.overrides[repo].Over(p.Resources)
	if profile != "" {
		named, ok := c.profiles[profile]
		if !ok {
			if len(c.profiles) == 0 {
				return Settings{}, fail.New(fail.Usage, "profile %q does not exist, and no other profile is defined; add one below profiles: in config.yaml", profile).
					WithHint("agent-sessionizer config edit config.yaml")
			}
			return Settings{}, fail.New(fail.Usage, "profile %q does not exist; defined profiles: %s", profile, strings.Join(c.Profiles(), ", ")).
				WithHint("agent-sessionizer config show")
		}
		p = named.mergeOver(p)
	}
	p = entry.Set.mergeOver(p)
	if p.Resources.CPUs < 1 {
		return Settings{}, fail.New(fail.Usage, "cpus for %s must be at least 1, got %d", repo, p.Resources.CPUs)
	}
	return Settings{Profile: profile, Resources: p.Resources, Network: p.Network, Secrets: p.Secrets, Persist: p.Persist}, nil
}

// Profiles returns the names of the profiles, sorted.
func (c *Config) Profiles() []string { return slices.Sorted(maps.Keys(c.profiles)) }

// Repos returns the repositories that have settings of their own, sorted.
func (c *Config) Repos() []RepoKey {
	all := maps.Clone(c.repos)
	for key := range c.overrides {
		all[key] = Repo{}
	}
	return slices.Sorted(maps.Keys(all))
}

// Additions are what the user allowed or denied for one session only, with `net allow`,
// `net deny` and --host-service. They are stored with the session.
type Additions struct {
	Allow        []policy.Rule    `json:"allow,omitempty"`
	Deny         []policy.Rule    `json:"deny,omitempty"`
	HostServices []netip.AddrPort `json:"host_services,omitempty"`
}

// Policy compiles the network policy of s. The project, which the repository provides, can
// only narrow it. The user's additions for the session take precedence over the project and
// rank with the user's files: a name that either of them denies is denied.
func (c *Config) Policy(s Settings, session Additions, project *Project) (*policy.Policy, error) {
	p := policy.Default()
	p.Mode, p.Enforced = policy.Mode(s.Network.Mode), s.Network.Enforced()
	p.Ports = nil
	for _, port := range s.Network.Ports {
		p.Ports = append(p.Ports, uint16(port))
	}
	allow, err := c.expand(s.Network.Allow, "network.allow")
	if err != nil {
		return nil, err
	}
	p.Names = slices.Concat(c.allowlist, allow)
	if p.Denied, err = c.expand(s.Network.Deny, "network.deny"); err != nil {
		return nil, err
	}
	for _, h := range s.Network.HostServices {
		p.HostServices = append(p.HostServices, netip.AddrPort(h))
	}
	if project != nil {
		wish, err := c.projectPolicy(project)
		if err != nil {
			return nil, err
		}
		wish.Denied = liftDenials(wish.Denied, session.Allow, p)
		p = policy.Tighten(p, wish)
	}
	p.Names = append(p.Names, session.Allow...)
	p.Denied = append(p.Denied, session.Deny...)
	p.HostServices = append(p.HostServices, session.HostServices...)
	if err := p.Validate(); err != nil {
		return nil, fail.New(fail.Usage, "network policy: %w", err)
	}
	return p, nil
}
