package config

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// Resources are the resources of a VM. Zero fields are inherited.
type Resources struct {
	CPUs   int  `yaml:"cpus,omitempty" json:"cpus"`
	Memory Size `yaml:"memory,omitempty" json:"memory"` // bytes
	Disk   Size `yaml:"disk,omitempty" json:"disk"`     // bytes
}

// The minimum resources of a VM. A test checks that the bounds of manifests and the docs
// agree with them.
const (
	MinCPUs        = 1
	MinMemory Size = 512 << 20
	MinDisk   Size = 4 << 30
)

// Over returns r with its zero fields taken from base.
func (r Resources) Over(base Resources) Resources {
	if r.CPUs == 0 {
		r.CPUs = base.CPUs
	}
	if r.Memory == 0 {
		r.Memory = base.Memory
	}
	if r.Disk == 0 {
		r.Disk = base.Disk
	}
	return r
}

// Network holds the network settings of a file. Zero fields are inherited. Allow, Deny, Ask
// and HostServices are added to what is inherited.
type Network struct {
	Mode         Mode          `yaml:"mode,omitempty" json:"mode,omitempty"`
	Ports        []Port        `yaml:"ports,omitempty" json:"ports,omitempty"`
	Allow        []Name        `yaml:"allow,omitempty" json:"allow,omitempty"`
	Deny         []Name        `yaml:"deny,omitempty" json:"deny,omitempty"`
	Ask          []Name        `yaml:"ask,omitempty" json:"ask,omitempty"`
	HostServices []HostService `yaml:"host_services,omitempty" json:"host_services,omitempty"`
	HTTP         Requests      `yaml:"http,omitempty" json:"http,omitempty"`
	Enforce      *bool         `yaml:"enforce,omitempty" json:"enforce,omitempty"` // nil means true
}

// Enforced reports whether the host's egress gateway enforces the policy.
func (n Network) Enforced() bool { return n.Enforce == nil || *n.Enforce }

func (n Network) mergeOver(base Network) Network {
	if n.Mode == "" {
		n.Mode = base.Mode
	}
	if n.Ports == nil {
		n.Ports = base.Ports
	}
	if n.Enforce == nil {
		n.Enforce = base.Enforce
	}
	n.Allow = slices.Concat(base.Allow, n.Allow)
	n.Deny = slices.Concat(base.Deny, n.Deny)
	n.Ask = slices.Concat(base.Ask, n.Ask)
	n.HostServices = slices.Concat(base.HostServices, n.HostServices)
	n.HTTP = n.HTTP.mergeOver(base.HTTP)
	return n
}

// Profile is a named set of settings. It also holds the settings that config.yaml and the
// repositories' entries have in common with profiles.
type Profile struct {
	Resources Resources         `yaml:"resources,omitempty" json:"resources"`
	Network   Network           `yaml:"network,omitempty" json:"network"`
	Secrets   map[string]Secret `yaml:"secrets,omitempty" json:"secrets,omitempty"`
	Persist   Persist           `yaml:"persist,omitempty" json:"persist,omitempty"`
	Budget    Budget            `yaml:"budget,omitempty" json:"budget,omitzero"`
	Logins    Logins            `yaml:"logins,omitempty" json:"logins,omitempty"`
	Questions Questions         `yaml:"questions,omitempty" json:"questions,omitzero"`
	Subtasks  Subtasks          `yaml:"subtasks,omitempty" json:"subtasks,omitzero"`
	Lifetime  Lifetime          `yaml:"lifetime,omitempty" json:"lifetime,omitzero"`
	Setup     Setup             `yaml:"setup,omitempty" json:"setup,omitzero"`
	Record    Switch            `yaml:"record,omitempty" json:"record,omitempty"`
}

func (p Profile) mergeOver(base Profile) Profile {
	secrets := map[string]Secret{}
	maps.Copy(secrets, base.Secrets)
	maps.Copy(secrets, p.Secrets)
	if p.Persist == nil {
		p.Persist = base.Persist
	}
	if p.Logins == nil {
		p.Logins = base.Logins
	}
	return Profile{Resources: p.Resources.Over(base.Resources), Network: p.Network.mergeOver(base.Network), Secrets: secrets, Persist: p.Persist, Budget: p.Budget.Over(base.Budget), Logins: p.Logins, Questions: p.Questions.over(base.Questions), Subtasks: p.Subtasks.over(base.Subtasks), Lifetime: p.Lifetime.over(base.Lifetime), Setup: p.Setup.Over(base.Setup), Record: cmp.Or(p.Record, base.Record)}
}

