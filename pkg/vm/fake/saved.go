package fake

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

var _ vm.Saver = (*Driver)(nil)

// forkFile marks a VM whose first start resumes a snapshot. As in a real driver it is
// removed before logins are possible.
const forkFile = "fork"

// StateKey implements vm.Saver.
func (d *Driver) StateKey(ctx context.Context, arch string, cpus int, memory int64) (string, error) {
	if err := d.faults.around(ctx, "save", "", func() error { return nil }); err != nil {
		return "", err
	}
	return fmt.Sprint("fake-", arch, "-", cpus, "-", memory), nil
}

// Save implements vm.Saver. It boots nothing: a fake guest has no memory.
func (d *Driver) Save(ctx context.Context, name, dir string, p vm.Progress) error {
	err := d.faults.around(ctx, "save", name, func() error {
		m, _, err := d.existing(name)
		if err != nil {
			return err
		}
		if m.running() {
			return fmt.Errorf("save %s: it is running", name)
		}
		return errors.Join(
			atomicfile.Write(filepath.Join(dir, vm.StateFile), []byte("state of "+name+"\n"), 0o600),
			atomicfile.Write(filepath.Join(dir, vm.DiskFile), []byte("disk of "+name+"\n"), 0o600),
		)
	})
	if err != nil {
		return err
	}
	return d.Delete(ctx, name)
}

// Export implements vm.Driver.
func (d *Driver) Export(ctx context.Context, name, dest string, p vm.Progress) error {
	return d.faults.around(ctx, "export", name, func() error {
		m, _, err := d.existing(name)
		if err != nil {
			return err
		}
		if m.running() {
			return fmt.Errorf("export %s: it is running", name)
		}
		return atomicfile.Write(dest, []byte("disk of "+name+"\n"), 0o600)
	})
}

// wake does what the first start of a fork does before it boots.
func (d *Driver) wake(ctx context.Context, m machine, s vm.Spec) error {
	mark, err := os.ReadFile(m.file(forkFile))
	if err != nil {
		return nil //nolint:nilerr // not a fork, or it has woken already
	}
	err = d.faults.around(ctx, "wake", m.name, func() error {
		state := s.Image.State
		if len(mark) > 0 {
			state = string(mark) // a checkpoint
		}
		_, err := os.Stat(state)
		return err
	})
	if err != nil {
		return fmt.Errorf("%w: %w", vm.ErrNotWoken, err)
	}
	return os.Remove(m.file(forkFile))
}
