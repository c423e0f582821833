package lima

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// A fork of a checkpoint has hard links to the checkpoint's memory and to all layers of its disk.
// These files are read-only, so the parent can be removed.

// linkTries limits the attempts to link a disk's layers while the parent merges them.
const linkTries = 3

// Fork implements vm.Checkpointer.
func (d *Driver) Fork(ctx context.Context, name, id string, s vm.Spec, memory bool) error {
	dir, err := d.dir(s.Name)
	if err != nil {
		return err
	}
	if _, err := readMeta(dir); err == nil { // also if the parent is gone since
		return nil
	}
	c, m, err := d.checkpoint(name, id)
	if err == nil {
		err = d.fork(ctx, c, m, dir, s, memory)
	}
	if err != nil {
		return fmt.Errorf("fork VM %s: %w", name, explainOS(err))
	}
	return nil
}

func (d *Driver) fork(ctx context.Context, c checkpoint, m meta, dir string, s vm.Spec, memory bool) error {
	is, err := c.read()
	if errors.Is(err, fs.ErrNotExist) {
		return fail.New(fail.NotFound, "it has no checkpoint %s", c.id)
	}
	if err != nil {
		return err
	}
	y, err := forkYAML(c.dir, s)
	if err != nil {
		return err
	}
	if s.ExternalNet {
		if err := connect(s.Name); err != nil {
			return err
		}
	}
	if err := d.remove(ctx, s.Name, dir); err != nil { // an incomplete directory that make did not publish
		return err
	}
	m.User, m.ExternalNet = s.User, s.ExternalNet
	var f *fork
	if memory {
		key, err := d.StateKey(ctx, m.Arch, m.CPUs, m.Memory)
		if err != nil {
			return err
		}
		if !is.Memory || is.Key != key {
			return fmt.Errorf("%w: the checkpoint has no memory, or it was saved with another QEMU, kernel or processor", vm.ErrNotWoken)
		}
		f = &fork{State: filepath.Join(dir, statePrefix+c.id), Base: layerPrefix + c.id, User: s.User, AuthorizedKey: s.AuthorizedKey, Key: is.Key}
	}
	return d.make(s.Name, dir, y, m, f, func(tmp string) error {
		for _, file := range []string{filenames.BaseDisk, filenames.Kernel, filenames.Initrd, filenames.KernelCmdline, disksFile} {
			if err := shareFile(filepath.Join(c.dir, file), filepath.Join(tmp, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		if m.VMType == limayaml.VZ {
			if err := clone(c.path(layerPrefix), filepath.Join(tmp, filenames.DiffDisk)); err != nil {
				return err
			}
			if err := os.Link(c.path(layerPrefix), filepath.Join(tmp, layerPrefix+c.id)); err != nil {
				return err
			}
		} else if err := c.linkLayers(tmp); err != nil {
			return err
		}
		for _, prefix := range []string{statePrefix, checkpointPrefix} { // so it can be forked as well
			if err := os.Link(c.path(prefix), filepath.Join(tmp, prefix+c.id)); err != nil && (memory || !errors.Is(err, fs.ErrNotExist)) {
				return err
			}
		}
		if m.VMType == limayaml.VZ {
			return nil
		}
		return overlay(ctx, layerPrefix+c.id, filepath.Join(tmp, filenames.DiffDisk))
	})
}

// forkYAML returns the lima.yaml of the VM in parent, adapted to the fork's spec.
func forkYAML(parent string, s vm.Spec) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(parent, filenames.LimaYAML))
	if err != nil {
		return nil, err
	}
	y, err := parseYAML(filenames.LimaYAML, b)
	if err != nil {
		return nil, err
	}
	if len(y.Provision) > 0 && y.Provision[0].Mode == limayaml.ProvisionModeBoot {
		y.Provision = y.Provision[1:]
	}
	if err := applyBootScript(y, s); err != nil {
		return nil, err
	}
	y.User.Name, y.Networks, y.AdditionalDisks = &s.User, nil, withoutDataDisks(y.AdditionalDisks)
	seal(y)
	if s.ExternalNet {
		y.Networks = []limayaml.Network{{Lima: network(s.Name)}}
	}
	return limayaml.Marshal(y, false)
}

// shareFile hard-links a file, or copies a symbolic link.
func shareFile(from, to string) error {
	target, err := os.Readlink(from)
	if err == nil {
		return os.Symlink(target, to)
	}
	return os.Link(from, to)
}

// linkLayers makes hard links to the layers of the checkpoint's disk in dir.
func (c checkpoint) linkLayers(dir string) error {
	var err error
	for range linkTries {
		if err = c.tryLinkLayers(dir); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return err
}

func (c checkpoint) tryLinkLayers(dir string) error {
	below := layerPrefix + c.id
	for range 10 * maxLayers {
		to := filepath.Join(dir, below)
		if err := errors.Join(removeFile(to), os.Link(filepath.Join(c.dir, below), to)); err != nil {
			return err
		}
		var err error
		if _, below, err = readDisk(to); err != nil {
			return err
		}
		if !strings.HasPrefix(below, layerPrefix) {
			break
		}
	}
	if below != filenames.BaseDisk { // made before relativeBase existed
		return fail.New(fail.Conflict, "the parent's disk has an old format").WithHint("agent-sessionizer stop SESSION # then start it, and create another checkpoint")
	}
	return nil
}

// relativeBase makes the backing file of a stopped VM's disk relative. Lima writes an absolute path,
// which in a fork would point into the parent's directory. A disk of vz has no backing file, whatever
// its guest wrote into its first bytes.
func relativeBase(ctx context.Context, dir string, m meta) error {
	if m.VMType == limayaml.VZ {
		return nil
	}
	disk, base := filepath.Join(dir, filenames.DiffDisk), filepath.Join(dir, filenames.BaseDisk)
	if _, below, err := readDisk(disk); err != nil || below != base {
		return nil //nolint:nilerr // a disk without layers
	}
	return qemuImg(ctx, "rebase", "-q", "-u", "-f", "qcow2", "-F", baseFormat(dir), "-b", filenames.BaseDisk, disk)
}

// baseFormat returns QEMU's name for the format of the base of the VM in dir.
func baseFormat(dir string) string {
	if _, _, err := readDisk(filepath.Join(dir, filenames.BaseDisk)); err != nil {
		return "raw"
	}
	return "qcow2"
}
