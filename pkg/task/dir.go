package task

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/agent"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/crash"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Dir is the directory of a task on the host. A queued task has none, because
// creating directories takes longer than writing a row.
//
//	manifest.yaml                 as it was submitted
//	state.json                    View, for people and scripts; the store is the source of truth
//	keeper.log
//	inbox/TASK.md                 the instructions for the agent
//	outbox/metadata.json          Metadata
//	outbox/progress/stdout.log    the agent's output, byte for byte except for secrets
//	outbox/progress/stderr.log
//	outbox/progress/events.jsonl  the events in the store, one per line
//	outbox/artifacts/             the collected files
//	ID.tar.gz                     outbox, once the task has ended
type Dir string

func (d Dir) path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}

func (d Dir) artifacts() string { return d.path("outbox", "artifacts") }
func (d Dir) progress(name string) string {
	return d.path("outbox", "progress", name)
}

// Stdout returns the log of the agent's output; its length is the amount received so
// far.
func (d Dir) Stdout() string { return d.progress("stdout.log") }

// Stderr returns the log of the agent's errors.
func (d Dir) Stderr() string { return d.progress("stderr.log") }

func (d Dir) events() string   { return d.progress("events.jsonl") }
func (d Dir) metadata() string { return d.path("outbox", "metadata.json") }

// Bundle returns the file with all of outbox; it exists once the task has ended.
func (d Dir) Bundle() string { return d.path(filepath.Base(string(d)) + ".tar.gz") }

// KeeperLog returns the log of the task's keeper.
func (d Dir) KeeperLog() string { return d.path("keeper.log") }

// trouble makes an error about the host's disk.
func (d Dir) trouble(format string, args ...any) error {
	err := fail.New(fail.Host, format, args...)
	if isDiskFull(err) {
		return err.WithHint("df -h %s", filepath.Dir(string(d)))
	}
	return err
}

// create makes the directory of a task, with the manifest as it was written, or in
// its normalized form if the written text is not available.
func (d Dir) create(text, normal []byte) error {
	if err := d.ensureDirs(); err != nil {
		return err
	}
	switch _, err := os.Stat(d.path("manifest.yaml")); {
	case text != nil:
		return d.write("manifest.yaml", text)
	case errors.Is(err, fs.ErrNotExist):
		return d.write("manifest.yaml", append(slices.Clip(normal), '\n')) // JSON is YAML
	}
	return nil
}

// ensureDirs makes the directories.
func (d Dir) ensureDirs() error {
	for _, dir := range []string{d.path("inbox"), d.progress(""), d.artifacts()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return d.trouble("create task directory: %w", err)
		}
	}
	return nil
}

// write replaces a file that can be made again from the store.
func (d Dir) write(name string, content []byte) error {
	if err := atomicfile.WriteUnflushed(d.path(name), content, 0o600); err != nil {
		return d.trouble("write %s of the task: %w", name, err)
	}
	return nil
}

func (d Dir) writeState(t Task) error {
	text, err := json.MarshalIndent(t.View(), "", "  ")
	if err != nil {
		return err
	}
	return d.write("state.json", append(text, '\n'))
}

// Brief returns the content of TASK.md for the agent. subtasks says whether it may submit any.
func Brief(t Task, subtasks bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n\n", t.Name)
	if p := t.Manifest.Agent.Prompt; p != "" {
		fmt.Fprintf(&b, "%s\n\n", strings.TrimSpace(p))
	} else {
		fmt.Fprintf(&b, "Run: %s\n\n", strings.Join(t.Manifest.Agent.Command, " "))
	}
	where := "You have sudo in a disposable VM."
	if t.InSession() {
		where = "You have sudo in a VM that people also use."
	}
	asking := "No one can answer questions; make reasonable decisions and continue."
	if t.Manifest.Agent.Permissions == manifest.AskPermissions {
		asking = "Tools that need a permission wait until a person answers."
	}
	fmt.Fprintf(&b, `## How this run works

- %s %s
- The current directory is the checkout. Commit if the task says so. All differences from the commit that was
  checked out are collected as a patch, whether committed or not. Untracked files are collected too, except those
  that a .gitignore excludes.
- You can reach only allowed network destinations. A denied destination stays denied; continue without it.
- The run ends after %v, or after %v without output.
`, where, asking, t.Manifest.Lifecycle.Timeout, t.Manifest.Lifecycle.HangTimeout)
	if subtasks {
		b.WriteString(`- You can submit subtasks, which run agents in VMs of their own on a copy of the commit that you began with:
  agent-guest task submit --prompt "TEXT", then agent-guest task wait ID and agent-guest task fetch ID, which brings
  their commits as the branch agent-ID. See also agent-guest task list, show, artifacts and cancel.
`)
	}
	if ps := t.Manifest.Lifecycle.ArtifactPatterns; len(ps) > 0 {
		fmt.Fprintf(&b, "- Files that match these patterns are also collected: %s\n", strings.Join(ps, ", "))
	}
	return b.String()
}

func (d Dir) writeBrief(t Task, subtasks bool) error {
	return d.write(filepath.Join("inbox", "TASK.md"), []byte(Brief(t, subtasks)))
}

