package taskrun

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const (
	loginShellTime = 2 * time.Minute  // for a login shell to print its environment
	stragglerTime  = 30 * time.Second // for the agent's leftover processes to end after KILL
	spareBytes     = 64 << 10

	// Exit codes as shells define them.
	codeNotStarted = 126
	codeNotFound   = 127
	codeSignal     = 128
)

// wrapper is the process that runs the agent of an attempt, in the agent's unit.
type wrapper struct {
	attempt Attempt
	agent   agentProcesses
}

// Run runs the agent to its end and records the result. It alone ensures that an
// agent is never started twice.
func (t Attempt) Run(ctx context.Context) error {
	release, err := t.lock()
	if err != nil {
		return err
	}
	defer release()
	w := wrapper{attempt: t, agent: agentProcesses{attempt: t, wrapper: os.Getpid()}}
	switch _, err := os.Lstat(t.path(taskBegun)); {
	case err == nil:
		return fail.New(fail.Conflict, "task %s was already started", t.name)
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	text, err := os.ReadFile(t.path(taskSpec))
	if err != nil {
		return err
	}
	spec, err := guestproto.DecodeTaskStart(bytes.NewReader(text))
	if err != nil {
		return err
	}
	if err := w.reserve(); err != nil {
		return err
	}
	if err := t.writeForGood(taskBegun, bootOf()); err != nil {
		return err
	}
	r := w.execute(ctx, spec)
	if ctx.Err() != nil && t.requestedSignal() == 0 {
		// systemd stops all units when the machine shuts down, however far the
		// agent is. The agent did not end on its own, so leave no result: the host
		// may start another attempt.
		return errors.New("the machine is shutting down; the agent's exit is not a result")
	}
	return w.finish(r)
}

// reserve reserves disk space for the result, because the agent may fill the disk.
func (w wrapper) reserve() error {
	spare := make([]byte, spareBytes)
	if _, err := rand.Read(spare); err != nil { // a file system may store zeros without using space
		return err
	}
	return w.attempt.write(taskSpare, string(spare))
}

func (w wrapper) finish(r guestproto.TaskResult) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := w.attempt.writeForGood(taskResult, string(text)); err != nil {
		return errors.Join(os.Remove(w.attempt.path(taskSpare)), w.attempt.writeForGood(taskResult, string(text)))
	}
	return nil
}

// execute runs the agent. An agent that cannot be started has a result, too.
func (w wrapper) execute(ctx context.Context, spec guestproto.TaskStart) (r guestproto.TaskResult) {
	r.Started = time.Now().UTC()
	defer func() {
		r.Ended = time.Now().UTC()
		r.Stdout, r.Stderr = sizeOf(w.attempt.path(taskStdout)), sizeOf(w.attempt.path(taskStderr))
	}()
	refuse := func(code int, err error) guestproto.TaskResult {
		r.ExitCode, r.Error = code, sys.OneLine(err)
		if sig := w.attempt.requestedSignal(); sig != 0 { // the signal is the cause of whatever failed
			r.ExitCode, r.Signal = codeSignal+int(sig), signalName(sig)
		}
		return r
	}
	out, err := w.openOutput(taskStdout)
	if err != nil {
		return refuse(codeNotStarted, err)
	}
	defer out.Close()
	errs, err := w.openOutput(taskStderr)
	if err != nil {
		return refuse(codeNotStarted, err)
	}
	defer errs.Close()
	group, err := w.agent.makeGroup()
	if err != nil {
		return refuse(codeNotStarted, fmt.Errorf("create a process group: %w", err))
	}
	defer group.close()
	env, err := w.login(ctx, spec, group)
	if err != nil {
		return refuse(codeNotStarted, fmt.Errorf("run a login shell: %w", err))
	}
	program, err := findProgram(spec.Argv[0], spec.Dir, env)
	if err != nil {
		return refuse(codeNotFound, err)
	}
	// The command must survive ctx: systemd signals the agent as well, and leaves
	// it time to end.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program)
	cmd.Args, cmd.Dir, cmd.Env = spec.Argv, spec.Dir, env
	cmd.Stdout, cmd.Stderr = out, errs // files, so that Wait waits for the agent only
	cmd.SysProcAttr = group.attributes()
	if w.attempt.requestedSignal() != 0 {
		return refuse(codeNotStarted, errors.New("it was stopped before it started"))
	}
	if err := cmd.Start(); err != nil {
		return refuse(codeNotStarted, err)
	}
	errNote := w.attempt.write(taskAgent, strconv.Itoa(cmd.Process.Pid))
	if sig := w.attempt.requestedSignal(); sig != 0 { // the signal was recorded before the agent existed
		_ = syscall.Kill(-cmd.Process.Pid, sig) // an agent that has already ended is a success
	}
	err = cmd.Wait()
	if cmd.ProcessState == nil {
		return refuse(codeNotStarted, errors.Join(err, errNote))
	}
	accountFor(&r, cmd.ProcessState)
	// Leftover processes would write to the output files, and to the checkout while
	// it is collected.
	if err := w.agent.clear(); err != nil {
		r.Error = sys.OneLine(err)
	}
	// systemd signals this process before the agent, but the signal arrives through
	// a goroutine that may be slower than Wait.
	select {
	case <-ctx.Done():
	case <-time.After(100 * time.Millisecond):
	}
	return r
}

