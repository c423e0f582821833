package guestagent

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// taskDir holds a directory, owned by the agent, for each attempt at a task.
const taskDir = "/var/lib/agent-task"

// Files in the directory of an attempt. After a power failure, the end of any file
// except begun and result may be missing.
const (
	taskSpec   = "start.json" // the command to run
	taskBrief  = "TASK.md"    // the agent's instructions, if the task has any
	taskLock   = "lock"       // held by the wrapper for as long as it runs the agent
	taskBegun  = "begun"      // exists once the agent may have run: it is never started again
	taskSignal = "signal"     // the strongest signal sent so far
	taskAgent  = "agent"      // the agent's process
	taskStdout = "stdout.log" // the agent's output
	taskStderr = "stderr.log"
	taskResult = "result.json" // the agent's exit
	taskSpare  = "spare"       // space reserved for the result on a full disk
	taskLog    = "run.log"     // log of a fake guest's wrapper; a unit uses the journal
	taskOut    = "out"         // collections of artifacts
)

// taskBegin bounds the wait for an agent to begin.
const taskBegin = 2 * time.Minute

// task is one attempt at a task. All its commands run as the agent's user, who can
// change everything in the directory. The host must not trust anything read from
// it.
type task struct {
	guest Guest
	name  string // as defined by guestproto.TaskName
	dir   string

	wrapper int // this process if it holds the lock, because it cannot query its own lock
}

