package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// groupsDir holds the groups of names, NAME.txt each: beside config.yaml, in
// the shipped files, the system's and the user's.
const groupsDir = "network-groups"

// Groups are the named lists that an entry "@NAME" stands for.
func (c *Config) Groups() policy.Groups { return c.groups }

// loadGroups reads the groups. A later directory's file replaces an earlier
// one's of the same name, as network-allowlist.txt does.
func (c *Config) loadGroups() error {
	c.groups = policy.Groups{}
	if _, err := c.groupsOf(c.defaults, shipped(groupsDir)); err != nil {
		return err
	}
	for _, dir := range []string{c.Paths.System, c.Paths.Config} {
		files, err := c.groupsOf(os.DirFS(dir), filepath.Join(dir, groupsDir))
		if err != nil {
			return err
		}
		c.Files = append(c.Files, files...)
	}
	return nil
}

// groupsOf reads the groups of one layer and returns their files; shown is how
// messages name the directory.
func (c *Config) groupsOf(layer fs.FS, shown string) (files []string, err error) {
	names, err := groupFiles(layer)
	if err != nil {
		return nil, fail.New(fail.Usage, "read the settings: %w", err)
	}
	for file := range c.instead {
		if name := filepath.Base(file); filepath.Dir(file) == shown && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		file, group := filepath.Join(shown, name), strings.TrimSuffix(name, ".txt")
		if !policy.GroupName(group) {
			return nil, fail.New(fail.Usage, "%s: a group cannot be called so; name the file with small letters, digits and hyphens", file)
		}
		text, changed := c.instead[file]
		if !changed {
			text, err = fs.ReadFile(layer, groupsDir+"/"+name)
		}
		if err != nil {
			return nil, fail.New(fail.Usage, "read the settings: %w", err)
		}
		rules, err := policy.Parse(bytes.NewReader(text), file, nil)
		if err != nil {
			return nil, c.hinted(file, err)
		}
		c.groups[group] = rules
		c.listed[groupsDir+"/"+name] = Origin{Layer: c.layerOf(file), File: file}
		files = append(files, file)
	}
	return files, nil
}

// groupFiles are the names of a layer's groups; editors leave other files there.
func groupFiles(layer fs.FS) ([]string, error) {
	entries, err := fs.ReadDir(layer, groupsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".txt") && !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// expand returns the rules of entries. One that stands twice counts once, so
// that a repository's file cannot make much of little.
func (c *Config) expand(entries []Name, source string) ([]policy.Rule, error) {
	rules := []policy.Rule{}
	seen := map[Name]bool{}
	for _, e := range entries {
		if seen[e] {
			continue
		}
		seen[e] = true
		found, err := c.groups.Expand(string(e), source)
		if err != nil {
			return nil, fail.New(fail.Usage, "%s: %w", source, err)
		}
		rules = append(rules, found...)
	}
	return rules, nil
}

// checkGroups finds what a file says of groups that do not exist, before a
// session needs them.
func (c *Config) checkGroups(file string, d document) error {
	networks := map[string]Network{"network": d.Network}
	for name, p := range d.Profiles {
		networks["profiles."+name+".network"] = p.Network
	}
	for key, r := range d.Repos {
		networks["repos."+string(key)+".network"] = r.Set.Network
	}
	for at, n := range networks {
		for key, entries := range map[string][]Name{"allow": n.Allow, "deny": n.Deny} {
			if _, err := c.expand(entries, fmt.Sprintf("%s: %s.%s", file, at, key)); err != nil {
				return fail.New(fail.Usage, "%w", err)
			}
		}
	}
	return nil
}
