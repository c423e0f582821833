//go:build vmtest

package lima

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
	"github.com/agent-sessionizer/agent-sessionizer/test/vmtest"
)

func runTests(m *testing.M) int { return realvm.Main(m, nil) }

// boot limits one boot: a busy machine takes minutes to emulate it.
const boot = 15 * time.Minute

// markerScript prints the marker once sshd offers the key that cloud-init made.
const markerScript = `#!/bin/bash
systemd-run --no-block --unit=marker --property=DefaultDependencies=no bash -c '
  until [ -e /run/cloud-init/result.json ] || [ -e /var/lib/cloud/instance/sem/config_ssh ] && (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null; do sleep 0.2; done
  echo "agent-sessionizer-ready $(cut -d" " -f1,2 /etc/ssh/ssh_host_ed25519_key.pub)" >/dev/ttyS0'
`

// small describes a VM with the image under test, whose file system has 6 GiB.
func small(t *testing.T, name, authorizedKey string) vm.Spec {
	t.Helper()
	return vm.Spec{
		Name: name, AuthorizedKey: authorizedKey, CPUs: 2, Memory: 1 << 30, Disk: 8 << 30,
		User: "agent", Boot: markerScript, Image: realvm.Image(t),
	}
}

// TestSuite runs the suite that every driver passes, on real VMs.
func TestSuite(t *testing.T) {
	key, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	// A VM's processes must not inherit these: a descriptor without close-on-exec,
	// such as that of a flock or the store, and a token.
	lock, err := unix.Open(filepath.Join(t.TempDir(), "lock"), unix.O_CREAT|unix.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(lock)
	t.Setenv("GITHUB_TOKEN", "sentinel-token")
	var d *Driver
	vmtest.Run(t, vmtest.Harness{
		New: func(t *testing.T) vm.Driver {
			d = newDriver(t)
			return d
		},
		Key: key, Real: true, Boot: boot,
		Spec: func(t *testing.T, name string) vm.Spec { return small(t, name, public) },
		HalfMade: func(t *testing.T, _ vm.Driver, s vm.Spec) {
			for _, dir := range []string{s.Name, asidePrefix(s.Name) + "new-1"} {
				if err := os.MkdirAll(filepath.Join(d.home, dir), 0o700); err != nil {
					t.Fatal(err)
				}
			}
		},
		Break: func(t *testing.T, _ vm.Driver, name string) {
			if err := os.Remove(filepath.Join(d.home, name, filenames.LimaYAML)); err != nil {
				t.Fatal(err)
			}
		},
		Crash: func(t *testing.T, _ vm.Driver, name string) { crash(t, filepath.Join(d.home, name)) },
		Trouble: func(t *testing.T, _ vm.Driver, ep vm.Endpoint, c *ssh.Client, name string) {
			trouble(t, d, ep, c, name)
		},
		Processes: func(t *testing.T, name string) int {
			left, err := family(filepath.Join(d.home, name))
			if err != nil {
				t.Fatal(err)
			}
			return len(left)
		},
	})
}

// crash simulates a crash of the host: everything dies, and after the reboot the pid
// files hold pids of other processes.
func crash(t *testing.T, dir string) {
	t.Helper()
	found, err := family(dir)
	if err != nil || len(found) == 0 {
		t.Fatalf("processes of the VM = %v, %v, want some", found, err)
	}
	for pid, is := range found {
		killVerified(pid, is, dir)
	}
	for end := time.Now().Add(time.Minute); len(found) > 0; time.Sleep(10 * time.Millisecond) {
		if found, err = family(dir); err != nil || time.Now().After(end) {
			t.Fatalf("processes of the VM after SIGKILL = %v, %v, want none", found, err)
		}
	}
	for _, file := range []string{filenames.HostAgentPID, "qemu.pid"} {
		writePID(t, filepath.Join(dir, file), os.Getpid())
	}
}

// trouble causes faults in a VM's processes while the guest continues.
func trouble(t *testing.T, d *Driver, ep vm.Endpoint, c *ssh.Client, name string) {
	t.Helper()
	dir := filepath.Join(d.home, name)
	agentPID := pidIn(t, filepath.Join(dir, filenames.HostAgentPID))
	for _, pid := range []int{agentPID, pidIn(t, filepath.Join(dir, "qemu.pid"))} {
		inherits(t, pid)
	}
	if out, err := c.Output(t.Context(), "findmnt -t 9p,virtiofs,fuse.sshfs; echo agent=$SSH_AUTH_SOCK", nil, 1<<16); err != nil || string(out) != "agent=\n" {
		t.Errorf("mounts and agent in the guest = %q, %v, want no mount of the host, no agent", out, err)
	}
	goesOn := func(when string) {
		t.Helper()
		if m, err := d.Inspect(t.Context(), name); err != nil || m.State != vm.Running || m.Endpoint != ep {
			t.Errorf("%s: Inspect = %+v, %v, want running at %+v", when, m, err, ep)
		}
		if again, err := d.Start(t.Context(), name, nil); err != nil || again != ep {
			t.Errorf("%s: Start = %+v, %v, want %+v", when, again, err, ep)
		}
		if err := c.Run(t.Context(), "true", ssh.IO{}); err != nil { // the port belongs to QEMU itself
			t.Errorf("%s: Run(true) = %v, want nil", when, err)
		}
	}
	send(t, agentPID, syscall.SIGSTOP)
	goesOn("host agent frozen")
	send(t, agentPID, syscall.SIGKILL)
	noticed, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		m, err := d.Inspect(t.Context(), name)
		if err == nil && m.Reason != "" {
			break
		}
		if sleep(noticed, poll) != nil {
			t.Fatalf("Inspect after killing the host agent = %+v, %v, want the death noticed", m, err)
		}
	}
	goesOn("host agent killed")
}

