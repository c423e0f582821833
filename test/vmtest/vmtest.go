// Package vmtest is the one behaviour suite that every vm.Driver passes.
//
// It follows the comments of vm.Driver line by line and requires nothing else. A real
// VM takes half a minute to boot, so the suite uses few boots: one VM goes through a
// VM's whole life, others are never started. It never reads a driver's files. Only
// the driver's own tests can make a half-made or a broken VM, so those come from the
// Harness.
package vmtest

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Harness is what the suite needs of a driver.
type Harness struct {
	// New makes a driver on an empty home of its own, which is removed with the test.
	New func(t *testing.T) vm.Driver
	// Spec describes a small VM that authorizes the public half of Key.
	Spec func(t *testing.T, name string) vm.Spec
	// Key is the private half, PEM.
	Key []byte
	// HalfMade leaves what a Create that died half way leaves.
	HalfMade func(t *testing.T, d vm.Driver, s vm.Spec)
	// Break damages the files of a stopped VM.
	Break func(t *testing.T, d vm.Driver, name string)
	// Crash kills the VM's processes, and no others, as a host failure does.
	Crash func(t *testing.T, d vm.Driver, name string)
	// Trouble causes faults that only this driver's VMs can have. The VM runs and
	// must continue; c is logged in. May be nil.
	Trouble func(t *testing.T, d vm.Driver, ep vm.Endpoint, c *ssh.Client, name string)
	// Processes counts a VM's processes. May be nil.
	Processes func(t *testing.T, name string) int
	// Real says that guests are real: they run Spec.Boot and have a disk of Spec.Disk
	// bytes.
	Real bool
	// Boot limits one boot; 0 means a minute.
	Boot time.Duration
}

// The names are as long as the product's longest, because they become part of socket
// paths.
const (
	alive  = "agent-some-organization-a-repository-with-a-name-0a1b2c"
	idle   = "agent-some-organization-a-repository-with-a-name-3d4e5f"
	broken = "agent-broken-607182"
)

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	if h.Boot == 0 {
		h.Boot = time.Minute
	}
	t.Run("nothing there", h.nothingThere)
	t.Run("names", h.names)
	t.Run("files only", h.filesOnly)
	t.Run("a life", h.life)
	if h.Real {
		t.Run("a guest that powers off while it boots", h.powersOff)
	}
}

func (h Harness) nothingThere(t *testing.T) {
	d := h.New(t)
	if _, err := d.Inspect(t.Context(), alive); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Inspect of an unknown VM = %v, want %v", err, vm.ErrNotFound)
	}
	if _, err := d.Start(t.Context(), alive, nil); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Start of an unknown VM = %v, want %v", err, vm.ErrNotFound)
	}
	if err := d.Export(t.Context(), alive, filepath.Join(t.TempDir(), "disk"), nil); !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Export of an unknown VM = %v, want %v", err, vm.ErrNotFound)
	}
	// Stop has no VM to stop; the driver may report that or not.
	if err := d.Stop(t.Context(), alive, nil, time.Second); err != nil && !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Stop of an unknown VM = %v, want nil or %v", err, vm.ErrNotFound)
	}
	if err := d.Delete(t.Context(), alive); err != nil {
		t.Errorf("Delete of an unknown VM = %v, want nil", err)
	}
	if l, err := d.List(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("List = %v, %v, want none", l, err)
	}
	a, err := d.Accel(t.Context(), vm.HostArch())
	if err != nil || a.Name == "" {
		t.Errorf("Accel = %+v, %v, want a name", a, err)
	}
	if again, err := d.Accel(t.Context(), vm.HostArch()); err != nil || again.Name != a.Name {
		t.Errorf("second Accel = %+v, %v, want %s", again, err, a.Name)
	}
	for _, err := range d.Check(t.Context(), vm.HostArch()) {
		t.Errorf("Check = %v, want no problem", err)
	}
}

// names checks that the driver refuses names with a special meaning, because a name becomes
// a directory and a socket path.
func (h Harness) names(t *testing.T) {
	d := h.New(t)
	for _, name := range []string{"", ".", "..", "../x", "a/b", "/a", "a b", "-a", "a\n", "a\x00", "ä", strings.Repeat("a", 300)} {
		s := h.Spec(t, alive)
		s.Name = name
		if err := d.Create(t.Context(), s); err == nil {
			t.Errorf("Create(%q) = nil, want an error", name)
		}
		if _, err := d.Inspect(t.Context(), name); err == nil {
			t.Errorf("Inspect(%q) = nil, want an error", name)
		}
		if _, err := d.Start(t.Context(), name, nil); err == nil {
			t.Errorf("Start(%q) = nil, want an error", name)
		}
	}
	if l, err := d.List(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("List after refused names = %v, %v, want none", l, err)
	}
}

