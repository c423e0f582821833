package app

import "golang.org/x/sys/unix"

// ForbidCoreDumps keeps the memory of this process, and of all processes that it starts,
// out of core files.
func ForbidCoreDumps() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) }
