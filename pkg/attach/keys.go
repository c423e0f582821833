package attach

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// watchKeys calls giveUp when q or Ctrl-C is pressed on a terminal, or when the
// terminal is gone. stop ends the watching, with no key taken after it returns.
// What is typed meanwhile is lost: there is no guest to type to.
func watchKeys(in *os.File, giveUp func()) (stop func(), err error) {
	fd := int(in.Fd())
	if !term.IsTerminal(fd) {
		return func() {}, nil
	}
	wakeR, wakeW, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("watch the keyboard: %w", err)
	}
	wake := int(wakeR.Fd())
	if max(fd, wake) >= unix.FD_SETSIZE {
		_, _ = wakeR.Close(), wakeW.Close()
		return func() {}, nil
	}
	var done sync.WaitGroup
	done.Go(func() {
		buf := make([]byte, 256)
		for {
			// select(2), for poll and kqueue do not know every terminal on macOS.
			var set unix.FdSet
			set.Set(fd)
			set.Set(wake)
			_, err := unix.Select(max(fd, wake)+1, &set, nil, nil, nil)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case err != nil || set.IsSet(wake):
				return
			}
			n, err := unix.Read(fd, buf)
			if err != nil || n <= 0 || bytes.ContainsAny(buf[:n], "\x03qQ") {
				giveUp()
				return
			}
		}
	})
	return func() {
		_ = wakeW.Close()
		done.Wait()
		_ = wakeR.Close()
	}, nil
}