// appendEvents appends the store's newer events to events.jsonl. A line that a crash
// cut off is replaced.
func (d Dir) appendEvents(after func(seq int64, limit int) ([]store.Event, error)) (err error) {
	f, err := os.OpenFile(d.events(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return d.trouble("open the task's events.jsonl: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	seq, end, err := lastEvent(f)
	if err != nil {
		return err
	}
	if err := f.Truncate(end); err != nil {
		return err
	}
	if _, err := f.Seek(end, io.SeekStart); err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	lines := json.NewEncoder(w)
	lines.SetEscapeHTML(false) // a line would be up to six times as long as its event
	for {
		evs, err := after(seq, 1000)
		if err != nil {
			return err
		}
		if len(evs) == 0 {
			crash.Here(crash.BeforeFile)
			defer crash.Here(crash.AfterFile)
			return w.Flush()
		}
		for _, ev := range evs {
			if err := lines.Encode(ev); err != nil {
				return err
			}
			seq = ev.Seq
		}
	}
}

// lastEvent returns the number of the event in the last complete line, and where that
// line ends.
func lastEvent(f *os.File) (seq, end int64, err error) {
	const most = 128 << 10 // twice the longest event
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, 0, err
	}
	from := max(0, size-most)
	tail := make([]byte, size-from)
	if _, err := f.ReadAt(tail, from); err != nil && !errors.Is(err, io.EOF) {
		return 0, 0, err
	}
	text := string(tail)
	whole := strings.LastIndexByte(text, '\n') + 1
	if whole == 0 {
		return 0, 0, nil
	}
	line := text[strings.LastIndexByte(text[:whole-1], '\n')+1 : whole]
	var ev store.Event
	if json.Unmarshal([]byte(line), &ev) != nil {
		return 0, 0, nil //nolint:nilerr // the file is written again from the store
	}
	return ev.Seq, from + int64(whole), nil
}

// Metadata is the content of metadata.json for a task that has ended.
type Metadata struct {
	Version    int               `json:"version"`
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Labels     map[string]string `json:"labels,omitempty"`
	Repository struct {
		manifest.Repository
		Base string `json:"base,omitempty"` // the commit that was checked out
	} `json:"repository"`
	Agent       manifest.Agent `json:"agent"`
	Outcome     *Outcome       `json:"outcome"`
	SubmittedAt time.Time      `json:"submitted_at"`
	StartedAt   *time.Time     `json:"started_at,omitempty"`
	EndedAt     *time.Time     `json:"ended_at,omitempty"`
	DurationMS  int64          `json:"duration_ms"` // of the agent
	Attempts    int            `json:"attempts"`
	Restarts    int            `json:"restarts,omitempty"`
	Rebuilds    int            `json:"rebuilds,omitempty"`
	Progress    agent.Progress `json:"progress"`

	Usage *lifecycle.Usage `json:"usage,omitempty"` // of models, as the gateway counted it

	Stdout    int64      `json:"stdout_bytes"`
	Stderr    int64      `json:"stderr_bytes"`
	Artifacts []Artifact `json:"artifacts"`
	Skipped   []Skipped  `json:"skipped,omitempty"`
	TraceID   string     `json:"trace_id,omitempty"`
}

const metadataVersion = 1

func (d Dir) writeMetadata(t Task, base string, used *lifecycle.Usage) error {
	md := Metadata{
		Version: metadataVersion, ID: t.ID, Name: t.Name, Labels: t.Labels, Agent: t.Manifest.Agent, Outcome: t.Status.Outcome,
		SubmittedAt: t.CreatedAt, StartedAt: optional(t.Status.Started), EndedAt: optional(t.Status.Ended),
		Attempts: t.Status.Attempt, Restarts: len(t.Status.Restarts), Rebuilds: t.Status.Rebuilds, Progress: t.Status.Progress,
		Stdout: size(d.Stdout()), Stderr: size(d.Stderr()), Artifacts: t.Status.Artifacts, Skipped: t.Status.Skipped, TraceID: t.Status.Trace, Usage: used,
	}
	md.Repository.Repository, md.Repository.Base = t.Manifest.Repository, base
	md.Repository.URL = t.repository()
	if !t.Status.Started.IsZero() && !t.Status.Ended.IsZero() {
		md.DurationMS = max(0, t.Status.Ended.Sub(t.Status.Started).Milliseconds())
	}
	if md.Artifacts == nil {
		md.Artifacts = []Artifact{}
	}
	text, err := json.MarshalIndent(md, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(d.metadata(), append(text, '\n'), 0o600); err != nil {
		return d.trouble("write the task's metadata.json: %w", err)
	}
	return nil
}

// sweep removes the temporary files of a keeper that died while it wrote a file.
func (d Dir) sweep() error {
	for _, dir := range []string{d.path(), d.path("inbox"), d.path("outbox")} {
		left, err := filepath.Glob(filepath.Join(dir, ".*.tmp"))
		if err != nil {
			return err
		}
		for _, file := range left {
			if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return d.trouble("remove incomplete file: %w", err)
			}
		}
	}
	return nil
}

func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// endLine ends a nonempty log with a newline if it lacks one.
func endLine(path string) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fail.New(fail.Host, "open task log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil || end == 0 {
		return err
	}
	var last [1]byte
	if _, err := f.ReadAt(last[:], end-1); err != nil || last[0] == '\n' {
		return err
	}
	_, err = f.Write([]byte{'\n'})
	return err
}
