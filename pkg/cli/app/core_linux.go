package app

import (
	"os"

	"golang.org/x/sys/unix"
)

// ForbidCoreDumps keeps the memory of this process, and of all processes that it starts,
// out of core dumps. The host agent's QEMU, for example, holds the guest's memory with its
// secrets. The resource limit covers core files; the filter covers programs to which the
// kernel pipes a dump.
func ForbidCoreDumps() error {
	if err := os.WriteFile("/proc/self/coredump_filter", []byte("0"), 0); err != nil && !os.IsNotExist(err) && !os.IsPermission(err) {
		return err
	}
	return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
}
