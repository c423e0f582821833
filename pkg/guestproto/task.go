package guestproto

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
)

// These limit the message that starts a task.
const (
	MaxTaskStart   = 8 << 20     // bytes of the message
	MaxTaskArgs    = 4096        // of the command
	MaxTaskArg     = 128<<10 - 1 // bytes of one argument or variable: Linux accepts no longer ones
	MaxTaskCommand = 1 << 20     // bytes of all arguments and variables
	MaxTaskBrief   = 1 << 20     // bytes
)

// TaskName returns the name of an attempt at a task in a guest: the task's id and the
// attempt's number, counted from 1.
func TaskName(id string, attempt int) string { return fmt.Sprintf("%s/%d", id, attempt) }

var taskName = lazyregexp.New(`^[0-9a-f]{12}/[1-9][0-9]{0,5}$`)

// CheckTaskName returns an error unless name has the form of an attempt's name.
func CheckTaskName(name string) error {
	if !taskName.MatchString(name) {
		return fmt.Errorf("%q is not a name of a task's attempt", shorten(name, maxName))
	}
	return nil
}

// TaskStart describes what a guest runs for a task.
type TaskStart struct {
	Version int               `json:"version"`
	Argv    []string          `json:"argv"`
	Env     map[string]string `json:"env,omitempty"`   // in addition to a login shell's variables; no secrets, because it is stored on the guest's disk
	Dir     string            `json:"dir"`             // the working directory
	Brief   string            `json:"brief,omitempty"` // the content of the file that AGENT_TASK_BRIEF names
}

// Encode writes the message.
func (s TaskStart) Encode(w io.Writer) error {
	s.Version = Version
	if err := s.check(); err != nil {
		return fmt.Errorf("start a task: %w", err)
	}
	return encodeTask(w, s)
}

// DecodeTaskStart reads the message.
func DecodeTaskStart(r io.Reader) (TaskStart, error) {
	s, err := decode[TaskStart](r, MaxTaskStart)
	if err == nil && s.Version != Version {
		err = fmt.Errorf("version must be %d, got %d", Version, s.Version)
	}
	if err == nil {
		err = s.check()
	}
	if err != nil {
		return TaskStart{}, fmt.Errorf("start a task: %w", err)
	}
	return s, nil
}

var variableName = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

func (s TaskStart) check() error {
	if len(s.Argv) == 0 || s.Argv[0] == "" {
		return errors.New("no command")
	}
	if len(s.Argv) > MaxTaskArgs {
		return fmt.Errorf("got a command of %d arguments, must be at most %d", len(s.Argv), MaxTaskArgs)
	}
	if !path.IsAbs(s.Dir) {
		return fmt.Errorf("directory must be absolute, got %q", shorten(s.Dir, maxName))
	}
	if len(s.Brief) > MaxTaskBrief {
		return fmt.Errorf("got a brief of %d bytes, must be at most %d", len(s.Brief), MaxTaskBrief)
	}
	all := 0
	text := func(what, s string) error {
		all += len(s) + 1
		switch {
		case len(s) > MaxTaskArg:
			return fmt.Errorf("%s has %d bytes; Linux allows at most %d", what, len(s), MaxTaskArg)
		case strings.IndexByte(s, 0) >= 0:
			return fmt.Errorf("%s contains a zero byte", what)
		case !utf8.ValidString(s):
			return fmt.Errorf("%s is not UTF-8", what)
		}
		return nil
	}
	for i, arg := range s.Argv {
		if err := text(fmt.Sprintf("argument %d of the command", i), arg); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		if !variableName.MatchString(name) {
			return fmt.Errorf("%q is not a valid name of an environment variable", shorten(name, maxName))
		}
		if err := text("variable "+name, name+"="+s.Env[name]); err != nil {
			return err
		}
	}
	if err := text("the directory", s.Dir); err != nil {
		return err
	}
	if all > MaxTaskCommand {
		return fmt.Errorf("got a command and variables of %d bytes, must be at most %d", all, MaxTaskCommand)
	}
	return nil
}

// TaskState is the state of an attempt at a task in a guest.
type TaskState string

// The states of an attempt.
const (
	TaskNone    TaskState = "none"    // it never began
	TaskRunning TaskState = "running" // it runs
	TaskExited  TaskState = "exited"  // it ended, and Result says how
	TaskLost    TaskState = "lost"    // it began, no longer runs, and left no result: the machine went down
)

// TaskStatus is what a guest reports about an attempt at a task.
type TaskStatus struct {
	Version int         `json:"version"`
	State   TaskState   `json:"state"`
	Time    time.Time   `json:"time"`             // by the guest's clock
	CPU     int64       `json:"cpu_ms,omitempty"` // used so far by all processes that the agent started, milliseconds
	Memory  int64       `json:"memory,omitempty"` // used by them now, bytes
	Stdout  int64       `json:"stdout"`           // bytes that the agent has printed
	Stderr  int64       `json:"stderr"`
	Result  *TaskResult `json:"result,omitempty"`
}

