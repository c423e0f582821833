// Package reexec supports tests that run their own binary as a child process.
package reexec

import (
	"fmt"
	"os"
	"runtime"
	"testing"
)

// Run runs the tests and returns the exit code. With -cover, it sets a directory for the
// coverage of child processes. Without one, they would print a warning to stderr, which
// tests do not expect there.
func Run(m *testing.M) int {
	watcher, err := watch()
	if err != nil {
		fmt.Fprintln(os.Stderr, "watch for processes that the tests leave:", err)
		return 1
	}
	defer runtime.KeepAlive(watcher)
	const place = "GOCOVERDIR"
	if testing.CoverMode() == "" || os.Getenv(place) != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "cover")
	if err == nil {
		defer os.RemoveAll(dir)
		err = os.Setenv(place, dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "make a place for the coverage of child processes:", err)
		return 1
	}
	return m.Run()
}
