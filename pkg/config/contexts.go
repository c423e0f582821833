package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// Contexts are the hosts that the user has given names to.
type Contexts struct {
	Current  string             `yaml:"current,omitempty"` // "" for this host
	Contexts map[string]Context `yaml:"contexts,omitempty"`
}

// Context is another host.
type Context struct {
	URL   string `yaml:"url" json:"url"`                         // as client.Target has it
	Token string `yaml:"token,omitempty" json:"token,omitempty"` // reference to the token, as for secrets
}

func (p Paths) contexts() string { return filepath.Join(p.Config, "contexts.yaml") }

// ReadContexts returns the user's contexts.
func ReadContexts(p Paths) (Contexts, error) {
	var c Contexts
	text, err := os.ReadFile(p.contexts())
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fail.New(fail.Usage, "read contexts: %w", err)
	}
	_, err = decode(p.contexts(), text, &c)
	return c, err
}

// Write replaces the user's contexts.
func (c Contexts) Write(p Paths) error {
	text, err := Text(c)
	if err == nil {
		err = os.MkdirAll(p.Config, 0o700)
	}
	if err == nil {
		err = atomicfile.Write(p.contexts(), text, 0o600)
	}
	if err != nil {
		return fail.New(fail.Host, "write contexts: %w", err)
	}
	return nil
}
