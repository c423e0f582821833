package lima

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lima-vm/lima/pkg/hostagent/events"
	"github.com/lima-vm/lima/pkg/store/filenames"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	// consolePoll costs two stats and a read or two; it is short because a person
	// waits.
	consolePoll = 10 * time.Millisecond

	// processPoll is longer than poll because it costs a ps on macOS.
	processPoll = 5 * poll

	// portTries is how often a start is repeated when another process took the SSH
	// port between Lima's choice and QEMU's bind.
	portTries = 3
)

var errPortTaken = errors.New("the SSH port was taken by another process")

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string, p vm.Progress) (vm.Endpoint, error) {
	dir, err := d.dir(name)
	if err != nil {
		return vm.Endpoint{}, err
	}
	m, err := readMeta(dir)
	switch _, statErr := os.Stat(dir); {
	case errors.Is(statErr, fs.ErrNotExist):
		return vm.Endpoint{}, notFound(name)
	case err != nil:
		return vm.Endpoint{}, fail.New(fail.Failure, "VM %s is broken: %w", name, err).WithHint("agent-sessionizer destroy %s", name)
	}
	for try := 1; ; try++ {
		e, err := d.start(ctx, name, dir, m, p)
		if errors.Is(err, errPortTaken) && try < portTries {
			report(p, "another process took the SSH port, starting again")
			continue
		}
		if err != nil && ctx.Err() == nil {
			err = fmt.Errorf("start VM %s: %w", name, err)
		}
		return e, err
	}
}

func (d *Driver) start(ctx context.Context, name, dir string, m meta, p vm.Progress) (vm.Endpoint, error) {
	e, old := readEndpoint(dir)
	reported, err := agentReported(dir)
	if err != nil {
		return vm.Endpoint{}, err
	}
	switch r, err := survivors(dir); {
	case err != nil:
		return vm.Endpoint{}, err
	case r.driver && old == nil:
		return e, nil
	case r.driver && !r.agent && !reported:
		// QEMU waits for a host agent that has died.
	case r.driver, r.agent && old != nil:
		// The process that started it died or gave up waiting.
		report(p, "the VM is already booting, waiting for it")
		return vmRun{meta: m, dir: dir}.endpoint(ctx)
	}
	r, err := d.launch(ctx, name, dir, m, p)
	if err != nil {
		return vm.Endpoint{}, err
	}
	return r.endpoint(ctx)
}

// checkKey returns an error if the memory that a restored VM is about to resume is of another QEMU
// or processor.
func (d *Driver) checkKey(ctx context.Context, dir string, m meta) error {
	f, err := readFork(dir)
	if f == nil || f.Key == "" || err != nil {
		return err
	}
	key, err := d.StateKey(ctx, m.Arch, m.CPUs, m.Memory)
	if err == nil && key != f.Key {
		err = fmt.Errorf("%w: it was saved with another QEMU, kernel or processor", vm.ErrNotWoken)
	}
	return err
}

// vmRun is the current run of a VM.
type vmRun struct {
	meta
	dir    string
	exited <-chan struct{} // of spawn, if this process started the run; nil otherwise
}

// launch starts the VM again. Anything left of the VM has lost its QEMU after it was
// ready, or is a stale pid file, socket or lock.
func (d *Driver) launch(ctx context.Context, name, dir string, m meta, p vm.Progress) (vmRun, error) {
	if err := kill(ctx, dir); err != nil {
		return vmRun{}, err
	}
	if err := errors.Join(removeFile(filepath.Join(dir, resumedFile)), tidyDisks(dir)); err != nil {
		return vmRun{}, err
	}
	flattenDisk(ctx, dir, m)
	if err := d.prepare(ctx, name, dir, m, p); err != nil {
		return vmRun{}, err
	}
	if err := relativeBase(ctx, dir, m); err != nil {
		return vmRun{}, err
	}
	if _, err := exec.LookPath("ssh"); err != nil { // Lima's host agent logs in with it
		return vmRun{}, explain(err.Error(), err)
	}
	if err := d.ensureUserKey(); err != nil {
		return vmRun{}, fmt.Errorf("create Lima's key: %w", explainOS(err))
	}
	if err := d.served(ctx, name, m); err != nil {
		return vmRun{}, err
	}
	accel, err := d.accel.find(ctx, m.Arch)
	if err != nil {
		return vmRun{}, err
	}
	verb := "starting"
	if isFork(dir) {
		verb = "resuming"
		if err := d.checkKey(ctx, dir, m); err != nil {
			return vmRun{}, err
		}
	}
	report(p, "%s the VM (%s)", verb, accel.Name)
	exited, err := d.spawn(ctx, name, dir, agentEnv(d.home, m, accel))
	return vmRun{m, dir, exited}, err
}

