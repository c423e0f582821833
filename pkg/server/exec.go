package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// execRecord is the form in which an ops.Exec is stored in its file.
type execRecord struct {
	ops.Exec
	Server string `json:"server"` // the server process that runs it
}

// EventExec is the kind of a session's events about commands; their data is
// ExecChange.
const EventExec = "exec"

// ExecChange reports that a command was started or has ended.
type ExecChange struct {
	Exec     string        `json:"exec"`
	State    ops.ExecState `json:"state"`
	ExitCode *int          `json:"exit_code,omitempty"`
	Signal   string        `json:"signal,omitempty"`
	Actor    string        `json:"actor"`
	TraceID  string        `json:"trace_id"`
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
	server *Server
	self   string // unique id of this server process

	mu      sync.Mutex
	running map[string]context.CancelCauseFunc // by the command's id
	group   sync.WaitGroup
}

func newExecs(s *Server, self string) *execs {
	return &execs{server: s, self: self, running: map[string]context.CancelCauseFunc{}}
}

type execDir struct{ dir, id string }

func (d execDir) file(suffix string) string { return filepath.Join(d.dir, d.id+suffix) }
func (d execDir) stdout() string            { return d.file(".stdout.log") }
func (d execDir) stderr() string            { return d.file(".stderr.log") }

func (x *execs) sessionDir(session string) string {
	return filepath.Join(x.server.tasks.Sessions.Config.Paths.SessionDir(session), "exec")
}

func (x *execs) dir(session, id string) execDir {
	return execDir{filepath.Join(x.sessionDir(session), id), id}
}

