// Package bootclock reads the clock of the host that cannot be set: the time since it booted,
// including the time that it slept.
package bootclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since the host booted.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(clock, &ts); err != nil {
		panic(err) // both systems have had it for many years
	}
	return time.Duration(ts.Nano())
}
