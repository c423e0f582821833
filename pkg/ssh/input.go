package ssh

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// errCancelled ends a Read of an input that is no longer needed.
var errCancelled = errors.New("input cancelled")

// input is a command's stdin. Reading from a file can be cancelled, so that a
// command that has ended does not consume the terminal's next key press.
type input struct {
	r    io.Reader
	file *os.File // set if reading can be cancelled
	wake [2]*os.File

	mu        sync.Mutex
	cancelled bool
	err       error
	reading   sync.Mutex // held while file descriptors are in use
}

func newInput(r io.Reader) (*input, error) {
	in := &input{r: r}
	f, ok := r.(*os.File)
	// select(2) works for terminals, pipes and files. It also works for /dev/tty on
	// macOS, where poll and kqueue do not. It is limited to descriptors below
	// FD_SETSIZE, which is 1024.
	if !ok || f == nil || f.Fd() >= unix.FD_SETSIZE {
		if ok && f == nil {
			in.r = nil
		}
		return in, nil
	}
	pr, pw, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("read the command's input: %w", err)
	}
	if pr.Fd() < unix.FD_SETSIZE {
		in.file, in.wake = f, [2]*os.File{pr, pw}
		return in, nil
	}
	return in, errors.Join(pr.Close(), pw.Close())
}

func (in *input) Read(p []byte) (int, error) {
	in.mu.Lock()
	cancelled := in.cancelled
	in.mu.Unlock()
	if cancelled {
		return 0, errCancelled
	}
	if in.r == nil {
		return 0, io.EOF
	}
	if in.file != nil {
		if err := in.ready(); err != nil {
			return 0, err
		}
	}
	n, err := in.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		in.mu.Lock()
		in.err = err
		in.mu.Unlock()
	}
	return n, err
}

// ready waits until the file can be read or the input is cancelled.
func (in *input) ready() error {
	in.reading.Lock()
	defer in.reading.Unlock()
	in.mu.Lock()
	cancelled := in.cancelled
	in.mu.Unlock()
	if cancelled {
		return errCancelled
	}
	file, wake := int(in.file.Fd()), int(in.wake[0].Fd())
	for {
		var set unix.FdSet
		set.Set(file)
		set.Set(wake)
		_, err := unix.Select(max(file, wake)+1, &set, nil, nil, nil)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil // the Read reports the error
		case set.IsSet(wake):
			return errCancelled
		}
		return nil
	}
}

// failure returns the error that ended reading, nil at a normal end.
func (in *input) failure() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.err
}

// cancel ends a pending Read of a file and all later ones.
func (in *input) cancel() {
	in.mu.Lock()
	was := in.cancelled
	in.cancelled = true
	in.mu.Unlock()
	if was || in.file == nil {
		return
	}
	_ = in.wake[1].Close() // wakes the reader, which then releases the pipe
	in.reading.Lock()
	_ = in.wake[0].Close()
	in.reading.Unlock()
}
