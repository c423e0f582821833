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

// watchKeys calls giveUp if the user presses q or Ctrl-C on a terminal, or if the terminal
// is gone. No key is consumed after stop returns. Other keys typed meanwhile are discarded,
// because there is no guest to send them to.
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
			// Use select(2), because poll and kqueue do not support every terminal on
			// macOS.
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
	// A question that termtext.Filter never passes from a guest, and its answer.
	question = "\x1b[5n"
	answer   = "\x1b[0n"
)

// drain reads the terminal's remaining answers to the guest's questions. Otherwise the
// user's shell would read them as input. Terminals answer in order, so no other answer
// follows the answer to our own question.
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

// discardInput discards input that was typed but not read.
func discardInput(fd int) {
	if state, err := unix.IoctlGetTermios(fd, getTermios); err == nil {
		_ = unix.IoctlSetTermios(fd, setTermiosFlush, state) // the terminal may be gone
	}
}
