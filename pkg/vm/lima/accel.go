package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/lima-vm/lima/pkg/limayaml"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

const (
	accelEnv  = "AGENT_SESSIONIZER_ACCEL"
	accelFile = "accel.json"
	kvmHint   = `sudo usermod -aG kvm "$USER" # and log in again`
)

func hostArch() limayaml.Arch { return limayaml.NewArch(runtime.GOARCH) }

// Accel implements vm.Driver.
func (d *Driver) Accel(ctx context.Context, arch string) (vm.Accel, error) {
	return d.accel.find(ctx, arch)
}

// accelCache finds out how guests run, and remembers it in a directory.
type accelCache struct{ dir, goos string }

// find says how guests of arch would run.
func (c accelCache) find(ctx context.Context, arch limayaml.Arch) (vm.Accel, error) {
	if vmType(c.goos, arch) == limayaml.VZ {
		return vm.Accel{Name: "vz"}, nil
	}
	switch forced := os.Getenv(accelEnv); {
	case forced != "" && forced != "kvm" && forced != "tcg":
		return vm.Accel{}, fail.New(fail.Usage, "%s must be kvm or tcg, got %q", accelEnv, forced).WithHint("export %s=kvm, or =tcg, or unset it", accelEnv)
	case arch != hostArch():
		return vm.Accel{Name: "tcg", Reason: fmt.Sprintf("%s guests are emulated on %s", arch, hostArch())}, nil
	case forced == "kvm":
		return vm.Accel{Name: "kvm"}, nil
	case forced == "tcg":
		return vm.Accel{Name: "tcg", Reason: accelEnv + "=tcg"}, nil
	case c.goos != "linux":
		return vm.Accel{Name: "tcg", Reason: "KVM is available on Linux only"}, nil
	}
	return c.probe(ctx, arch)
}

// verdict is the cached answer. It is valid for one boot of one kernel with one QEMU,
// and for as long as opening /dev/kvm gives the same result.
type verdict struct {
	Key    string `json:"key"`
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

func (c accelCache) probe(ctx context.Context, arch limayaml.Arch) (vm.Accel, error) {
	path := filepath.Join(c.dir, accelFile)
	key := verdictKey(arch)
	if b, err := os.ReadFile(path); err == nil {
		var v verdict
		if json.Unmarshal(b, &v) == nil && v.Key == key && (v.Name == "kvm" || v.Name == "tcg") {
			return v.accel(), nil
		}
	}
	begin := time.Now()
	why := probeKVM()
	if why == "" {
		bounded, cancel := context.WithTimeout(ctx, askTimeout)
		why = askQEMU(bounded, arch, "kvm", "host")
		cancel()
	}
	if err := ctx.Err(); err != nil { // an interrupted probe proves nothing
		return vm.Accel{}, err
	}
	v := verdict{Key: key, Name: "kvm"}
	if why != "" {
		v.Name, v.Reason = "tcg", "KVM does not work on this host: "+why
	}
	b, err := json.Marshal(v)
	if err != nil {
		return vm.Accel{}, err
	}
	if err := atomicfile.Write(path, b, 0o600); err != nil {
		return vm.Accel{}, fmt.Errorf("save the result of the acceleration check: %w", explainOS(err))
	}
	a := v.accel()
	a.Took = time.Since(begin)
	return a, nil
}

func (v verdict) accel() vm.Accel {
	a := vm.Accel{Name: v.Name, Reason: v.Reason}
	if v.Name == "tcg" {
		a.Hint = kvmHelp(openKVM(), read("/proc/cpuinfo"))
	}
	return a
}

// openKVM returns the error from opening /dev/kvm.
func openKVM() error {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// kvmHelp returns a command that may help where KVM does not work, based on the error
// from opening /dev/kvm and on the CPU's flags.
func kvmHelp(open error, cpuinfo string) string {
	has := func(flag string) bool { return strings.Contains(cpuinfo, " "+flag+" ") }
	module := "kvm_intel"
	if has("svm") || strings.Contains(cpuinfo, "AuthenticAMD") {
		module = "kvm_amd"
	}
	switch capable := has("vmx") || has("svm"); {
	case errors.Is(open, fs.ErrPermission):
		return kvmHint
	case capable && errors.Is(open, fs.ErrNotExist):
		return "sudo modprobe " + module
	case has("hypervisor"):
		// Only the administrator of the outer machine can change that.
		return fmt.Sprintf("sudo modprobe -r %[1]s && sudo modprobe %[1]s nested=1 # on the machine that runs this VM, with its VMs stopped", module)
	case errors.Is(open, fs.ErrNotExist):
		return "systemctl reboot --firmware-setup # and enable virtualization (VT-x, AMD-V)"
	}
	return "sudo dmesg | grep -i kvm"
}

// verdictKey identifies everything that the verdict depends on. QEMU is identified by
// its file, because asking for its version takes longer than the probe.
func verdictKey(arch limayaml.Arch) string {
	parts := []string{arch, kernelRelease(), read("/proc/sys/kernel/random/boot_id")}
	if exe, err := exec.LookPath("qemu-system-" + arch); err == nil {
		if st, err := os.Stat(exe); err == nil {
			parts = append(parts, fmt.Sprint(exe, st.Size(), st.ModTime().UnixNano()))
		}
	}
	return strings.Join(append(parts, fmt.Sprint(openKVM())), "|")
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// agentEnv returns the host agent's whole environment, which QEMU inherits. It leaves
// out everything else in this process's environment, such as tokens.
func agentEnv(home string, m meta, a vm.Accel) []string {
	env := []string{"LIMA_HOME=" + home}
	for _, k := range []string{"PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	if q := qemuCommand(m.Arch, m.Memory, a.Name, availableMemory()); q != "" {
		env = append(env, "QEMU_SYSTEM_"+strings.ToUpper(m.Arch)+"="+q)
	}
	return env
}

// qemuCommand returns QEMU with the arguments that Lima must not choose, or "" when
// Lima's choice is right. On the host's own architecture Lima insists on KVM.
func qemuCommand(arch limayaml.Arch, memory int64, accel string, available int64) string {
	if accel != "tcg" {
		return ""
	}
	machine, cpu := "q35,vmport=off", "max"
	if arch == limayaml.AARCH64 {
		// The architected algorithm of pointer authentication costs an emulated guest
		// about half its speed.
		machine, cpu = "virt", "max,pauth-impdef=on"
	}
	return fmt.Sprintf("qemu-system-%s -machine %s -accel tcg,thread=multi,tb-size=%d -cpu %s",
		arch, machine, translationBuffer(memory, available), cpu)
}

// translationBuffer returns the size of TCG's buffer in MiB. A larger buffer is
// faster, but takes memory in addition to the guest's.
func translationBuffer(guest, available int64) int {
	switch spare := available - guest; {
	case spare > 2<<30:
		return 512
	case spare > 1<<30:
		return 256
	default:
		return 128
	}
}

// availableMemory returns what the host can give without swapping, or 0 if that is
// unknown.
func availableMemory() int64 {
	for line := range strings.Lines(read("/proc/meminfo")) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	return 0
}
