package bootclock

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// clock goes on while a Mac sleeps, unlike CLOCK_UPTIME_RAW (clock_gettime(3)).
const clock = unix.CLOCK_MONOTONIC

// ID identifies the boot of the host: times of another boot cannot be compared.
func ID() (string, error) {
	id, err := unix.Sysctl("kern.bootsessionuuid")
	if err != nil {
		return "", fmt.Errorf("identify the boot of this host: %w", err)
	}
	return id, nil
}
