// Package peer says who is at the other end of a UNIX socket.
package peer

import (
	"errors"
	"fmt"
	"net"
	"os"
)

// Own returns an error unless a process of this user is at the other end. Where a
// socket lies says who may connect only as long as nobody changes its directory's mode.
func Own(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("ask who is at the other end: %w", err)
	}
	var uid int
	var credErr error
	err = raw.Control(func(fd uintptr) { uid, credErr = uidOf(int(fd)) })
	if err := errors.Join(err, credErr); err != nil {
		return fmt.Errorf("ask who is at the other end: %w", err)
	}
	if uid != os.Geteuid() {
		return fmt.Errorf("the other end of the socket belongs to user %d", uid)
	}
	return nil
}
