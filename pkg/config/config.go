package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
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
	Cluster Cluster
	Log     Log
	Audit   Audit

	Recordings Recordings
	Files      []string // the files that were read, in order
	Prices     meter.Prices

	Editor   string // the editor that code opens; "" for the first that exists
	Dotfiles string // the user's dotfiles, a directory on the host; "" for none

	Attention Attention // how the user learns that an agent needs attention
	Roots     []string  // directories under which the picker looks for local clones

	defaults fs.FS
	sources  []source          // the YAML files that were read
	listed   map[string]Origin // origins of the lists of names, by file name
	instead  map[string][]byte // content that Check substitutes for a file, by path

	profile  string // name of the default profile
	base     Profile
	bindings map[string]Binding // by the secret's name

	requestRules map[string]Requests // by the name of the set
	profiles     map[string]Profile
	repos        map[RepoKey]Repo
	overrides    map[RepoKey]Resources
	groups       policy.Groups
	allowlist    []policy.Rule
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
		bindings: map[string]Binding{}, requestRules: map[string]Requests{}, profiles: map[string]Profile{}, repos: map[RepoKey]Repo{}, overrides: map[RepoKey]Resources{},
	}
	if err := c.loadGroups(); err != nil {
		return nil, err
	}
	err := c.eachFile(defaults, "config.yaml", func(file string, text []byte) error {
		var d document
		if err := c.decode(file, text, &d); err != nil {
			return err
		}
		if err := c.checkGroups(file, d); err != nil {
			return err
		}
		c.base = Profile{Network: d.Network, Secrets: d.Secrets, Persist: d.Persist, Budget: d.Budget, Logins: d.Logins, Questions: d.Questions, Subtasks: d.Subtasks, Lifetime: d.Lifetime, Setup: d.Setup, Record: d.Record}.mergeOver(c.base)
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
		maps.Copy(c.bindings, d.Bindings)
		maps.Copy(c.requestRules, d.RequestRules)
		maps.Copy(c.profiles, d.Profiles)
		maps.Copy(c.repos, d.Repos)
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = c.eachFile(defaults, "resources.yaml", func(file string, text []byte) error {
		var r resourcesFile
		if err := c.decode(file, text, &r); err != nil {
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
	if err := c.eachFile(defaults, "prices.yaml", c.loadPrices); err != nil {
		return nil, err
	}
	c.findDotfiles()
	return c, c.setScalars()
}

// Reload reads all settings again, as Load did.
func (c *Config) Reload() (*Config, error) { return Load(c.Paths, c.defaults) }

// Stamp returns a text that changes when a settings file changes. It contains the size and
// modification time of each file.
func (c *Config) Stamp() string {
	var b strings.Builder
	for _, dir := range []string{c.Paths.System, c.Paths.Config} {
		names := Files()
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

// Files returns the names of the files in each settings directory, besides the groups.
func Files() []string {
	return []string{"config.yaml", "resources.yaml", "prices.yaml", "network-allowlist.txt"}
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
	}
	return nil
}

// decode reads a YAML file into a struct, and keeps its nodes.
func (c *Config) decode(file string, text []byte, into any) error {
	root, err := decode(file, text, into)
	c.sources = append(c.sources, source{c.layerOf(file), filepath.Base(file), file, root})
	return err
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

// Text formats settings as YAML for people.
func Text(v any) ([]byte, error) { return yaml.Marshal(v) }

// Settings are what one session gets, before flags and the repository's own file apply.
type Settings struct {
	Profile   string            `json:"profile,omitempty"`
	Resources Resources         `json:"resources"`
	Network   Network           `json:"network"`
	Secrets   map[string]Secret `json:"secrets,omitempty"`
	Persist   Persist           `json:"persist,omitempty"`
	Budget    Budget            `json:"budget,omitzero"`
	Logins    Logins            `json:"logins,omitempty"`
	Questions Questions         `json:"questions,omitzero"`
	Subtasks  Subtasks          `json:"subtasks,omitzero"`
	Lifetime  Lifetime          `json:"lifetime,omitzero"`
	Setup     Setup             `json:"setup,omitzero"`
	Record    Switch            `json:"record,omitempty" doc:"Whether the session's terminals are recorded."`

	Repo RepoKey `json:"-"`
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
				WithHint("agent-sessionizer profile list")
		}
		p = named.mergeOver(p)
	}
	p = entry.Set.mergeOver(p)
	if p.Resources.CPUs < 1 {
		return Settings{}, fail.New(fail.Usage, "cpus for %s must be at least 1, got %d", repo, p.Resources.CPUs)
	}
	return Settings{Profile: profile, Resources: p.Resources, Network: p.Network, Secrets: p.Secrets, Persist: p.Persist, Budget: p.Budget, Logins: p.Logins, Questions: p.Questions, Subtasks: p.Subtasks, Lifetime: p.Lifetime, Setup: p.Setup, Record: p.Record, Repo: repo}, nil
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

	Requests []policy.RequestRules `json:"requests,omitempty"` // with Except or Deny

	// Layer are rules that the session was created with. They only narrow.
	Layer []policy.RequestRules `json:"-"`
}

// addRequests adds the requests that are allowed or denied for one session.
func (a Additions) addRequests(p *policy.Policy) {
	var denied []policy.RequestRules
	for _, r := range a.Requests {
		if len(r.Deny) > 0 {
			denied = append(denied, r)
			continue
		}
		for i := range p.Requests {
			p.Requests[i] = append(p.Requests[i], r)
		}
	}
	if len(denied) > 0 {
		p.Requests = append(p.Requests, denied)
	}
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
	if len(s.Network.Ask) > 0 {
		if p.Asked, err = c.expand(s.Network.Ask, "network.ask"); err != nil {
			return nil, err
		}
	}
	if len(p.Asked) > 0 && !p.Enforced {
		return nil, fail.New(fail.Usage, "network.ask needs the gateway, which network.enforce: false turns off").WithHint("agent-sessionizer config edit config.yaml")
	}
	for _, h := range s.Network.HostServices {
		p.HostServices = append(p.HostServices, netip.AddrPort(h))
	}
	if p.Requests, err = c.requestLayers(s); err != nil {
		return nil, err
	}
	if len(p.Requests)+len(session.Layer) > 0 && !p.Enforced {
		return nil, fail.New(fail.Usage, "request rules need the gateway, which network.enforce: false turns off").WithHint("agent-sessionizer config edit config.yaml")
	}
	if s.Budget.Limited() && !p.Enforced {
		return nil, fail.New(fail.Usage, "a budget needs the gateway, which network.enforce: false turns off").WithHint("agent-sessionizer config edit config.yaml")
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
	if len(session.Layer) > 0 {
		p.Requests = append(p.Requests, session.Layer)
	}
	session.addRequests(p)
	if err := p.Validate(); err != nil {
		return nil, fail.New(fail.Usage, "network policy: %w", err)
	}
	return p, nil
}
