package secrets

import (
	"errors"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
	"golang.org/x/sys/unix"
)

// inMemory reports whether files in dir never reach a disk.
func inMemory(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	if st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC {
		return errors.New("must be a tmpfs")
	}
	for line := range strings.Lines(sys.Text("/proc/swaps")) {
		if device, _, _ := strings.Cut(line, " "); strings.HasPrefix(device, "/") && !strings.HasPrefix(device, "/dev/zram") {
			return errors.New("memory is swapped to a disk; turn swap off with: sudo swapoff -a")
		}
	}
	return nil
}