// TaskResult is how an agent ended.
type TaskResult struct {
	ExitCode int       `json:"exit_code"`        // 128 and the signal's number when a signal ended it; 126 or 127 when it could not be started
	Signal   string    `json:"signal,omitempty"` // "KILL", "TERM", …
	Error    string    `json:"error,omitempty"`  // why it could not be started
	Started  time.Time `json:"started"`          // by the guest's clock
	Ended    time.Time `json:"ended"`
	User     int64     `json:"user_ms"` // processor time of the agent and of those children that it waited for
	System   int64     `json:"system_ms"`
	MaxRSS   int64     `json:"max_rss"` // bytes, of the largest process among them
	Stdout   int64     `json:"stdout"`  // bytes printed in total
	Stderr   int64     `json:"stderr"`
}

const maxTaskStatus = 16 << 10

// Encode writes the message.
func (s TaskStatus) Encode(w io.Writer) error {
	s.Version = Version
	return encodeTask(w, s.sanitized())
}

// DecodeTaskStatus reads one status.
func DecodeTaskStatus(r io.Reader) (TaskStatus, error) {
	s, err := decode[TaskStatus](r, maxTaskStatus)
	switch {
	case err != nil:
	case s.Version != Version:
		err = fmt.Errorf("version must be %d, got %d", Version, s.Version)
	case !slices.Contains([]TaskState{TaskNone, TaskRunning, TaskExited, TaskLost}, s.State):
		err = fmt.Errorf("unknown state %q", shorten(string(s.State), maxName))
	case (s.Result != nil) != (s.State == TaskExited):
		err = fmt.Errorf("state %q does not match the result", s.State)
	}
	if err != nil {
		return TaskStatus{}, fmt.Errorf("state of a task: %w", err)
	}
	return s.sanitized(), nil
}

// DecodeTaskResult reads what the guest program stored for its own use.
func DecodeTaskResult(r io.Reader) (TaskResult, error) {
	t, err := decode[TaskResult](r, maxTaskStatus)
	if err != nil {
		return TaskResult{}, fmt.Errorf("result of a task: %w", err)
	}
	return t.sanitized(), nil
}

func (s TaskStatus) sanitized() TaskStatus {
	s.Time = possible(s.Time)
	for _, n := range []*int64{&s.CPU, &s.Memory, &s.Stdout, &s.Stderr} {
		*n = max(*n, 0)
	}
	if s.Result != nil {
		r := s.Result.sanitized()
		s.Result = &r
	}
	return s
}

var signalName = lazyregexp.New(`^[A-Z][A-Z0-9]{0,15}$`)

func (r TaskResult) sanitized() TaskResult {
	r.ExitCode = min(max(r.ExitCode, 0), 255)
	if r.Signal != "" {
		if !signalName.MatchString(r.Signal) {
			r.Signal = "UNKNOWN"
		}
		r.ExitCode = max(r.ExitCode, 1) // otherwise it would count as a success
	}
	r.Error = Clean(r.Error)
	r.Started, r.Ended = possible(r.Started), possible(r.Ended)
	for _, n := range []*int64{&r.User, &r.System, &r.MaxRSS, &r.Stdout, &r.Stderr} {
		*n = max(*n, 0)
	}
	return r
}

// These limit what is collected from a task.
const (
	MaxArtifacts    = 100_000 // files
	MaxTaskSkipped  = 1000    // that are listed individually
	MaxTaskPatterns = 256
	maxPattern      = 1024 // bytes
	maxCollect      = 1 << 20
	MaxTaskManifest = 64 << 20 // bytes, of all artifacts' descriptions
)

// TaskCollect says what to collect from a task's checkout.
type TaskCollect struct {
	Version  int      `json:"version"`
	Dir      string   `json:"dir"`                // the checkout
	Base     string   `json:"base,omitempty"`     // the commit it began with, "" for none
	Patterns []string `json:"patterns,omitempty"` // of files, below Dir; with ** for directories
	MaxFiles int      `json:"max_files"`
	MaxBytes int64    `json:"max_bytes"`
}

// Encode writes the message.
func (c TaskCollect) Encode(w io.Writer) error {
	c.Version = Version
	if err := c.check(); err != nil {
		return fmt.Errorf("collect a task's artifacts: %w", err)
	}
	return encodeTask(w, c)
}

// DecodeTaskCollect reads the message.
func DecodeTaskCollect(r io.Reader) (TaskCollect, error) {
	c, err := decode[TaskCollect](r, maxCollect)
	if err == nil && c.Version != Version {
		err = fmt.Errorf("version must be %d, got %d", Version, c.Version)
	}
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return TaskCollect{}, fmt.Errorf("collect a task's artifacts: %w", err)
	}
	return c, nil
}

var commitID = lazyregexp.New(`^([0-9a-f]{40}|[0-9a-f]{64})?$`)

