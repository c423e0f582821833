package fake_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
	"github.com/agent-sessionizer/agent-sessionizer/test/vmtest"
)

// TestMain lets this test binary also act as a VM's process, as the product does.
func TestMain(m *testing.M) {
	if dir := os.Getenv("FAKE_TEST_START"); dir != "" { // dies where the faults file says
		d, err := fake.New(fake.Options{Dir: dir})
		if err == nil {
			_, err = d.Start(context.Background(), name, nil)
		}
		fmt.Println("survived:", err)
		os.Exit(0)
	}
	testenv.Main(m, testenv.Commands{"fake-vm": fake.Main})
}

const name = "agent-o-r-012345"

// world is a driver, its home and the key of its VMs.
type world struct {
	*fake.Driver
	dir        string
	key        []byte
	authorized string
}

func newWorld(t *testing.T) world {
	t.Helper()
	w := world{dir: t.TempDir()}
	var err error
	if w.key, w.authorized, err = ssh.NewKey(); err != nil {
		t.Fatal(err)
	}
	if w.Driver, err = fake.New(fake.Options{Dir: w.dir}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.tell(t, `{}`)
		l, err := w.List(context.Background())
		for _, m := range l {
			err = errors.Join(err, w.Delete(context.Background(), m.Name))
		}
		if err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w world) spec(name string) vm.Spec {
	return vm.Spec{
		Name: name, CPUs: 2, Memory: 1 << 30, Disk: 4 << 30, User: "agent", AuthorizedKey: w.authorized,
		Image: vm.Image{Arch: "x86_64", Location: "/dev/null"},
	}
}

// tell writes the faults file.
func (w world) tell(t *testing.T, script string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, "faults.json"), []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
}

