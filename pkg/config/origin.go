package config

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// Origin is the source of a value in effect.
type Origin struct {
	Layer string `json:"layer"`          // default, system, user, environment or flag
	File  string `json:"file,omitempty"` // of a shipped file: "(shipped) config/NAME"
	Line  int    `json:"line,omitempty"`
	Name  string `json:"name,omitempty"` // of the environment variable or the flag
}

// The layers, lowest precedence first.
const (
	layerDefault     = "default"
	layerSystem      = "system"
	layerUser        = "user"
	layerEnvironment = "environment"
	layerFlag        = "flag"
)

// String returns FILE:LINE, the variable or the flag, or "default" if nothing set the
// value.
func (o Origin) String() string {
	switch {
	case o.File != "" && o.Line > 0:
		return fmt.Sprintf("%s:%d", o.File, o.Line)
	case o.File != "":
		return o.File
	case o.Name != "":
		return o.Name
	}
	return o.Layer
}

// Value is one setting in effect. A list that several files add to is one Value per item.
type Value struct {
	Key    string `json:"key"` // as in config.yaml; the settings of resources.yaml have the prefix resources.
	Value  any    `json:"value"`
	Origin Origin `json:"origin"`
}

// source is a YAML file that was read.
type source struct {
	layer string
	name  string // config.yaml or resources.yaml
	file  string
	root  *strictyaml.Node
}

// step joins the parts of a key. It is not a dot, because repository names contain dots and
// slashes.
const step = "\x00"

// isSet reports whether a file's value for a key counts. An empty value does not: the setting
// is inherited.
func isSet(n *strictyaml.Node, key string) bool {
	text, isScalar := n.Scalar()
	return n.Kind == strictyaml.List || isScalar && text != "" && (text != "0" || key == "pool")
}

// find returns what the file has for a key, or nil.
func (s source) find(key string) *strictyaml.Node {
	n := s.root
	for i, part := range strings.Split(key, step) {
		var found *strictyaml.Node
		for j, k := range n.Keys {
			name := k.Text
			if i == 1 && (strings.HasPrefix(key, "repos"+step) || strings.HasPrefix(key, "overrides"+step)) { // a repository can be written in several ways
				if repo, ok := ParseRepoKey(name); ok {
					name = string(repo)
				}
			}
			if name == part {
				found = n.Items[j]
			}
		}
		if n = found; n == nil {
			return nil
		}
	}
	return n
}

func join(key, part string) string {
	if key == "" {
		return part
	}
	return key + step + part
}

// settingsPlace is a part of a file that can set values.
type settingsPlace struct {
	source
	at string // key of the part; "" is the whole file
}

// find returns the value of one of document's keys, or of one of resources.*, or nil if the
// part does not set it.
func (p settingsPlace) find(key string) *strictyaml.Node {
	if p.name == "resources.yaml" {
		part, ok := strings.CutPrefix(key, "resources"+step)
		if !ok {
			return nil
		}
		key = part
	}
	if n := p.source.find(join(p.at, key)); n != nil && isSet(n, key) {
		return n
	}
	return nil
}

// settingPlaces returns the parts of files that For and setScalars consult, lowest precedence
// first.
func (c *Config) settingPlaces(repo RepoKey, profile string) []settingsPlace {
	var all, entries []settingsPlace
	whole := map[string]string{"config.yaml": "", "resources.yaml": "defaults"}
	for _, s := range c.sources {
		all = append(all, settingsPlace{s, whole[s.name]})
	}
	// If several files have an entry with the same name, the last file's entry counts.
	for _, e := range []struct{ name, at string }{
		{"resources.yaml", join("overrides", string(repo))},
		{"config.yaml", join("profiles", profile)},
		{"config.yaml", join("repos", string(repo))},
	} {
		for _, p := range slices.Backward(all) {
			if p.name == e.name && p.source.find(e.at) != nil {
				entries = append(entries, settingsPlace{p.source, e.at})
				break
			}
		}
	}
	return append(all, entries...)
}

// origin returns the source of the value of a key: the place of highest precedence that
// sets it.
func origin(places []settingsPlace, key string) Origin {
	dotted := strings.ReplaceAll(key, step, ".")
	if i := slices.IndexFunc(settings, func(s setting) bool { return s.key == dotted }); i >= 0 {
		if name := settings[i].variable(); name != "" {
			return Origin{Layer: layerEnvironment, Name: name}
		}
	}
	for _, p := range slices.Backward(places) {
		if n := p.find(key); n != nil {
			return Origin{Layer: p.layer, File: p.file, Line: n.Line}
		}
	}
	return Origin{Layer: layerDefault}
}

// origins returns the sources of the items of a list that several places add to.
func origins(places []settingsPlace, key string) []Origin {
	var all []Origin
	for _, p := range places {
		if n := p.find(key); n != nil {
			for _, item := range n.Items {
				all = append(all, Origin{Layer: p.layer, File: p.file, Line: item.Line})
			}
		}
	}
	return all
}

