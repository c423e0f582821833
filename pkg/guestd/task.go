package guestd

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
	"github.com/agent-sessionizer/agent-sessionizer/pkg/wire"
)

// taskDir has a directory for each attempt at a task, of the agent's.
const taskDir = "/var/lib/agent-task"

// What is in the directory of an attempt. Of all files but begun and result the
// end may be missing after a power cut.
const (
	taskSpec   = "start.json" // what to run
	taskBrief  = "TASK.md"    // what the agent is told, if that is asked for
	taskLock   = "lock"       // held by what runs the agent, for as long as it does
	taskBegun  = "begun"      // since then the agent may have run: it is never started again
	taskSignal = "signal"     // the strongest signal that was sent
	taskAgent  = "agent"      // the agent's process
	taskStdout = "stdout.log" // what it prints
	taskStderr = "stderr.log"
	taskResult = "result.json" // how it ended
	taskSpare  = "spare"       // room for the result on a full disk
	taskLog    = "run.log"     // of a fake guest's wrapper; a unit has the journal
	taskOut    = "out"         // collections of artifacts
)

// taskBegin bounds the wait for an agent to begin.
const taskBegin = 2 * time.Minute

// task is one attempt at a task. Whatever is done to it is done as the agent's
// user, who can change all that is in its directory: nothing here is to be
// believed by a host.
type task struct {
	guest Guest
	name  string // wire.TaskName
	dir   string

	wrapper int // our own process where it holds the lock, and cannot ask for the holder
}

// Task runs one of the commands about tasks.
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
		return fail.New(fail.Usage, "task %s: %w\n%s", wire.Clean(verb), err, usage)
	}
	want := 1
	if verb == "signal" {
		want = 2
	}
	if flags.NArg() != want {
		return fail.New(fail.Usage, "task %s: takes %d arguments\n%s", wire.Clean(verb), want, usage)
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
	return fail.New(fail.Usage, "task: it is start, run, status, watch, signal, artifacts or send\n%s", usage)
}

func (g Guest) task(name string) (task, error) {
	if err := wire.CheckTaskName(name); err != nil {
		return task{}, fail.New(fail.Usage, "%w", err)
	}
	if !g.Fake && os.Geteuid() == 0 {
		return task{}, fail.New(fail.Usage, "tasks are the agent's own; run it without sudo")
	}
	return task{guest: g, name: name, dir: filepath.Join(g.path(taskDir), filepath.FromSlash(name))}, nil
}

func (t task) path(name string) string { return filepath.Join(t.dir, name) }

// unit is what systemd runs.
func (t task) unit() string { return "agent-task-" + strings.ReplaceAll(t.name, "/", "-") + ".service" }

func (t task) id() string { return filepath.Dir(filepath.FromSlash(t.name)) }

// state says how it stands, and how it ended if it did.
func (t task) state() (wire.TaskState, *wire.TaskResult) {
	if r := t.result(); r != nil {
		return wire.TaskExited, r
	}
	begun, err := os.ReadFile(t.path(taskBegun))
	if err != nil {
		return wire.TaskNone, nil
	}
	if string(begun) == bootOf() && t.holder() != 0 {
		return wire.TaskRunning, nil
	}
	// It may have ended since we looked.
	if r := t.result(); r != nil {
		return wire.TaskExited, r
	}
	return wire.TaskLost, nil
}

// status is the state with all that is known.
func (t task) status() wire.TaskStatus {
	s := wire.TaskStatus{Time: time.Now().UTC(), Stdout: sizeOf(t.path(taskStdout)), Stderr: sizeOf(t.path(taskStderr))}
	s.State, s.Result = t.state()
	if s.State == wire.TaskRunning {
		s.CPU, s.Memory = t.usage()
	}
	return s
}

func (t task) result() *wire.TaskResult {
	text, err := os.ReadFile(t.path(taskResult))
	if err != nil {
		return nil
	}
	r, err := wire.DecodeTaskResult(bytes.NewReader(text))
	if err != nil {
		return nil
	}
	return &r
}

