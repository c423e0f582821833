// Package peercred identifies the process at the other end of a UNIX socket.
package peercred

import (
	"errors"
	"fmt"
	"net"
	"os"
)

// Own returns an error unless the process at the other end runs as this user. A
// socket's directory restricts who can connect only as long as its mode is not changed.
func Own(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("read the user of the socket's peer: %w", err)
	}
	var uid int
	var credErr error
	err = raw.Control(func(fd uintptr) { uid, credErr = uidOf(int(fd)) })
	if err := errors.Join(err, credErr); err != nil {
		return fmt.Errorf("read the user of the socket's peer: %w", err)
	}
	if uid != os.Geteuid() {
		return fmt.Errorf("the socket's peer belongs to user %d", uid)
	}
	return nil
}
