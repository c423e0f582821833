// Package config merges the shipped defaults, the system's files, the user's files, the
// environment and flags into one set of settings, in that order.
//
// It reads files and never writes any. A repository's own file has a separate type,
// Project, which can only narrow.
package config

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const app = "agent-sessionizer"

// Paths holds the product's directories, which follow the XDG Base Directory Specification.
type Paths struct {
	System   string // /etc/agent-sessionizer
	Config   string // the user's settings
	State    string // store, locks, logs, keys
	Data     string // guest images
	Cache    string // repository mirrors, downloads
	LimaHome string // Lima's directory; short, because the paths of sockets under it are limited to 104 bytes
}

// DefaultPaths derives the directories from HOME and XDG_*_HOME. It ignores relative XDG
// values, as the specification requires.
func DefaultPaths() (Paths, error) {
	home, err := os.UserHomeDir()
	if err != nil || !filepath.IsAbs(home) {
		return Paths{}, fail.New(fail.Host, "find home directory: HOME must be an absolute path, got %q", os.Getenv("HOME")).WithHint("export HOME=/absolute/path")
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

// Store returns the path of the SQLite file.
func (p Paths) Store() string { return filepath.Join(p.State, "store.db") }

// Logins returns the directory of the subscription logins that are this program's.
func (p Paths) Logins() string { return filepath.Join(p.State, "logins") }

// SessionLock returns the path of the lock that a session's keeper holds while it runs.
func (p Paths) SessionLock(id string) string { return filepath.Join(p.State, "locks", "session-"+id) }

// Sessions returns the directory of all sessions' directories.
func (p Paths) Sessions() string { return filepath.Join(p.State, "sessions") }

// Tasks returns the directory of all tasks' directories.
func (p Paths) Tasks() string { return filepath.Join(p.State, "tasks") }

// SessionDir returns the directory of one session, with its keys and keeper log. It is
// removed with the session.
func (p Paths) SessionDir(id string) string { return filepath.Join(p.Sessions(), id) }

// Observation returns the path of the keeper's last observation of a session's guest.
func (p Paths) Observation(id string) string {
	return filepath.Join(p.SessionDir(id), "observation.json")
}

// Gateway returns the directory of a session's gateway.
func (p Paths) Gateway(id string) string { return filepath.Join(p.SessionDir(id), "gateway") }

// Standby returns the directory that a standby VM is moved to when a session takes it. While it exists,
// the session has not adopted all of its content yet.
func (p Paths) Standby(id string) string { return filepath.Join(p.SessionDir(id), "standby") }

// WakeLock returns the path of the lock that a fork holds while it wakes on a host that emulates VMs.
func (p Paths) WakeLock() string { return filepath.Join(p.State, "locks", "wake") }

// TaskLock returns the path of the lock that a task's keeper holds while it runs.
func (p Paths) TaskLock(id string) string { return filepath.Join(p.State, "locks", "task-"+id) }

// TaskDir returns the directory of a task, with its manifest, logs and artifacts.
func (p Paths) TaskDir(id string) string { return filepath.Join(p.Tasks(), id) }

// Pool returns the directory of the standby VMs.
func (p Paths) Pool() string { return filepath.Join(p.State, "pool") }

// SavedHomes returns the directory of the saved homes, from which later sessions of the same
// repositories are restored.
func (p Paths) SavedHomes() string { return filepath.Join(p.State, "homes") }

// Reviews returns the directory of the marks and notes of reviews.
func (p Paths) Reviews() string { return filepath.Join(p.State, "reviews") }

// Cluster returns the directory with what this host knows of its cluster.
func (p Paths) Cluster() string { return filepath.Join(p.State, "cluster") }

// Term returns the path of the file that says until when this host may let the guests of its cluster's
// tasks send.
func (p Paths) Term() string { return filepath.Join(p.Cluster(), "term.json") }

// SecretsSocket returns the path of the socket at which keepers ask serve for secrets of their tasks that
// another host of the cluster resolves.
func (p Paths) SecretsSocket() string { return filepath.Join(p.Cluster(), "secrets.sock") }

// Images returns the directory of the guest images.
func (p Paths) Images() string { return filepath.Join(p.Data, "images") }

// Mirrors returns the directory of the bare mirrors of remote repositories.
func (p Paths) Mirrors() string { return filepath.Join(p.Cache, "mirrors") }

// Make creates the directories that belong to the product alone.
func (p Paths) Make() error {
	for _, dir := range []string{p.State, p.Data, p.Cache, p.LimaHome} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fail.New(fail.Host, "create %s: %w", dir, err)
		}
	}
	return nil
}

func shipped(name string) string { return fmt.Sprintf("(shipped) config/%s", name) }
