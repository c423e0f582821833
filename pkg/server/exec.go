package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// ExecRequest is a request to run a command in a session.
type ExecRequest struct {
	Argv    []string          `json:"argv,omitempty" minItems:"1" maxItems:"256" nullable:"false" doc:"Program and arguments, no shell. Either this or command."`
	Command string            `json:"command,omitempty" minLength:"1" maxLength:"65536" doc:"A line for sh. Either this or argv."`
	Cwd     string            `json:"cwd,omitempty" maxLength:"4096" doc:"Directory, relative to the repository's. Default: the repository's directory."`
	Env     map[string]string `json:"env,omitempty" doc:"Additional environment variables, at most 64. They appear on a command line in the guest; the host does not store their values."`
	Timeout string            `json:"timeout,omitempty" default:"10m" example:"90s" doc:"Time limit of the command, at most 24h."`
}

// ExecState is the state of a command.
type ExecState string

// States of a command.
const (
	ExecRunning   ExecState = "running"
	ExecExited    ExecState = "exited" // see exit_code or signal
	ExecTimeout   ExecState = "timeout"
	ExecCancelled ExecState = "cancelled"
	ExecFailed    ExecState = "failed" // it could not be run, or the connection was lost; see error
	ExecLost      ExecState = "lost"   // the server that ran it was killed
)

// Exec is a command in a session.
type Exec struct {
	ID        string          `json:"id"`
	Session   string          `json:"session"`
	State     ExecState       `json:"state" enum:"running,exited,timeout,cancelled,failed,lost"`
	Argv      []string        `json:"argv,omitempty" doc:"Visible only to the scope admin, like command, cwd and env."`
	Command   string          `json:"command,omitempty"`
	Cwd       string          `json:"cwd,omitempty"`
	Env       []string        `json:"env,omitempty" doc:"Names only."`
	ExitCode  *int            `json:"exit_code,omitempty"`
	Signal    string          `json:"signal,omitempty" doc:"Signal that ended the command."`
	Error     *task.ViewError `json:"error,omitempty"`
	StartedAt time.Time       `json:"started_at"`
	EndedAt   *time.Time      `json:"ended_at,omitempty"`
	Stdout    ExecOutput      `json:"stdout"`
	Stderr    ExecOutput      `json:"stderr"`
	LastEvent string          `json:"last_event" doc:"Id of one of the session's events. All later events of the command follow it."`
	Actor     string          `json:"actor"`
	TraceID   string          `json:"trace_id"`
}

// ExecOutput describes one of a command's two outputs.
type ExecOutput struct {
	Bytes     int64 `json:"bytes" doc:"Size of the log."`
	Truncated bool  `json:"truncated" doc:"There was more output, which was discarded."`
}

// shownTo returns e as a client may see it: only admins see command lines.
func (e Exec) shownTo(who principal) Exec {
	if !who.Scope.allows(Admin) {
		e.Argv, e.Command, e.Cwd, e.Env = nil, "", "", nil
	}
	return e
}

// execRecord is the form in which an Exec is stored in its file.
type execRecord struct {
	Exec
	Server string `json:"server"` // the server process that runs it
}

// EventExec is the kind of a session's events about commands; their data is
// ExecChange.
const EventExec = "exec"

// ExecChange reports that a command was started or has ended.
type ExecChange struct {
	Exec     string    `json:"exec"`
	State    ExecState `json:"state"`
	ExitCode *int      `json:"exit_code,omitempty"`
	Signal   string    `json:"signal,omitempty"`
	Actor    string    `json:"actor"`
	TraceID  string    `json:"trace_id"`
}

const (
	defaultExecTimeout = 10 * time.Minute
	maxExecTimeout     = 24 * time.Hour
	maxExecs           = 200 // number of commands kept per session
	maxExecEnv         = 64
)

// execs runs commands in guests over SSH. Each command has a directory,
// sessions/SESSION/exec/ID, which is removed with its session:
//
//	ID.json                     execRecord
//	ID.stdout.log, ID.stderr.log
type execs struct {
	*Server
	self string // unique id of this server process

	mu      sync.Mutex
	running map[string]context.CancelCauseFunc // by the command's id
	group   sync.WaitGroup
}

