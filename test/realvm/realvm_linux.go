// Package realvm runs test binaries that boot real VMs. They all use one guest image,
// which is rebuilt when its inputs change. They run in their own network namespace,
// so that no packet of a test leaves the machine.
package realvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const module = "github.com/agent-sessionizer/agent-sessionizer"

// These are passed from the outer process to the one in the namespace.
const (
	envBinary  = "REALVM_BINARY"
	envData    = "REALVM_DATA"
	envPrepare = "REALVM_PREPARE" // what sessions of a Box start from; set by Prepare
)

// The size of the VM that Prepare saves, which is that of most tests' sessions.
const (
	CPUs   = "2"
	Memory = "1536MiB"
)

// Arch is the architecture of the image. TestMain may set it before it calls Main.
var Arch = vm.HostArch()

// Binary returns the path of the program under test.
func Binary() string { return os.Getenv(envBinary) }

// DataHome returns the XDG_DATA_HOME that contains the image.
func DataHome() string { return os.Getenv(envData) }

// Image returns the guest image.
func Image(t *testing.T) vm.Image {
	t.Helper()
	img, err := (&image.Store{Dir: filepath.Join(DataHome(), "agent-sessionizer", "images")}).Lookup(image.Debian, Arch)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// Prepare makes, in the namespace, what users' sessions start from: the golden image,
// and the snapshot of a VM of CPUs and Memory, which another architecture than the host's
// does without. Without Prepare the sessions of a Box boot the generic image.
func Prepare(ctx context.Context) error {
	prepare := "warm"
	if Arch != vm.HostArch() {
		prepare = "golden"
	}
	home, err := os.MkdirTemp("", "e")
	if err != nil {
		return err
	}
	defer os.RemoveAll(home)
	cmd := exec.CommandContext(ctx, Binary(), "image", "build", "--from", "debian", "--arch", Arch, "--cpus", CPUs, "--memory", Memory, "--prepare", prepare)
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME=", "XDG_STATE_HOME=", "XDG_CACHE_HOME=", "XDG_DATA_HOME="+DataHome())
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("prepare the image: %w", err)
	}
	return os.Setenv(envPrepare, prepare)
}

// Outside prepares what a test needs from the real network. It runs there before the
// tests enter their namespace, and returns additions to their environment. It may
// keep files in dir, and ends with ctx.
type Outside func(ctx context.Context, dir string) (env []string, err error)

// Main runs the tests and returns the exit status, for TestMain. prepare sets up the
// namespace beyond its loopback interface; it may be nil.
func Main(m *testing.M, prepare func() error, outside ...Outside) int {
	run := func() (int, error) { return outer(outside) }
	if Binary() != "" {
		run = func() (int, error) {
			if err := loopback(prepare); err != nil {
				return 1, err
			}
			return m.Run(), nil
		}
	}
	code, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "realvm:", err)
		code = max(code, 1)
	}
	return code
}

func loopback(prepare func() error) error {
	if out, err := exec.CommandContext(context.Background(), "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("loopback: %w: %s", err, out)
	}
	if prepare == nil {
		return nil
	}
	return prepare()
}

// outer builds the program and the image, which needs the real network, and runs this
// test binary again in its own namespaces.
func outer(outside []Outside) (int, error) {
	// When interrupted, it ends what it started and cleans up.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "asz-realvm")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "agent-sessionizer")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", binary, module+"/cmd/agent-sessionizer").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("build: %w\n%s", err, out)
	}
	// The image is kept between runs; its name is a hash of all its inputs.
	cache, err := os.UserCacheDir()
	if err != nil {
		return 1, err
	}
	data := filepath.Join(cache, "agent-sessionizer-e2e")
	if os.Getenv("REALVM_KEEP_IMAGE") == "" { // set while writing tests, to reuse the last run's image
		if err := build(ctx, binary, data); err != nil {
			return 1, err
		}
	}
	env := []string{envBinary + "=" + binary, envData + "=" + data}
	for _, start := range outside {
		more, err := start(ctx, dir)
		if err != nil {
			return 1, err
		}
		env = append(env, more...)
	}
	return inside(ctx, env)
}

func build(ctx context.Context, binary, data string) error {
	lists, err := aptLists()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, binary, "image", "build", "--from", "debian", "--arch", Arch, "--prepare", "none")
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+data)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build the image: %w", err)
	}
	// A hook once deleted mmdebstrap's configuration, and its apt then emptied these
	// lists.
	if now, err := aptLists(); err != nil || now != lists {
		return fmt.Errorf("the build changed the host's package lists:\n%s\nwas\n%s\n%w", now, lists, err)
	}
	return nil
}

// aptLists returns the names of the host's package lists.
func aptLists() (string, error) {
	names, err := filepath.Glob("/var/lib/apt/lists/*")
	return strings.Join(names, "\n"), err
}

// Build makes a static program for this machine, and therefore for its guests.
func Build(ctx context.Context, to, pkg string, flags ...string) error {
	cmd := exec.CommandContext(ctx, "go", append(append([]string{"build", "-trimpath", "-o", to}, flags...), pkg)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

func inside(ctx context.Context, env []string) (int, error) {
	inner := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	inner.Env = append(os.Environ(), env...)
	inner.Stdin, inner.Stdout, inner.Stderr = nil, os.Stdout, os.Stderr
	inner.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		inner.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		inner.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		inner.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	err := inner.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), nil
	}
	if err != nil && strings.Contains(err.Error(), "operation not permitted") {
		err = fmt.Errorf("%w; run as root, or allow unprivileged user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0", err)
	}
	return 0, err
}
