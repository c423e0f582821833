package attach

import "golang.org/x/sys/unix"

// The requests that read a terminal's settings, and that set them and drop its input.
const (
	getTermios      = unix.TIOCGETA
	setTermiosFlush = unix.TIOCSETAF
)