var (
	errCancelled = errors.New("cancelled")
	errTimeout   = errors.New("timeout")
	variable     = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// execLine converts the request into a command line for the guest's login shell.
func execLine(r ops.ExecRequest, s session.Session) (line string, timeout time.Duration, err error) {
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

// Start starts a command, and returns once the request is recorded.
func (x *execs) Start(ctx context.Context, c ops.Caller, s session.Session, r ops.ExecRequest, once *task.Once) (e ops.Exec, err error) {
	if once != nil {
		first, found, err := x.server.store.Request(ctx, c.Name, once.Key)
		if err != nil {
			return ops.Exec{}, err
		}
		if found {
			return x.repeated(s.ID, first, *once)
		}
	}
	line, timeout, err := execLine(r, s)
	if err != nil {
		return ops.Exec{}, err
	}
	if s.Phase != session.Ready {
		return ops.Exec{}, fail.New(fail.Conflict, "session %s is %s", s.ID, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	id := ids.New()
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx)) // it outlives the request, but not this server
	if err := x.add(id, cancel); err != nil {
		cancel(nil)
		return ops.Exec{}, err
	}
	if once != nil {
		var first store.Request
		request := store.Request{Actor: c.Name, Key: once.Key, Digest: once.Digest, Subject: id, Notes: json.RawMessage("null")}
		if first, err = x.server.store.Reserve(ctx, request); err != nil {
			x.remove(id)
			return ops.Exec{}, err
		}
		if first.Subject != id { // a concurrent repetition of the same request
			x.remove(id)
			return x.repeated(s.ID, first, *once)
		}
		defer func() {
			if err != nil { // the command did not start, so a repetition may start it
				err = errors.Join(err, x.server.store.Release(context.WithoutCancel(ctx), request))
			}
		}()
	}
	rec := execRecord{Server: x.self, Exec: ops.Exec{
		ID: id, Session: s.ID, State: ops.ExecRunning, Argv: r.Argv, Command: r.Command, Cwd: r.Cwd, Env: slices.Sorted(maps.Keys(r.Env)),
		StartedAt: time.Now().UTC(), Actor: c.Name, TraceID: traceid.ID(ctx),
	}}
	stdout, stderr, err := x.prepare(ctx, &rec)
	if err != nil {
		x.remove(id)
		return ops.Exec{}, err
	}
	if audited := x.server.tasks.Sessions.Audit; audited != nil {
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
func (x *execs) repeated(session string, first store.Request, once task.Once) (ops.Exec, error) {
	if err := once.Check(first); err != nil {
		return ops.Exec{}, err
	}
	e, err := x.Get(session, first.Subject)
	if fail.CodeOf(err) == fail.NotFound {
		return ops.Exec{}, fail.New(fail.Conflict, "the command of this Idempotency-Key is not recorded yet").WithHint("try again, or use another Idempotency-Key")
	}
	return e, err
}

// add registers a running command, if the limit allows it.
func (x *execs) add(id string, cancel context.CancelCauseFunc) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	select {
	case <-x.server.closing:
		return fail.New(fail.Interrupted, "serve is shutting down").WithHint("try again")
	default:
	}
	if len(x.running) >= x.server.limits.Execs {
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
	if err := x.server.store.Append(ctx, rec.Session, ev); err != nil {
		return err
	}
	_, newest, err := x.server.store.EventRange(ctx, rec.Session)
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
	logs := [2]logWriter{{File: stdout}, {File: stderr}}
	out := pipe.Writer{W: &logs[0], Left: x.server.limits.ExecBytes, Cut: true}
	errOut := pipe.Writer{W: &logs[1], Left: x.server.limits.ExecBytes, Cut: true}
	limited, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	err := session.Connections{Paths: x.server.tasks.Sessions.Config.Paths}.RunMasked(limited, s, line, &out, &errOut)
	cause := context.Cause(limited)
	cancel()
	err = errors.Join(err, logs[0].failed, logs[1].failed) // a failed log write is not the command's error
	closed := errors.Join(stdout.Close(), stderr.Close())

	ended := time.Now().UTC()
	rec.EndedAt = &ended
	rec.Stdout, rec.Stderr = ops.ExecOutput{Bytes: length(stdout.Name()), Truncated: out.Over}, ops.ExecOutput{Bytes: length(stderr.Name()), Truncated: errOut.Over}
	exit, exited := errors.AsType[*ssh.ExitError](err)
	switch {
	case errors.Is(cause, errTimeout) && err != nil:
		rec.State = ops.ExecTimeout
	case errors.Is(cause, errCancelled) && err != nil:
		rec.State = ops.ExecCancelled
	case errors.Join(logs[0].failed, logs[1].failed, closed) != nil:
		rec.State, rec.Error = ops.ExecFailed, &lifecycle.ViewError{Code: fail.Host.String(), Message: "its output could not be written", Hint: "df -h"}
	case err == nil:
		zero := 0
		rec.State, rec.ExitCode = ops.ExecExited, &zero
	case exited && exit.Signal != "":
		rec.State, rec.Signal = ops.ExecExited, exit.Signal
	case exited:
		rec.State, rec.ExitCode = ops.ExecExited, &exit.Code
	default:
		rec.State, rec.Error = ops.ExecFailed, &lifecycle.ViewError{Code: fail.CodeOf(err).String(), Message: bounded(err.Error()), Hint: fail.HintOf(err)}
	}
	// Record the end even if the request or the server has ended.
	keep, cancelKeep := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancelKeep()
	if err := errors.Join(x.announce(keep, &rec), x.write(rec)); err != nil {
		x.server.log.ErrorContext(ctx, "failed to record end of command", "session", rec.Session, "exec", rec.ID, "error", err)
	}
	x.server.metrics.command(rec.Exec)
	x.server.log.InfoContext(ctx, "command ended", "session", rec.Session, "exec", rec.ID, "state", rec.State, "actor", rec.Actor)
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
		if err != nil || rec.State != ops.ExecRunning || rec.Server == x.self {
			continue // reading it through the API reports the error
		}
		ended := time.Now().UTC()
		rec.State, rec.EndedAt = ops.ExecLost, &ended
		dir := x.dir(rec.Session, rec.ID)
		rec.Stdout.Bytes, rec.Stderr.Bytes = length(dir.stdout()), length(dir.stderr())
		errs = append(errs, errors.Join(x.announce(ctx, &rec), x.write(rec)))
	}
	return errors.Join(errs...)
}

// logWriter writes a command's log. It remembers an error instead of returning it, so that the
// command can continue.
type logWriter struct {
	*os.File
	failed error
}

func (l *logWriter) Write(p []byte) (int, error) {
	if l.failed == nil {
		_, l.failed = l.File.Write(p)
	}
	return len(p), nil
}

// Get reads a command. A running command of another server process is lost, because
// only one server runs at a time.
func (x *execs) Get(session, id string) (ops.Exec, error) {
	rec, err := x.read(session, id)
	if err != nil {
		return ops.Exec{}, err
	}
	if rec.State == ops.ExecRunning {
		x.mu.Lock()
		_, ours := x.running[id]
		x.mu.Unlock()
		dir := x.dir(session, id)
		rec.Stdout.Bytes, rec.Stderr.Bytes = length(dir.stdout()), length(dir.stderr())
		if !ours {
			// The command may have ended between the two checks.
			if again, err := x.read(session, id); err != nil || again.State != ops.ExecRunning {
				return again.Exec, err
			}
			rec.State = ops.ExecLost
		}
	}
	return rec.Exec, nil
}

func (x *execs) read(session, id string) (rec execRecord, err error) {
	if !ids.Valid(session) || !ids.Valid(id) {
		return rec, ops.NoSuch("session", session)
	}
	text, err := os.ReadFile(x.dir(session, id).file(".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return rec, fail.New(fail.NotFound, "session %s has no command %s", session, id).WithHint("POST %s/%s/exec starts one", ops.SessionsPath, session)
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

// Cancel ends a running command. It does not change one that has ended.
func (x *execs) Cancel(session, id string) (ops.Exec, error) {
	e, err := x.Get(session, id)
	if err != nil || e.State != ops.ExecRunning {
		return e, err
	}
	x.mu.Lock()
	if cancel := x.running[id]; cancel != nil {
		cancel(errCancelled)
	}
	x.mu.Unlock()
	return e, nil
}

// List returns a session's commands, the newest first. It leaves out those whose record
// cannot be read, which Get reports.
func (x *execs) List(session string) (all []ops.Exec, err error) {
	entries, err := os.ReadDir(x.sessionDir(session))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if got, err := x.Get(session, e.Name()); err == nil {
			all = append(all, got)
		}
	}
	slices.SortFunc(all, func(a, b ops.Exec) int { return b.StartedAt.Compare(a.StartedAt) })
	return all, err
}

// prune removes a session's oldest ended commands when there are too many.
func (x *execs) prune(session string) {
	all, err := x.List(session)
	if err != nil || len(all) < maxExecs {
		return
	}
	ended := slices.DeleteFunc(slices.Clone(all), func(e ops.Exec) bool { return e.State == ops.ExecRunning })
	slices.Reverse(ended)
	for _, e := range ended[:min(len(ended), len(all)-maxExecs+1)] {
		if err := os.RemoveAll(x.dir(session, e.ID).dir); err != nil {
			x.server.log.Warn("failed to remove old command", "session", session, "exec", e.ID, "error", err)
		}
	}
}
