//go:build !darwin || cgo

package lima

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/lima-vm/lima/pkg/hostagent"
	"github.com/lima-vm/lima/pkg/hostagent/api/server"
	"github.com/lima-vm/lima/pkg/instance"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/lima-vm/lima/pkg/store/filenames"
	"github.com/lima-vm/lima/pkg/version"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const (
	maxLog      = 16 << 20 // for each log that a guest can make grow
	logInterval = 2 * time.Second
)

// HostAgent implements the hidden command "hostagent". It runs one VM until the VM
// ends, and accepts the flags that Lima gives its own host agent, so that limactl can
// handle it.
func HostAgent(ctx context.Context, args []string) error {
	f := flag.NewFlagSet("hostagent", flag.ContinueOnError)
	pidFile := f.String("pidfile", "", "file for the process id")
	socket := f.String("socket", "", "socket of the API")
	gui := f.Bool("run-gui", false, "whether to keep the main thread for a window")
	guestAgent := f.String("guestagent", "", "unused, because VMs are plain")
	if err := f.Parse(args); err != nil {
		return fail.New(fail.Usage, "hostagent: %w", err)
	}
	if f.NArg() != 1 || *pidFile == "" || *socket == "" || *guestAgent != "" {
		return fail.New(fail.Usage, "hostagent: usage: --pidfile FILE --socket FILE NAME")
	}
	if *gui {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	dir := filepath.Dir(*pidFile)
	unix.Umask(0o077) // access to QEMU's sockets means access to its console and monitor

	lock, err := claim(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	events, err := freshLogs(dir, *socket)
	if err != nil {
		return err
	}
	defer events.Close()
	// From here on waiting processes may trust the logs, see Driver.await.
	if err := atomicfile.Write(*pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		return err
	}
	defer os.Remove(*pidFile)

	// The terminal, and the process that started us, may go away.
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(stop)

	version.Version = limaVersion
	logrus.SetOutput(os.Stderr)
	logrus.SetFormatter(new(logrus.JSONFormatter)) // Lima's own readers parse JSON
	logrus.SetLevel(logrus.DebugLevel)             // QEMU's stderr is logged as debug

	ctx, cancel := context.WithCancel(ctx)
	limited := make(chan struct{})
	go func() { defer close(limited); limitLogs(ctx, dir) }()
	defer func() { cancel(); <-limited }()

	if err := serve(ctx, f.Arg(0), dir, events, stop, *socket); err != nil {
		logrus.WithError(err).Error("host agent failed") // the process that started this one sees only the log
		return err
	}
	return nil
}

// claim takes the VM's lock, which the kernel drops when this process dies, however
// that happens. It fails when a QEMU has survived its host agent.
func claim(dir string) (*flock.Flock, error) {
	lock := flock.New(filepath.Join(dir, lockFile))
	ok, err := lock.TryLock()
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fail.New(fail.Conflict, "the VM in %s already has a host agent", dir)
	}
	found, err := family(dir)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	for pid, is := range found {
		if is == driver {
			return nil, errors.Join(fail.New(fail.Conflict, "the VM in %s is already running, process %d", dir, pid), lock.Close())
		}
	}
	return lock, nil
}

// freshLogs removes what the previous run left to read and returns the new event log.
func freshLogs(dir, socket string) (*os.File, error) {
	for _, f := range append([]string{endpointFile}, consoles...) {
		if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if st, err := os.Stderr.Stat(); err == nil && st.Mode().IsRegular() {
		if err := os.Stderr.Truncate(0); err != nil {
			return nil, err
		}
	}
	return os.OpenFile(filepath.Join(dir, filenames.HostAgentStdoutLog), os.O_CREATE|os.O_WRONLY|os.O_TRUNC|os.O_APPEND, 0o600)
}

// serve runs the VM, together with Lima's API.
func serve(ctx context.Context, name, dir string, events *os.File, stop chan os.Signal, socket string) error {
	if err := verifyNetwork(name, dir); err != nil {
		return err
	}
	woken, err := wake(ctx, name, dir)
	if err != nil {
		return err
	}
	defer woken()
	ha, err := hostagent.New(name, events, stop)
	if err != nil {
		return fmt.Errorf("set up the host agent: %w", err)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("open the host agent's socket: %w", err)
	}
	mux := http.NewServeMux()
	server.AddRoutes(mux, &server.Backend{Agent: ha})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	err = ha.Run(ctx)
	return errors.Join(err, srv.Close(), ignoreClosed(<-served))
}

// wake resumes the VM in dir instead of booting it, if it is a fork that has not
// woken. The returned function waits for the end of that.
func wake(ctx context.Context, name, dir string) (wait func(), err error) {
	f, err := readFork(dir)
	if f == nil || err != nil {
		return func() {}, err
	}
	m, err := readMeta(dir)
	if err != nil {
		return nil, err
	}
	if err := f.overlay(ctx, dir); err != nil {
		return nil, err
	}
	variable := "QEMU_SYSTEM_" + strings.ToUpper(m.Arch)
	if err := os.Setenv(variable, cmp.Or(os.Getenv(variable), "qemu-system-"+m.Arch)+" -incoming defer"); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f.wake(ctx, name, dir); err != nil && ctx.Err() == nil {
			logrus.WithError(err).Error("resuming the saved VM failed")
			// QEMU would wait forever. The process that started it notices its end.
			if found, err := family(dir); err == nil {
				for pid, is := range found {
					if is == driver {
						killVerified(pid, driver, dir)
					}
				}
			}
		}
	}()
	return func() { cancel(); <-done }, nil
}

func ignoreClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// limitLogs empties logs that have grown too long: a guest that prints without end
// must not fill the host's disk. QEMU continues at its old offset, which leaves a
// hole that takes no space.
func limitLogs(ctx context.Context, dir string) {
	for sleep(ctx, logInterval) == nil {
		if err := shorten(dir); err != nil {
			logrus.WithError(err).Warn("truncating a log failed")
		}
	}
}

func shorten(dir string) error {
	var errs []error
	for _, f := range append([]string{filenames.HostAgentStderrLog}, consoles...) {
		path := filepath.Join(dir, f)
		st, err := os.Stat(path)
		if err != nil {
			continue // not created yet
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Blocks*512 >= maxLog {
			errs = append(errs, os.Truncate(path, 0))
		}
	}
	return errors.Join(errs...)
}

// prepareInstance does Lima's part in making a VM's disks. It is in this file because
// it links the VM managers, which on macOS need cgo.
func prepareInstance(ctx context.Context, inst *store.Instance) error {
	_, err := instance.Prepare(ctx, inst)
	return err
}
