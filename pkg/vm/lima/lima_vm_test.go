//go:build vmtest

package lima

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lima-vm/lima/pkg/store/filenames"
	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"

	ourssh "github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/vmtest"
)

// markerScript prints the marker once sshd offers the key that cloud-init made.
// Lima gives each start a new instance id, and cloud-init then new host keys.
const markerScript = `#!/bin/bash
systemd-run --no-block --unit=marker --property=DefaultDependencies=no bash -c '
  until [ -e /run/cloud-init/result.json ] || [ -e /var/lib/cloud/instance/sem/config_ssh ] && (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null; do sleep 0.2; done
  echo "agent-sessionizer-ready $(cut -d" " -f1,2 /etc/ssh/ssh_host_ed25519_key.pub)" >/dev/ttyS0'
`

// guest is what a test knows of its VM.
type guest struct {
	d    *Driver
	spec vm.Spec
	key  ssh.Signer
}

// testImage is a small VM with the image under test.
func testImage(t *testing.T) vm.Spec {
	t.Helper()
	dir := os.Getenv("AGENT_SESSIONIZER_TEST_IMAGE")
	if dir == "" {
		t.Fatal("set AGENT_SESSIONIZER_TEST_IMAGE to a directory with disk.qcow2, kernel, initrd and cmdline (agent-sessionizer image build --from debian)")
	}
	cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		t.Fatal(err)
	}
	return vm.Spec{
		CPUs: 2, Memory: 1 << 30, Disk: 4 << 30, User: "agent", Boot: markerScript,
		Image: vm.Image{
			Arch: "x86_64", Location: filepath.Join(dir, "disk.qcow2"), Kernel: filepath.Join(dir, "kernel"),
			Initrd: filepath.Join(dir, "initrd"), Cmdline: strings.TrimSpace(string(cmdline)),
		},
	}
}