// accountFor records how a process ended and what resources it used.
func accountFor(r *guestproto.TaskResult, p *os.ProcessState) {
	r.ExitCode = p.ExitCode()
	if status, ok := p.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		r.ExitCode, r.Signal = codeSignal+int(status.Signal()), signalName(status.Signal())
	}
	r.User, r.System = p.UserTime().Milliseconds(), p.SystemTime().Milliseconds()
	if usage, ok := p.SysUsage().(*syscall.Rusage); ok {
		r.MaxRSS = usage.Maxrss
		if runtime.GOOS == "linux" {
			r.MaxRSS <<= 10
		}
	}
}

func signalName(s syscall.Signal) string {
	name := strings.TrimPrefix(unix.SignalName(s), "SIG")
	if name == "" { // a real-time signal
		name = "RT" + strconv.Itoa(int(s))
	}
	return name
}

// openOutput opens an output file for appending. It only grows, unless the agent
// truncates it.
func (w wrapper) openOutput(name string) (*os.File, error) {
	return os.OpenFile(w.attempt.path(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
}

// loginScript prints the environment after a marker line, because a shell's startup
// files may print, too. It sources the secrets itself in case the agent's dotfiles
// were changed and no longer do.
const loginScript = `if [ -r "$1" ]; then . "$1"; fi; printf '\n%s\n' "$2"; exec env -0`

// notInherited lists variables that the shell inherits from the unit, or sets for
// itself.
var notInherited = []string{
	"_", "SHLVL", "OLDPWD", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE",
	"SSH_CONNECTION", "SSH_CLIENT",
}

// login returns the agent's environment: that of its user's login shell with the
// session's secrets, plus the variables from spec and the task's own.
func (w wrapper) login(ctx context.Context, spec guestproto.TaskStart, group *taskGroup) ([]string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, loginShellTime, fmt.Errorf("it took longer than %v", loginShellTime))
	defer cancel()
	shell, option := loginShell(), "-lc"
	if w.attempt.guest.Fake { // a fake guest must not read the host's profile
		shell, option = "/bin/sh", "-c"
	}
	mark := ids.Hex(16)
	out, errs := pipe.Buffer{Limit: sys.MaxOutput}, pipe.Buffer{Limit: sys.MaxOutput}
	cmd := exec.CommandContext(ctx, shell, option, loginScript, "login", filepath.Join(w.attempt.guest.Path(sys.SecretDir), "env"), mark)
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.SysProcAttr = group.attributes()
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second // a background process may hold its output open
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		// Do not quote its output, which may contain a secret.
		return nil, err
	}
	_, text, ok := strings.Cut(out.String(), "\n"+mark+"\n")
	if !ok || len(out.String()) >= sys.MaxOutput {
		return nil, errors.New("its environment could not be parsed")
	}
	set := map[string]string{}
	for entry := range strings.SplitSeq(strings.TrimSuffix(text, "\x00"), "\x00") {
		if name, value, ok := strings.Cut(entry, "="); ok && !slices.Contains(notInherited, name) {
			set[name] = value
		}
	}
	for name, value := range spec.Env {
		set[name] = value
	}
	id, attempt, _ := strings.Cut(w.attempt.name, "/")
	set["PWD"], set["AGENT_TASK"], set["AGENT_TASK_ATTEMPT"] = spec.Dir, id, attempt
	if spec.Brief != "" {
		set["AGENT_TASK_BRIEF"] = w.attempt.path(taskBrief)
	}
	env := make([]string, 0, len(set))
	for name, value := range set {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env, nil
}

// loginShell returns the agent's login shell, as set by systemd, if the shell can
// run loginScript.
func loginShell() string {
	shell := os.Getenv("SHELL")
	if slices.Contains([]string{"sh", "bash", "dash", "ksh", "zsh"}, filepath.Base(shell)) && filepath.IsAbs(shell) {
		return shell
	}
	return "/bin/sh"
}

// findProgram looks a program up as a shell in dir would.
func findProgram(name, dir string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil // exec.Cmd resolves it relative to dir
	}
	var search string
	for _, entry := range env {
		if value, ok := strings.CutPrefix(entry, "PATH="); ok {
			search = value
		}
	}
	for _, place := range filepath.SplitList(search) {
		if !filepath.IsAbs(place) {
			place = filepath.Join(dir, place)
		}
		path := filepath.Join(place, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fail.New(fail.NotFound, "%s: command not found", guestproto.Clean(name))
}
