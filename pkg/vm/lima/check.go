package lima

import (
	"context"
	"os/exec"

	limaqemu "github.com/lima-vm/lima/pkg/driver/qemu"
	"github.com/lima-vm/lima/pkg/limayaml"
	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// minFree is less than any VM needs. How much should stay free is the user's setting,
// limits.disk_reserve, and not the driver's.
const minFree = 2 << 30

// Check implements vm.Driver. Causes of slow VMs are reported by Accel instead.
func (d *Driver) Check(_ context.Context, arch string) []error {
	var errs []error
	lack := func(hint string, format string, args ...any) {
		errs = append(errs, fail.New(fail.Host, format, args...).WithHint("%s", hint))
	}
	need := func(exe, why string, fix func() string) {
		if _, err := exec.LookPath(exe); err != nil {
			lack(fix(), "%s is not installed; %s", exe, why)
		}
	}
	if d.vmType(arch) != d.vmType(hostArch()) { // network cards and data disks are made for the host's VM manager
		return []error{fail.New(fail.Host, "this host runs VMs of %s only", hostArch()).WithHint("use a Linux host for --arch %s", arch)}
	}
	if d.vmType(arch) == limayaml.QEMU {
		need("qemu-system-"+arch, "it runs the VMs", installQEMU(arch))
		if exe, err := exec.LookPath("qemu-system-" + arch); err == nil && arch == limayaml.AARCH64 {
			if _, err := limaqemu.Firmware(exe, arch); err != nil { // x86_64 boots without it
				lack(installFirmware(arch)(), "the UEFI firmware for %s is not installed; VMs boot with it", arch)
			}
		}
		need("qemu-img", "it makes their disks", install("qemu-utils", "qemu-img", "qemu"))
	}
	need("ssh", "Lima watches VMs with it", install("openssh-client", "openssh-clients", "openssh"))
	need("ssh-keygen", "Lima makes its key with it", install("openssh-client", "openssh-clients", "openssh"))

	var st unix.Statfs_t
	if err := unix.Statfs(d.home, &st); err != nil {
		lack("ls -ld "+d.home, "free space of %s: %w", d.home, err)
	} else if free := int64(st.Bavail) * int64(st.Bsize); free < minFree { //nolint:unconvert // uint32 on macOS
		lack("df -h "+d.home, "%.1f GB are free in %s, VMs need at least %d GB", float64(free)/1e9, d.home, int64(minFree)/1e9)
	}
	return errs
}

// install returns the command that installs a package, by its names in apt, dnf and
// Homebrew.
func install(apt, dnf, brew string) func() string {
	return func() string {
		for _, m := range []struct{ exe, cmd string }{
			{"apt-get", "sudo apt-get install -y " + apt},
			{"dnf", "sudo dnf install -y " + dnf},
			{"brew", "brew install " + brew},
		} {
			if _, err := exec.LookPath(m.exe); err == nil {
				return m.cmd
			}
		}
		return "apt-get install -y " + apt
	}
}

func installQEMU(arch limayaml.Arch) func() string {
	if arch == limayaml.AARCH64 {
		return install("qemu-system-arm", "qemu-system-aarch64", "qemu")
	}
	return install("qemu-system-x86", "qemu-system-x86", "qemu")
}

func installFirmware(arch limayaml.Arch) func() string {
	if arch == limayaml.AARCH64 {
		return install("qemu-efi-aarch64", "edk2-aarch64", "qemu")
	}
	return install("ovmf", "edk2-ovmf", "qemu")
}