func newGuest(t *testing.T, name string) *guest {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	key, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{d: newDriver(t), key: key, spec: testImage(t)}
	g.spec.Name, g.spec.AuthorizedKey = name, string(ssh.MarshalAuthorizedKey(key.PublicKey()))
	t.Cleanup(func() {
		if err := g.d.Delete(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
	return g
}

func (g *guest) create(t *testing.T) {
	t.Helper()
	if err := g.d.Create(t.Context(), g.spec); err != nil {
		t.Fatal(err)
	}
}

func (g *guest) start(t *testing.T) vm.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	begin := time.Now()
	e, err := g.d.Start(ctx, g.spec.Name, func(msg string) { t.Logf("%6.2fs %s", time.Since(begin).Seconds(), msg) })
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%6.2fs ready %+v", time.Since(begin).Seconds(), e)
	return e
}

// exec runs a command in the guest with the endpoint's pinned key.
func (g *guest) exec(ctx context.Context, e vm.Endpoint, command string) (string, error) {
	want, _, _, _, err := ssh.ParseAuthorizedKey([]byte(e.HostKey))
	if err != nil {
		return "", err
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", e.Addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	c, chans, reqs, err := ssh.NewClientConn(conn, e.Addr, &ssh.ClientConfig{
		User: e.User, Auth: []ssh.AuthMethod{ssh.PublicKeys(g.key)},
		HostKeyCallback: ssh.FixedHostKey(want), HostKeyAlgorithms: []string{want.Type()},
	})
	if err != nil {
		return "", err
	}
	client := ssh.NewClient(c, chans, reqs)
	defer client.Close()
	s, err := client.NewSession()
	if err != nil {
		return "", err
	}
	out, err := s.CombinedOutput(command)
	return strings.TrimSpace(string(out)), err
}

func (g *guest) must(t *testing.T, e vm.Endpoint, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := g.exec(ctx, e, command)
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return out
}

func (g *guest) pid(t *testing.T, file string) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(g.d.home, g.spec.Name, file))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func (g *guest) inspect(t *testing.T) vm.Machine {
	t.Helper()
	m, err := g.d.Inspect(t.Context(), g.spec.Name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (g *guest) becomes(t *testing.T, want vm.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for g.inspect(t).State != want {
		if err := sleep(ctx, poll); err != nil {
			t.Fatalf("the VM is not %s: %+v", want, g.inspect(t))
		}
	}
}

func (g *guest) alone(t *testing.T) {
	t.Helper()
	left, err := family(filepath.Join(g.d.home, g.spec.Name))
	if err != nil || len(left) > 0 {
		t.Fatalf("processes are left: %v, %v", left, err)
	}
}

func send(t *testing.T, pid int, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// TestLife is a VM's ordinary life and every crash that needs one boot only.
func TestLife(t *testing.T) {
	g := newGuest(t, "life")
	g.create(t)
	g.create(t) // again: left as it is

	// A descriptor such as a flock's or the store's, without close-on-exec.
	leak, err := unix.Open(filepath.Join(t.TempDir(), "lock"), unix.O_CREAT|unix.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leak)
	t.Setenv("GITHUB_TOKEN", "sentinel-token")

	// The one who starts gives up while the VM boots; the next attaches.
	impatient, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if _, err := g.d.Start(impatient, g.spec.Name, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Start with a short deadline: %v", err)
	}
	if m := g.inspect(t); m.State != vm.Running || m.Endpoint.Addr != "" {
		t.Fatalf("while it boots: %+v", m)
	}
	agentPID := g.pid(t, filenames.HostAgentPID)
	e := g.start(t)
	if again := g.pid(t, filenames.HostAgentPID); again != agentPID {
		t.Fatalf("a second host agent, %d after %d", again, agentPID)
	}
	if again := g.start(t); again != e {
		t.Fatalf("Start of a running VM returned %+v, not %+v", again, e)
	}
	if m := g.inspect(t); m.State != vm.Running || m.Endpoint != e || m.Reason != "" {
		t.Fatalf("%+v", m)
	}
	if got := g.must(t, e, "id -un; id -u; sudo -n id -u 2>/dev/null; findmnt -t 9p,virtiofs,fuse.sshfs; echo $SSH_AUTH_SOCK"); got != "agent\n1000\n0" {
		t.Fatalf("in the guest: %q", got)
	}
	qemuPID := g.pid(t, "qemu.pid")
	for _, pid := range []int{agentPID, qemuPID} {
		inherits(t, pid)
	}

	t.Run("host agent frozen", func(t *testing.T) {
		send(t, agentPID, syscall.SIGSTOP)
		defer send(t, agentPID, syscall.SIGCONT)
		if m := g.inspect(t); m.State != vm.Running || m.Endpoint != e {
			t.Fatalf("%+v", m)
		}
		if again := g.start(t); again != e {
			t.Fatalf("%+v", again)
		}
	})
	t.Run("host agent killed", func(t *testing.T) {
		send(t, agentPID, syscall.SIGKILL)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		for g.inspect(t).Reason == "" {
			if err := sleep(ctx, poll); err != nil {
				t.Fatal("nobody notices")
			}
		}
		if m := g.inspect(t); m.State != vm.Running || m.Endpoint != e {
			t.Fatalf("%+v", m)
		}
		g.must(t, e, "true") // the port is QEMU's own
		if again := g.start(t); again != e {
			t.Fatalf("%+v", again)
		}
	})
	t.Run("stop without host agent", func(t *testing.T) {
		poweroff := func(ctx context.Context) error {
			_, err := g.exec(ctx, e, "sudo systemctl poweroff --no-wall")
			return err
		}
		begin := time.Now()
		if err := g.d.Stop(t.Context(), g.spec.Name, poweroff, time.Minute); err != nil {
			t.Fatal(err)
		}
		t.Logf("stopped in %v", time.Since(begin))
		if m := g.inspect(t); m.State != vm.Stopped {
			t.Fatalf("%+v", m)
		}
		g.alone(t)
	})
	t.Run("restart", func(t *testing.T) {
		// As after a host's reboot: pid files with the pid of somebody else.
		for _, f := range []string{filenames.HostAgentPID, "qemu.pid"} {
			if err := os.WriteFile(filepath.Join(g.d.home, g.spec.Name, f), []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if m := g.inspect(t); m.State != vm.Stopped {
			t.Fatalf("%+v", m)
		}
		again := g.start(t)
		if again.HostKey == e.HostKey {
			t.Error("the host key is that of the boot before: was the old marker read?")
		}
		g.must(t, again, "true")
		e = again
	})
	t.Run("QEMU killed", func(t *testing.T) {
		send(t, g.pid(t, "qemu.pid"), syscall.SIGKILL)
		g.becomes(t, vm.Stopped)
	})
	t.Run("pull the plug", func(t *testing.T) {
		g.start(t)
		if err := g.d.Stop(t.Context(), g.spec.Name, nil, time.Minute); err != nil {
			t.Fatal(err)
		}
		g.alone(t)
	})
	if err := g.d.Delete(t.Context(), g.spec.Name); err != nil {
		t.Fatal(err)
	}
	if _, err := g.d.Inspect(t.Context(), g.spec.Name); !isNotFound(err) {
		t.Fatalf("after Delete: %v", err)
	}
}

// TestSuite is what every driver passes, on real VMs.
func TestSuite(t *testing.T) {
	key, public, err := ourssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	vmtest.Run(t, vmtest.Harness{
		New: func(t *testing.T) vm.Driver { return newDriver(t) },
		Key: key, Real: true, Boot: 4 * time.Minute,
		Spec: func(t *testing.T, name string) vm.Spec {
			s := testImage(t)
			s.Name, s.AuthorizedKey = name, public
			return s
		},
		HalfMade: func(t *testing.T, d vm.Driver, s vm.Spec) {
			for _, dir := range []string{s.Name, asidePrefix(s.Name) + "new-1"} {
				if err := os.MkdirAll(filepath.Join(d.(*Driver).home, dir), 0o700); err != nil {
					t.Fatal(err)
				}
			}
		},
		Break: func(t *testing.T, d vm.Driver, name string) {
			if err := os.Remove(filepath.Join(d.(*Driver).home, name, filenames.LimaYAML)); err != nil {
				t.Fatal(err)
			}
		},
		Crash: func(t *testing.T, d vm.Driver, name string) {
			dir := filepath.Join(d.(*Driver).home, name)
			found, err := family(dir)
			if err != nil {
				t.Fatal(err)
			}
			for pid, is := range found {
				killVerified(pid, is, dir)
			}
		},
	})
}

// inherits fails when a process holds what belongs to its starter.
func inherits(t *testing.T, pid int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/fd/*")
	if err != nil || len(fds) == 0 {
		t.Fatal(err, "no descriptors")
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && filepath.Base(to) == "lock" {
			t.Errorf("process %d holds %s", pid, to)
		}
	}
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(env), "sentinel-token") {
		t.Errorf("process %d has our token in its environment", pid)
	}
}

func TestPanic(t *testing.T) {
	g := newGuest(t, "panic")
	g.spec.Image.Cmdline += " init=/bin/false"
	g.create(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err := g.d.Start(ctx, g.spec.Name, nil)
	if err == nil || !strings.Contains(err.Error(), "kernel panicked") {
		t.Fatalf("Start of a guest that panics: %v", err)
	}
	t.Log(err)
	g.alone(t)
}
