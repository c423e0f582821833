package taskrun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// launcher starts the wrapper of an attempt.
type launcher struct{ attempt Attempt }

// Start runs the agent at most once: an attempt that runs or has run is not started
// again. It prints the state.
func (t Attempt) Start(ctx context.Context, in io.Reader, out io.Writer) error {
	spec, err := guestproto.DecodeTaskStart(in)
	if err != nil {
		return fail.New(fail.Usage, "%w", err)
	}
	l := launcher{attempt: t}
	if err := l.makeDir(ctx); err != nil {
		return fmt.Errorf("create the task's directory: %w", err)
	}
	// If two processes start the attempt, the second finds the first one's state.
	unlock, err := waitLock(ctx, t.path("start.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if state, _ := t.state(); state == guestproto.TaskNone {
		if err := l.launch(ctx, spec); err != nil {
			return fmt.Errorf("start the agent: %w", err)
		}
	}
	return t.Status().Encode(out)
}

// makeDir creates the attempt's directory. It uses sudo to create the directory of
// all tasks, whose parent belongs to root.
func (l launcher) makeDir(ctx context.Context) error {
	top := l.attempt.guest.Path(taskDir)
	if _, err := os.Lstat(top); errors.Is(err, fs.ErrNotExist) && !l.attempt.guest.Fake {
		uid, gid := strconv.Itoa(os.Getuid()), strconv.Itoa(os.Getgid())
		if _, err := sys.Run(ctx, "", "sudo", "-n", "install", "-d", "-m", "700", "-o", uid, "-g", gid, top); err != nil {
			return err
		}
	}
	return os.MkdirAll(l.attempt.dir, 0o700)
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
func (l launcher) launch(ctx context.Context, spec guestproto.TaskStart) error {
	var text bytes.Buffer
	if err := spec.Encode(&text); err != nil {
		return err
	}
	for name, content := range map[string]string{taskSpec: text.String(), taskBrief: spec.Brief} {
		if err := sys.WriteFile(l.attempt.path(name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	start := l.startUnit
	if l.attempt.guest.Fake {
		start = l.startProcess
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
		if state, _ := l.attempt.state(); state != guestproto.TaskNone {
			return nil
		}
		if over {
			return fail.New(fail.Failure, "it ended before the agent started").WithHint("journalctl -u %s", l.attempt.unit())
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
func (l launcher) startUnit(ctx context.Context) (ended func() bool, err error) {
	ended = func() bool {
		state, err := sys.Run(ctx, "", "systemctl", "show", "--property=ActiveState", "--value", l.attempt.unit())
		state = strings.TrimSpace(state)
		return err == nil && (state == "inactive" || state == "failed")
	}
	if !ended() {
		return ended, nil
	}
	_, err = sys.Run(ctx, "", "sudo", append(append([]string{
		"-n", "systemd-run", "--quiet", "--collect", "--unit=" + l.attempt.unit(),
		"--description=Agent of task " + l.attempt.name,
		"--uid=" + strconv.Itoa(os.Getuid()), "--gid=" + strconv.Itoa(os.Getgid()),
	}, taskProperties()...), "--", sys.Binary, "task", "run", l.attempt.name)...)
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
func (l launcher) startProcess(ctx context.Context) (ended func() bool, err error) {
	if l.attempt.lockHolder() != 0 {
		return func() bool { return l.attempt.lockHolder() == 0 }, nil
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(l.attempt.path(taskLog), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// The wrapper outlives this command, as a unit does.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), self, "task", "run", l.attempt.name)
	cmd.Dir = l.attempt.dir
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+l.attempt.guest.Root)
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
