// Package lima is the vm.Driver for real VMs: Lima as a library, QEMU on Linux,
// Virtualization.framework on macOS.
//
// It owns LIMA_HOME and every process that runs for a VM: the host agent, which is
// this product's own binary executed again, and QEMU. It never logs in to a guest,
// never needs limactl, and trusts nothing that a guest prints except a host key that
// it has parsed.
//
// Lima keeps its state in globals: LIMA_HOME is an environment variable, and its
// logger is logrus's standard one. New sets both, so a process can hold drivers for
// one Home only.
package lima

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/lima-vm/lima/pkg/downloader"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/version"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	_ "github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima/internal/a0env" // must initialise before Lima
)

// limaVersion is what the linked library reports as its version. Unless it is set,
// the version is "<unknown>", and Lima warns at every inspection.
const limaVersion = "1.2.2"

// Options configure a Driver.
type Options struct {
	Home     string // LIMA_HOME; short, because socket paths below it are limited to 104 bytes
	Self     string // our own binary, which serves the hidden command "hostagent"
	CacheDir string // downloads and the accelerator verdict
	Template []byte // VM template for a Spec without one

	// Log receives what Lima logs in this process; nil drops it.
	Log func(level, msg string, fields map[string]any)
}

// Driver implements vm.Driver.
type Driver struct {
	goos     string // of the host; tests set another one
	home     string
	self     string
	template []byte
	images   imageCache
	accel    accelCache
	reached  func(step string) // of a checkpoint; only in tests
}

var _ vm.Driver = (*Driver)(nil)

// New creates Home and CacheDir where they are missing, and sets LIMA_HOME and Lima's
// logger for the whole process.
func New(o Options) (*Driver, error) {
	for _, p := range []string{o.Home, o.Self, o.CacheDir} {
		if !filepath.IsAbs(p) {
			return nil, fmt.Errorf("lima driver: %q must be an absolute path", p)
		}
	}
	for _, dir := range []string{o.Home, o.CacheDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fail.New(fail.Host, "create the VM directory: %w", err)
		}
	}
	// Lima resolves symlinks in LIMA_HOME. Processes are recognised by their
	// arguments, so both sides must spell the path alike.
	home, err := filepath.EvalSymlinks(o.Home)
	if err != nil {
		return nil, fail.New(fail.Host, "resolve the VM directory: %w", err)
	}
	if strings.ContainsAny(home, " \t\n,\"'\\%") {
		return nil, fail.New(fail.Host, "the VM directory %q contains a blank, comma, quote or percent sign, which QEMU and ssh do not support", home).
			WithHint("export AGENT_SESSIONIZER_LIMA_HOME=/another/directory")
	}
	if err := os.Setenv("LIMA_HOME", home); err != nil {
		return nil, err
	}
	version.Version = limaVersion
	downloader.HideProgress = true // it draws on stderr; we report our own progress
	captureLog(o.Log)
	return &Driver{
		goos: runtime.GOOS, home: home, self: o.Self, template: o.Template,
		images: imageCache{o.CacheDir}, accel: accelCache{dir: o.CacheDir, goos: runtime.GOOS},
	}, nil
}

// vmType returns the virtual machine manager for guests of arch on this host.
func (d *Driver) vmType(arch string) limayaml.VMType { return vmType(d.goos, arch) }

// vmType returns the virtual machine manager for guests of arch on a host with that operating
// system.
func vmType(goos, arch string) limayaml.VMType {
	if goos == "darwin" && limayaml.IsNativeArch(arch) {
		return limayaml.VZ
	}
	return limayaml.QEMU
}

func notFound(name string) error {
	return &fail.Error{
		Code: fail.NotFound, Hint: "agent-sessionizer list",
		Err: fmt.Errorf("VM %s: %w", name, vm.ErrNotFound),
	}
}

func isNotFound(err error) bool { return errors.Is(err, vm.ErrNotFound) }