func (c TaskCollect) check() error {
	switch {
	case !path.IsAbs(c.Dir) || strings.IndexByte(c.Dir, 0) >= 0:
		return fmt.Errorf("directory must be absolute, got %q", shorten(c.Dir, maxName))
	case !commitID.MatchString(c.Base):
		return fmt.Errorf("%q must be a commit id", shorten(c.Base, maxName))
	case len(c.Patterns) > MaxTaskPatterns:
		return fmt.Errorf("got %d patterns, must be at most %d", len(c.Patterns), MaxTaskPatterns)
	case c.MaxFiles < 0 || c.MaxFiles > MaxArtifacts:
		return fmt.Errorf("got %d files, must be at most %d", c.MaxFiles, MaxArtifacts)
	case c.MaxBytes < 0:
		return fmt.Errorf("the size limit of %d bytes is out of range", c.MaxBytes)
	}
	for _, p := range c.Patterns {
		if p == "" || len(p) > maxPattern || strings.IndexByte(p, 0) >= 0 || path.IsAbs(p) || !utf8.ValidString(p) ||
			slices.Contains(strings.Split(p, "/"), "..") {
			return fmt.Errorf("pattern %q must match paths below the checkout", shorten(p, maxName))
		}
	}
	return nil
}

// Artifact is a file that a task leaves, or one that could not be collected: Skipped
// says why.
type Artifact struct {
	// Name is the file's path below the directory of the artifacts: ID.patch,
	// ID-untracked.txt, untracked/PATH or files/PATH. The name of a skipped artifact
	// is only for display.
	Name       string `json:"name"`
	Size       int64  `json:"size"`
	SHA256     string `json:"sha256,omitempty"` // hexadecimal
	Executable bool   `json:"executable,omitempty"`
	Skipped    string `json:"skipped,omitempty"`
}

// Collection describes everything that was collected at one time. The files stay
// where they are in the guest until they are sent.
type Collection struct {
	ID        string     `json:"id"`
	Artifacts []Artifact `json:"artifacts"`
	More      int        `json:"more,omitempty"` // number of skipped files that are not listed
}

var collectionID = lazyregexp.New(`^[0-9a-f]{16}$`)

// CheckCollectionID returns an error unless id has the form of a collection's id.
func CheckCollectionID(id string) error {
	if !collectionID.MatchString(id) {
		return fmt.Errorf("%q must be a collection id", shorten(id, maxName))
	}
	return nil
}

// TaskSend asks for files of a collection.
type TaskSend struct {
	Version    int        `json:"version"`
	Collection string     `json:"collection"`
	Items      []SendItem `json:"items"`
}

// SendItem is a file, given by its index in the collection, and the offset to start
// at.
type SendItem struct {
	Index  int   `json:"index"`
	Offset int64 `json:"offset"`
}

// Encode writes the message.
func (s TaskSend) Encode(w io.Writer) error {
	s.Version = Version
	return encodeTask(w, s)
}

// DecodeTaskSend reads the message.
func DecodeTaskSend(r io.Reader) (TaskSend, error) {
	const each = 64 // bytes
	s, err := decode[TaskSend](r, (MaxArtifacts+MaxTaskSkipped)*each)
	if err == nil && s.Version != Version {
		err = fmt.Errorf("version must be %d, got %d", Version, s.Version)
	}
	if err == nil {
		err = CheckCollectionID(s.Collection)
	}
	if err != nil {
		return TaskSend{}, fmt.Errorf("send a task's artifacts: %w", err)
	}
	return s, nil
}

// DecodeArtifact reads the description of one artifact of the task with that id.
func DecodeArtifact(text []byte, id string) (Artifact, error) {
	a, err := decode[Artifact](strings.NewReader(string(text)), MaxFrame)
	if err == nil {
		err = a.check(id)
	}
	if err != nil {
		return Artifact{}, fmt.Errorf("artifact: %w", err)
	}
	if a.Skipped != "" {
		a = Artifact{Name: Clean(a.Name), Size: max(a.Size, 0), Skipped: Clean(a.Skipped)}
	}
	return a, nil
}

func (a Artifact) check(id string) error {
	if a.Skipped != "" {
		return nil
	}
	if err := CheckArtifactName(a.Name); err != nil {
		return err
	}
	top, _, below := strings.Cut(a.Name, "/")
	if below != (top == UntrackedDir || top == FilesDir || top == SubmodulesDir) || !below && a.Name != PatchName(id) && a.Name != UntrackedName(id) {
		return fmt.Errorf("%q does not belong to this task", shorten(a.Name, maxName))
	}
	if sum, err := hex.DecodeString(a.SHA256); err != nil || len(sum) != 32 || strings.ToLower(a.SHA256) != a.SHA256 {
		return fmt.Errorf("%q has no checksum", shorten(a.Name, maxName))
	}
	if a.Size < 0 {
		return fmt.Errorf("%q has an invalid size of %d", shorten(a.Name, maxName), a.Size)
	}
	return nil
}

// These are the directories for artifacts.
const (
	UntrackedDir  = "untracked"
	FilesDir      = "files"
	SubmodulesDir = "submodules" // one patch for each submodule
)

// PatchName returns the name of a task's patch among its artifacts.
func PatchName(id string) string { return id + ".patch" }

// UntrackedName returns the name of the list of a task's untracked files.
func UntrackedName(id string) string { return id + "-untracked.txt" }

func encodeTask(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // a prompt may be full of characters that escaping turns into six bytes
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("send to the guest agent: %w", err)
	}
	return nil
}