// Repo is a repository's entry in config.yaml.
type Repo struct {
	Profile string  `yaml:"profile,omitempty"`
	Set     Profile `yaml:",inline"`
}

// Limits keep the host usable.
type Limits struct {
	Running       int  `yaml:"running,omitempty" json:"running"`               // number of VMs at the same time
	MemoryReserve Size `yaml:"memory_reserve,omitempty" json:"memory_reserve"` // bytes
	DiskReserve   Size `yaml:"disk_reserve,omitempty" json:"disk_reserve"`     // bytes
	SavedHome     Size `yaml:"saved_home,omitempty" json:"saved_home"`         // bytes, for each repository

	// For each repository's mirror: bytes on disk, number of branches and tags, and
	// duration of one fetch.
	MirrorSize Size          `yaml:"mirror_size,omitempty" json:"mirror_size"`
	MirrorRefs int           `yaml:"mirror_refs,omitempty" json:"mirror_refs"`
	MirrorTime time.Duration `yaml:"mirror_time,omitempty" json:"mirror_time"`
}

// Tasks holds the settings of unattended runs.
type Tasks struct {
	Slots      int           `yaml:"slots,omitempty" json:"slots"`             // number of tasks that run at the same time
	CleanupTTL time.Duration `yaml:"cleanup_ttl,omitempty" json:"cleanup_ttl"` // how long events and the leftovers of a task are kept

	Labels map[string]string `yaml:"labels,omitempty" json:"labels,omitempty"` // of this host in its cluster
}

// Cluster names a NATS cluster that holds the streams of this host's cluster, if the host is a core of it.
type Cluster struct {
	URL         string `yaml:"url,omitempty" json:"url"`                 // "" for none
	Domain      string `yaml:"domain,omitempty" json:"domain"`           // of its JetStream
	Credentials Dir    `yaml:"credentials,omitempty" json:"credentials"` // file; "" for none
	CA          Dir    `yaml:"ca,omitempty" json:"ca"`                   // file; "" for the system's
}

// document is the content of config.yaml.
type document struct {
	Image     string             `yaml:"image,omitempty"`
	Prepare   string             `yaml:"prepare,omitempty"`
	Pool      *int               `yaml:"pool,omitempty"`
	Profile   string             `yaml:"profile,omitempty"`
	Editor    string             `yaml:"editor,omitempty"`
	LimaHome  string             `yaml:"lima_home,omitempty"`
	Limits    Limits             `yaml:"limits,omitempty"`
	Tasks     Tasks              `yaml:"tasks,omitempty"`
	Cluster   Cluster            `yaml:"cluster,omitempty"`
	Log       Log                `yaml:"log,omitempty"`
	Audit     Audit              `yaml:"audit,omitempty"`
	Record    Switch             `yaml:"record,omitempty"`
	Network   Network            `yaml:"network,omitempty"`
	Attention Attention          `yaml:"attention,omitempty"`
	Secrets   map[string]Secret  `yaml:"secrets,omitempty"`
	Bindings  map[string]Binding `yaml:"bindings,omitempty"`

	RequestRules map[string]Requests `yaml:"request_rules,omitempty"`
	Dotfiles     Dir                 `yaml:"dotfiles,omitempty"`
	Persist      Persist             `yaml:"persist,omitempty"`
	Recordings   Recordings          `yaml:"recordings,omitempty"`
	Budget       Budget              `yaml:"budget,omitempty"`
	Logins       Logins              `yaml:"logins,omitempty"`
	Questions    Questions           `yaml:"questions,omitempty"`
	Subtasks     Subtasks            `yaml:"subtasks,omitempty"`
	Lifetime     Lifetime            `yaml:"lifetime,omitempty"`
	Setup        Setup               `yaml:"setup,omitempty"`
	Roots        []Dir               `yaml:"roots,omitempty"`
	Profiles     map[string]Profile  `yaml:"profiles,omitempty"`
	Repos        map[RepoKey]Repo    `yaml:"repos,omitempty"`
}

// resourcesFile is the content of resources.yaml.
type resourcesFile struct {
	Defaults  Resources             `yaml:"defaults,omitempty"`
	Overrides map[RepoKey]Resources `yaml:"overrides,omitempty"`
}

