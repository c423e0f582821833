package fake

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// commandLine returns a process's arguments, or nothing when it is gone or a zombie.
func commandLine(pid int) []string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return nil
	}
	return strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
}

// reap kills the processes that a VM's commands left running, including daemons: they
// all carry the VM's root in their environment. Several rounds catch those that fork.
func reap(root string) {
	mark := []byte(rootVariable + "=" + root + "\x00")
	for range 10 {
		found := false
		files, _ := filepath.Glob("/proc/[0-9]*/environ") // the error can be ignored because the pattern is constant
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil || !bytes.Contains(b, mark) {
				continue
			}
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			if err == nil && pid != os.Getpid() && syscall.Kill(pid, syscall.SIGKILL) == nil {
				found = true
			}
		}
		if !found {
			return
		}
	}
}
