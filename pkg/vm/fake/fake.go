// Package fake is a vm.Driver that behaves like a real one but runs no guest. It
// makes the product fast to test and lets a test choose what goes wrong, and when.
//
// A VM is a directory, DIR/NAME:
//
//	spec.json      as given to Create; written last, so its absence means "half made"
//	host_key       of the guest's sshd, kept for the VM's life
//	pid, lock      of the running process; the lock is held while it runs
//	endpoint.json  written once sshd listens
//	console.log    the serial console: ReadyMarker, and why a boot failed
//	boot.sh        Spec.Boot, which is kept but never run: it would affect the host
//	root/          the disk, and Machine.Root
//
// While it runs, a detached process (Options.Self with the hidden command "fake-vm",
// that is Main) serves SSH on a loopback port. It runs commands for real, as the user
// on the host, in root/home/USER with root/bin first in PATH: the caller prefixes
// every guest path with Machine.Root. In root/bin, sudo runs its arguments. systemctl
// and the iptables family write their arguments to root/var/log/stub.log and succeed;
// "systemctl poweroff" ends the VM.
//
// Faults are described by a JSON file, Options.Faults, which is read again on each
// call:
//
//	{"start": {"error": "no space left on device", "code": 5, "hint": "df -h"},
//	 "create": {"stall": "30s", "count": 1},
//	 "ready": {"never": true},
//	 "exec": {"match": "git", "drop_after": 1000},
//	 "kill_self_at": "start:before"}
//
// The operations are create, start, stop, delete, inspect, list, check, export, save,
// checkpoint, suspend, restore, fork, disk (a change of a data disk), wake (the first start of a fork or of a restored VM) and connect (a connection to sshd, which is
// accepted, and then stalls or is closed). Each has error, code, hint, stall, match
// (part of the VM's name), after (skip the first N times since the file changed) and
// count (only N times), and panic (of the kernel, before it did anything). Two more are
// possible: ready, with never and panic; and exec,
// where match is part of the command, with drop_after (bytes, after which the
// connection breaks), die (the VM is gone) and freeze (it stops responding).
// kill_self_at sends SIGKILL to the process that calls the driver, before or after
// the operation's work. emulate makes the driver report that it emulates VMs. SIGUSR1 to the VM's process breaks all connections to the VM.
//
// It isolates nothing and must never be part of the shipped program.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Options configure a Driver.
type Options struct {
	Dir    string // home of all VMs; created when missing
	Self   string // program whose hidden command fake-vm is Main; "" means this one
	Faults string // "" means DIR/faults.json
}

// Driver implements vm.Driver.
type Driver struct {
	dir, self string
	faults    faults
}

var _ vm.Driver = (*Driver)(nil)

// New makes a driver on o.Dir, which may hold VMs already.
func New(o Options) (*Driver, error) {
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("fake driver: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("fake driver: %w", err)
	}
	if o.Self == "" {
		if o.Self, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("fake driver: %w", err)
		}
	}
	if o.Faults == "" {
		o.Faults = filepath.Join(dir, "faults.json")
	}
	return &Driver{dir: dir, self: o.Self, faults: faults{path: o.Faults}}, nil
}

// nameForm is Lima's rule, so that names that work here work there.
const nameForm = `^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$`

// machine is the directory of one VM.
type machine struct{ name, dir string }

func (m machine) file(name string) string { return filepath.Join(m.dir, name) }
func (m machine) root() string            { return filepath.Join(m.dir, "root") }

func (d *Driver) machine(name string) (machine, error) {
	if ok, _ := regexp.MatchString(nameForm, name); !ok || len(name) > 76 {
		return machine{}, fmt.Errorf("VM name %q: must be letters and digits, with single . _ - between them, at most 76 characters", name)
	}
	return machine{name: name, dir: filepath.Join(d.dir, name)}, nil
}

// existing returns the machine for calls that need a complete VM.
func (d *Driver) existing(name string) (machine, vm.Spec, error) {
	m, err := d.machine(name)
	if err != nil {
		return m, vm.Spec{}, err
	}
	if _, err := os.Lstat(m.dir); errors.Is(err, fs.ErrNotExist) {
		return m, vm.Spec{}, fmt.Errorf("%s: %w", name, vm.ErrNotFound)
	}
	s, err := readSpec(m)
	return m, s, err
}

func readSpec(m machine) (vm.Spec, error) {
	var s vm.Spec
	b, err := os.ReadFile(m.file("spec.json"))
	if err != nil {
		return s, fmt.Errorf("%s is incomplete: %w", m.name, err)
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%s: read spec.json: %w", m.name, err)
	}
	return s, nil
}

