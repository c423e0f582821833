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

// groupsDir is the directory of the name groups, one NAME.txt each. It is beside
// config.yaml in the shipped, the system's and the user's files.
const groupsDir = "network-groups"

// Groups returns the named lists that entries "@NAME" stand for.
func (c *Config) Groups() policy.Groups { return c.groups }

// loadGroups reads the groups. A file in a later directory replaces one of the same name in
// an earlier directory, as with network-allowlist.txt.
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

// groupsOf reads the groups of one layer and returns their files. Messages refer to the
// directory as shown.
func (c *Config) groupsOf(layer fs.FS, shown string) (files []string, err error) {
	names, err := groupFiles(layer)
	if err != nil {
		return nil, fail.New(fail.Usage, "read settings: %w", err)
	}
	for file := range c.instead {
		if name := filepath.Base(file); filepath.Dir(file) == shown && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, name := range names {
		file, group := filepath.Join(shown, name), strings.TrimSuffix(name, ".txt")
		if !policy.GroupName(group) {
			return nil, fail.New(fail.Usage, "%s: invalid group name; the file's name may have only lower-case letters, digits and hyphens", file)
		}
		text, changed := c.instead[file]
		if !changed {
			text, err = fs.ReadFile(layer, groupsDir+"/"+name)
		}
		if err != nil {
			return nil, fail.New(fail.Usage, "read settings: %w", err)
		}
		rules, err := policy.Parse(bytes.NewReader(text), file, nil)
		if err != nil {
			return nil, c.withHint(file, err)
		}
		c.groups[group] = rules
		c.listed[groupsDir+"/"+name] = Origin{Layer: c.layerOf(file), File: file}
		files = append(files, file)
	}
	return files, nil
}

// groupFiles returns the file names of a layer's groups. It skips other files, such as
// those that editors leave.
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

// expand returns the rules of entries. A repeated entry is expanded once, so that a
// repository's small file cannot produce a huge policy.
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

// checkGroups reports references to groups that do not exist, before a session needs them.
func (c *Config) checkGroups(file string, d document) error {
	networks := map[string]Network{"network": d.Network}
	for name, p := range d.Profiles {
		networks["profiles."+name+".network"] = p.Network
	}
	for key, r := range d.Repos {
		networks["repos."+string(key)+".network"] = r.Set.Network
	}
	for at, n := range networks {
		for key, entries := range map[string][]Name{"allow": n.Allow, "deny": n.Deny, "ask": n.Ask} {
			if _, err := c.expand(entries, fmt.Sprintf("%s: %s.%s", file, at, key)); err != nil {
				return fail.New(fail.Usage, "%w", err)
			}
		}
	}
	return nil
}
