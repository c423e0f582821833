//go:build !linux

package guestclient

import (
	"os"

	"golang.org/x/sys/unix"
)

// syncAll flushes a directory with everything below it. It flushes all other file
// systems as well.
func syncAll(*os.Root) error { return unix.Sync() }
