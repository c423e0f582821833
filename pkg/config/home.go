package config

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/home"
)

// Keep is what is kept of a session's home directory, for the next session of its
// repository; nil is inherited, an empty one keeps nothing.
type Keep home.Patterns

// keepAgents stands for the usual agents' transcripts and settings.
const keepAgents = "agent"

// UnmarshalYAML reads paths below the guest's home directory, or one.
func (k *Keep) UnmarshalYAML(n ast.Node) error {
	items := []ast.Node{n}
	if list, ok := n.(*ast.SequenceNode); ok {
		items = list.Values
	}
	*k = Keep{}
	for _, item := range items {
		text, ok := scalar(item)
		if !ok {
			return at(item, "a path like .claude/projects is wanted here, or %q", keepAgents)
		}
		if text == keepAgents {
			*k = append(*k, home.Agents()...)
			continue
		}
		if err := home.CheckPattern(text); err != nil {
			return at(item, "%q cannot be kept: %v", text, err)
		}
		*k = append(*k, text)
	}
	if len(*k) > home.MaxPatterns {
		return at(n, "%d paths to keep; at most %d", len(*k), home.MaxPatterns)
	}
	return nil
}

// Dir is a directory, or a file, of this host: an absolute path, or one that starts with ~/.
type Dir string

// UnmarshalYAML reads one; "" is none.
func (d *Dir) UnmarshalYAML(n ast.Node) error {
	text, ok := scalar(n)
	if !ok {
		return at(n, "a directory is wanted here")
	}
	text, err := expandHome(text)
	if err != nil {
		return at(n, "~ is unknown: HOME is not set")
	}
	if text != "" && !filepath.IsAbs(text) {
		return at(n, "%q is neither an absolute path nor one that starts with ~/", text)
	}
	*d = Dir(text)
	return nil
}

// expandHome is path with ~ as the home directory, without needless parts.
func expandHome(path string) (string, error) {
	if rest, ok := strings.CutPrefix(path, "~"); ok && (rest == "" || rest[0] == '/') {
		dir, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		path = dir + rest
	}
	if path == "" {
		return "", nil
	}
	return filepath.Clean(path), nil
}

// setDotfiles takes what a file says of them. They go into every session, so only
// whose they are may name them.
func (c *Config) setDotfiles(file string, dir Dir) error {
	if dir == "" {
		return nil
	}
	if own := filepath.Join(c.Paths.Config, "config.yaml"); file != own {
		return fail.New(fail.Usage, "%s: dotfiles are a user's; they are named in %s only", file, own)
	}
	c.Dotfiles = string(dir)
	return nil
}

// findDotfiles takes the directory beside the settings for them where no file
// names another.
func (c *Config) findDotfiles() {
	dir := filepath.Join(c.Paths.Config, "dotfiles")
	if st, err := os.Stat(dir); c.Dotfiles == "" && err == nil && st.IsDir() {
		c.Dotfiles = dir
	}
}