func (h Harness) filesOnly(t *testing.T) {
	d := h.New(t)
	want := h.Spec(t, idle)
	h.HalfMade(t, d, want)
	if m, err := d.Inspect(t.Context(), idle); err == nil && m.State != vm.Broken {
		t.Errorf("state of an incomplete VM = %s, want %s", m.State, vm.Broken)
	} else if err != nil && !errors.Is(err, vm.ErrNotFound) {
		t.Errorf("Inspect of an incomplete VM = %v, want %v", err, vm.ErrNotFound)
	}
	for range 2 {
		if err := d.Create(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		check(t, d, want, vm.Stopped)
	}
	other := want
	other.CPUs++
	if err := d.Create(t.Context(), other); err != nil {
		t.Fatalf("Create of an existing VM = %v, want nil", err)
	}
	check(t, d, want, vm.Stopped) // unchanged
	if err := d.Stop(t.Context(), idle, nil, time.Second); err != nil {
		t.Errorf("Stop of a VM that never ran = %v, want nil", err)
	}

	if err := d.Create(t.Context(), h.Spec(t, broken)); err != nil {
		t.Fatal(err)
	}
	h.Break(t, d, broken)
	m, err := d.Inspect(t.Context(), broken)
	if err != nil || m.State != vm.Broken || m.Reason == "" {
		t.Errorf("Inspect of a broken VM = %+v, %v, want %s with a reason", m, err, vm.Broken)
	}
	l, err := d.List(t.Context())
	if err != nil || len(l) != 2 {
		t.Fatalf("List with a broken VM = %+v, %v, want 2", l, err)
	}
	for _, m := range l {
		if want := map[string]vm.State{idle: vm.Stopped, broken: vm.Broken}[m.Name]; m.State != want {
			t.Errorf("state of %s in List = %q, want %q", m.Name, m.State, want)
		}
	}
	for _, name := range []string{broken, idle, idle} {
		if err := d.Delete(t.Context(), name); err != nil {
			t.Errorf("Delete(%s) = %v, want nil", name, err)
		}
	}
	if l, err := d.List(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("List after Delete = %v, %v, want none", l, err)
	}
}

// check compares what Inspect returns with the spec.
func check(t *testing.T, d vm.Driver, s vm.Spec, state vm.State) vm.Machine {
	t.Helper()
	m, err := d.Inspect(t.Context(), s.Name)
	if err != nil {
		t.Fatalf("Inspect = %v, want nil", err)
	}
	if m.Name != s.Name || m.State != state || m.Dir == "" {
		t.Errorf("Inspect: %+v, want %s, %s", m, s.Name, state)
	}
	if m.CPUs != s.CPUs || m.Memory != s.Memory || m.Disk != s.Disk || m.Arch != s.Image.Arch {
		t.Errorf("Inspect: %+v, want the resources of %+v", m, s)
	}
	if running := m.Endpoint.Addr != ""; running && state != vm.Running {
		t.Errorf("endpoint of a %s VM = %+v, want none", state, m.Endpoint)
	}
	return m
}

// panics counts the boots that ended with a panic.
var panics int

// start boots the VM alive within the limit, and fails the test otherwise. An emulated kernel sometimes
// panics while it boots; then start boots it once more, as a session does.
func (h Harness) start(t *testing.T, d vm.Driver) vm.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), h.Boot)
	defer cancel()
	boot := func() (vm.Endpoint, error) {
		return d.Start(ctx, alive, func(msg string) {
			if strings.ContainsAny(msg, "\n\r\x1b") {
				t.Errorf("progress = %q, want one line without control bytes", msg)
			}
		})
	}
	ep, err := boot()
	if errors.Is(err, vm.ErrPanicked) && h.Real {
		t.Logf("starting the VM again: %v", err)
		panics++
		ep, err = boot()
	}
	if err != nil {
		t.Fatalf("Start = %v, want nil", err)
	}
	return ep
}

func (h Harness) dial(t *testing.T, ep vm.Endpoint) *ssh.Client {
	t.Helper()
	c, err := ssh.Dial(t.Context(), ssh.Target{Addr: ep.Addr, User: ep.User, Key: h.Key, HostKey: ep.HostKey})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// output runs a command in the guest and returns its output.
func output(t *testing.T, c *ssh.Client, cmd string) string {
	t.Helper()
	b, err := c.Output(t.Context(), cmd, nil, 64<<10)
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	return strings.TrimSpace(string(b))
}
