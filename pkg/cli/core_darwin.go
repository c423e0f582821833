package cli

import "golang.org/x/sys/unix"

// forbidCoreDumps keeps the memory of this process, and of all processes that it starts,
// out of core files.
func forbidCoreDumps() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) }