func newExecs(s *Server, self string) *execs {
	return &execs{Server: s, self: self, running: map[string]context.CancelCauseFunc{}}
}

type execDir struct{ dir, id string }

func (d execDir) file(suffix string) string { return filepath.Join(d.dir, d.id+suffix) }
func (d execDir) stdout() string            { return d.file(".stdout.log") }
func (d execDir) stderr() string            { return d.file(".stderr.log") }

func (x *execs) sessionDir(session string) string {
	return filepath.Join(x.tasks.Sessions.Config.Paths.SessionDir(session), "exec")
}

func (x *execs) dir(session, id string) execDir {
	return execDir{filepath.Join(x.sessionDir(session), id), id}
}

func execPath(e Exec) string { return path.Join(sessionsPath, e.Session, "exec", e.ID) }

var (
	errCancelled = errors.New("cancelled")
	errTimeout   = errors.New("timeout")
	variable     = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// line converts the request into a command line for the guest's login shell.
func (r ExecRequest) line(s session.Session) (line string, timeout time.Duration, err error) {
	bad := func(hint, format string, args ...any) error {
		return fail.New(fail.Usage, format, args...).WithHint("%s", hint)
	}
	argv := r.Argv
	switch {
	case len(r.Argv) > 0 && r.Command != "":
		return "", 0, bad("send one of the two", "both argv and command are set")
	case r.Command != "":
		argv = []string{"sh", "-c", r.Command}
	case len(r.Argv) == 0 || r.Argv[0] == "":
		return "", 0, bad(`send argv, such as ["make", "test"], or command`, "no command was sent")
	}
	timeout = defaultExecTimeout
	if r.Timeout != "" {
		if timeout, err = time.ParseDuration(r.Timeout); err != nil || timeout <= 0 || timeout > maxExecTimeout {
			return "", 0, bad("write it like 90s or 1h30m, at most 24h", "the timeout is invalid")
		}
	}
	if len(r.Env) > maxExecEnv {
		return "", 0, bad("send fewer", "too many environment variables: %d, the limit is %d", len(r.Env), maxExecEnv)
	}
	var b strings.Builder
	cd := func(dir string) { fmt.Fprintf(&b, "cd %s && ", ssh.Quote(dir)) }
	if s.Status.Dir != "" {
		cd(s.Status.Dir)
	}
	if strings.HasPrefix(r.Cwd, "/") {
		cd(s.Status.Root + r.Cwd)
	} else if r.Cwd != "" {
		cd("./" + r.Cwd)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Env)) {
		if !variable.MatchString(name) {
			return "", 0, bad("use letters, digits and _", "%q is not a valid name of an environment variable", short(name))
		}
		fmt.Fprintf(&b, "export %s=%s && ", name, ssh.Quote(r.Env[name]))
	}
	b.WriteString("exec " + ssh.Quote(argv...))
	if line = b.String(); strings.Contains(line, "\x00") {
		return "", 0, bad("leave it out", "the command contains a NUL byte")
	}
	return line, timeout, nil
}