// Task runs one of the task commands.
func (g Guest) Task(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	verb := ""
	if len(args) > 0 {
		verb, args = args[0], args[1:]
	}
	flags := flag.NewFlagSet("task", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	var from taskOffsets
	if verb == "watch" {
		flags.Int64Var(&from.stdout, "stdout", 0, "")
		flags.Int64Var(&from.stderr, "stderr", 0, "")
		flags.Int64Var(&from.most, "max", 0, "")
	}
	if err := flags.Parse(args); err != nil {
		return fail.New(fail.Usage, "task %s: %w\n%s", guestproto.Clean(verb), err, usage)
	}
	want := 1
	if verb == "signal" {
		want = 2
	}
	if flags.NArg() != want {
		return fail.New(fail.Usage, "task %s: takes %d arguments\n%s", guestproto.Clean(verb), want, usage)
	}
	t, err := g.task(flags.Arg(0))
	if err != nil {
		return err
	}
	switch verb {
	case "start":
		return t.start(ctx, in, out)
	case "run":
		frugal()
		return t.run(ctx)
	case "status":
		return t.status().Encode(out)
	case "watch":
		frugal()
		return t.watch(ctx, from, in, out)
	case "signal":
		return t.signal(flags.Arg(1), out)
	case "artifacts":
		return t.collect(ctx, in, out)
	case "send":
		return t.send(ctx, in, out)
	}
	return fail.New(fail.Usage, "task: verb must be start, run, status, watch, signal, artifacts or send\n%s", usage)
}

func (g Guest) task(name string) (task, error) {
	if err := guestproto.CheckTaskName(name); err != nil {
		return task{}, fail.New(fail.Usage, "%w", err)
	}
	if !g.Fake && os.Geteuid() == 0 {
		return task{}, fail.New(fail.Usage, "tasks run as the agent's user; run the command without sudo")
	}
	return task{guest: g, name: name, dir: filepath.Join(g.path(taskDir), filepath.FromSlash(name))}, nil
}

func (t task) path(name string) string { return filepath.Join(t.dir, name) }

// unit returns the name of the attempt's systemd unit.
func (t task) unit() string { return "agent-task-" + strings.ReplaceAll(t.name, "/", "-") + ".service" }

func (t task) id() string { return filepath.Dir(filepath.FromSlash(t.name)) }

// state returns the attempt's state, and its result if it has ended.
func (t task) state() (guestproto.TaskState, *guestproto.TaskResult) {
	if r := t.result(); r != nil {
		return guestproto.TaskExited, r
	}
	begun, err := os.ReadFile(t.path(taskBegun))
	if err != nil {
		return guestproto.TaskNone, nil
	}
	if string(begun) == bootOf() && t.lockHolder() != 0 {
		return guestproto.TaskRunning, nil
	}
	// The agent may have ended since the first check.
	if r := t.result(); r != nil {
		return guestproto.TaskExited, r
	}
	return guestproto.TaskLost, nil
}

// status returns the state, sizes and resource usage.
func (t task) status() guestproto.TaskStatus {
	s := guestproto.TaskStatus{Time: time.Now().UTC(), Stdout: sizeOf(t.path(taskStdout)), Stderr: sizeOf(t.path(taskStderr))}
	s.State, s.Result = t.state()
	if s.State == guestproto.TaskRunning {
		s.CPU, s.Memory = t.usage()
	}
	return s
}

func (t task) result() *guestproto.TaskResult {
	text, err := os.ReadFile(t.path(taskResult))
	if err != nil {
		return nil
	}
	r, err := guestproto.DecodeTaskResult(bytes.NewReader(text))
	if err != nil {
		return nil
	}
	return &r
}

// bootOf returns the boot id, which distinguishes this boot from earlier ones.
func bootOf() string { return readBounded("/proc/sys/kernel/random/boot_id") }

func sizeOf(path string) int64 {
	info, err := os.Lstat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// lockHolder returns the process that runs the agent, or 0. It uses a POSIX lock
// because testing one does not interfere with other processes.
func (t task) lockHolder() int {
	f, err := os.Open(t.path(taskLock))
	if err != nil {
		return 0
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_RDLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l); err != nil || l.Type == unix.F_UNLCK {
		return 0
	}
	return int(l.Pid)
}

// lock takes the lock until release is called. Nothing else in the process may open
// the file, because closing it would release the lock.
func (t task) lock() (release func(), err error) {
	f, err := os.OpenFile(t.path(taskLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return nil, errors.Join(fail.New(fail.Conflict, "another process is running task %s: %w", t.name, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // no written data can be lost
}

// start runs the agent at most once: an attempt that runs or has run is not started
// again. It prints the state.
func (t task) start(ctx context.Context, in io.Reader, out io.Writer) error {
	spec, err := guestproto.DecodeTaskStart(in)
	if err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	if err := t.makeDir(ctx); err != nil {
		return fmt.Errorf("create the task's directory: %w", err)
	}
	// If two processes start the attempt, the second finds the first one's state.
	unlock, err := waitLock(ctx, t.path("start.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if state, _ := t.state(); state == guestproto.TaskNone {
		if err := t.launch(ctx, spec); err != nil {
			return fmt.Errorf("start the agent: %w", err)
		}
	}
	return t.status().Encode(out)
}

// makeDir creates the attempt's directory. It uses sudo to create the directory of
// all tasks, whose parent belongs to root.
func (t task) makeDir(ctx context.Context) error {
	top := t.guest.path(taskDir)
	if _, err := os.Lstat(top); errors.Is(err, fs.ErrNotExist) && !t.guest.Fake {
		uid, gid := strconv.Itoa(os.Getuid()), strconv.Itoa(os.Getgid())
		if _, err := run(ctx, "", "sudo", "-n", "install", "-d", "-m", "700", "-o", uid, "-g", gid, top); err != nil {
			return err
		}
	}
	return os.MkdirAll(t.dir, 0o700)
}

// waitLock waits for a lock that the kernel releases with the process.
func waitLock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil // no written data can be lost
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(err, f.Close())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), f.Close())
		}
	}
}

// launch starts the wrapper that runs the agent, and waits until the attempt has
// begun.
func (t task) launch(ctx context.Context, spec guestproto.TaskStart) error {
	var text bytes.Buffer
	if err := spec.Encode(&text); err != nil {
		return err
	}
	for name, content := range map[string]string{taskSpec: text.String(), taskBrief: spec.Brief} {
		if err := writeFile(t.path(name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	start := t.startUnit
	if t.guest.Fake {
		start = t.startProcess
	}
	ended, err := start(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, taskBegin, errors.New("it did not start in time"))
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		over := ended()
		if state, _ := t.state(); state != guestproto.TaskNone {
			return nil
		}
		if over {
			return fail.New(fail.Failure, "it ended before the agent started").WithHint("journalctl -u %s", t.unit())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// startUnit runs the wrapper in a systemd unit, so that it outlives the connection
// and ends with all its children. It leaves a running unit alone, because that
// attempt is about to begin.
func (t task) startUnit(ctx context.Context) (ended func() bool, err error) {
	ended = func() bool {
		state, err := run(ctx, "", "systemctl", "show", "--property=ActiveState", "--value", t.unit())
		state = strings.TrimSpace(state)
		return err == nil && (state == "inactive" || state == "failed")
	}
	if !ended() {
		return ended, nil
	}
	_, err = run(ctx, "", "sudo", append(append([]string{
		"-n", "systemd-run", "--quiet", "--collect", "--unit=" + t.unit(),
		"--description=Agent of task " + t.name,
		"--uid=" + strconv.Itoa(os.Getuid()), "--gid=" + strconv.Itoa(os.Getgid()),
	}, taskProperties()...), "--", Binary, "task", "run", t.name)...)
	return ended, err
}

// taskProperties returns the unit's properties as options of systemd-run. Delegate
// lets the agent's processes have their own control group below the wrapper's.
func taskProperties() []string {
	var options []string
	for _, p := range []string{
		"Type=exec", "Restart=no", "KillMode=control-group", "Delegate=yes", "CPUAccounting=yes", "MemoryAccounting=yes",
		"OOMPolicy=continue", // the agent handles a child that was killed for using too much memory
		"TasksMax=infinity", "IgnoreSIGPIPE=no", "StandardInput=null", "WorkingDirectory=/",
	} {
		options = append(options, "--property="+p)
	}
	return options
}

// startProcess starts the wrapper in a fake guest, which has no systemd.
func (t task) startProcess(ctx context.Context) (ended func() bool, err error) {
	if t.lockHolder() != 0 {
		return func() bool { return t.lockHolder() == 0 }, nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(t.path(taskLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// The wrapper outlives this command, as a unit does.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), self, "task", "run", t.name)
	cmd.Dir = t.dir
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+t.guest.Root)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	gone := make(chan struct{})
	go func() { // ends with the wrapper or with this process
		_ = cmd.Wait()
		close(gone)
	}()
	return func() bool {
		select {
		case <-gone:
			return true
		default:
			return false
		}
	}, nil
}

// signal sends TERM or KILL to all of the agent's processes, and prints the state.
// It also stops an attempt that is about to begin.
func (t task) signal(name string, out io.Writer) error {
	sig, known := map[string]syscall.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL}[name]
	if !known {
		return fail.New(fail.Usage, "task signal: signal must be TERM or KILL\n%s", usage)
	}
	_, errDir := os.Lstat(t.dir)
	if state, _ := t.state(); errDir == nil && state != guestproto.TaskExited {
		// Record the signal first. An agent that is about to begin cannot be killed
		// yet, so the wrapper checks this file before and after it starts the
		// agent.
		if t.requestedSignal() != syscall.SIGKILL {
			if err := t.write(taskSignal, name); err != nil {
				return err
			}
		}
		if err := t.kill(sig); err != nil {
			return fmt.Errorf("send %s to the agent: %w", name, err)
		}
	}
	return t.status().Encode(out)
}

// requestedSignal returns the signal that was requested, or 0.
func (t task) requestedSignal() syscall.Signal {
	switch name, _ := os.ReadFile(t.path(taskSignal)); string(name) {
	case "TERM":
		return syscall.SIGTERM
	case "KILL":
		return syscall.SIGKILL
	}
	return 0
}

func (t task) write(name, content string) error {
	return writeFile(t.path(name), []byte(content), 0o600)
}

// writeForGood writes a file so that a power failure does not undo it.
func (t task) writeForGood(name, content string) error {
	if err := t.write(name, content); err != nil {
		return err
	}
	dir, err := os.Open(t.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
