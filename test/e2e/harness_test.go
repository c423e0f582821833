//go:build e2e

package e2e

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// box is a user's account, with helpers for these tests.
type box struct {
	*realvm.Box
	t *testing.T
}

func newBox(t *testing.T) *box {
	t.Helper()
	b := &box{Box: realvm.NewBox(t), t: t}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("sessions at the end:\n%s", b.Run("agent-sessionizer", "list").All())
			for _, s := range b.List() {
				if s.State == "ready" {
					t.Logf("in %s:\n%s", s.Name, b.Run("timeout", "60", "agent-sessionizer", "exec", s.Name, "--", "sh", "-c",
						"date; ps -eo pid,ppid,stat,etimes,args --forest | tail -n 50; tmux capture-pane -p -t agent:claude").All())
				}
			}
			t.Logf("logs:\n%s", b.Logs())
			logs, _ := filepath.Glob(b.taskDir("*") + "/keeper.log")
			for _, log := range logs {
				t.Logf("end of %s:\n%s", log, b.Run("tail", "-n", "5", log).All())
			}
		}
	})
	return b
}

// long skips a test with -short, which make test passes. It is for what costs minutes of
// an emulated guest, and repeats with another client, answer or number what the rest shows.
func long(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("make e2e runs it")
	}
}

// qemu occurs in the command line of a VM, but not of a QEMU that Lima runs to query
// its version or capabilities.
const qemu = " -pidfile "

// kill sends SIGKILL to the box's processes of one kind, of which at least one must
// exist.
func (b *box) kill(what string) {
	b.t.Helper()
	pids := b.Processes(what)
	if len(pids) == 0 {
		b.t.Fatalf("processes %q = none of %v, want some to kill", what, b.Processes(""))
	}
	for pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	// A process that is being torn down holds its locks until it is gone.
	testenv.WaitFor(b.t, "the end of "+what, func() bool {
		for pid := range b.Processes(what) {
			if pids[pid] != "" {
				return false
			}
		}
		return true
	})
}

const small = "--cpus=" + realvm.CPUs + " --memory=" + realvm.Memory + " --disk=8GiB"

func (b *box) open(args ...string) string {
	b.t.Helper()
	return strings.TrimSpace(b.Asz(append(append([]string{"open", "-d"}, strings.Fields(small)...), args...)...))
}
