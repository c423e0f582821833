//go:build !linux

package netguard

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// Guests run Linux. On other systems only a fake guest works, which does not call
// these functions.

func markSocket(_, _ string, _ syscall.RawConn) error { return errors.ErrUnsupported }

func viaDir(dir *os.File, name string) string { return filepath.Join(dir.Name(), name) }

func peerPID(*net.UnixConn) (int, error) { return 0, errors.ErrUnsupported }
