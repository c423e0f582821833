package cli

import (
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/spf13/cobra"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/console"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain also runs as a process of the product, started by TestNoCoreDumps.
func TestMain(m *testing.M) {
	if os.Getenv("TEST_HIDDEN_COMMAND") == "" {
		testenv.Main(m, nil)
	}
	a := &app.App{Con: console.New(os.Stdout, os.Stderr, os.Getenv)}
	cmd := newHiddenCmds(a)[0]
	cmd.Args, cmd.SilenceUsage = nil, true
	cmd.RunE = func(*cobra.Command, []string) error {
		child := exec.Command("cat", "/proc/self/limits", "/proc/self/coredump_filter")
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		return child.Run()
	}
	cmd.SetArgs(nil)
	if cmd.Execute() != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// TestNoCoreDumps checks that processes that hold secrets leave no core file, and neither
// do their children. These processes are keepers, the gateway, the host agent, whose child
// is QEMU, and the secret resolver.
func TestNoCoreDumps(t *testing.T) {
	root, _ := testRoot(t)
	for _, c := range append(newHiddenCmds(&app.App{}), commandNamed(t, root, "serve")) {
		if c.PreRunE == nil {
			t.Errorf("%s has no PreRunE, want one that forbids core dumps", c.Name())
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	cmd.Env = append(os.Environ(), "TEST_HIDDEN_COMMAND=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("run a hidden command: %v\n%s", err, out)
	}
	for _, want := range []string{`(?m)^Max core file size +0 +0 +bytes`, `(?m)^0+$`} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("limits of a child of a hidden command = %s\nwant a match of %q", out, want)
		}
	}
}

func commandNamed(t *testing.T, root *cobra.Command, name string) *cobra.Command {
	t.Helper()
	cmd, _, err := root.Find([]string{name})
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}
