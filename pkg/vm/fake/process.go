package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// command is the hidden command that runs Main.
const command = "fake-vm"

// pollEvery is how often files are read while waiting for a process that may not be
// our child.
const pollEvery = 5 * time.Millisecond

// listening is the content of endpoint.json.
type listening struct {
	vm.Endpoint
	PID int `json:"pid"`
}

// pid returns the running process of the VM. It checks the command line, because the
// pid may have been reused.
func (m machine) pid() (int, bool) {
	b, err := os.ReadFile(m.file("pid"))
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return 0, false
	}
	args := commandLine(pid) // empty for a zombie
	for i, a := range args {
		if a == command && i+1 < len(args) && args[i+1] == m.dir {
			return pid, true
		}
	}
	return 0, false
}

func (m machine) running() bool {
	_, ok := m.pid()
	return ok
}

// endpoint returns the endpoint of the current run, once it is ready.
func (m machine) endpoint() (vm.Endpoint, bool) {
	pid, ok := m.pid()
	if !ok {
		return vm.Endpoint{}, false
	}
	b, err := os.ReadFile(m.file("endpoint.json"))
	if err != nil {
		return vm.Endpoint{}, false
	}
	var l listening
	if json.Unmarshal(b, &l) != nil || l.PID != pid {
		return vm.Endpoint{}, false
	}
	return l.Endpoint, true
}

// boot starts the VM's process unless it runs, and waits until it is ready.
func (d *Driver) boot(ctx context.Context, m machine) (vm.Endpoint, error) {
	exited := make(chan error, 1)
	if m.running() {
		exited = nil
	} else {
		reap(m.root())
		if err := d.launch(m, exited); err != nil {
			return vm.Endpoint{}, err
		}
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		if ep, ok := m.endpoint(); ok {
			return ep, nil
		}
		select {
		case <-ctx.Done():
			return vm.Endpoint{}, context.Cause(ctx)
		case err := <-exited:
			// If another process started the VM first, ours failed to get the lock.
			if !m.running() {
				if text := m.console(); strings.Contains(text, "Kernel panic") {
					return vm.Endpoint{}, fmt.Errorf("%w: %s", vm.ErrPanicked, text)
				}
				return vm.Endpoint{}, fmt.Errorf("the VM stopped during boot: %w: %s", exitText(err), m.console())
			}
			exited = nil
		case <-tick.C:
			if exited == nil && !m.running() {
				return vm.Endpoint{}, fmt.Errorf("the VM stopped during boot: %s", m.console())
			}
		}
	}
}

// exitText describes how the process ended; nil means that it powered off.
func exitText(err error) error {
	if err == nil {
		return errors.New("it powered off")
	}
	return err
}

func (d *Driver) launch(m machine, exited chan<- error) error {
	console, err := os.OpenFile(m.file("console.log"), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	// Without the caller's context: a cancelled Start must not end the VM.
	cmd := exec.CommandContext(context.Background(), d.self, command, m.dir, d.faults.path)
	cmd.Dir = m.dir
	// GOCOVERDIR is for tests with -cover, see test/testenv.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GOCOVERDIR=" + os.Getenv("GOCOVERDIR")}
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	// The VM outlives this call on purpose. This only collects its exit status if it
	// ends before this process does, so that no zombie remains.
	go func() { exited <- cmd.Wait() }()
	if m.running() {
		return nil
	}
	// The process writes the same, but until then, a Delete after a cancelled Start would not
	// find it.
	return atomicfile.Write(m.file("pid"), []byte(strconv.Itoa(cmd.Process.Pid)+"\n"), 0o600)
}

// console returns the last line of the serial console.
func (m machine) console() string {
	b, err := os.ReadFile(m.file("console.log"))
	if err != nil {
		return termtext.Line(err.Error())
	}
	lines := strings.Split(strings.TrimSpace(termtext.Lines(string(b))), "\n")
	return lines[len(lines)-1]
}

// waitGone waits for the process to end.
func (m machine) waitGone(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for m.running() {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
	return nil
}

// kill cuts the power: it kills the process and everything that runs inside the VM.
func (m machine) kill(ctx context.Context) error {
	if pid, ok := m.pid(); ok {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill %s: %w", m.name, err)
		}
		if err := m.waitGone(ctx); err != nil {
			return fmt.Errorf("kill %s: %w", m.name, err)
		}
	}
	reap(m.root())
	return nil
}

// pressPowerButton makes a VM power off, unless it is frozen.
func (m machine) pressPowerButton() {
	if pid, ok := m.pid(); ok {
		_ = syscall.Kill(pid, syscall.SIGTERM) // an error means that it has ended already
	}
}
