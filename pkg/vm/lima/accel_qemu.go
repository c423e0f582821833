package lima

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/lima-vm/lima/pkg/limayaml"
)

// askTimeout is for KVM: with it a guest finishes in 0.2 s, including QEMU's start.
const askTimeout = 2 * time.Second

// debugExit is the status of a QEMU whose guest wrote 0x10 to isa-debug-exit.
const debugExit = 0x10<<1 | 1

// askQEMU boots a minimal guest with an accelerator and returns what went wrong, or
// "" when it ran. The probe alone cannot know what QEMU needs of KVM. The caller must
// limit a guest that does not end, by ctx.
func askQEMU(ctx context.Context, arch limayaml.Arch, accel, cpu string) string {
	dir, err := os.MkdirTemp("", "agent-sessionizer-probe-")
	if err != nil {
		return err.Error()
	}
	defer os.RemoveAll(dir)
	guest := filepath.Join(dir, "guest")
	code, args, want := bootSector(), []string{
		"-machine", "pc,accel=" + accel, "-drive", "if=none,id=d,format=raw,file=" + guest, "-device", "ide-hd,drive=d",
		"-device", "isa-debug-exit,iobase=0xf4,iosize=4",
	}, debugExit
	if arch == limayaml.AARCH64 {
		code, args, want = powerOffCode(), []string{"-machine", "virt,accel=" + accel, "-kernel", guest}, 0
	}
	if err := os.WriteFile(guest, code, 0o600); err != nil {
		return err.Error()
	}
	args = append(args, "-cpu", cpu, "-m", "64", "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config")
	out, err := exec.CommandContext(ctx, "qemu-system-"+arch, args...).CombinedOutput()
	status := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		status = exit.ExitCode()
	} else if err != nil {
		return err.Error()
	}
	switch {
	case ctx.Err() != nil:
		return "QEMU did not run a trivial guest in time"
	case status != want:
		first, _, _ := strings.Cut(string(out), "\n")
		return clean(fmt.Sprintf("QEMU exited with status %d: %s", status, first))
	}
	return ""
}

// bootSector returns code that reports to isa-debug-exit that it runs: mov dx,0xf4;
// mov al,0x10; out dx,al; cli; hlt.
func bootSector() []byte {
	b := make([]byte, 512)
	copy(b, []byte{0xba, 0xf4, 0x00, 0xb0, 0x10, 0xee, 0xfa, 0xf4})
	b[510], b[511] = 0x55, 0xaa
	return b
}

// powerOffCode returns code that asks the firmware for PSCI SYSTEM_OFF: mov w0,#8;
// movk w0,#0x8400,lsl #16; hvc #0; b .
func powerOffCode() []byte {
	var b []byte
	for _, w := range []uint32{0x52800100, 0x72b08000, 0xd4000002, 0x14000000} {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}
