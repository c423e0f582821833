package vmtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// grace is how long a guest may take to power off. It is far longer than any guest
// needs, so a guest that took this long was killed.
const grace = 5 * time.Minute

// life takes one VM through three complete boots and an interrupted one. The VM is
// cancelled and resumed, powered off, crashed, killed, and deleted while it runs.
func (h Harness) life(t *testing.T) {
	d := h.New(t)
	spec := h.Spec(t, alive)
	if h.Real {
		spec.Boot += "\necho booted >>/var/lib/vmtest-boots; sync\n"
	}
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), alive); err != nil {
			t.Errorf("Delete after the test = %v, want nil", err)
		}
	})
	if err := d.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	h.cancelledStart(t, d)
	ep := h.startWhileInspected(t, d, spec)
	if err := d.Export(t.Context(), alive, filepath.Join(t.TempDir(), "disk"), nil); err == nil {
		t.Error("Export of a running VM = nil, want an error")
	}
	if again := h.start(t, d); again != ep {
		t.Errorf("Start of a running VM = %+v, want %+v", again, ep)
	}
	if err := d.Create(t.Context(), spec); err != nil {
		t.Errorf("Create of a running VM = %v, want nil", err)
	}
	if m := check(t, d, spec, vm.Running); m.Endpoint != ep {
		t.Errorf("Inspect: endpoint %+v, want %+v", m.Endpoint, ep)
	}
	h.login(t, spec, ep)
	c := h.dial(t, ep)
	if h.Trouble != nil {
		h.Trouble(t, d, ep, c, alive)
	}

	// First run: powered off over SSH, which must not need the whole grace.
	output(t, c, "echo kept >~/vmtest && sync")
	begin := time.Now()
	err := d.Stop(t.Context(), alive, func(ctx context.Context) error {
		return c.Run(ctx, "sudo systemctl poweroff", ssh.IO{})
	}, grace)
	if err != nil {
		t.Fatalf("Stop = %v, want nil", err)
	}
	if took := time.Since(begin); took >= grace {
		t.Errorf("Stop by poweroff took %s, want less than the grace of %s", took, grace)
	}
	h.ended(t, d, spec)
	if err := d.Stop(t.Context(), alive, nil, time.Second); err != nil {
		t.Errorf("second Stop = %v, want nil", err)
	}
	if _, err := ssh.Dial(t.Context(), h.target(ep)); err == nil {
		t.Error("Dial of a stopped VM = nil, want an error")
	}
	disk := filepath.Join(t.TempDir(), "disk")
	if err := d.Export(t.Context(), alive, disk, nil); err != nil {
		t.Errorf("Export = %v, want nil", err)
	} else if st, err := os.Stat(disk); err != nil || st.Size() == 0 {
		t.Errorf("exported disk: %v, want a file with content", err)
	}

	// Second run: the disk is unchanged; then the host kills the VM.
	ep = h.start(t, d)
	c = h.dial(t, ep)
	if got := output(t, c, "cat ~/vmtest"); got != "kept" {
		t.Errorf("file after a restart = %q, want \"kept\"", got)
	}
	c = h.checkpoints(t, d, ep, c)
	h.Crash(t, d, alive)
	select {
	case <-c.Done():
	case <-time.After(2 * time.Minute):
		t.Error("connection to a crashed VM is open after 2 minutes, want it closed")
	}
	if m, err := d.Inspect(t.Context(), alive); err != nil || m.State == vm.Running {
		t.Errorf("Inspect after a crash = %+v, %v, want not %s", m, err, vm.Running)
	}

	// Third run: stale files prevent no start. A guest that ignores the poweroff is
	// killed when its grace is over, and not before.
	ep = h.start(t, d)
	c = h.dial(t, ep)
	if got := output(t, c, "cat ~/vmtest"); got != "kept" {
		t.Errorf("file after a crash = %q, want \"kept\"", got)
	}
	if h.Real {
		// A boot that panicked may have run it or not.
		if n, err := strconv.Atoi(output(t, c, "wc -l </var/lib/vmtest-boots")); err != nil || n < 4 || n > 4+panics {
			t.Errorf("runs of Spec.Boot in 4 boots = %d, %v, want 4", n, err)
		}
	}
	begin = time.Now()
	asked := false
	err = d.Stop(t.Context(), alive, func(context.Context) error { asked = true; return nil }, time.Second)
	if err != nil || !asked {
		t.Errorf("Stop of a guest that stays up = %v, asked %t, want nil, true", err, asked)
	}
	if took := time.Since(begin); took < time.Second {
		t.Errorf("Stop with a grace of a second took %s, want at least a second", took)
	}
	h.ended(t, d, spec)

	// Deleted while it runs.
	h.cancelledStart(t, d)
	for range 2 {
		if err := d.Delete(t.Context(), alive); err != nil {
			t.Fatalf("Delete = %v, want nil", err)
		}
		if _, err := d.Inspect(t.Context(), alive); !errors.Is(err, vm.ErrNotFound) {
			t.Errorf("Inspect after Delete = %v, want %v", err, vm.ErrNotFound)
		}
		h.alone(t, alive)
	}
	if _, err := ssh.Dial(t.Context(), h.target(ep)); err == nil {
		t.Error("Dial of a deleted VM = nil, want an error")
	}
}

// ended checks that a VM is stopped and has no processes.
func (h Harness) ended(t *testing.T, d vm.Driver, spec vm.Spec) {
	t.Helper()
	check(t, d, spec, vm.Stopped)
	h.alone(t, spec.Name)
}

func (h Harness) alone(t *testing.T, name string) {
	t.Helper()
	if h.Processes == nil {
		return
	}
	if n := h.Processes(t, name); n > 0 {
		t.Errorf("processes of the VM = %d, want 0", n)
	}
}

