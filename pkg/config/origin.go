package config

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
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
	text  []byte
}

// step joins the parts of a key. It is not a dot, because repository names contain dots and
// slashes.
const step = "\x00"

// listedValue is the value that a file has for a key.
type listedValue struct {
	line  int
	text  string        // of a scalar
	items []listedValue // of a list
	kind  ast.NodeType
}

// set reports whether the value counts. An empty value does not: the setting is inherited.
func (s listedValue) set(key string) bool {
	switch s.kind {
	case ast.NullType, ast.MappingType:
		return false
	case ast.SequenceType:
		return true
	}
	return s.text != "" && (s.text != "0" || key == "pool")
}

// keys returns everything that a file sets, by key.
func (s source) keys() map[string]listedValue {
	found := map[string]listedValue{}
	f, err := parser.ParseBytes(bytes.TrimPrefix(s.text, []byte("\ufeff")), 0)
	if err != nil {
		return found // decode has reported it
	}
	r := reader{found: found, anchors: map[string]ast.Node{}}
	for _, doc := range f.Docs {
		if doc.Body != nil {
			r.read("", doc.Body)
		}
	}
	return found
}

type reader struct {
	found   map[string]listedValue
	anchors map[string]ast.Node
	depth   int
}

// deepest bounds the recursion through a cycle of aliases.
const deepest = 100

func (r *reader) read(key string, n ast.Node) {
	if r.depth++; r.depth > deepest {
		return
	}
	defer func() { r.depth-- }()
	switch n := n.(type) {
	case *ast.AnchorNode:
		r.anchors[n.Name.GetToken().Value] = n.Value
		r.read(key, n.Value)
	case *ast.AliasNode:
		if to, ok := r.anchors[n.Value.GetToken().Value]; ok {
			r.read(key, to)
		}
	case *ast.MappingNode:
		r.found[key] = listedValue{line: lineOf(n), kind: ast.MappingType}
		for _, merged := range []bool{true, false} { // merged values have lower precedence than written ones
			for _, kv := range n.Values {
				if kv.Key.IsMergeKey() == merged {
					r.pair(key, kv)
				}
			}
		}
	case *ast.MappingValueNode:
		r.found[key] = listedValue{line: lineOf(n), kind: ast.MappingType}
		r.pair(key, n)
	case *ast.SequenceNode:
		s := listedValue{line: lineOf(n), kind: ast.SequenceType}
		for _, item := range n.Values {
			if alias, ok := item.(*ast.AliasNode); ok {
				item = r.anchors[alias.Value.GetToken().Value]
			}
			if anchor, ok := item.(*ast.AnchorNode); ok {
				item = anchor.Value
			}
			if item == nil {
				continue
			}
			text, _ := scalar(item)
			s.items = append(s.items, listedValue{line: lineOf(item), text: text, kind: item.Type()})
		}
		r.found[key] = s
	default:
		text, _ := scalar(n)
		r.found[key] = listedValue{line: lineOf(n), text: text, kind: n.Type()}
	}
}

func (r *reader) pair(key string, kv *ast.MappingValueNode) {
	if kv.Key.IsMergeKey() {
		r.read(key, kv.Value)
		return
	}
	name := kv.Key.GetToken().Value
	if key == "repos" || key == "overrides" { // a repository can be written in several ways
		if repo, ok := ParseRepoKey(name); ok {
			name = string(repo)
		}
	}
	r.read(join(key, name), kv.Value)
	// An entry without a value still has a line of its own.
	if s, ok := r.found[join(key, name)]; ok && s.kind == ast.NullType {
		s.line = lineOf(kv.Key)
		r.found[join(key, name)] = s
	}
}

func lineOf(n ast.Node) int {
	if tok := n.GetToken(); tok != nil && tok.Position != nil {
		return tok.Position.Line
	}
	return 0
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
	keys map[string]listedValue
	at   string // key of the part; "" is the whole file
}

