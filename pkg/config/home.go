package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/homearchive"
)

// Persist lists the paths of a session's home directory that are saved for the next session of
// its repository. A nil Persist is inherited; an empty one saves nothing.
type Persist homearchive.Patterns

// persistAgents stands for the transcripts and settings of the usual agents.
const persistAgents = "agent"

// Dir is a directory or file on this host: an absolute path, or one that starts with ~/.
type Dir string

// Set parses a path; "" means none.
func (d *Dir) Set(text string) error {
	path, err := expandHome(text)
	if err != nil {
		return errors.New("must not start with ~: HOME is not set")
	}
	if path != "" && !filepath.IsAbs(path) {
		return fmt.Errorf("must be an absolute path or start with ~/, got %q", text)
	}
	*d = Dir(path)
	return nil
}

// expandHome replaces a leading ~ with the home directory and cleans the path.
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

// setDotfiles sets the directory of the dotfiles that a file names. They are copied into
// every session, so only the user's own file may name them.
func (c *Config) setDotfiles(file string, dir Dir) error {
	if dir == "" {
		return nil
	}
	if own := filepath.Join(c.Paths.Config, "config.yaml"); file != own {
		return fail.New(fail.Usage, "%s: dotfiles may be set only in your own %s", file, own)
	}
	c.Dotfiles = string(dir)
	return nil
}

// findDotfiles uses the directory dotfiles beside the settings, unless a file names another
// one.
func (c *Config) findDotfiles() {
	dir := filepath.Join(c.Paths.Config, "dotfiles")
	if st, err := os.Stat(dir); c.Dotfiles == "" && err == nil && st.IsDir() {
		c.Dotfiles = dir
	}
}
