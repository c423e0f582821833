package task

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// ErrPruned means that the logs and artifacts of a task were removed, some time after
// its end. It is returned wrapped.
var ErrPruned = errors.New("its logs and artifacts were removed")

// CheckFiles returns an error that wraps ErrPruned if a task has ended and its files
// were removed.
func (m *Manager) CheckFiles(t Task) error {
	if t.IsElsewhere() {
		return fail.New(fail.Conflict, "the logs and artifacts of task %s are on host %s", t.ID, t.Host).
			WithHint("agent-sessionizer --host %s task logs %s", t.Host, t.ID)
	}
	if !t.Phase.Over() {
		return nil
	}
	_, err := os.Stat(m.Dir(t.ID).path("outbox"))
	if errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.NotFound, "task %s: %w after tasks.cleanup_ttl (%v)", t.ID, ErrPruned, m.settings().CleanupTTL).
			WithHint("agent-sessionizer task retry %s", t.ID)
	}
	if err != nil {
		return fmt.Errorf("find files of task %s: %w", t.ID, err)
	}
	return nil
}

// IsElsewhere reports whether another host of the cluster has the task, with its files.
func (t Task) IsElsewhere() bool { return t.Host != "" && t.Host != store.Waiting }

// Output is a file of a task that has ended.
type Output struct {
	Artifact string // its name; "" for an output of the agent
	Stream   string // stdout or stderr; "" for an artifact
	Open     func() (*os.File, error)
}

// Outputs returns the files of a task that has ended, which may have been removed.
func (m *Manager) Outputs(t Task) (all []Output, err error) {
	err = m.CheckFiles(t)
	if errors.Is(err, ErrPruned) {
		return nil, nil
	}
	d := m.Dir(t.ID)
	for stream, path := range map[string]string{"stdout": d.Stdout(), "stderr": d.Stderr()} {
		all = append(all, Output{Stream: stream, Open: func() (*os.File, error) { return os.Open(path) }})
	}
	for _, a := range t.Status.Artifacts {
		all = append(all, Output{Artifact: a.Name, Open: func() (*os.File, error) { return m.OpenArtifact(t, a.Name) }})
	}
	return all, err
}

// OpenArtifact opens an artifact by its name. The name may come from an untrusted
// client: only names in the list are opened, and only below the task's directory.
func (m *Manager) OpenArtifact(t Task, name string) (*os.File, error) {
	if err := m.CheckFiles(t); err != nil {
		return nil, err
	}
	for _, a := range t.Status.Artifacts {
		if a.Name != name {
			continue
		}
		root, err := os.OpenRoot(m.Dir(t.ID).artifacts())
		if err != nil {
			return nil, fail.New(fail.NotFound, "open artifacts of task %s: %w", t.ID, err).WithHint("agent-sessionizer task show %s", t.ID)
		}
		defer root.Close()
		f, err := root.Open(filepath.FromSlash(name))
		if err != nil {
			return nil, fail.New(fail.NotFound, "artifact %q of task %s: %w", name, t.ID, err).WithHint("agent-sessionizer task artifacts %s", t.ID)
		}
		return f, nil
	}
	return nil, fail.New(fail.NotFound, "task %s has no artifact %q", t.ID, name).WithHint("agent-sessionizer task artifacts %s", t.ID)
}
