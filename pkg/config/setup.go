package config

import (
	"path/filepath"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// maxSetup limits the length of a setup script, in bytes.
const maxSetup = 16 << 10

const maxSetupFiles = 32

// Setup is what prepares a new session's checkout: a script, the repository's dev container, and
// services, in this order. Sessions with the same Setup and Files start from one saved setup. Over and
// IsZero ignore Files.
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

// check returns an error if the setup has too many files, or nothing that depends on them.
func (s Setup) check() error {
	if len(s.Files) > 0 && s.Run == "" {
		return fail.New(fail.Usage, "setup.files: also needs setup.run")
	}
	if len(s.Files) > maxSetupFiles {
		return fail.New(fail.Usage, "setup.files: must list at most %d files, got %d", maxSetupFiles, len(s.Files))
	}
	return nil
}

// SetupScript is a script for bash, run by the agent's user in the checkout.
type SetupScript string

// Set checks the script.
func (s *SetupScript) Set(text string) error {
	if *s = SetupScript(text); len(text) > maxSetup {
		return fail.New(fail.Usage, "must be at most %v, got %v", Size(maxSetup), Size(len(text)))
	}
	if strings.ContainsRune(text, 0) {
		return fail.New(fail.Usage, "must not contain a NUL byte")
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