func pidIn(t *testing.T, file string) int {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func send(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// inherits fails when a process has something that belongs to the process that
// started it.
func inherits(t *testing.T, pid int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/fd/*")
	if err != nil || len(fds) == 0 {
		t.Fatalf("descriptors of process %d = %d, %v, want some", pid, len(fds), err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && filepath.Base(to) == "lock" {
			t.Errorf("process %d holds %s, want no lock", pid, to)
		}
	}
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(env), "sentinel-token") {
		t.Errorf("environment of process %d holds the token, want none", pid)
	}
}

// A guest that panics is an error, after a second start where guests are emulated. It
// leaves nothing running.
func TestPanic(t *testing.T) {
	d := newDriver(t)
	_, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	s := small(t, "panic", public)
	s.Image.Cmdline += " init=/bin/false"
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), s.Name); err != nil {
			t.Error(err)
		}
	})
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), boot)
	defer cancel()
	if _, err := d.Start(ctx, s.Name, nil); !errors.Is(err, vm.ErrPanicked) {
		t.Fatalf("Start of a guest that panics = %v, want %v", err, vm.ErrPanicked)
	}
	if left, err := family(filepath.Join(d.home, s.Name)); err != nil || len(left) > 0 {
		t.Fatalf("processes after the panic = %v, %v, want none", left, err)
	}
}

// A disk with many layers gets a single one, with the same content.
func TestLayers(t *testing.T) {
	dir := t.TempDir()
	run := func(name string, args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
	}
	run("qemu-img", "create", "-q", "-f", "qcow2", filenames.BaseDisk, "64M")
	run("qemu-io", "-c", "write -P 9 0 1M", filenames.BaseDisk)
	below := filepath.Join(dir, filenames.BaseDisk) // as Lima names it
	var c checkpoint
	for n := range maxLayers {
		c = checkpoint{dir: dir, id: strconv.Itoa(n)}
		run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below, layerPrefix+c.id)
		below = layerPrefix + c.id
		if n == maxLayers-1 {
			c.flatten(t.Context()) // before it has data of its own
			break
		}
		run("qemu-io", "-c", fmt.Sprintf("write -P %d %dk 64k", n+1, n*96), below)
		c.flatten(t.Context())
		if layers, err := layersOf(dir, below); err != nil || len(layers) != n+1 {
			t.Fatalf("layers = %v, %v, want %d", layers, err, n+1)
		}
	}
	run("qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", layerPrefix+strconv.Itoa(maxLayers-2), below)
	if layers, err := layersOf(dir, below); err != nil || len(layers) != 1 {
		t.Errorf("layers = %v, %v, want one", layers, err)
	}
	// Only what is below the VM's disk or a checkpoint stays.
	run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", layerPrefix+"1", filenames.DiffDisk)
	run("touch", checkpointPrefix+c.id)
	if err := removeLayers(dir); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(dir, layerPrefix+"*"))
	if want := []string{layerPrefix + "0", layerPrefix + "1", layerPrefix + c.id}; err != nil || len(left) != len(want) {
		t.Errorf("layers that stay = %v, %v, want %v", left, err, want)
	}
}

// TestCheckpointInterrupted ends the process at each step of a checkpoint. The next call completes
// it, and the VM goes on. A VM that ends at that moment as well starts with everything that its guest
// has written.
func TestCheckpointInterrupted(t *testing.T) {
	d := newDriver(t)
	key, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	s := small(t, "interrupted", public)
	dir := filepath.Join(d.home, s.Name)
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), s.Name); err != nil {
			t.Error(err)
		}
	})
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	var c *ssh.Client
	start := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), boot)
		defer cancel()
		ep, err := d.Start(ctx, s.Name, nil)
		if err == nil {
			c, err = ssh.DialBooted(ctx, ssh.Target{Addr: ep.Addr, User: ep.User, Key: key, HostKey: ep.HostKey}, func() error { return nil })
		}
		if err != nil {
			m, inspectErr := d.Inspect(ctx, s.Name)
			out, _ := exec.Command("sh", "-c", "ls -la "+dir+"; cat "+dir+"/ha.stdout.log; tail -5 "+dir+"/ha.stderr.log "+dir+"/serial*.log").CombinedOutput()
			t.Fatalf("%v; endpoint %+v; VM %+v, %v\n%s", err, ep, m, inspectErr, out)
		}
	}
	guest := func(command string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		out, err := c.Output(ctx, command, nil, 1<<16)
		if err != nil {
			t.Fatalf("%s = %v, want nil", command, err)
		}
		return strings.TrimSpace(string(out))
	}
	interrupted := func(id, step string) {
		t.Helper()
		type end struct{}
		defer func() {
			d.reached = nil
			if r := recover(); r != (end{}) {
				t.Fatalf("%s: the step %q was not reached: %v", id, step, r)
			}
		}()
		d.reached = func(now string) {
			if now == step {
				panic(end{}) // runs no cleanup of its own, like the end of the process
			}
		}
		_, err := d.Checkpoint(t.Context(), s.Name, id, nil)
		t.Errorf("Checkpoint = %v, want it interrupted", err)
	}
	start()
	steps := []string{"new disk", "memory", "change of disks", "name", "running", "final name"}
	for i, step := range steps {
		id := fmt.Sprintf("step-%d", i)
		guest("echo " + id + " >~/file; sync")
		interrupted(id, step)
		is, err := d.Checkpoint(t.Context(), s.Name, id, nil)
		if err != nil || !is.Memory || is.Size == 0 {
			t.Fatalf("Checkpoint after %q = %+v, %v, want memory and disk", step, is, err)
		}
		if got := guest("cat ~/file"); got != id {
			t.Errorf("file after %q = %q, want %q", step, got, id)
		}
	}
	// Each is complete: the first is the oldest, and has most layers above it.
	for _, id := range []string{"step-5", "step-0", "step-3"} {
		if err := errors.Join(d.Stop(t.Context(), s.Name, nil, 0), d.Restore(t.Context(), s.Name, id, true)); err != nil {
			t.Fatal(err)
		}
		start()
		if got := guest("cat ~/file"); got != id {
			t.Errorf("file after Restore(%s) = %q", id, got)
		}
	}
	for i, step := range []string{"change of disks", "name", "running"} {
		id := fmt.Sprintf("crash-%d", i)
		guest("echo " + id + " >~/file; sync")
		interrupted(id, step)
		if step == "running" {
			guest("echo later >>~/file; sync")
			id += "\nlater"
		}
		crash(t, dir)
		start()
		if got := guest("cat ~/file"); got != id {
			t.Errorf("file after %q and the end of the VM = %q, want %q", step, got, id)
		}
	}
}