// survivors returns what runs for the VM, including processes without a pid file.
func survivors(dir string) (running, error) {
	found, err := family(dir)
	if err != nil {
		return running{}, err
	}
	var r running
	for _, is := range found {
		r.agent = r.agent || is == agent
		r.driver = r.driver || is == driver
	}
	if m, err := readMeta(dir); err == nil && r.agent {
		r.driver = r.driver || readProcesses(dir, m).driver // vz
	}
	return r, nil
}

// isRunning reports whether something runs for the VM. It looks several times: a child that the host
// agent has forked looks like the host agent until it executes its own program, and may outlive it.
func isRunning(ctx context.Context, dir string) (bool, error) {
	r, err := survivors(dir)
	for range 10 {
		if err != nil || !r.any() || sleep(ctx, processPoll) != nil {
			break
		}
		r, err = survivors(dir)
	}
	return r.any(), err
}

// spawn executes this program as the VM's host agent, in a process session of its
// own. The channel is closed when the host agent ends.
func (d *Driver) spawn(ctx context.Context, name, dir string, env []string) (<-chan struct{}, error) {
	if err := closeOnExec(); err != nil {
		return nil, fmt.Errorf("start the host agent: %w", err)
	}
	stderr, err := os.OpenFile(filepath.Join(dir, filenames.HostAgentStderrLog), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, explainOS(err)
	}
	defer stderr.Close()
	// Without cancel: a caller that gives up must not end the VM.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), d.self, "hostagent",
		"--pidfile", filepath.Join(dir, filenames.HostAgentPID),
		"--socket", filepath.Join(dir, filenames.HostAgentSock), name)
	cmd.Env = env
	cmd.Dir = d.home
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fail.New(fail.Host, "start the host agent: %w", err)
	}
	exited := make(chan struct{})
	// This goroutine lives as long as the host agent, which is meant to outlive the
	// call. It only reaps the process, so that no zombie is left.
	go func() {
		defer close(exited)
		_ = cmd.Wait() // its log says more than its status
	}()
	return exited, nil
}

