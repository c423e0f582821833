//go:build browser

// Package browser tests the dashboard in a real browser, with the real binary and fake VMs.
package browser

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// binary is the path of the program, built once with the tag for the fake driver.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "asz-browser")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "agent-sessionizer")
	out, err := exec.Command("go", "build", "-tags", "fakevm", "-o", binary, "../../cmd/agent-sessionizer").CombinedOutput()
	code := 1
	if err != nil {
		fmt.Fprintf(os.Stderr, "build the test binary: %v\n%s", err, out)
	} else {
		code = testenv.Run(m)
	}
	os.RemoveAll(dir)
	os.Exit(code)
}
