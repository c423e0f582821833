package bootclock

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const clock = unix.CLOCK_BOOTTIME

// ID identifies the boot of the host: times of another boot cannot be compared.
func ID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("identify the boot of this host: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