// Project is the content of .agent-sessionizer.yaml in a repository. Anyone who can write
// to the repository controls it, so it has only fields that narrow the policy, and a setup, which
// runs in the guest. Allow, if
// present, keeps only those of the user's names that it lists.
type Project struct {
	Network struct {
		Mode  Mode     `yaml:"mode,omitempty"`
		Ports []Port   `yaml:"ports,omitempty"`
		Allow []Name   `yaml:"allow,omitempty"`
		Deny  []Name   `yaml:"deny,omitempty"`
		HTTP  Requests `yaml:"http,omitempty"`
	} `yaml:"network,omitempty"`
	Setup Setup `yaml:"setup,omitempty"`
}

// ProjectFile is the path of a Project in its repository.
const ProjectFile = ".agent-sessionizer.yaml"

// maxProject bounds a repository's own file more tightly than a user's, because the YAML
// parser's time can grow with the square of the nesting depth.
const maxProject = 16 << 10

// ParseProject parses a repository's own file. Errors refer to it as file.
func ParseProject(file string, text []byte) (Project, error) {
	var p Project
	if len(text) > maxProject {
		return p, fail.New(fail.Usage, "%s: file is larger than %v", file, Size(maxProject))
	}
	if _, err := decode(file, text, &p); err != nil {
		return Project{}, err
	}
	if err := p.Setup.check(); err != nil {
		return Project{}, fail.New(fail.Usage, "%s: %w", file, err)
	}
	return p, nil
}

// Mode is a policy.Mode in a file.
type Mode policy.Mode

// Set parses a mode.
func (m *Mode) Set(text string) error {
	switch mode := policy.Mode(text); mode {
	case policy.Isolated, policy.Allowlist, policy.Open:
		*m = Mode(mode)
		return nil
	}
	return fmt.Errorf("must be isolated, allowlist or open, got %q", text)
}

// Name is an entry of a list: NAME, *.ZONE or .ZONE, each optionally with :PORT,PORT, or
// @GROUP.
type Name string

// Set parses and checks an entry. Whether a group exists is checked only when the entry is
// expanded.
func (p *Name) Set(text string) error {
	if group, ok := strings.CutPrefix(text, "@"); ok {
		if !policy.GroupName(group) {
			return fmt.Errorf("must be a group like @github, got %q", text)
		}
		*p = Name(text)
		return nil
	}
	rules, err := policy.Groups{}.Expand(text, "")
	if err != nil {
		return err
	}
	*p = Name(text)
	if len(rules) == 1 {
		*p = Name(rules[0].String())
	}
	return nil
}

// Port is an outbound port.
type Port uint16

// Set parses a port from 1 to 65535.
func (p *Port) Set(text string) error {
	ap, err := netip.ParseAddrPort("0.0.0.0:" + text)
	if err != nil || ap.Port() == 0 {
		return fmt.Errorf("must be 1 to 65535, got %q", text)
	}
	*p = Port(ap.Port())
	return nil
}

// HostService is one address and port outside the public internet.
type HostService netip.AddrPort

// ParseHostService parses ADDRESS:PORT or localhost:PORT, which means a port of this host.
func ParseHostService(text string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(text)
	if err == nil && strings.EqualFold(host, "localhost") {
		text = "127.0.0.1:" + port
	} else if _, errAddr := netip.ParseAddr(host); err == nil && errAddr != nil && host != "" {
		return netip.AddrPort{}, fmt.Errorf("host service must be ADDRESS:PORT, got the name %q, whose address can change", text)
	}
	ap, err := netip.ParseAddrPort(text)
	addr := ap.Addr().Unmap()
	if err != nil || ap.Port() == 0 || addr.Zone() != "" || addr.IsUnspecified() || addr.IsMulticast() {
		return netip.AddrPort{}, fmt.Errorf("host service must be localhost:PORT or ADDRESS:PORT, like 192.168.5.2:5432, got %q", text)
	}
	return netip.AddrPortFrom(addr, ap.Port()), nil
}

// Set parses a host service.
func (h *HostService) Set(text string) error {
	ap, err := ParseHostService(text)
	*h = HostService(ap)
	return err
}

// MarshalText formats the address and port.
func (h HostService) MarshalText() ([]byte, error) { return netip.AddrPort(h).MarshalText() }