// start starts a command, and returns once the request is recorded.
func (x *execs) start(ctx context.Context, s session.Session, r ExecRequest, once *task.Once, req *request) (e Exec, err error) {
	if once != nil {
		first, found, err := x.store.Request(ctx, req.who.Name, once.Key)
		if err != nil {
			return Exec{}, err
		}
		if found {
			return x.repeated(s.ID, first, *once)
		}
	}
	line, timeout, err := r.line(s)
	if err != nil {
		return Exec{}, err
	}
	if s.Phase != session.Ready {
		return Exec{}, fail.New(fail.Conflict, "session %s is %s", s.ID, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	id := randomHex(6)
	if once != nil {
		first, err := x.store.Reserve(ctx, store.Request{Actor: req.who.Name, Key: once.Key, Digest: once.Digest, Subject: id, Notes: json.RawMessage("null")})
		if err != nil {
			return Exec{}, err
		}
		if first.Subject != id { // a concurrent repetition of the same request
			return x.repeated(s.ID, first, *once)
		}
	}
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // it outlives the request, but not this server
	if err := x.add(id, cancel); err != nil {
		cancel(nil)
		return Exec{}, err
	}
	rec := execRecord{Server: x.self, Exec: Exec{
		ID: id, Session: s.ID, State: ExecRunning, Argv: r.Argv, Command: r.Command, Cwd: r.Cwd, Env: slices.Sorted(maps.Keys(r.Env)),
		StartedAt: time.Now().UTC(), Actor: req.who.Name, TraceID: req.trace,
	}}
	stdout, stderr, err := x.prepare(ctx, &rec)
	if err != nil {
		x.remove(id)
		return Exec{}, err
	}
	if audited := x.tasks.Sessions.Audit; audited != nil {
		audited(ctx, audit.Record{
			Type: audit.ExecStarted, Actor: rec.Actor, Resource: "session:" + rec.Session, Outcome: audit.Success,
			Details: map[string]any{"exec": rec.ID, "argv": rec.Argv, "command": rec.Command},
		})
	}
	e = rec.Exec
	go x.run(runCtx, s, rec, line, timeout, stdout, stderr)
	return e, nil
}

// repeated returns the current state of the command that an earlier request with
// the same key has started. If there is no record of the command, it may or may not
// have been started, so repeated does not start another one.
func (x *execs) repeated(session string, first store.Request, once task.Once) (Exec, error) {
	if err := once.Check(first); err != nil {
		return Exec{}, err
	}
	e, err := x.get(session, first.Subject)
	if fail.CodeOf(err) == fail.NotFound {
		return Exec{}, fail.New(fail.Conflict, "the command of this Idempotency-Key is not recorded yet").WithHint("try again, or use another Idempotency-Key")
	}
	return e, err
}

// add registers a running command, if the limit allows it.
func (x *execs) add(id string, cancel context.CancelCauseFunc) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	select {
	case <-x.closing:
		return fail.New(fail.Interrupted, "serve is shutting down").WithHint("try again")
	default:
	}
	if len(x.running) >= x.limits.Execs {
		return problem(http.StatusTooManyRequests, codeTooMany, "wait for one of them, or cancel it", "%d commands are already running", len(x.running)).with("Retry-After", "5")
	}
	x.running[id] = cancel
	x.group.Add(1)
	return nil
}

func (x *execs) remove(id string) {
	x.mu.Lock()
	x.running[id](nil)
	delete(x.running, id)
	x.mu.Unlock()
	x.group.Done()
}

// wait cancels all running commands and waits for their end.
func (x *execs) wait(ctx context.Context) {
	x.mu.Lock()
	for _, cancel := range x.running {
		cancel(errCancelled)
	}
	x.mu.Unlock()
	waitFor(ctx, &x.group)
}

// prepare creates the command's directory and announces the start.
func (x *execs) prepare(ctx context.Context, rec *execRecord) (stdout, stderr *os.File, err error) {
	x.prune(rec.Session)
	dir := x.dir(rec.Session, rec.ID)
	if err := os.MkdirAll(dir.dir, 0o700); err != nil {
		return nil, nil, fail.New(fail.Host, "create command directory: %w", err)
	}
	create := func(name string) (*os.File, error) {
		f, err := os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, fail.New(fail.Host, "create command log: %w", err)
		}
		return f, nil
	}
	if stdout, err = create(dir.stdout()); err == nil {
		stderr, err = create(dir.stderr())
	}
	if err == nil {
		err = x.announce(ctx, rec)
	}
	if err == nil {
		err = x.write(*rec)
	}
	if err != nil {
		_, _ = stdout.Close(), stderr.Close() // nothing was written; Close on a nil file only returns an error
		return nil, nil, errors.Join(err, os.RemoveAll(dir.dir))
	}
	return stdout, stderr, nil
}

