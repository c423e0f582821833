// Package reexec is for tests whose binary is also a process that they start.
package reexec

import (
	"fmt"
	"os"
	"testing"
)

// Run runs the tests and returns the exit code. With -cover, child processes get a
// place for their coverage: without one they print a warning on the standard error,
// which is a line more than a test expects there.
func Run(m *testing.M) int {
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
