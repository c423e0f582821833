package taskrun

import (
	"errors"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// notice reports, by inotify, each write to the directory of an attempt and the
// release of the wrapper's lock. An idle agent therefore costs nothing. A directory
// that does not exist never causes a notice.
func (t Attempt) notice() (stirred <-chan struct{}, stop func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, nil, os.NewSyscallError("inotify_init1", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	_, err = unix.InotifyAddWatch(fd, t.dir, unix.IN_MODIFY|unix.IN_MOVED_TO|unix.IN_CLOSE_WRITE|unix.IN_ONLYDIR)
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		return nil, nil, errors.Join(os.NewSyscallError("inotify_add_watch", err), events.Close())
	}
	changed, done := make(chan struct{}), make(chan struct{})
	var reading sync.WaitGroup
	reading.Go(func() {
		buf := make([]byte, 4096)
		for {
			if _, err := events.Read(buf); err != nil {
				return
			}
			select {
			case changed <- struct{}{}: // until then the kernel merges identical events
			case <-done:
				return
			}
		}
	})
	return changed, func() {
		close(done)
		_ = events.Close() // ends the Read
		reading.Wait()
	}, nil
}