// bootOf tells this run of the machine from those before it.
func bootOf() string { return readBounded("/proc/sys/kernel/random/boot_id") }

func sizeOf(path string) int64 {
	info, err := os.Lstat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// holder is the process that runs the agent, 0 when there is none. Asking
// disturbs nobody, which is why this is a lock of POSIX.
func (t task) holder() int {
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

// hold takes the lock until release is called. Nothing else in the process may
// open the file: closing it would release the lock, too.
func (t task) hold() (release func(), err error) {
	f, err := os.OpenFile(t.path(taskLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return nil, errors.Join(fail.New(fail.Conflict, "another process runs task %s: %w", t.name, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // nothing was written that could be lost
}

// start has the agent run, once and for all: one that runs, or ran, is not
// started again. It prints the state.
func (t task) start(ctx context.Context, in io.Reader, out io.Writer) error {
	spec, err := wire.DecodeTaskStart(in)
	if err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	if err := t.makeDir(ctx); err != nil {
		return fmt.Errorf("make the task's directory: %w", err)
	}
	// Of two who start, the second finds what the first did.
	unlock, err := waitLock(ctx, t.path("start.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if state, _ := t.state(); state == wire.TaskNone {
		if err := t.launch(ctx, spec); err != nil {
			return fmt.Errorf("start the agent: %w", err)
		}
	}
	return t.status().Encode(out)
}

// makeDir makes the attempt's directory. That of all tasks is in a directory of
// root's, so root makes it.
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

// waitLock waits for a lock that ends with the process.
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
			return func() { _ = f.Close() }, nil // nothing was written that could be lost
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

// launch starts what runs the agent, and waits until that has begun.
func (t task) launch(ctx context.Context, spec wire.TaskStart) error {
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
	ctx, cancel := context.WithTimeoutCause(ctx, taskBegin, errors.New("it did not begin in time"))
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		over := ended()
		if state, _ := t.state(); state != wire.TaskNone {
			return nil
		}
		if over {
			return fail.New(fail.Failure, "it ended before it began").WithHint("journalctl -u %s", t.unit())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// startUnit has systemd run it, so that it outlives the connection that asked
// for it, and ends with all its children. A unit that runs is left alone: it is
// about to begin.
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

// taskProperties are the unit's, as options of systemd-run. Delegate lets the
// agent's processes have a control group of their own below the wrapper's.
func taskProperties() []string {
	var options []string
	for _, p := range []string{
		"Type=exec", "Restart=no", "KillMode=control-group", "Delegate=yes", "CPUAccounting=yes", "MemoryAccounting=yes",
		"OOMPolicy=continue", // a child that takes too much memory is the agent's to see
		"TasksMax=infinity", "IgnoreSIGPIPE=no", "StandardInput=null", "WorkingDirectory=/",
	} {
		options = append(options, "--property="+p)
	}
	return options
}

// startProcess starts it in a fake guest, which has no systemd.
func (t task) startProcess(ctx context.Context) (ended func() bool, err error) {
	if t.holder() != 0 {
		return func() bool { return t.holder() == 0 }, nil
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
	// It outlives this command, as a unit does.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), self, "task", "run", t.name)
	cmd.Dir = t.dir
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+t.guest.Root)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	gone := make(chan struct{})
	go func() { // ends with the process that it waits for, or with ours
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

// signal sends TERM or KILL to the agent and to all that it started, and prints
// the state. One that is about to begin does not.
func (t task) signal(name string, out io.Writer) error {
	sig, known := map[string]syscall.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL}[name]
	if !known {
		return fail.New(fail.Usage, "task signal: TERM or KILL\n%s", usage)
	}
	_, errDir := os.Lstat(t.dir)
	if state, _ := t.state(); errDir == nil && state != wire.TaskExited {
		// Written first: an agent that is about to begin is not there to be
		// killed, and whoever starts it looks at this before and after.
		if t.wanted() != syscall.SIGKILL {
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

// wanted is the signal that was sent, 0 for none.
func (t task) wanted() syscall.Signal {
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

// writeForGood is write that a power cut does not undo.
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
