// Package config turns the shipped defaults, the system's and the user's
// files, the environment and flags into one set of settings, in that order.
//
// It reads files and never writes any. A repository's own file is a separate
// type, Project, which can only narrow.
package config

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const app = "agent-sessionizer"

// Paths are the product's directories, by the XDG Base Directory Specification.
type Paths struct {
	System   string // /etc/agent-sessionizer
	Config   string // the user's settings
	State    string // store, locks, logs, keys
	Data     string // guest images
	Cache    string // repository mirrors, downloads
	LimaHome string // Lima's directory; short, since sockets under it are bound to 104 bytes
}

// DefaultPaths reads HOME and XDG_*_HOME. Relative XDG values are ignored, as
// the specification wants.
func DefaultPaths() (Paths, error) {
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return Paths{}, fail.New(fail.Host, "the home directory is unknown: HOME is %q", os.Getenv("HOME")).WithHint("export HOME=/absolute/path")
	}
	xdg := func(env string, fallback ...string) string {
		if dir := os.Getenv(env); filepath.IsAbs(dir) {
			return filepath.Join(dir, app)
		}
		return filepath.Join(append([]string{home}, append(fallback, app)...)...)
	}
	return Paths{
		System:   filepath.Join("/etc", app),
		Config:   xdg("XDG_CONFIG_HOME", ".config"),
		State:    xdg("XDG_STATE_HOME", ".local", "state"),
		Data:     xdg("XDG_DATA_HOME", ".local", "share"),
		Cache:    xdg("XDG_CACHE_HOME", ".cache"),
		LimaHome: filepath.Join(home, ".agent-vms"),
	}, nil
}

// Store is the SQLite file.
func (p Paths) Store() string { return filepath.Join(p.State, "store.db") }

// SessionLock is the lock that a session's keeper holds while it lives.
func (p Paths) SessionLock(id string) string { return filepath.Join(p.State, "locks", "session-"+id) }

// SessionDir holds what belongs to one session and goes with it: keys, keeper log.
func (p Paths) SessionDir(id string) string { return filepath.Join(p.State, "sessions", id) }

// TaskLock is the lock that a task's keeper holds while it lives.
func (p Paths) TaskLock(id string) string { return filepath.Join(p.State, "locks", "task-"+id) }

// TaskDir is what is kept of a task: what was asked, its logs, what it brought home.
func (p Paths) TaskDir(id string) string { return filepath.Join(p.State, "tasks", id) }

// Pool holds the VMs that wait for a session.
func (p Paths) Pool() string { return filepath.Join(p.State, "pool") }

// Kept holds what is kept of sessions for the next ones of their repositories.
func (p Paths) Kept() string { return filepath.Join(p.State, "kept") }

// Images holds locally built guest images.
func (p Paths) Images() string { return filepath.Join(p.Data, "images") }

// Mirrors holds bare mirrors of remote repositories.
func (p Paths) Mirrors() string { return filepath.Join(p.Cache, "mirrors") }

// Make creates the directories that are ours alone.
func (p Paths) Make() error {
	for _, dir := range []string{p.State, p.Data, p.Cache, p.LimaHome} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fail.New(fail.Host, "make %s: %w", dir, err)
		}
	}
	return nil
}

func shipped(name string) string { return fmt.Sprintf("(shipped) config/%s", name) }
