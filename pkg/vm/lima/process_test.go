package lima

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func TestRoleOf(t *testing.T) {
	const dir = "/h/vm"
	for _, c := range []struct {
		want role
		args []string
	}{
		{agent, []string{"/bin/as", "hostagent", "--pidfile", "/h/vm/ha.pid", "--socket", "/h/vm/ha.sock", "vm"}},
		{driver, []string{"qemu-system-x86_64", "-name", "lima-vm", "-pidfile", "/h/vm/qemu.pid"}},
		{sshMux, []string{"ssh: /h/vm/ssh.sock [mux]"}},
		{sshMux, []string{"ssh:", "/h/vm/ssh.sock", "[mux]"}}, // the same, as ps prints it
		{sshMux, []string{"/usr/bin/ssh", "-o", `ControlPath="/h/vm/ssh.sock"`}},
		{stranger, []string{"/bin/as", "hostagent", "--pidfile", "/h/vm2/ha.pid", "vm2"}},
		{stranger, []string{"qemu-system-x86_64", "-pidfile", "/h/vm/sub/qemu.pid"}},
		{stranger, []string{"vim", "/h/vm/ssh.sock"}},
		{stranger, []string{"tail", "-f", "/h/vm/serial.log"}},
		{stranger, []string{"x", "-pidfile"}},
		{stranger, nil},
	} {
		if got := roleOf(c.args, dir); got != c.want {
			t.Errorf("roleOf(%q) = %v, want %v", c.args, got, c.want)
		}
	}
}

// TestParseProcesses reads what ps prints on macOS, and what it prints on this host.
func TestParseProcesses(t *testing.T) {
	long := strings.Repeat(" argument", 20_000)
	got := parseProcesses([]byte("    1 /sbin/launchd\n  345 /usr/bin/java" + long + "\n  346 (zombie)\n  347 \nPID COMMAND\n" +
		"99999 /Applications/My App/agent-sessionizer hostagent --pidfile /h/vm/ha.pid vm\n  400 ssh: /h/vm/ssh.sock [mux]  \n"))
	roles := map[int]role{}
	for pid, args := range got {
		roles[pid] = roleOf(args, "/h/vm")
	}
	want := map[int]role{1: stranger, 345: stranger, 346: stranger, 99999: agent, 400: sshMux}
	if diff := cmp.Diff(want, roles); diff != "" {
		t.Errorf("roles of parseProcesses (-want +got):\n%s", diff)
	}
	if len(got[345]) != 20_001 {
		t.Errorf("arguments of a long line = %d, want 20001", len(got[345]))
	}

	marked := idle(t, "-pidfile", "/h/vm/qemu.pid")
	out, err := exec.CommandContext(t.Context(), "ps", "-axww", "-o", "pid=,command=").Output()
	if err != nil {
		t.Fatalf("%v; apt-get install procps", err)
	}
	if args := parseProcesses(out)[marked.Process.Pid]; roleOf(args, "/h/vm") != driver {
		t.Errorf("process in the output of ps = %q, want one with the role %d", args, driver)
	}
}

// idle starts a process with these arguments that waits for an interrupt.
func idle(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, append([]string{"idle"}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("output of the process = %v, want it started", err)
	}
	return cmd
}

func writePID(t *testing.T, path string, pid int) {
	t.Helper()
	if err := os.WriteFile(path, []byte(strconv.Itoa(pid)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A pid file that survived a reboot names a process that is not ours. That process
// must neither be taken for the VM nor be killed.
func TestStalePIDs(t *testing.T) {
	d := newDriver(t)
	if err := d.Create(t.Context(), testSpec("stale")); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.home, "stale")
	innocent := idle(t, "--pidfile", "/elsewhere/ha.pid")
	for _, content := range []string{strconv.Itoa(innocent.Process.Pid), "1", "0", "-1", "", "x", "99999999"} {
		for _, f := range []string{"ha.pid", "qemu.pid"} {
			if err := os.WriteFile(filepath.Join(dir, f), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if m, err := d.Inspect(t.Context(), "stale"); err != nil || m.State != vm.Stopped {
			t.Fatalf("Inspect with pid file %q = %+v, %v, want %s", content, m, err, vm.Stopped)
		}
	}
	lock := filepath.Join(d.home, "_disks", "work", "in_use_by")
	if err := os.MkdirAll(filepath.Dir(lock), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, lock); err != nil {
		t.Fatal(err)
	}
	writePID(t, filepath.Join(dir, "ha.pid"), innocent.Process.Pid)
	if err := d.Stop(t.Context(), "stale", nil, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(lock); err == nil {
		t.Error("lock of the disk exists, want it removed")
	}
	if _, err := os.Stat(filepath.Join(dir, "ha.pid")); err == nil {
		t.Error("stale pid file exists, want it removed")
	}
	if err := d.Delete(t.Context(), "stale"); err != nil {
		t.Fatal(err)
	}
	if len(arguments(innocent.Process.Pid)) == 0 {
		t.Fatal("process of the stale pid = ended, want it running")
	}
}

// This finds a QEMU whose host agent died before QEMU wrote its pid file.
func TestOrphanIsFound(t *testing.T) {
	d := newDriver(t)
	if err := d.Create(t.Context(), testSpec("orphan")); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.home, "orphan")
	orphan := idle(t, "-pidfile", filepath.Join(dir, "qemu.pid"))
	reaped := make(chan struct{})
	go func() { orphan.Wait(); close(reaped) }()
	// Without a poweroff function Stop must not wait for the grace.
	const grace = time.Hour
	if err := d.Stop(t.Context(), "orphan", nil, grace); err != nil {
		t.Fatal(err)
	}
	<-reaped
}

func TestStopWaitsForTheGuest(t *testing.T) {
	d := newDriver(t)
	if err := d.Create(t.Context(), testSpec("graceful")); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(d.home, "graceful")
	start := func() *exec.Cmd {
		q := idle(t, "-pidfile", filepath.Join(dir, "qemu.pid"))
		writePID(t, filepath.Join(dir, "qemu.pid"), q.Process.Pid)
		return q
	}
	q := start()
	err := d.Stop(t.Context(), "graceful", func(context.Context) error {
		q.Process.Signal(os.Interrupt)
		return q.Wait()
	}, time.Hour)
	if err != nil || !q.ProcessState.Success() {
		t.Fatalf("Stop = %v, QEMU %v, want nil, a success", err, q.ProcessState)
	}

	q = start()
	reaped := make(chan struct{})
	go func() { q.Wait(); close(reaped) }()
	begin := time.Now()
	if err := d.Stop(t.Context(), "graceful", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	<-reaped
	if took := time.Since(begin); took < 300*time.Millisecond || q.ProcessState.Success() {
		t.Errorf("killed after %v: %v, want after the grace of 300ms, no success", took, q.ProcessState)
	}

	q = start()
	ctx, cancel := context.WithCancel(t.Context())
	if err := d.Stop(ctx, "graceful", func(context.Context) error { cancel(); return nil }, time.Hour); err == nil {
		t.Error("cancelled Stop = nil, want an error")
	}
	if len(arguments(q.Process.Pid)) == 0 {
		t.Error("QEMU after a cancelled Stop = ended, want it running")
	}
}