// up starts a VM and returns a connection to it.
func (w world) up(t *testing.T) *ssh.Client {
	t.Helper()
	if err := w.Create(t.Context(), w.spec(name)); err != nil {
		t.Fatal(err)
	}
	ep, err := w.Start(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := ssh.Dial(t.Context(), ssh.Target{Addr: ep.Addr, User: ep.User, Key: w.key, HostKey: ep.HostKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestDriver(t *testing.T) {
	key, authorized, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	var w world
	vmtest.Run(t, vmtest.Harness{
		New: func(t *testing.T) vm.Driver {
			w = newWorld(t)
			w.key, w.authorized = key, authorized
			return w
		},
		Spec: func(_ *testing.T, name string) vm.Spec { return w.spec(name) },
		Key:  key,
		HalfMade: func(t *testing.T, _ vm.Driver, s vm.Spec) {
			if err := os.MkdirAll(filepath.Join(w.dir, s.Name, "root", "home"), 0o755); err != nil {
				t.Fatal(err)
			}
		},
		Break: func(t *testing.T, _ vm.Driver, name string) {
			if err := os.WriteFile(filepath.Join(w.dir, name, "spec.json"), []byte("{"), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		Crash: func(t *testing.T, _ vm.Driver, name string) {
			if err := w.Signal(name, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	})
}

func output(t *testing.T, c *ssh.Client, cmd string) string {
	t.Helper()
	b, err := c.Output(t.Context(), cmd, nil, 1<<20)
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	return strings.TrimSpace(string(b))
}

func TestGuest(t *testing.T) {
	w := newWorld(t)
	c := w.up(t)
	m, err := w.Inspect(t.Context(), name)
	if err != nil || m.Root != filepath.Join(w.dir, name, "root") {
		t.Fatalf("Inspect = %+v, %v, want root %s", m, err, filepath.Join(w.dir, name, "root"))
	}
	if got := output(t, c, "pwd; echo $HOME $AGENT_GUEST_ROOT"); got != m.Root+"/home/agent\n"+m.Root+"/home/agent "+m.Root {
		t.Errorf("home and root = %s, want %s", got, m.Root+"/home/agent\n"+m.Root+"/home/agent "+m.Root)
	}
	output(t, c, "sudo -n -u root -- iptables -A INPUT 'two words'; echo rules | sudo iptables-restore; sudo systemctl restart x")
	if got := output(t, c, "cat $AGENT_GUEST_ROOT/var/log/stub.log"); got != "iptables -A INPUT two words\niptables-restore \nsystemctl restart x" {
		t.Errorf("stub.log = %q, want the three stubbed commands", got)
	}
	var screen strings.Builder
	if err := c.Terminal(t.Context(), "stty size; tty; echo $TERM", ssh.Terminal{Out: &screen, Width: 100, Height: 30, Term: "screen"}); err != nil {
		t.Fatal(err)
	}
	if got := screen.String(); !strings.HasPrefix(got, "30 100\r\n/dev/") || !strings.HasSuffix(got, "screen\r\n") {
		t.Errorf("terminal = %q, want size 30 100, a device, screen", got)
	}
	if err := c.Run(t.Context(), "kill -SEGV $$; sleep 1; exit 7", ssh.IO{}); err == nil {
		t.Error("Run of a killed shell = nil, want an error")
	}
	// Files, by the guest's own paths and by prefixed ones, with a relative link.
	src, back := filepath.Join(t.TempDir(), "d"), t.TempDir()
	if err := errors.Join(os.Mkdir(src, 0o755), os.WriteFile(src+"/f", []byte("x"), 0o640), os.Symlink("../f", src+"/l")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.CopyTo(t.Context(), src, "/tmp", nil), c.CopyTo(t.Context(), src, m.Root+"/etc", nil), c.CopyTo(t.Context(), src, "", nil)); err != nil {
		t.Fatal(err)
	}
	if got := output(t, c, "cd $AGENT_GUEST_ROOT; cat tmp/d/f etc/d/f home/agent/d/f; readlink tmp/d/l; stat -c %a tmp/d/f"); got != "xxx../f\n640" {
		t.Errorf("copied files = %q, want %q", got, "xxx../f\n640")
	}
	if err := c.CopyFrom(t.Context(), "/tmp/d/f", back, nil); err != nil {
		t.Error(err)
	}
}

// When a VM is gone, everything that ran in it is gone.
func TestKillTakesDaemonsToo(t *testing.T) {
	w := newWorld(t)
	c := w.up(t)
	pid := output(t, c, "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!")
	if err := w.Stop(t.Context(), name, nil, 0); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile("/proc/" + pid + "/cmdline"); err == nil && len(b) > 0 {
		t.Errorf("process %s = %q, want it ended", pid, b)
	}
}

func TestFaults(t *testing.T) {
	w := newWorld(t)
	w.tell(t, `{"create": {"error": "no space left on device", "code": 5, "hint": "df -h", "count": 1}}`)
	err := w.Create(t.Context(), w.spec(name))
	if fail.CodeOf(err) != fail.Host || fail.HintOf(err) != "df -h" || !strings.Contains(err.Error(), "no space") {
		t.Errorf("Create with a fault = %v (code %v, hint %q), want \"no space\", code %v, hint \"df -h\"", err, fail.CodeOf(err), fail.HintOf(err), fail.Host)
	}
	if err := w.Create(t.Context(), w.spec(name)); err != nil {
		t.Errorf("second Create = %v, want nil", err)
	}

	w.tell(t, `{"start": {"stall": "1h"}}`)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := w.Start(ctx, name, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stalled Start = %v, want %v", err, context.DeadlineExceeded)
	}
	w.tell(t, `{"ready": {"panic": true}}`)
	if _, err := w.Start(t.Context(), name, nil); !errors.Is(err, vm.ErrPanicked) {
		t.Errorf("Start with a panic = %v, want %v", err, vm.ErrPanicked)
	}
	w.tell(t, `{"ready": {"never": true}}`)
	ctx, cancel = context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := w.Start(ctx, name, nil)
		ended <- err
	}()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) { // the other process offers nothing to wait on
		if m, err := w.Inspect(t.Context(), name); err != nil || m.State == vm.Running || time.Now().After(end) {
			break
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Start that is never ready = %v, want %v", err, context.Canceled)
	}
	if m, err := w.Inspect(t.Context(), name); err != nil || m.State != vm.Running || m.Endpoint.Addr != "" {
		t.Errorf("Inspect of a VM that is never ready = %+v, %v, want %s without an endpoint", m, err, vm.Running)
	}
	if err := w.Stop(t.Context(), name, nil, 0); err != nil {
		t.Error(err)
	}

	w.tell(t, `{"exec": {"match": "yes", "drop_after": 100000}, "check": {"error": "no QEMU", "code": 5}}`)
	c := w.up(t)
	output(t, c, "true")
	if err := c.Run(t.Context(), "yes", ssh.IO{}); !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Run with drop_after = %v, want %v", err, ssh.ErrUnreachable)
	}
	if problems := w.Check(t.Context(), vm.HostArch()); len(problems) != 1 || fail.CodeOf(problems[0]) != fail.Host {
		t.Errorf("Check = %v, want one problem of code %v", problems, fail.Host)
	}
	w.tell(t, `{"exec": {"die": true}}`)
	c = w.up(t)
	if err := c.Run(t.Context(), "true", ssh.IO{}); !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Run with die = %v, want %v", err, ssh.ErrUnreachable)
	}
	w.tell(t, `{"satrt": {}}`)
	if _, err := w.Start(t.Context(), name, nil); err == nil {
		t.Error("Start with a misspelt fault = nil, want an error")
	}
}

func TestFrozenGuestIsNoticed(t *testing.T) {
	w := newWorld(t)
	c := w.up(t)
	if err := w.Signal(name, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.KeepAlive(t.Context(), 10*time.Millisecond, 100*time.Millisecond)
	<-c.Done()
	if m, err := w.Inspect(t.Context(), name); err != nil || m.State != vm.Running {
		t.Errorf("Inspect of a frozen guest = %+v, %v, want state %s", m, err, vm.Running)
	}
}

func TestKillSelf(t *testing.T) {
	for at, running := range map[string]vm.State{"before": vm.Stopped, "after": vm.Running} {
		t.Run(at, func(t *testing.T) {
			w := newWorld(t)
			if err := w.Create(t.Context(), w.spec(name)); err != nil {
				t.Fatal(err)
			}
			w.tell(t, `{"kill_self_at": "start:`+at+`"}`)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			p, err := os.StartProcess(self, []string{self}, &os.ProcAttr{Env: append(os.Environ(), "FAKE_TEST_START="+w.dir)})
			if err != nil {
				t.Fatal(err)
			}
			st, err := p.Wait()
			if err != nil || !st.Sys().(syscall.WaitStatus).Signaled() {
				t.Fatalf("end of the process = %v, %v, want a signal", st, err)
			}
			w.tell(t, `{}`)
			if m, err := w.Inspect(t.Context(), name); err != nil || m.State != running {
				t.Errorf("Inspect after the kill = %+v, %v, want state %s", m, err, running)
			}
			w.up(t) // and work can continue from there
		})
	}
}
