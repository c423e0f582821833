package ops

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// File names a file of a task: an artifact, or one of its agent's outputs. Or it names a recording.
type File struct {
	Task     string // id
	Artifact string // name in the list; "" for an output
	Stream   string // stdout or stderr
	Follow   bool   // continue with new output until the task has ended

	Recording string // id; the other fields but Format are empty
	Format    string // Asciicast or PlainText
}

// Path returns the file's path in the API, with its query.
func (f File) Path() string {
	if f.Recording != "" {
		return RecordingsPath + "/" + url.PathEscape(f.Recording) + "?" + url.Values{"format": {f.Format}}.Encode()
	}
	if f.Artifact != "" {
		parts := strings.Split(f.Artifact, "/")
		for i, p := range parts {
			if parts[i] = url.PathEscape(p); p == "." || p == ".." { // no name of an artifact; the host's answer says so
				parts[i] = strings.ReplaceAll(p, ".", "%2E")
			}
		}
		return Task(f.Task).Path() + "/artifacts/" + strings.Join(parts, "/")
	}
	query := url.Values{"stream": {f.Stream}}
	if f.Follow {
		query.Set("follow", "true")
	}
	return Task(f.Task).Path() + "/logs?" + query.Encode()
}

// Stored opens a file of a task of another host of the cluster, which stores it after the task's end. It
// returns nil for a task of this host. ctx limits all reading.
func (e *Engine) Stored(ctx context.Context, t task.Task, f File) (*io.SectionReader, error) {
	if !t.IsElsewhere() {
		return nil, nil //nolint:nilnil // nothing is stored elsewhere
	}
	p, err := e.part()
	if err != nil {
		return nil, err
	}
	return p.Open(ctx, t, f.Artifact, f.Stream)
}

// Read implements Host.
func (e Engine) Read(ctx context.Context, f File) (io.ReadCloser, error) {
	if f.Recording != "" {
		return e.readRecording(ctx, f.Recording, f.Format)
	}
	t, err := e.Task(ctx, f.Task)
	if err != nil {
		return nil, err
	}
	if r, err := e.Stored(ctx, t, f); r != nil || err != nil {
		return io.NopCloser(r), err
	}
	if err := e.Tasks.CheckFiles(t); err != nil {
		return nil, err
	}
	if f.Artifact != "" {
		return e.Tasks.OpenArtifact(t, f.Artifact)
	}
	path := e.Tasks.Dir(t.ID).Stdout()
	if f.Stream == "stderr" {
		path = e.Tasks.Dir(t.ID).Stderr()
	}
	if f.Follow {
		return e.Follow(ctx, t.ID, path), nil
	}
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return io.NopCloser(strings.NewReader("")), nil
	}
	if err != nil {
		return nil, fail.New(fail.Host, "open log: %w", err)
	}
	return file, nil
}

// maxCommits limits the commits of a subtask that its parent gets.
const maxCommits = 1 << 30

// Commits returns the commits of a subtask that has ended, as a git bundle of its branch.
func (e Engine) Commits(ctx context.Context, id string) (bundle *os.File, err error) {
	t, err := e.Task(ctx, id)
	if err != nil {
		return nil, err
	}
	if !t.Phase.Over() || t.SessionID == "" {
		return nil, fail.New(fail.Conflict, "subtask %s is %s; its commits exist after its end", t.ID, t.Phase).WithHint("agent-guest task wait %s", t.ID)
	}
	s, err := e.Tasks.Sessions.Get(ctx, t.SessionID)
	if err != nil {
		return nil, err
	}
	if s.Status.Base == nil {
		return nil, fail.New(fail.NotFound, "subtask %s never had a checkout", t.ID).WithHint("agent-guest task show %s", t.ID)
	}
	cfg := e.sessions().Config
	host, err := session.MeasureHost(cfg.Paths.State)
	if err != nil {
		return nil, err
	}
	space := int64(host.FreeDisk) - int64(cfg.Limits.DiskReserve)
	if space <= 0 {
		return nil, fail.New(fail.Host, "not enough disk space for the commits of subtask %s: %v free, the reserve is %v", t.ID, host.FreeDisk, cfg.Limits.DiskReserve).
			WithHint("df -h %s", host.DiskDir)
	}
	if bundle, err = os.CreateTemp(cfg.Paths.State, "agent-sessionizer-*.bundle"); err != nil {
		return nil, fail.New(fail.Host, "create a bundle: %w", err)
	}
	err = os.Remove(bundle.Name()) // it goes with its last descriptor
	if err == nil {
		err = repo.Bundle(ctx, bundle, s.Status.Target, s.Name, t.Branch(), s.Status.Base.Commit, min(maxCommits, space))
	}
	if err == nil {
		_, err = bundle.Seek(0, io.SeekStart)
	}
	if err != nil {
		_ = bundle.Close() // nothing is left of it
		return nil, fail.New(fail.CodeOf(err), "commits of subtask %s: %w", t.ID, err).WithHint("agent-guest task artifacts %s --get %s.patch", t.ID, t.ID)
	}
	return bundle, nil
}

// Follow returns a growing file of a task, which ends when the task has ended.
func (e Engine) Follow(ctx context.Context, id, path string) io.ReadCloser {
	ctx, cancel := context.WithCancel(ctx)
	r, w := io.Pipe()
	over := make(chan struct{})
	go func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			t, err := e.Tasks.Get(ctx, id)
			if err == nil && t.Phase.Over() {
				close(over)
				return
			}
			if err != nil {
				_ = w.CloseWithError(err)
				cancel()
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	}()
	go func() {
		err := logfile.Tail(ctx, path, 0, over, func(_ int64, data []byte) error {
			_, err := w.Write(data)
			return err
		})
		_ = w.CloseWithError(err)
	}()
	return &following{r, cancel}
}

// following is an output that is being followed.
type following struct {
	*io.PipeReader
	stop func()
}

func (f *following) Close() error {
	f.stop()
	return f.PipeReader.Close()
}
