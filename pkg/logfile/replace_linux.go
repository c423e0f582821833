package logfile

import (
	"os"

	"golang.org/x/sys/unix"
)

// replace makes the descriptor of old refer to f.
func replace(f, old *os.File) error { return unix.Dup3(int(f.Fd()), int(old.Fd()), 0) }
