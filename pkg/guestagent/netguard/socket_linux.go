package netguard

import (
	"errors"
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/rules"
)

// markSocket sets the proxy's firewall mark on a socket.
func markSocket(_, _ string, c syscall.RawConn) error {
	var errMark error
	err := c.Control(func(fd uintptr) {
		errMark = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, rules.Mark)
	})
	return errors.Join(err, errMark)
}

// viaDir returns a path to a file in an open directory. The path is short enough
// for a socket address, however long the directory's own path is.
func viaDir(dir *os.File, name string) string {
	return "/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name
}

// peerPID returns the process at the other end of a connection. For a listening
// socket's connection, that is the process that called listen.
func peerPID(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var errCred error
	err = raw.Control(func(fd uintptr) {
		cred, errCred = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, errCred); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
