package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

var _ vm.Checkpointer = (*Driver)(nil)

// A checkpoint is a copy of the disk, checkpoints/ID in the VM's directory, and a description,
// checkpoints/ID.json, which is written last. A fake guest has no memory; its programs end.

func (m machine) checkpoint(id string) string { return m.file(filepath.Join("checkpoints", id)) }

// Checkpoint implements vm.Checkpointer.
func (d *Driver) Checkpoint(ctx context.Context, name, id string, _ vm.Progress) (is vm.Checkpoint, err error) {
	err = d.faults.around(ctx, "checkpoint", name, func() error {
		m, _, err := d.existing(name)
		if err == nil {
			is, err = m.keep(ctx, id)
		}
		return err
	})
	return is, err
}

// Suspend implements vm.Checkpointer.
func (d *Driver) Suspend(ctx context.Context, name, id string, _ vm.Progress) (is vm.Checkpoint, err error) {
	err = d.faults.around(ctx, "suspend", name, func() error {
		m, _, err := d.existing(name)
		if err != nil {
			return err
		}
		if _, statErr := os.Stat(m.checkpoint(id) + ".json"); statErr != nil && !m.running() {
			return fmt.Errorf("suspend %s: it does not run", name)
		}
		if is, err = m.keep(ctx, id); err != nil {
			return err
		}
		if err := m.kill(ctx); err != nil {
			return err
		}
		return m.restore(ctx, id, true)
	})
	return is, err
}

// Settle implements vm.Checkpointer. A fake VM is never paused.
func (d *Driver) Settle(context.Context, string) error { return nil }

// Restore implements vm.Checkpointer.
func (d *Driver) Restore(ctx context.Context, name, id string, memory bool) error {
	return d.faults.around(ctx, "restore", name, func() error {
		m, _, err := d.existing(name)
		if err != nil {
			return err
		}
		if m.running() {
			return fmt.Errorf("restore %s: it runs", name)
		}
		if id == "" {
			return removeAll(m.file(forkFile))
		}
		return m.restore(ctx, id, memory)
	})
}

// Fork implements vm.Checkpointer.
func (d *Driver) Fork(ctx context.Context, name, id string, s vm.Spec, memory bool) error {
	return d.faults.around(ctx, "fork", s.Name, func() error {
		to, err := d.machine(s.Name)
		if err != nil {
			return err
		}
		if _, err := readSpec(to); err == nil { // also if the parent is gone since
			return nil
		}
		from, parent, err := d.existing(name)
		if err != nil {
			return err
		}
		var is vm.Checkpoint
		b, err := os.ReadFile(from.checkpoint(id) + ".json")
		if err == nil {
			err = json.Unmarshal(b, &is)
		}
		if err != nil {
			return fmt.Errorf("fork %s: %w", name, err)
		}
		if memory && !is.Memory {
			return fmt.Errorf("fork %s: %w", name, vm.ErrNotWoken)
		}
		if err := errors.Join(removeAll(to.dir), os.MkdirAll(to.dir, 0o700)); err != nil {
			return err
		}
		if err := errors.Join(copyTree(ctx, from.checkpoint(id), to.root()), os.MkdirAll(to.file("checkpoints"), 0o700)); err != nil {
			return err
		}
		if err := errors.Join(copyTree(ctx, from.checkpoint(id), to.checkpoint(id)), atomicfile.Write(to.checkpoint(id)+".json", b, 0o600)); err != nil {
			return err
		}
		if memory {
			if err := os.WriteFile(to.file(forkFile), []byte(to.root()), 0o600); err != nil {
				return err
			}
		}
		s.Image, s.CPUs, s.Memory, s.Disk = parent.Image, parent.CPUs, parent.Memory, parent.Disk
		return writeSpec(to, s)
	})
}

// RemoveCheckpoint implements vm.Checkpointer.
func (d *Driver) RemoveCheckpoint(_ context.Context, name, id string) error {
	m, _, err := d.existing(name)
	if errors.Is(err, vm.ErrNotFound) {
		return nil
	}
	if err == nil {
		err = os.Remove(m.checkpoint(id) + ".json")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return removeAll(m.checkpoint(id))
}

func (m machine) keep(ctx context.Context, id string) (is vm.Checkpoint, err error) {
	b, err := os.ReadFile(m.checkpoint(id) + ".json")
	if err == nil {
		return is, json.Unmarshal(b, &is)
	}
	if err := errors.Join(removeAll(m.checkpoint(id)), os.MkdirAll(m.file("checkpoints"), 0o700)); err != nil {
		return is, err
	}
	if err := copyTree(ctx, m.root(), m.checkpoint(id)); err != nil {
		return is, err
	}
	is = vm.Checkpoint{Memory: m.running(), Size: used(m.checkpoint(id), time.Now().Add(time.Second)), Pause: time.Millisecond}
	if b, err = json.Marshal(is); err != nil {
		return is, err
	}
	return is, atomicfile.Write(m.checkpoint(id)+".json", b, 0o600)
}

func (m machine) restore(ctx context.Context, id string, memory bool) error {
	var is vm.Checkpoint
	b, err := os.ReadFile(m.checkpoint(id) + ".json")
	if err == nil {
		err = json.Unmarshal(b, &is)
	}
	if err != nil {
		return fmt.Errorf("restore %s: %w", m.name, err)
	}
	if memory && !is.Memory {
		return fmt.Errorf("restore %s: %w", m.name, vm.ErrNotWoken)
	}
	next := m.file("root.next")
	if err := errors.Join(removeAll(next), os.Remove(m.file(forkFile))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := copyTree(ctx, m.checkpoint(id), next); err != nil {
		return err
	}
	if err := removeAll(m.root()); err != nil {
		return err
	}
	if err := os.Rename(next, m.root()); err != nil || !memory {
		return err
	}
	return atomicfile.Write(m.file(forkFile), []byte(m.checkpoint(id)), 0o600)
}

// copyTree copies a directory that processes may change meanwhile.
func copyTree(ctx context.Context, from, to string) error {
	out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput()
	if err != nil {
		if _, statErr := os.Stat(to); statErr == nil && ctx.Err() == nil { // a file vanished
			return nil
		}
		return fmt.Errorf("copy the disk: %w: %s", err, out)
	}
	return nil
}
