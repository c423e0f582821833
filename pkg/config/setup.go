package config

import (
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// maxSetup limits the length of a setup script, in bytes.
const maxSetup = 16 << 10

const maxSetupFiles = 32

// Setup prepares a repository in its guest, in this order: by a script, for example to install
// dependencies, by the repository's dev container, and by services that run beside it. The result is
// kept for later sessions of the repository, as long as all of this and the files are the same.
type Setup struct {
	Run          SetupScript `yaml:"run,omitempty" json:"run,omitempty"`
	Files        []RepoPath  `yaml:"files,omitempty" json:"files,omitempty"` // such as lock files
	Devcontainer bool        `yaml:"devcontainer,omitempty" json:"devcontainer,omitempty"`
	Services     RepoPath    `yaml:"services,omitempty" json:"services,omitempty"` // a compose file
}

// IsZero reports whether there is nothing to do.
func (s Setup) IsZero() bool { return s.Run == "" && !s.Devcontainer && s.Services == "" }

// Over returns s, or base if s has nothing to do.
func (s Setup) Over(base Setup) Setup {
	if s.IsZero() {
		return base
	}
	return s
}

// Set parses the short form, which is a script alone.
func (s *Setup) Set(text string) error { return s.Run.Set(text) }

// check returns an error if the setup has too many files.
func (s Setup) check() error {
	if len(s.Files) > maxSetupFiles {
		return fail.New(fail.Usage, "setup.files: at most %d, got %d", maxSetupFiles, len(s.Files))
	}
	return nil
}

// SetupScript is a script for bash, run by the agent's user in the checkout.
type SetupScript string

// Set checks the script.
func (s *SetupScript) Set(text string) error {
	if *s = SetupScript(text); len(text) > maxSetup || strings.ContainsRune(text, 0) {
		return fail.New(fail.Usage, "must be a script of at most %v", Size(maxSetup))
	}
	return nil
}

// RepoPath is the path of a file in a repository.
type RepoPath string

// Set checks the path.
func (p *RepoPath) Set(text string) error {
	if *p = RepoPath(text); !filepath.IsLocal(text) || len(text) > 255 || strings.ContainsAny(text, "\x00\n\\") {
		return fail.New(fail.Usage, "must be the path of a file in the repository, such as package-lock.json, got %q", text)
	}
	return nil
}
