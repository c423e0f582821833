package attach

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

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

const (
	// A question that plain.Filter passes from no guest, and its answer.
	question = "\x1b[5n"
	answer   = "\x1b[0n"
)

// drain reads what the terminal still answers to the guest's questions: nobody
// takes it any more, and the user's shell would find it typed. Terminals answer in
// order, so after the answer to a question of our own no other comes.
func (s *screen) drain() {
	fd := int(s.in.Fd())
	if _, err := io.WriteString(s.out, question); err != nil || fd >= unix.FD_SETSIZE {
		return
	}
	var last []byte
	buf := make([]byte, 4096)
	for deadline := time.Now().Add(s.answerWait); !bytes.Contains(last, []byte(answer)); {
		var set unix.FdSet
		set.Set(fd)
		left := unix.NsecToTimeval(max(time.Until(deadline), 0).Nanoseconds())
		n, err := unix.Select(fd+1, &set, nil, nil, &left)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		if n, err = unix.Read(fd, buf); err != nil || n <= 0 {
			return
		}
		last = append(last[max(0, len(last)-len(answer)):], buf[:n]...)
	}
}

// discardInput drops what was typed and not read.
func discardInput(fd int) {
	if state, err := unix.IoctlGetTermios(fd, getTermios); err == nil {
		_ = unix.IoctlSetTermios(fd, setTermiosFlush, state) // a terminal that is gone has no input
	}
}