// Values returns the settings that For returns and those of every session, each with its
// origin. profile is the value of --profile.
func (c *Config) Values(repo RepoKey, profile string) ([]Value, error) {
	set, err := c.For(repo, profile)
	if err != nil {
		return nil, err
	}
	places := c.settingPlaces(repo, set.Profile)
	var all []Value
	add := func(v any, path ...string) {
		all = append(all, Value{strings.Join(path, "."), v, origin(places, strings.Join(path, step))})
	}
	for _, s := range settings {
		v := s.value(c)
		if s.key == "profile" { // the repository may have one of its own
			v = set.Profile
		}
		add(v, strings.Split(s.key, ".")...)
		if s.key == "profile" && profile != "" {
			all[len(all)-1].Origin = Origin{Layer: layerFlag, Name: "--profile"}
		}
	}
	add(c.Attention.Desktop, "attention", "desktop")
	add(c.Attention.Command, "attention", "command")
	add(c.Tasks.Labels, "tasks", "labels")
	add(c.Dotfiles, "dotfiles")
	add(c.Roots, "roots")
	add(set.Persist, "persist")
	add(set.Record, "record")
	add(set.Budget.Session, "budget", "session")
	add(set.Budget.Day, "budget", "day")
	add(set.Budget.Tokens, "budget", "tokens")
	add(set.Logins, "logins")
	add(set.Questions.Allow, "questions", "allow")
	add(set.Questions.DenyAfter, "questions", "deny_after")
	add(set.Subtasks.Count, "subtasks", "count")
	add(set.Subtasks.Depth, "subtasks", "depth")
	add(set.Subtasks.Running, "subtasks", "running")
	add(set.Lifetime.Lease, "lifetime", "lease")
	add(set.Lifetime.IdleTTL, "lifetime", "idle_ttl")
	add(set.Lifetime.Idle, "lifetime", "idle")
	add(set.Lifetime.CleanupTTL, "lifetime", "cleanup_ttl")
	add(set.Setup.Run, "setup", "run")
	add(set.Setup.Files, "setup", "files")
	add(set.Setup.Devcontainer, "setup", "devcontainer")
	add(set.Setup.Services, "setup", "services")
	add(set.Resources.CPUs, "resources", "cpus")
	add(set.Resources.Memory, "resources", "memory")
	add(set.Resources.Disk, "resources", "disk")
	add(set.Network.Mode, "network", "mode")
	add(set.Network.Ports, "network", "ports")
	add(set.Network.Enforced(), "network", "enforce")
	each := func(n int, item func(int) any, path ...string) {
		from := origins(places, strings.Join(path, step))
		for i := range n {
			v := Value{strings.Join(path, "."), item(i), Origin{Layer: layerDefault}}
			if i < len(from) {
				v.Origin = from[i]
			}
			all = append(all, v)
		}
	}
	each(len(set.Network.Allow), func(i int) any { return set.Network.Allow[i] }, "network", "allow")
	each(len(set.Network.Deny), func(i int) any { return set.Network.Deny[i] }, "network", "deny")
	each(len(set.Network.Ask), func(i int) any { return set.Network.Ask[i] }, "network", "ask")
	each(len(set.Network.HostServices), func(i int) any { return netip.AddrPort(set.Network.HostServices[i]) }, "network", "host_services")
	for _, name := range slices.Sorted(maps.Keys(set.Secrets)) {
		add(set.Secrets[name], "secrets", name)
	}
	for _, host := range slices.Sorted(maps.Keys(set.Network.HTTP)) {
		add(set.Network.HTTP[host], "network", "http", host)
	}
	for _, name := range slices.Sorted(maps.Keys(c.requestRules)) {
		add(c.requestRules[name], "request_rules", name)
	}
	for _, name := range slices.Sorted(maps.Keys(c.bindings)) {
		add(c.bindings[name], "bindings", name)
	}
	return append(all, c.lists()...), nil
}

// lists returns one value for each file of names.
func (c *Config) lists() []Value {
	all := []Value{{"network-allowlist.txt", names(len(c.allowlist)), c.listed["network-allowlist.txt"]}}
	all = append(all, Value{"prices.yaml", fmt.Sprintf("%d models, %s", len(c.Prices.Models), c.Prices.Date), c.listed["prices.yaml"]})
	for _, name := range slices.Sorted(maps.Keys(c.groups)) {
		file := groupsDir + "/" + name + ".txt"
		all = append(all, Value{file, names(len(c.groups[name])), c.listed[file]})
	}
	return all
}

func names(n int) string {
	if n == 1 {
		return "1 name"
	}
	return fmt.Sprintf("%d names", n)
}
