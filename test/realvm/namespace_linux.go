package realvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Namespace is another network namespace of this process, for addresses that must not
// be the host's own. It lives on its own thread; sockets that are created there stay
// there.
type Namespace struct {
	TID  int // of its thread, for `ip link … netns TID`
	work chan func()
}

// NewNamespace makes an empty namespace.
func NewNamespace() (*Namespace, error) {
	n := &Namespace{work: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that no other goroutine uses this thread
		err := unix.Unshare(unix.CLONE_NEWNET)
		n.TID = unix.Gettid()
		ready <- err
		for f := range n.work {
			f()
		}
	}()
	return n, <-ready
}

// Do runs f in the namespace.
func (n *Namespace) Do(f func() error) error {
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}

// IP runs ip(8) with each line of arguments, in the calling thread's namespace.
func IP(lines ...string) error {
	for _, line := range lines {
		if out, err := exec.CommandContext(context.Background(), "ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", line, err, out)
		}
	}
	return nil
}

// Resolver makes addr the host's resolver, in this mount namespace.
func Resolver(addr string) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	f, err := os.CreateTemp("", "asz-resolv")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // the mount keeps the inode
	_, err = fmt.Fprintln(f, "nameserver "+addr)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	if err := unix.Mount(f.Name(), "/etc/resolv.conf", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("replace resolv.conf: %w", err)
	}
	return nil
}
