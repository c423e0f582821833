package lima

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

const (
	tailSize   = 64 << 10
	quotedLogs = 6
)

// agentLog returns the end of the host agent's log: warnings, errors, QEMU's
// messages, and lines that are not records, such as a panic's.
func agentLog(dir string) string {
	f, err := os.Open(filepath.Join(dir, filenames.HostAgentStderrLog))
	if err != nil {
		return ""
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > tailSize {
		if _, err := f.Seek(-tailSize, io.SeekEnd); err != nil {
			return ""
		}
	}
	b, err := io.ReadAll(io.LimitReader(f, tailSize))
	if err != nil {
		return ""
	}
	var out []string
	for line := range bytes.Lines(b) {
		var rec struct{ Level, Msg, Error string }
		if json.Unmarshal(line, &rec) != nil {
			out = append(out, clean(string(line)))
			continue
		}
		_, message, byQEMU := strings.Cut(rec.Msg, "qemu[stderr]: ")
		switch {
		case byQEMU:
			out = append(out, clean(message))
		case rec.Level == "error" || rec.Level == "fatal":
			out = append(out, clean(strings.TrimSuffix(rec.Msg+": "+rec.Error, ": ")))
		}
	}
	return strings.Join(out[max(0, len(out)-quotedLogs):], "\n")
}

func quote(log string) string {
	if log == "" {
		return ""
	}
	return ":\n  " + strings.ReplaceAll(log, "\n", "\n  ")
}

// known lists causes that can be recognised in the output of QEMU, qemu-img and Lima.
// "fix" may name a package, see install.
var known = []struct {
	says []string // any of these
	code fail.Code
	what string
	fix  func() string
}{
	{[]string{"No space left on device", "no space left on device", "disk quota exceeded"}, fail.Host, "the disk is full", hint("df -h # and: agent-sessionizer destroy SESSION, agent-sessionizer image prune")},
	{[]string{"Could not access KVM kernel module: Permission denied"}, fail.Host, "no permission to open /dev/kvm", hint(kvmHint)},
	{[]string{`could not find firmware for "aarch64"`}, fail.Host, "the UEFI firmware for VMs of aarch64 is missing", installFirmware(limayaml.AARCH64)},
	{[]string{"could not find firmware"}, fail.Host, "the UEFI firmware for VMs is missing", installFirmware(limayaml.X8664)},
	{[]string{`"qemu-img": executable file not found`}, fail.Host, "qemu-img is missing", install("qemu-utils", "qemu-img", "qemu")},
	{[]string{`"ssh": executable file not found`, `"ssh-keygen": executable file not found`}, fail.Host, "the SSH client is missing", install("openssh-client", "openssh-clients", "openssh")},
	{[]string{`"qemu-system-aarch64": executable file not found`}, fail.Host, "QEMU for aarch64 is missing", installQEMU(limayaml.AARCH64)},
	{[]string{"executable file not found"}, fail.Host, "QEMU is missing", func() string { return installQEMU(hostArch())() }},
	// The log of the host agent may be cut after "process".
	{[]string{"com.apple.security.virtualization", "Invalid virtual machine configuration. The process"}, fail.Host, "the program is not signed with the entitlement for Virtualization.framework", hint(codesignHint)},
	{[]string{"Virtualization is not available on this hardware"}, fail.Host, "this Mac cannot run VMs; inside a VM, it needs nested virtualization", nil},
	{[]string{"Cannot allocate memory", "cannot set up guest memory"}, fail.Host, "the host does not have enough memory for this VM", hint("agent-sessionizer stop SESSION # or give the VM less memory: --memory")},
	{[]string{`Failed to get "write" lock`, `Failed to get shared "write" lock`}, fail.Conflict, "the VM's disk is in use by another process", nil},
	{[]string{"not in qcow2 format", "is not acceptable as the base disk", "Could not open backing file", "Image is corrupt", "unsupported version", "Could not read qcow2 header", "Could not open"}, fail.Failure, "the VM's image is unusable", hint("agent-sessionizer image build --rebuild")},
}

// codesignHint is the command that a clone of the repository needs after each build.
const codesignHint = "codesign --force --sign - --entitlements vz.entitlements PROGRAM # in a clone of the repository"

func hint(s string) func() string { return func() string { return s } }

// explain finds a known cause in text, or returns err.
func explain(text string, err error) error {
	for _, s := range []string{"Could not set up host forwarding rule", "ddress already in use"} {
		if strings.Contains(text, s) {
			return &fail.Error{Code: fail.Conflict, Hint: "run the command again", Err: fmt.Errorf("%w: %w", errPortTaken, err)}
		}
	}
	for _, k := range known {
		for _, s := range k.says {
			if !strings.Contains(text, s) {
				continue
			}
			e := &fail.Error{Code: k.code, Err: fmt.Errorf("%s: %w", k.what, err)}
			if k.fix != nil {
				e.Hint = k.fix()
			}
			return e
		}
	}
	return err
}

// explainOS explains errors of our own file operations.
func explainOS(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return explain("no space left on device", err)
	}
	return err
}