// announce appends an event to the session, and records its position as LastEvent.
func (x *execs) announce(ctx context.Context, rec *execRecord) error {
	ev := store.NewEvent(EventExec, ExecChange{Exec: rec.ID, State: rec.State, ExitCode: rec.ExitCode, Signal: rec.Signal, Actor: rec.Actor, TraceID: rec.TraceID})
	if err := x.store.Append(ctx, rec.Session, ev); err != nil {
		return err
	}
	_, newest, err := x.store.EventRange(ctx, rec.Session)
	rec.LastEvent = anchor(rec.Session, newest)
	return err
}

func (x *execs) write(rec execRecord) error {
	text, err := json.MarshalIndent(rec, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(x.dir(rec.Session, rec.ID).file(".json"), append(text, '\n'), 0o600)
}

// run runs the command to its end and records the result.
func (x *execs) run(ctx context.Context, s session.Session, rec execRecord, line string, timeout time.Duration, stdout, stderr *os.File) {
	defer x.remove(rec.ID)
	out := &cut{w: stdout, left: x.limits.ExecBytes}
	errOut := &cut{w: stderr, left: x.limits.ExecBytes}
	limited, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	err := x.inGuest(limited, s, line, out, errOut)
	cause := context.Cause(limited)
	cancel()
	err = errors.Join(err, out.failed, errOut.failed) // a failed log write is not the command's error
	closed := errors.Join(stdout.Close(), stderr.Close())

	ended := time.Now().UTC()
	rec.EndedAt = &ended
	rec.Stdout, rec.Stderr = ExecOutput{out.written, out.over}, ExecOutput{errOut.written, errOut.over}
	exit, exited := errors.AsType[*ssh.ExitError](err)
	switch {
	case errors.Is(cause, errTimeout) && err != nil:
		rec.State = ExecTimeout
	case errors.Is(cause, errCancelled) && err != nil:
		rec.State = ExecCancelled
	case errors.Join(out.failed, errOut.failed, closed) != nil:
		rec.State, rec.Error = ExecFailed, &task.ViewError{Code: fail.Host.String(), Message: "its output could not be written", Hint: "df -h"}
	case err == nil:
		zero := 0
		rec.State, rec.ExitCode = ExecExited, &zero
	case exited && exit.Signal != "":
		rec.State, rec.Signal = ExecExited, exit.Signal
	case exited:
		rec.State, rec.ExitCode = ExecExited, &exit.Code
	default:
		rec.State, rec.Error = ExecFailed, &task.ViewError{Code: fail.CodeOf(err).String(), Message: bounded(err.Error()), Hint: fail.HintOf(err)}
	}
	// Record the end even if the request or the server has ended.
	keep, cancelKeep := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancelKeep()
	if err := errors.Join(x.announce(keep, &rec), x.write(rec)); err != nil {
		x.log.ErrorContext(ctx, "failed to record end of command", "session", rec.Session, "exec", rec.ID, "error", err)
	}
	x.metrics.command(rec.Exec)
	x.log.InfoContext(ctx, "command ended", "session", rec.Session, "exec", rec.ID, "state", rec.State, "actor", rec.Actor)
}

// inGuest runs a command line. It masks the guest's secrets in the output, as in
// the logs of tasks, because clients with the scope read can see it.
func (x *execs) inGuest(ctx context.Context, s session.Session, line string, stdout, stderr io.Writer) error {
	conn, err := x.tasks.Sessions.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	values, err := s.Guest(conn).Secrets(ctx)
	if err != nil {
		return err
	}
	redact := secret.NewRedactor(values...)
	out, errOut := redact.Mask(stdout), redact.Mask(stderr)
	err = conn.Run(ctx, line, ssh.IO{Stdout: out, Stderr: errOut})
	return errors.Join(err, out.Close(), errOut.Close())
}

// recordLost ends every command of a server that was killed: it records the state,
// and appends the event that followers of the session wait for. It must be called
// before this server starts any command.
func (x *execs) recordLost(ctx context.Context) error {
	files, err := filepath.Glob(filepath.Join(x.sessionDir("*"), "*", "*.json"))
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		id := strings.TrimSuffix(filepath.Base(file), ".json")
		rec, err := x.read(filepath.Base(filepath.Dir(filepath.Dir(filepath.Dir(file)))), id)
		if err != nil || rec.State != ExecRunning || rec.Server == x.self {
			continue // reading it through the API reports the error
		}
		ended := time.Now().UTC()
		rec.State, rec.EndedAt = ExecLost, &ended
		dir := x.dir(rec.Session, rec.ID)
		rec.Stdout.Bytes, rec.Stderr.Bytes = length(dir.stdout()), length(dir.stderr())
		errs = append(errs, errors.Join(x.announce(ctx, &rec), x.write(rec)))
	}
	return errors.Join(errs...)
}

