package realvm

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestProcessesLeavesOutForks runs a shell with a child that has started no program.
func TestProcessesLeavesOutForks(t *testing.T) {
	b := &Box{t: t, Home: t.TempDir()}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", "(read -r _; true); true")
	cmd.Env = append(os.Environ(), "HOME="+b.Home)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { // both shells end
		_ = in.Close()
		_ = cmd.Wait()
	}()
	pid := strconv.Itoa(cmd.Process.Pid)
	testenv.WaitFor(t, "the shell's child", func() bool {
		children, _ := os.ReadFile(filepath.Join("/proc", pid, "task", pid, "children"))
		return len(children) > 0
	})
	if got := slices.Collect(maps.Keys(b.Processes("read -r"))); !slices.Equal(got, []int{cmd.Process.Pid}) {
		t.Errorf("processes = %v, want only the shell, %s", got, pid)
	}
}
