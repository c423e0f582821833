// Package testenv holds what the tests of several packages share: processes of their own
// binary, directories for sockets, and waiting for other processes. It imports nothing of
// the program, so that every test can use it.
package testenv

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"
)

// Commands are what a test binary does when a test starts it with one of these names as
// its first argument. The arguments follow the name.
type Commands map[string]func(ctx context.Context, args []string) error

// Main runs a command, or the tests, and exits. It is the body of a TestMain.
func Main(m *testing.M, commands Commands) {
	if len(os.Args) > 1 {
		if run, ok := commands[os.Args[1]]; ok {
			if err := run(context.Background(), os.Args[2:]); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(Run(m))
}

// ShortDir returns a directory that is removed at the end of the test. It is for sockets:
// their paths must be short, and t.TempDir contains the name of the test.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// WaitFor polls until done returns true. It is for conditions that offer nothing to wait on. A
// slow done gets longer pauses, so that polling takes at most a fifth of a core.
func WaitFor(t testing.TB, what string, done func() bool) {
	t.Helper()
	const limit = 5 * time.Minute // even a slow machine with an emulated VM needs less
	for end := time.Now().Add(limit); ; {
		began := time.Now()
		if done() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, limit)
		}
		time.Sleep(min(max(4*time.Since(began), 5*time.Millisecond), time.Second))
	}
}

// Run runs the tests and returns the exit code. With -cover, it sets a directory for the
// coverage of child processes. Without one, they would print a warning to stderr, which
// tests do not expect there.
func Run(m *testing.M) int {
	var err error
	if watcher, err = watch(); err != nil {
		fmt.Fprintln(os.Stderr, "watch for processes that the tests leave:", err)
		return 1
	}
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
