package lima

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

func TestAccelForced(t *testing.T) {
	d := newDriver(t)
	for _, name := range []string{"kvm", "tcg"} {
		t.Setenv(accelEnv, name)
		if a, err := d.Accel(t.Context(), hostArch()); err != nil || a.Name != name {
			t.Errorf("Accel forced to %s = %+v, %v, want that name", name, a, err)
		}
	}
	t.Setenv(accelEnv, "warp")
	if _, err := d.Accel(t.Context(), hostArch()); fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
		t.Errorf("Accel forced to an unknown name = %v (hint %q), want code %v with a hint", err, fail.HintOf(err), fail.Usage)
	}
}

// foreignArch returns an architecture that is not this host's.
func foreignArch() string {
	if hostArch() == vm.AArch64 {
		return vm.X8664
	}
	return vm.AArch64
}

func TestAccelForeignArchitecture(t *testing.T) {
	d, foreign := newDriver(t), foreignArch()
	if a, err := d.Accel(t.Context(), foreign); err != nil || a.Name != "tcg" || a.Reason == "" {
		t.Errorf("Accel(%s) = %+v, %v, want tcg with a reason", foreign, a, err)
	}
}

func TestAccelVerdictIsKept(t *testing.T) {
	d := newDriver(t)
	t.Setenv(accelEnv, "")
	first, err := d.Accel(t.Context(), hostArch())
	if err != nil || first.Took == 0 || (first.Name == "kvm") != (first.Reason == "") {
		t.Fatalf("first Accel = %+v, %v, want a measured time, a reason unless kvm", first, err)
	}
	t.Logf("%+v", first)
	again, err := d.Accel(t.Context(), hostArch())
	if err != nil || again.Took != 0 || again.Name != first.Name || again.Reason != first.Reason {
		t.Fatalf("second Accel = %+v, %v, want %+v without measuring", again, err, first)
	}
	for _, kept := range []string{`{`, `{"key":"of another boot","name":"kvm"}`, `{"name":"warp"}`} {
		if err := os.WriteFile(filepath.Join(d.accel.dir, accelFile), []byte(kept), 0o600); err != nil {
			t.Fatal(err)
		}
		if a, err := d.Accel(t.Context(), hostArch()); err != nil || a.Took == 0 || a.Name != first.Name {
			t.Errorf("Accel with the stored verdict %q = %+v, %v, want %s, measured again", kept, a, err, first.Name)
		}
	}
}

func TestKVMHelp(t *testing.T) {
	const (
		intel  = "vendor_id : GenuineIntel\nflags : fpu vmx ssse3 \n"
		amd    = "vendor_id : AuthenticAMD\nflags : fpu svm ssse3 \n"
		nested = "vendor_id : GenuineIntel\nflags : fpu hypervisor ssse3 \n"
		off    = "vendor_id : GenuineIntel\nflags : fpu ssse3 \n"
	)
	for _, c := range []struct {
		open          error
		cpuinfo, want string
	}{
		{fs.ErrPermission, intel, "usermod -aG kvm"},
		{fs.ErrPermission, nested, "usermod -aG kvm"},
		{fs.ErrNotExist, intel, "sudo modprobe kvm_intel"},
		{fs.ErrNotExist, amd, "sudo modprobe kvm_amd"},
		{fs.ErrNotExist, nested, "kvm_intel nested=1 # on the machine that runs this VM"},
		{nil, nested, "kvm_intel nested=1 # on the machine that runs this VM"},
		{nil, strings.ReplaceAll(nested, "GenuineIntel", "AuthenticAMD"), "kvm_amd nested=1"},
		{fs.ErrNotExist, off, "firmware-setup"},
		{nil, intel, "dmesg"},
	} {
		if got := kvmHelp(c.open, c.cpuinfo); !strings.Contains(got, c.want) {
			t.Errorf("kvmHelp(%v, %q) = %q, want %q in it", c.open, c.cpuinfo, got, c.want)
		}
	}
}

// The probe has its own timeout, so a KVM that hangs results in a reason.
func TestProbe(t *testing.T) {
	why := probeKVM()
	t.Logf("%q", why)
	if openKVM() != nil && why == "" {
		t.Error("probe = \"\" though /dev/kvm does not open, want a reason")
	}
}

// TCG always works, so this shows that the minimal guest is correct.
func TestAskQEMU(t *testing.T) {
	if why := askQEMU(t.Context(), hostArch(), "tcg", "max"); why != "" {
		t.Errorf("askQEMU(tcg) = %q, want no reason", why)
	}
	if why := askQEMU(t.Context(), hostArch(), "nosuch", "max"); !strings.Contains(why, "status 1") {
		t.Errorf("askQEMU(nosuch) = %q, want \"status 1\"", why)
	}
	// A QEMU that never ends is killed, with its guest, after its time limit.
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "qemu-system-"+hostArch()), []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	bounded, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if why := askQEMU(bounded, hostArch(), "tcg", "max"); !strings.Contains(why, "in time") {
		t.Errorf("askQEMU of a hanging QEMU = %q, want \"in time\"", why)
	}
}

func TestAgentEnvironment(t *testing.T) {
	t.Setenv("GITHUB_TOKEN", "sentinel")
	t.Setenv("SSH_AUTH_SOCK", "/sentinel")
	t.Setenv("QEMU_SYSTEM_X86_64", "sentinel")
	env := strings.Join(agentEnv("/h", meta{Arch: "x86_64", Memory: 1 << 30}, vm.Accel{Name: "tcg"}), "\n")
	if strings.Contains(env, "sentinel") || !strings.Contains(env, "LIMA_HOME=/h\n") || !strings.Contains(env, "QEMU_SYSTEM_X86_64=qemu-system-x86_64 -machine q35") {
		t.Errorf("agentEnv = %q, want LIMA_HOME=/h, the machine q35, no sentinel", env)
	}
}

func TestQEMUCommand(t *testing.T) {
	const g = 1 << 30
	for _, c := range []struct {
		arch, accel string
		available   int64
		want        string
	}{
		{"x86_64", "kvm", 16 * g, ""},
		{"x86_64", "tcg", 16 * g, "qemu-system-x86_64 -machine q35,vmport=off -accel tcg,thread=multi,tb-size=512 -cpu max"},
		{"x86_64", "tcg", 5*g + g/2, "qemu-system-x86_64 -machine q35,vmport=off -accel tcg,thread=multi,tb-size=256 -cpu max"},
		{"aarch64", "tcg", 0, "qemu-system-aarch64 -machine virt -accel tcg,thread=multi,tb-size=128 -cpu max,pauth-impdef=on"},
	} {
		if got := qemuCommand(c.arch, 4*g, c.accel, c.available); got != c.want {
			t.Errorf("qemuCommand(%+v) = %q, want %q", c, got, c.want)
		}
	}
}
