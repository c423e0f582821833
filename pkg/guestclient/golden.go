package guestclient

import (
	"context"
	"fmt"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lazyregexp"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// initrdPath is where the generalising script leaves the initial RAM disk for the
// guest's clones, if it makes one.
const initrdPath = "/boot/agent-sessionizer/initrd"

// maxInitrd limits how much of the file is read; a generic one has about 10 MB,
// unpacked 40.
const maxInitrd = 96 << 20

// Generalise removes everything from a provisioned guest that identifies it, so that
// its disk can become a golden image. It returns the initial RAM disk for the clones,
// or nil if the image has its own. Afterwards the guest can only be powered off.
func (r Provisioner) Generalise(ctx context.Context) (initrd []byte, err error) {
	dir, err := r.unpack(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.run(ctx, dir, "golden/generalise.sh", r.Report); err != nil {
		return nil, fail.New(fail.Failure, "prepare the guest for cloning: %w", err)
	}
	initrd, err = r.Guest.SSH.Output(ctx, "sudo cat "+initrdPath+" 2>/dev/null || true", nil, maxInitrd)
	if err != nil {
		return nil, fmt.Errorf("fetch the initial RAM disk: %w", err)
	}
	return initrd, nil
}

// Verify tests every tool, and checks that no service has failed.
func (r Provisioner) Verify(ctx context.Context) error {
	dir, err := r.unpack(ctx)
	if err != nil {
		return err
	}
	if err := r.run(ctx, dir, "90-verify.sh", r.Report); err != nil {
		return fail.New(fail.Failure, "a tool is missing: %w", err)
	}
	out, err := r.Guest.SSH.Output(ctx, "systemctl list-units --failed --plain --no-legend", nil, maxReply)
	if err != nil {
		return fmt.Errorf("list failed services: %w", err)
	}
	if failed := termtext.Line(string(out)); failed != "" {
		return fail.New(fail.Failure, "services failed: %s", failed)
	}
	return nil
}

// Identity holds the values that no two machines share.
type Identity struct {
	MachineID, Hostname, BootID string
}

var hex32 = lazyregexp.New(`^[0-9a-f]{32}$`)

// Identity reads the guest's identity.
func (g Guest) Identity(ctx context.Context) (Identity, error) {
	out, err := g.SSH.Output(ctx, "cat /etc/machine-id /proc/sys/kernel/hostname /proc/sys/kernel/random/boot_id", nil, 4096)
	if err != nil {
		return Identity{}, fmt.Errorf("read the guest's identity: %w", err)
	}
	f := strings.Fields(string(out))
	if len(f) != 3 || !hex32.MatchString(f[0]) {
		return Identity{}, fail.New(fail.Failure, "the guest has no machine-id")
	}
	return Identity{MachineID: f[0], Hostname: termtext.Line(f[1]), BootID: termtext.Line(f[2])}, nil
}
