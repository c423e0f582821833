package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
)

// watchedVariable holds the path of the watched test binary. What the tests start
// inherits it, and tests that run with it have no watcher of their own.
const watchedVariable = "AGENT_TEST_WATCHED"

// killOrphans waits for the end of its input, when the tests end, and then kills every
// process of their binary and every process with watchedVariable in its environment.
// It repeats that for processes that were started meanwhile.
const killOrphans = `read -r _
found=1
while [ "$found" ]; do
	found=
	for dir in /proc/[0-9]*; do
		case $(readlink "$dir/exe") in
		"$1" | "$1 (deleted)") ;;
		*) tr '\0' '\n' <"$dir/environ" | grep -qxF "$2=$1" || continue ;;
		esac
		kill -9 "${dir#/proc/}" && found=1
	done
done 2>/dev/null`

// watcher must not become garbage: the end of its input would kill the tests, also while they exit, which
// takes a second with the race detector.
var watcher *exec.Cmd //nolint:unused // see above

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
	cmd := exec.Command("/bin/sh", "-c", killOrphans, "sh", self, watchedVariable) //nolint:noctx // it outlives the tests
	if _, err := cmd.StdinPipe(); err != nil {                                     // closed by the end of this process
		return nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C is for the tests
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return cmd, os.Setenv(watchedVariable, self) // after Start, or it would kill itself
}