// Create implements vm.Driver.
func (d *Driver) Create(ctx context.Context, s vm.Spec) error {
	return d.faults.around(ctx, "create", s.Name, func() error {
		m, err := d.machine(s.Name)
		if err != nil {
			return err
		}
		if _, err := os.Stat(m.file("spec.json")); err == nil {
			return nil
		}
		if err := removeAll(m.dir); err != nil {
			return fmt.Errorf("create %s: %w", s.Name, err)
		}
		if err := writeRootFS(m, s.User); err != nil {
			return fmt.Errorf("create %s: %w", s.Name, err)
		}
		if s.Image.State != "" {
			if err := os.WriteFile(m.file(forkFile), nil, 0o600); err != nil {
				return fmt.Errorf("create %s: %w", s.Name, err)
			}
		}
		if err := writeSpec(m, s); err != nil {
			return fmt.Errorf("create %s: %w", s.Name, err)
		}
		return nil
	})
}

// writeSpec completes a new machine.
func writeSpec(m machine, s vm.Spec) error {
	key, _, err := ssh.NewKey()
	if err != nil {
		return err
	}
	spec, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(m.file("host_key"), key, 0o600),
		os.WriteFile(m.file("boot.sh"), []byte(s.Boot), 0o600),
		atomicfile.Write(m.file("spec.json"), spec, 0o600),
	)
}

// Start implements vm.Driver.
func (d *Driver) Start(ctx context.Context, name string, p vm.Progress) (vm.Endpoint, error) {
	var ep vm.Endpoint
	err := d.faults.around(ctx, "start", name, func() error {
		m, s, err := d.existing(name)
		if err != nil {
			return err
		}
		if p != nil {
			p("starting the fake VM")
		}
		if err := d.wake(ctx, m, s); err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		if !m.running() {
			if err := d.plugDataDisk(ctx, m); err != nil {
				return fmt.Errorf("start %s: %w", name, err)
			}
		}
		ep, err = d.boot(ctx, m)
		if err != nil {
			return fmt.Errorf("start %s: %w", name, err)
		}
		return nil
	})
	return ep, err
}

// Stop implements vm.Driver.
func (d *Driver) Stop(ctx context.Context, name string, poweroff func(context.Context) error, grace time.Duration) error {
	return d.faults.around(ctx, "stop", name, func() error {
		m, err := d.machine(name)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(m.dir); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("stop %s: %w", name, vm.ErrNotFound)
		}
		if poweroff != nil && m.running() {
			bounded, cancel := context.WithTimeout(ctx, grace)
			defer cancel()
			// The error says little: a guest that powers off drops the connection.
			if poweroff(bounded) != nil {
				m.pressPowerButton()
			}
			if err := m.waitGone(bounded); err != nil && ctx.Err() != nil {
				return fmt.Errorf("stop %s: %w", name, context.Cause(ctx))
			}
		}
		return m.kill(ctx)
	})
}

// Delete implements vm.Driver.
func (d *Driver) Delete(ctx context.Context, name string) error {
	return d.faults.around(ctx, "delete", name, func() error {
		m, err := d.machine(name)
		if err != nil {
			return err
		}
		if err := m.kill(ctx); err != nil {
			return err
		}
		// Rename it first, so that an interrupted Delete leaves no VM that looks
		// alive.
		trash := filepath.Join(d.dir, ".deleted-"+name)
		if err := removeAll(trash); err != nil {
			return fmt.Errorf("delete %s: %w", name, err)
		}
		if err := os.Rename(m.dir, trash); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("delete %s: %w", name, err)
		}
		if err := errors.Join(removeAll(trash), removeAll(netSocketsDir(d.dir, name))); err != nil {
			return fmt.Errorf("delete %s: %w", name, err)
		}
		return nil
	})
}

// Inspect implements vm.Driver.
func (d *Driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	var out vm.Machine
	err := d.faults.around(ctx, "inspect", name, func() (err error) {
		out, err = d.inspect(name)
		return err
	})
	return out, err
}

