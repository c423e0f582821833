package boot

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestagent/sys"
)

// identityUnit waits, in a running machine, for the identity of a fork. The host sends one only to
// forks. In the original machine, the unit waits until shutdown.
const identityUnit = "agent-identity.service"

// seedName contains the name that the machine had on its seed disk when it last booted.
const seedName = "/var/lib/agent-sessionizer/seed-name"

// PrepareFork prepares a running machine for checkpoints that can be forked: it starts identityUnit.
// It may be repeated.
func PrepareFork(ctx context.Context, g sys.Guest) error {
	if err := g.NeedRoot("fork prepare"); err != nil {
		return err
	}
	if g.Fake {
		return nil // the fake driver gives a fork its identity
	}
	if _, err := sys.Run(ctx, "", "systemctl", "is-active", "--quiet", identityUnit); err == nil {
		return nil
	}
	// A generic image has a login prompt on the port, which would read the identity.
	const login = "serial-getty@hvc0.service"
	if _, err := sys.Run(ctx, "", "systemctl", "mask", "--runtime", "--now", "--quiet", login); err != nil {
		return err
	}
	// A read of the port cannot be interrupted, hence SIGKILL at the shutdown.
	return sys.Perform(ctx, "", "systemd-run", "--quiet", "--collect", "--unit="+identityUnit,
		"--service-type=notify", "--property=NotifyAccess=main", "--property=KillSignal=SIGKILL", sys.Binary, "fork", "wait")
}

// AwaitFork waits for an identity from the host and applies it. It calls ready once it is waiting. If
// any part of the identity cannot be applied, it powers the fork off.
func AwaitFork(ctx context.Context, g sys.Guest, ready func()) error {
	if err := g.NeedRoot("fork wait"); err != nil {
		return err
	}
	s := snapshotWaiter{guest: g}
	var err error
	if s.port, err = openRaw(identityPort); err != nil {
		return err
	}
	if s.card, err = findCard(ctx); err != nil {
		return err
	}
	ready()
	if err := s.readIdentity(); err != nil { // perhaps in the original machine, which stays as it is
		return err
	}
	if err := s.takeIdentity(ctx); err != nil {
		return poweroffWithError("setting the identity of the fork failed", err)
	}
	return s.finish(ctx)
}

// isCopy reports whether the disk belonged to a machine of another name when it last booted. An image
// has no name. The name is that of the seed disk.
func isCopy(g sys.Guest, name string) bool {
	old := strings.TrimSpace(g.Text(seedName))
	return old != "" && old != name
}

// renew replaces the identity that a copied disk brings along: machine ID and host keys.
func (s *cloneBooter) renew() (err error) {
	if err := removeParentFiles(s.guest); err != nil {
		return err
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id) // crypto/rand documents that it never fails
	if err := place(s.guest, "/etc/machine-id", hex.EncodeToString(id)+"\n", 0o444); err != nil {
		return err
	}
	if s.key, err = ensureHostKey(s.guest); err == nil {
		unix.Sync() // the new name must not be on the disk before the rest is
	}
	return err
}

// dropParent removes the parent's identity from a fork of a running machine. It leaves the card up:
// on Linux 6.12, taking it down just after a resume can deadlock in virtnet_close.
func (s *snapshotWaiter) dropParent() (err error) {
	// A fork of a fork, or of a warm start, has its parent's boot_id mounted over the kernel's.
	if err := unix.Unmount(bootID, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	if s.disk, err = removeSeedDisk(unix.MNT_DETACH); err != nil {
		return fmt.Errorf("seed disk: %w", err)
	}
	return errors.Join(removeParentFiles(s.guest), os.MkdirAll(seedDir, 0o755))
}

// removeParentFiles removes host keys, and the id of Docker's engine, which Docker creates again
// when it starts.
func removeParentFiles(g sys.Guest) error {
	keys, err := filepath.Glob(g.Path("/etc/ssh/ssh_host_*"))
	if err != nil {
		return err
	}
	for _, path := range append(keys, g.Path(identityDoneFile), g.Path("/var/lib/docker/engine-id")) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