// find looks up one of document's keys, or one of resources.*.
func (p settingsPlace) find(key string) (listedValue, bool) {
	if p.name == "resources.yaml" {
		part, ok := strings.CutPrefix(key, "resources"+step)
		if !ok {
			return listedValue{}, false
		}
		key = part
	}
	s, ok := p.keys[join(p.at, key)]
	return s, ok && s.set(key)
}

// settingPlaces returns the parts of files that For and setScalars consult, lowest precedence
// first.
func (c *Config) settingPlaces(repo RepoKey, profile string) []settingsPlace {
	var all, entries []settingsPlace
	whole := map[string]string{"config.yaml": "", "resources.yaml": "defaults"}
	for _, s := range c.sources {
		all = append(all, settingsPlace{s, s.keys(), whole[s.name]})
	}
	// If several files have an entry with the same name, the last file's entry counts.
	for _, e := range []struct{ name, at string }{
		{"resources.yaml", join("overrides", string(repo))},
		{"config.yaml", join("profiles", profile)},
		{"config.yaml", join("repos", string(repo))},
	} {
		for _, p := range slices.Backward(all) {
			if _, ok := p.keys[e.at]; ok && p.name == e.name {
				entries = append(entries, settingsPlace{p.source, p.keys, e.at})
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
	for _, name := range []string{env[dotted], bareOf(dotted)} {
		if name != "" && os.Getenv(name) != "" {
			return Origin{Layer: layerEnvironment, Name: name}
		}
	}
	for _, p := range slices.Backward(places) {
		if s, ok := p.find(key); ok {
			return Origin{Layer: p.layer, File: p.file, Line: s.line}
		}
	}
	return Origin{Layer: layerDefault}
}

// origins returns the sources of the items of a list that several places add to.
func origins(places []settingsPlace, key string) []Origin {
	var all []Origin
	for _, p := range places {
		s, _ := p.find(key)
		for _, item := range s.items {
			all = append(all, Origin{Layer: p.layer, File: p.file, Line: item.line})
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
	add(c.Image, "image")
	add(c.Prepare, "prepare")
	add(c.Pool, "pool")
	add(set.Profile, "profile")
	if profile != "" {
		all[len(all)-1].Origin = Origin{Layer: layerFlag, Name: "--profile"}
	}
	add(c.Paths.LimaHome, "lima_home")
	add(c.Limits.Running, "limits", "running")
	add(c.Limits.MemoryReserve, "limits", "memory_reserve")
	add(c.Limits.DiskReserve, "limits", "disk_reserve")
	add(c.Limits.SavedHome, "limits", "saved_home")
	add(c.Limits.MirrorSize, "limits", "mirror_size")
	add(c.Limits.MirrorRefs, "limits", "mirror_refs")
	add(c.Limits.MirrorTime.String(), "limits", "mirror_time")
	add(c.Tasks.Slots, "tasks", "slots")
	add(c.Tasks.CleanupTTL.String(), "tasks", "cleanup_ttl")
	add(c.Log.Level, "log", "level")
	add(c.Log.Format, "log", "format")
	add(c.Log.File, "log", "file")
	add(c.Log.Rotation, "log", "rotation")
	add(c.Log.MaxSize, "log", "max_size")
	add(c.Log.Keep, "log", "keep")
	add(c.Audit.Retention, "audit", "retention")
	add(c.Attention.Desktop, "attention", "desktop")
	add(c.Attention.Command, "attention", "command")
	add(c.Dotfiles, "dotfiles")
	add(c.Roots, "roots")
	add(set.Persist, "persist")
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
	each(len(set.Network.HostServices), func(i int) any { return netip.AddrPort(set.Network.HostServices[i]) }, "network", "host_services")
	for _, name := range slices.Sorted(maps.Keys(set.Secrets)) {
		add(set.Secrets[name], "secrets", name)
	}
	return append(all, c.lists()...), nil
}

// lists returns one value for each file of names.
func (c *Config) lists() []Value {
	all := []Value{{"network-allowlist.txt", names(len(c.allowlist)), c.listed["network-allowlist.txt"]}}
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