func (d *Driver) inspect(name string) (vm.Machine, error) {
	m, s, err := d.existing(name)
	if m.dir == "" || errors.Is(err, vm.ErrNotFound) {
		return vm.Machine{}, err
	}
	out := vm.Machine{Name: name, State: vm.Stopped, Dir: m.dir, Root: m.root()}
	if err != nil {
		out.State, out.Reason = vm.Broken, termtext.Line(err.Error())
		return out, nil
	}
	out.Arch, out.CPUs, out.Memory, out.Disk = s.Image.Arch, s.CPUs, s.Memory, s.Disk
	_, forkErr := os.Lstat(m.file(forkFile))
	out.Resumes = forkErr == nil
	out.DiskUsed = used(m.root(), time.Now().Add(time.Second/2))
	if m.running() {
		out.State = vm.Running
		if ep, ok := m.endpoint(); ok {
			out.Endpoint = ep
		}
	}
	return out, nil
}

// List implements vm.Driver.
func (d *Driver) List(ctx context.Context) ([]vm.Machine, error) {
	var out []vm.Machine
	err := d.faults.around(ctx, "list", "", func() error {
		entries, err := os.ReadDir(d.dir)
		if err != nil {
			return fmt.Errorf("list VMs: %w", err)
		}
		for _, e := range entries {
			if !e.IsDir() || strings.HasPrefix(e.Name(), ".") {
				continue
			}
			m, err := d.inspect(e.Name())
			switch {
			case errors.Is(err, vm.ErrNotFound): // deleted meanwhile
				continue
			case err != nil:
				m = vm.Machine{Name: e.Name(), State: vm.Broken, Reason: termtext.Line(err.Error())}
			}
			out = append(out, m)
		}
		return nil
	})
	return out, err
}

// Accel implements vm.Driver.
func (d *Driver) Accel(ctx context.Context, _ string) (vm.Accel, error) {
	if err := d.faults.around(ctx, "accel", "", func() error { return nil }); err != nil {
		return vm.Accel{}, err
	}
	s, _, err := d.faults.read()
	if err != nil {
		return vm.Accel{}, err
	}
	if s.Emulate {
		return vm.Accel{Name: "tcg", Reason: "faults.json asks for emulation"}, nil
	}
	return vm.Accel{Name: "none", Reason: "the fake driver does not run guest code"}, nil
}

// Check implements vm.Driver; it reports only the problems in the faults file.
func (d *Driver) Check(ctx context.Context, _ string) []error {
	if err := d.faults.around(ctx, "check", "", func() error { return nil }); err != nil {
		return []error{err}
	}
	return nil
}

// Signal sends sig to a VM's process: SIGKILL is a crash, SIGSTOP freezes it and
// SIGCONT resumes it.
func (d *Driver) Signal(name string, sig syscall.Signal) error {
	m, err := d.machine(name)
	if err != nil {
		return err
	}
	pid, ok := m.pid()
	if !ok {
		return fmt.Errorf("%s is not running", name)
	}
	return syscall.Kill(pid, sig)
}

// used returns the size of the files below root, as far as it can be counted before
// until.
func used(root string, until time.Time) int64 {
	var sum int64
	// A file that vanishes while it is counted is not worth an error.
	_ = filepath.WalkDir(root, func(_ string, e fs.DirEntry, err error) error {
		if time.Now().After(until) {
			return fs.SkipAll
		}
		if e == nil || err != nil && e.IsDir() {
			return nil //nolint:nilerr // what cannot be read is not counted
		}
		if st, err := e.Info(); err == nil && st.Mode().IsRegular() {
			sum += st.Size()
		}
		return nil
	})
	return sum
}

// removeAll works like os.RemoveAll, also for trees with read-only directories.
func removeAll(dir string) error {
	if os.RemoveAll(dir) == nil {
		return nil
	}
	walkErr := filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
		if e != nil && e.IsDir() {
			return os.Chmod(p, 0o700)
		}
		return nil
	})
	if err := os.RemoveAll(dir); err != nil {
		return errors.Join(err, walkErr)
	}
	return nil
}

// writeRootFS makes the disk: the directories that a guest has, and the stubs.
func writeRootFS(m machine, user string) error {
	if strings.ContainsAny(user, "/\x00") || slices.Contains([]string{"", ".", ".."}, user) {
		return fmt.Errorf("login user %q", user)
	}
	for _, d := range []string{"bin", "etc", "run", "tmp", "usr/local/bin", "var/lib", "var/log", "home/" + user + "/.ssh"} {
		if err := os.MkdirAll(filepath.Join(m.root(), d), 0o755); err != nil {
			return err
		}
	}
	for name, script := range stubs() {
		if err := os.WriteFile(filepath.Join(m.root(), "bin", name), []byte(script), 0o755); err != nil {
			return err
		}
	}
	return nil
}
