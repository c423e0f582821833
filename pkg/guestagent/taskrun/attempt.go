// Package taskrun runs an attempt of an unattended task: it starts the agent at most once,
// reports its output and state, and collects its results. It judges no outcome; the host does.
package taskrun

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
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

// Attempt is one attempt at a task. All its commands run as the agent's user, who can
// change everything in the directory. The host must not trust anything read from
// it.
type Attempt struct {
	guest sys.Guest
	name  string // as defined by guestproto.TaskName
	dir   string
}

// Open returns the attempt of a name such as ID/1.
func Open(g sys.Guest, name string) (Attempt, error) {
	if err := guestproto.CheckTaskName(name); err != nil {
		return Attempt{}, fail.New(fail.Usage, "%w", err)
	}
	if !g.Fake && os.Geteuid() == 0 {
		return Attempt{}, fail.New(fail.Usage, "tasks run as the agent's user; run the command without sudo")
	}
	return Attempt{guest: g, name: name, dir: filepath.Join(g.Path(taskDir), filepath.FromSlash(name))}, nil
}

// agent returns the attempt's processes, as another process than the wrapper sees them.
func (t Attempt) agent() agentProcesses { return agentProcesses{attempt: t} }

func (t Attempt) path(name string) string { return filepath.Join(t.dir, name) }

// unit returns the name of the attempt's systemd unit.
func (t Attempt) unit() string {
	return "agent-task-" + strings.ReplaceAll(t.name, "/", "-") + ".service"
}

func (t Attempt) id() string { return filepath.Dir(filepath.FromSlash(t.name)) }

// state returns the attempt's state, and its result if it has ended.
func (t Attempt) state() (guestproto.TaskState, *guestproto.TaskResult) {
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

// Status returns the state, sizes and resource usage.
func (t Attempt) Status() guestproto.TaskStatus {
	s := guestproto.TaskStatus{Time: time.Now().UTC(), Stdout: sizeOf(t.path(taskStdout)), Stderr: sizeOf(t.path(taskStderr))}
	s.State, s.Result = t.state()
	if s.State == guestproto.TaskRunning {
		s.CPU, s.Memory = t.agent().usage()
	}
	return s
}

func (t Attempt) result() *guestproto.TaskResult {
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
func bootOf() string { return sys.Text("/proc/sys/kernel/random/boot_id") }

func sizeOf(path string) int64 {
	info, err := os.Lstat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// lockHolder returns the process that runs the agent, or 0. It uses a POSIX lock
// because testing one does not interfere with other processes.
func (t Attempt) lockHolder() int {
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
func (t Attempt) lock() (release func(), err error) {
	f, err := os.OpenFile(t.path(taskLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}); err != nil {
		return nil, errors.Join(fail.New(fail.Conflict, "another process is running task %s: %w", t.name, err), f.Close())
	}
	return func() { _ = f.Close() }, nil // no written data can be lost
}

// Signal sends TERM or KILL to all of the agent's processes, and prints the state.
// It also stops an attempt that is about to begin.
func (t Attempt) Signal(name string, out io.Writer) error {
	sig, known := map[string]syscall.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL}[name]
	if !known {
		return fail.New(fail.Usage, "task signal: signal must be TERM or KILL")
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
		if err := t.agent().kill(sig); err != nil {
			return fmt.Errorf("send %s to the agent: %w", name, err)
		}
	}
	return t.Status().Encode(out)
}

// requestedSignal returns the signal that was requested, or 0.
func (t Attempt) requestedSignal() syscall.Signal {
	switch name, _ := os.ReadFile(t.path(taskSignal)); string(name) {
	case "TERM":
		return syscall.SIGTERM
	case "KILL":
		return syscall.SIGKILL
	}
	return 0
}

func (t Attempt) write(name, content string) error {
	return sys.WriteFile(t.path(name), []byte(content), 0o600)
}

// writeForGood writes a file so that a power failure does not undo it.
func (t Attempt) writeForGood(name, content string) error {
	if err := t.write(name, content); err != nil {
		return err
	}
	dir, err := os.Open(t.dir)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
