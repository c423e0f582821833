package vm

import (
	"runtime"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// The architectures of guests.
const (
	X8664   = "x86_64"
	AArch64 = "aarch64"
)

// Archs lists the architectures of guests.
var Archs = []string{X8664, AArch64}

// HostArch returns the host's architecture, which is that of most guests.
func HostArch() string {
	if arch, err := ParseArch(runtime.GOARCH); err == nil {
		return arch
	}
	return runtime.GOARCH
}

// ParseArch returns the architecture with that name. It accepts the names of Debian and Go
// (amd64, arm64) too.
func ParseArch(name string) (string, error) {
	switch name {
	case X8664, "amd64":
		return X8664, nil
	case AArch64, "arm64":
		return AArch64, nil
	}
	return "", fail.New(fail.Usage, "architecture must be x86_64 or aarch64, got %q", name)
}

// Console returns the device of the serial console that QEMU gives a guest first.
func Console(arch string) string {
	if arch == AArch64 {
		return "ttyAMA0"
	}
	return "ttyS0"
}
