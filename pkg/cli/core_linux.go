package cli

import (
	"os"

	"golang.org/x/sys/unix"
)

// forbidCoreDumps keeps the memory of this process, and of all that it starts (the
// host agent's QEMU has the guest's memory, with its secrets), out of core files. The
// limit is for files, the filter for programs that the kernel hands a dump to.
func forbidCoreDumps() error {
	if err := os.WriteFile("/proc/self/coredump_filter", []byte("0"), 0); err != nil && !os.IsNotExist(err) && !os.IsPermission(err) {
		return err
	}
	return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
}