// closeOnExec keeps the host agent, and QEMU after it, from inheriting our locks or
// databases. Go opens files with close-on-exec, libraries may not.
func closeOnExec() error {
	entries, err := os.ReadDir("/dev/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// endpoint waits until the VM accepts logins.
func (r vmRun) endpoint(ctx context.Context) (vm.Endpoint, error) {
	var e vm.Endpoint
	err := r.await(ctx, func(w *watcher) (bool, error) {
		// The host agent removes the file once a fork has woken.
		if isFork(r.dir) {
			return false, nil
		}
		// The host knows the key of a restored guest, which does not print it, and of a fork.
		resumed, err := readForkFile(filepath.Join(r.dir, resumedFile))
		if err != nil {
			return false, err
		}
		if resumed != nil {
			w.hostKey = resumed.HostKey
		}
		if w.hostKey == "" {
			return false, nil
		}
		port, err := sshPort(r.dir)
		if err != nil || port == 0 { // the event follows QEMU's start immediately
			return false, err
		}
		if exists(filepath.Join(r.dir, resumedFile)) && exists(filepath.Join(r.dir, forkFile)) {
			if err := removeSynced(filepath.Join(r.dir, forkFile)); err != nil {
				return false, err
			}
		}
		e = vm.Endpoint{Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), User: r.User, HostKey: w.hostKey}
		b, err := json.Marshal(e)
		if err != nil {
			return false, err
		}
		return true, atomicfile.Write(filepath.Join(r.dir, endpointFile), b, 0o600)
	})
	return e, err
}

// await waits until done returns true for the consoles of the run.
func (r vmRun) await(ctx context.Context, done func(*watcher) (bool, error)) error {
	var (
		w       = newWatcher(r.dir)
		seen    running // at any time of this run
		exited  = r.exited
		ours    = exited != nil
		console = time.NewTicker(consolePoll)
		procs   = time.NewTicker(processPoll)
	)
	defer console.Stop()
	defer procs.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-exited:
			exited, ours = nil, false // decide at the next check: another process may have been faster
		case <-procs.C:
			now := readProcesses(r.dir, r.meta)
			seen.agent, seen.driver = seen.agent || now.agent, seen.driver || now.driver
			if ours {
				now.agent = true
			}
			if !now.agent { // perhaps one without a pid file so far
				all, err := survivors(r.dir)
				if err != nil {
					return err
				}
				now.agent, now.driver = all.agent, now.driver || all.driver
			}
			reported, err := agentReported(r.dir)
			if err != nil {
				return err
			}
			// A vanished QEMU ends the run even if its agent lingers. A QEMU whose
			// agent is gone never becomes ready, unless the agent has reported
			// everything already.
			if !now.any() || seen.driver && !now.driver || !now.agent && !reported {
				return r.ended(ctx, w)
			}
		case <-console.C:
			if !seen.agent && !seen.driver {
				// Until the host agent has its pid file, the logs belong to the
				// previous run. launch leaves no old pid file.
				if _, err := os.Stat(filepath.Join(r.dir, filenames.HostAgentPID)); err != nil || !ours {
					continue
				}
				seen.agent = true
			}
			if err := w.readNew(); err != nil {
				return err
			}
			if w.panic != "" && w.hostKey == "" {
				return r.ended(ctx, w)
			}
			if ok, err := done(w); ok || err != nil {
				return err
			}
		}
	}
}

// ended kills what is left of the run, which cannot become ready, and returns the reason.
func (r vmRun) ended(ctx context.Context, w *watcher) error {
	// The last output is often written while the process ends.
	if err := sleep(ctx, 2*poll); err != nil {
		return err
	}
	if err := w.readNew(); err != nil {
		return err
	}
	// A panicked guest reboots forever, so kill it even if the caller has just given
	// up.
	if err := kill(context.WithoutCancel(ctx), r.dir); err != nil {
		return err
	}
	output := ""
	if len(w.last) > 0 {
		output = "\n  " + strings.Join(w.last, "\n  ")
	}
	if isFork(r.dir) {
		log := agentLog(r.dir)
		err := fmt.Errorf("%w%s%s", vm.ErrNotWoken, quote(log), output)
		if port := explain(log, err); errors.Is(port, errPortTaken) {
			return port
		}
		return err
	}
	if w.panic != "" {
		return fail.New(fail.Failure, "%w: %s%s", vm.ErrPanicked, w.panic, output)
	}
	log := agentLog(r.dir)
	cause := fail.New(fail.Failure, "the guest powered off, or QEMU exited, before the guest was ready%s%s", quote(log), output)
	return explain(log, cause)
}

// agentReported reports whether the host agent has reported what only it knows: the SSH
// port, and whether a fork has woken.
func agentReported(dir string) (bool, error) {
	if isFork(dir) {
		return false, nil
	}
	port, err := sshPort(dir)
	return port != 0, err
}

// sshPort reads the port from the host agent's events, 0 before it is known.
func sshPort(dir string) (int, error) {
	f, err := os.Open(filepath.Join(dir, filenames.HostAgentStdoutLog))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var ev events.Event
		if json.Unmarshal(sc.Bytes(), &ev) == nil && ev.Status.SSHLocalPort != 0 {
			return ev.Status.SSHLocalPort, nil
		}
	}
	return 0, nil
}
