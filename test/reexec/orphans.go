package reexec

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
)

// watchedVariable is set in the environment of tests that are watched: tests that run
// the same binary again are part of them.
const watchedVariable = "AGENT_TEST_WATCHED"

// killOrphans waits for the end of its input, which is that of the tests, and then kills
// every process of their binary. Some of these were started by others of them.
const killOrphans = `read -r _
found=1
while [ "$found" ]; do
	found=
	for dir in /proc/[0-9]*; do
		case $(readlink "$dir/exe") in
		"$1" | "$1 (deleted)") kill -9 "${dir#/proc/}" && found=1 ;;
		esac
	done
done`

// watch starts a process that ends what the tests leave when they are killed, by their
// time limit for example. It works on Linux, for the binaries that "go test" builds:
// their path is that of one run. The caller keeps what it returns.
func watch() (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil || runtime.GOOS != "linux" || !strings.Contains(self, "/go-build") || os.Getenv(watchedVariable) != "" {
		return nil, err
	}
	// A test may run the binary with an empty environment.
	if parent, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", os.Getppid())); err == nil && parent == self {
		return nil, nil
	}
	if err := os.Setenv(watchedVariable, "1"); err != nil {
		return nil, err
	}
	cmd := exec.Command("/bin/sh", "-c", killOrphans, "sh", self) //nolint:noctx // it outlives the tests
	if _, err := cmd.StdinPipe(); err != nil {                    // closed by the end of this process
		return nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the tests
	return cmd, cmd.Start()
}
