package attach

import "golang.org/x/sys/unix"

// The ioctl requests that read a terminal's settings, and that set them and discard its
// input.
const (
	getTermios      = unix.TCGETS
	setTermiosFlush = unix.TCSETSF
)
