//go:build e2e

package e2e

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestCrash kills the processes of a real VM. Repeating the command must lead to the
// same result; the disk and the work on it stay.
func TestCrash(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")

	// The command is interrupted and the keeper killed while the VM boots. Two
	// concurrent commands then find the same VM and finish it.
	open := exec.Command("agent-sessionizer", append([]string{"open", "-d"}, append(strings.Fields(small), "./project")...)...)
	open.Path, open.Err = realvm.Binary(), nil
	open.Env, open.Dir = b.Env, b.Home
	var said strings.Builder
	open.Stderr = &said
	if err := open.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "QEMU", func() bool { return len(b.Processes(qemu)) > 0 })
	if err := open.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	err := open.Wait()
	if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 130 || !strings.Contains(said.String(), "continues in the background") {
		t.Errorf("interrupted open = %v, want exit status 130 and \"continues in the background\"\n%s", err, said.String())
	}
	b.kill("keeper")
	names := make(chan string, 2)
	for range 2 {
		go func() { names <- strings.TrimSpace(b.Run("agent-sessionizer", "open", "-d", "./project").Stdout) }()
	}
	name := <-names
	if other := <-names; name == "" || name != other || len(b.List()) != 1 {
		t.Fatalf("two opens at once = %q and %q, sessions %+v, want one session\n%s", name, other, b.List(), b.Logs())
	}
	b.MustIn(name, "echo precious >precious.txt && sync")

	// The keeper dies: the VM does not notice, and the next command starts another
	// keeper.
	b.kill("keeper")
	b.MustIn(name, "cat precious.txt")
	testenv.WaitFor(t, "a new keeper", func() bool { return len(b.Processes("keeper")) > 0 })

	// The host agent dies: the VM still runs and can be used and stopped.
	b.kill("hostagent")
	b.MustIn(name, "cat precious.txt")

	// The gateway dies, and with it the VM's network, for good; the session reports
	// that. start shuts the guest down by its power button, so that unwritten data is
	// not lost, and starts both again. Until then the sysctl settings keep the data
	// in memory.
	b.MustIn(name, "sudo sysctl -qw vm.dirty_writeback_centisecs=0 vm.dirty_expire_centisecs=360000 && echo unwritten >unwritten.txt")
	b.kill("gateway")
	b.WaitState("broken")
	if out := b.Asz("list"); !strings.Contains(out, "gateway has stopped") {
		t.Errorf("list after the gateway's end = %s, want \"gateway has stopped\"", out)
	}
	b.Asz("start", name)
	if got := b.MustIn(name, "cat precious.txt unwritten.txt; curl -sS http://github.com/"); got != "precious\nunwritten\nthis is "+allowedAddr+":80" {
		t.Errorf("files and request after a new gateway = %q, want both files and %s:80", got, allowedAddr)
	}

	// The host loses power: everything dies at once, and pid files and locks stay.
	for _, what := range []string{"keeper", "hostagent", "gateway", qemu} {
		b.kill(what)
	}
	b.WaitState("stopped")
	if out := b.Asz("list"); !strings.Contains(out, "stopped unexpectedly") {
		t.Errorf("list after the VM's end = %s, want \"stopped unexpectedly\"", out)
	}
	b.Asz("open", "-d", "./project")
	if got := b.MustIn(name, "cat precious.txt"); got != "precious" {
		t.Errorf("precious.txt = %q, want \"precious\"", got)
	}
	b.Asz("destroy", "--force", name)
	if left := b.Leftovers(); len(left) > 0 {
		t.Errorf("processes at the end = %v, want none", left)
	}
}

// TestDestroyWhileCreating cancels the work in the middle of a boot.
func TestDestroyWhileCreating(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")
	open := exec.Command("agent-sessionizer", append([]string{"open", "-d"}, append(strings.Fields(small), "./project")...)...)
	open.Path, open.Err = realvm.Binary(), nil
	open.Env, open.Dir = b.Env, b.Home
	if err := open.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "QEMU", func() bool { return len(b.Processes(qemu)) > 0 })
	b.Asz("destroy", "project")
	if err := open.Wait(); err == nil {
		t.Error("open of a session destroyed meanwhile = nil, want an error")
	}
	if left := b.Leftovers(); len(left) > 0 {
		t.Errorf("processes at the end = %v, want none", left)
	}
	if l := b.List(); len(l) != 0 {
		t.Errorf("sessions at the end = %+v, want none", l)
	}
}