func (h Harness) target(ep vm.Endpoint) ssh.Target {
	return ssh.Target{Addr: ep.Addr, User: ep.User, Key: h.Key, HostKey: ep.HostKey}
}

// cancelledStart stops waiting as soon as the VM's process exists, and checks that
// the VM continues.
func (h Harness) cancelledStart(t *testing.T, d vm.Driver) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := d.Start(ctx, alive, nil)
		ended <- err
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(h.Boot); ; {
		m, err := d.Inspect(t.Context(), alive)
		if err != nil {
			t.Errorf("Inspect during the start = %v, want nil", err)
		}
		if m.State == vm.Running {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("Inspect after %s = %+v, want it running", h.Boot, m)
		}
		<-tick.C
	}
	cancel()
	select {
	case err := <-ended:
		// A fake may have been ready before it could be cancelled.
		if !errors.Is(err, context.Canceled) && (err != nil || h.Real) {
			t.Errorf("cancelled Start = %v, want %v", err, context.Canceled)
		}
	case <-time.After(2 * time.Minute):
		t.Error("cancelled Start runs after 2 minutes, want it to return")
	}
	if m, err := d.Inspect(t.Context(), alive); err != nil || m.State != vm.Running {
		t.Errorf("Inspect after a cancelled Start = %+v, %v, want %s", m, err, vm.Running)
	}
}

// startWhileInspected waits for the boot while others inspect the VM.
func (h Harness) startWhileInspected(t *testing.T, d vm.Driver, spec vm.Spec) vm.Endpoint {
	t.Helper()
	stop, looked := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { looked <- n }()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			if m, err := d.Inspect(t.Context(), spec.Name); err != nil || m.State != vm.Running {
				t.Errorf("Inspect during the boot = %+v, %v, want %s", m, err, vm.Running)
			}
			if l, err := d.List(t.Context()); err != nil || len(l) != 1 {
				t.Errorf("List during the boot = %+v, %v, want 1", l, err)
			}
			n++
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
	defer func() {
		close(stop)
		if <-looked == 0 {
			t.Error("calls of Inspect during the boot = 0, want some")
		}
	}()
	return h.start(t, d)
}

// login checks which host answers at the endpoint, and which keys it accepts.
func (h Harness) login(t *testing.T, spec vm.Spec, ep vm.Endpoint) {
	t.Helper()
	if ep.User != spec.User || ep.HostKey == "" || !strings.HasPrefix(ep.Addr, "127.0.0.1:") {
		t.Errorf("endpoint = %+v, want user %s, a host key, an address on 127.0.0.1", ep, spec.User)
	}
	foreign, public, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	intruder := h.target(ep)
	intruder.Key = foreign
	if c, err := ssh.Dial(t.Context(), intruder); err == nil {
		_ = c.Close()
		t.Error("login with a foreign key = nil, want an error")
	}
	certified := intruder
	if certified.Certificate, err = ssh.Certify(h.Key, public, ep.User, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if c, err := ssh.Dial(t.Context(), certified); err != nil {
		t.Errorf("login with a certificate of the key = %v, want success", err)
	} else {
		if got := output(t, c, "echo $USER"); got != spec.User {
			t.Errorf("user with a certificate = %q, want %q", got, spec.User)
		}
		_ = c.Close()
	}
	if certified.Certificate, err = ssh.Certify(h.Key, public, ep.User, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if c, err := ssh.Dial(t.Context(), certified); err == nil {
		_ = c.Close()
		t.Error("login with an expired certificate = nil, want an error")
	}
	mistaken := h.target(ep)
	mistaken.HostKey = public
	if _, err := ssh.Dial(t.Context(), mistaken); !errors.Is(err, ssh.ErrHostKey) {
		t.Errorf("Dial with another host key pinned = %v, want %v", err, ssh.ErrHostKey)
	}
	c := h.dial(t, ep)
	if got := output(t, c, "echo $USER"); got != spec.User {
		t.Errorf("user = %q, want %q", got, spec.User)
	}
	if got := output(t, c, "sudo -n id -u"); h.Real && got != "0" {
		t.Errorf("uid of sudo = %q, want 0", got)
	}
	if !h.Real {
		return
	}
	if got := output(t, c, "id -u"); got != "1000" {
		t.Errorf("uid = %q, want 1000", got)
	}
	// The root is the disk or a partition of it; the last of its parents is the disk.
	disk := output(t, c, "lsblk -bdno SIZE $(lsblk -lnpso NAME $(findmnt -no SOURCE /) | tail -1)")
	if size, err := strconv.ParseInt(disk, 10, 64); err != nil || size != spec.Disk {
		t.Errorf("the guest's disk has %s bytes, want %d", disk, spec.Disk)
	}
	if got := output(t, c, "nproc"); got != strconv.Itoa(spec.CPUs) {
		t.Errorf("the guest has %s CPUs, want %d", got, spec.CPUs)
	}
}

// powersOff checks that Start does not wait for a guest that will never be ready.
func (h Harness) powersOff(t *testing.T) {
	d := h.New(t)
	s := h.Spec(t, idle)
	s.Boot = "poweroff -f\n"
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), idle); err != nil {
			t.Errorf("Delete after the test = %v, want nil", err)
		}
	})
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), h.Boot)
	defer cancel()
	if _, err := d.Start(ctx, idle, nil); err == nil || ctx.Err() != nil {
		t.Errorf("Start of a guest that powers off = %v (context %v), want an error before the context ends", err, ctx.Err())
	}
	h.ended(t, d, s)
}
