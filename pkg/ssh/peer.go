package ssh

import (
	"errors"
	"fmt"
	"net"
	"os"
)

var errForeign = errors.New("the other end of the socket belongs to another user")

// ownPeer returns an error unless a process of this user is at the other end.
func ownPeer(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("ask who is at the other end: %w", err)
	}
	var uid int
	var credErr error
	err = raw.Control(func(fd uintptr) { uid, credErr = peerUID(int(fd)) })
	if err := errors.Join(err, credErr); err != nil {
		return fmt.Errorf("ask who is at the other end: %w", err)
	}
	if uid != os.Geteuid() {
		return errForeign
	}
	return nil
}