// cut keeps the first bytes and discards the rest, so that the command can
// continue.
type cut struct {
	w       io.Writer
	left    int64
	written int64
	over    bool
	failed  error
}

func (c *cut) Write(p []byte) (int, error) {
	keep := p[:min(int64(len(p)), c.left)]
	c.over = c.over || len(keep) < len(p)
	if c.failed == nil && len(keep) > 0 {
		n, err := c.w.Write(keep)
		c.left, c.written, c.failed = c.left-int64(n), c.written+int64(n), err
	}
	return len(p), nil
}

// get reads a command. A running command of another server process is lost, because
// only one server runs at a time.
func (x *execs) get(session, id string) (Exec, error) {
	rec, err := x.read(session, id)
	if err != nil {
		return Exec{}, err
	}
	if rec.State == ExecRunning {
		x.mu.Lock()
		_, ours := x.running[id]
		x.mu.Unlock()
		dir := x.dir(session, id)
		rec.Stdout.Bytes, rec.Stderr.Bytes = length(dir.stdout()), length(dir.stderr())
		if !ours {
			// The command may have ended between the two checks.
			if again, err := x.read(session, id); err != nil || again.State != ExecRunning {
				return again.Exec, err
			}
			rec.State = ExecLost
		}
	}
	return rec.Exec, nil
}

func (x *execs) read(session, id string) (rec execRecord, err error) {
	if !isID(session) || !isID(id) {
		return rec, noSuch("session", session)
	}
	text, err := os.ReadFile(x.dir(session, id).file(".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return rec, fail.New(fail.NotFound, "session %s has no command %s", session, id).WithHint("POST %s/%s/exec starts one", sessionsPath, session)
	}
	if err != nil {
		return rec, err
	}
	return rec, json.Unmarshal(text, &rec)
}

func length(name string) int64 {
	st, err := os.Stat(name)
	if err != nil {
		return 0
	}
	return st.Size()
}

// cancel ends a running command. It does not change one that has ended.
func (x *execs) cancel(session, id string) (Exec, error) {
	e, err := x.get(session, id)
	if err != nil || e.State != ExecRunning {
		return e, err
	}
	x.mu.Lock()
	if cancel := x.running[id]; cancel != nil {
		cancel(errCancelled)
	}
	x.mu.Unlock()
	return e, nil
}

// prune removes a session's oldest ended commands when there are too many.
func (x *execs) prune(session string) {
	entries, err := os.ReadDir(x.sessionDir(session))
	if err != nil || len(entries) < maxExecs {
		return
	}
	var ended []Exec
	for _, e := range entries {
		if got, err := x.get(session, e.Name()); err == nil && got.State != ExecRunning {
			ended = append(ended, got)
		}
	}
	slices.SortFunc(ended, func(a, b Exec) int { return a.StartedAt.Compare(b.StartedAt) })
	for _, e := range ended[:min(len(ended), len(entries)-maxExecs+1)] {
		if err := os.RemoveAll(x.dir(session, e.ID).dir); err != nil {
			x.log.Warn("failed to remove old command", "session", session, "exec", e.ID, "error", err)
		}
	}
}
