//go:build e2e

// Package e2e opens sessions in real VMs: Lima as a library, QEMU, a Debian
// guest built here from packages, real sshd, tmux and iptables.
//
// Everything but the building of the image runs in a network namespace that
// the test makes for itself. In it stand a pretend internet (203.0.113.0/24,
// with a resolver), a LAN and services on loopback, so that whatever a guest
// tries to reach ends in this process.
package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// Passed from the outer process to the one in the namespace.
const (
	envBinary = "E2E_BINARY"
	envData   = "E2E_DATA"
)

func TestMain(m *testing.M) {
	if runtime.GOOS != "linux" {
		fmt.Fprintln(os.Stderr, "e2e: needs Linux: guest images are built from Debian packages and the pretend internet is a network namespace")
		os.Exit(1)
	}
	code, err := 0, error(nil)
	if os.Getenv(envBinary) == "" {
		code, err = outer()
	} else if err = pretendInternet(); err == nil {
		code = m.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// outer builds the binary and the image, which takes the real network, and runs
// this test binary again in namespaces of its own.
func outer() (int, error) {
	dir, err := os.MkdirTemp("", "asz-e2e")
	if err != nil {
		return 1, err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "agent-sessionizer")
	if out, err := exec.Command("go", "build", "-o", binary, "../../cmd/agent-sessionizer").CombinedOutput(); err != nil {
		return 1, fmt.Errorf("build: %w\n%s", err, out)
	}
	// The image is kept between runs; its name is a hash of all that goes in.
	cache, err := os.UserCacheDir()
	if err != nil {
		return 1, err
	}
	data := filepath.Join(cache, "agent-sessionizer-e2e")
	if os.Getenv("E2E_KEEP_IMAGE") != "" { // while writing tests: the image of the last run will do
		return inside(binary, data)
	}
	build := exec.Command(binary, "image", "build", "--from", "debian")
	build.Env = append(os.Environ(), "XDG_DATA_HOME="+data)
	build.Stdout, build.Stderr = os.Stdout, os.Stderr
	if err := build.Run(); err != nil {
		return 1, fmt.Errorf("build the image: %w", err)
	}
	return inside(binary, data)
}

func inside(binary, data string) (int, error) {
	inner := exec.Command("/proc/self/exe", os.Args[1:]...)
	inner.Env = append(os.Environ(), envBinary+"="+binary, envData+"="+data)
	inner.Stdin, inner.Stdout, inner.Stderr = nil, os.Stdout, os.Stderr
	inner.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		inner.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		inner.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		inner.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	err := inner.Run()
	if exit, ok := err.(*exec.ExitError); ok {
		return exit.ExitCode(), nil
	}
	if err != nil && strings.Contains(err.Error(), "operation not permitted") {
		err = fmt.Errorf("%w; run as root, or allow unprivileged user namespaces: sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0", err)
	}
	return 0, err
}
