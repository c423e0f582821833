package guestclient

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// syncAll flushes a directory with everything below it.
func syncAll(root *os.Root) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(dir.Fd())), dir.Close())
}
