package lima

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"
	"github.com/sirupsen/logrus"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Restore implements vm.Checkpointer.
func (d *Driver) Restore(ctx context.Context, name, id string, memory bool) error {
	if id == "" {
		var err error
		if id, err = d.resumesFrom(name); id == "" || err != nil {
			return err
		}
	}
	c, m, err := d.checkpoint(name, id)
	if err == nil {
		err = d.restore(ctx, c, m, memory)
	}
	if err != nil {
		return fmt.Errorf("restore VM %s: %w", name, explainOS(err))
	}
	return nil
}

// resumesFrom returns the id of the checkpoint that the VM is about to resume, "" for none.
func (d *Driver) resumesFrom(name string) (string, error) {
	dir, err := d.dir(name)
	if err != nil {
		return "", err
	}
	f, err := readFork(dir)
	if f == nil || err != nil {
		return "", err
	}
	return strings.TrimPrefix(f.Base, layerPrefix), nil
}

func (d *Driver) restore(ctx context.Context, c checkpoint, m meta, memory bool) error {
	if runs, err := isRunning(ctx, c.dir); err != nil || runs {
		return errors.Join(err, fail.New(fail.Conflict, "the VM runs"))
	}
	is, err := c.read()
	if errors.Is(err, fs.ErrNotExist) && (memory || !exists(c.path(layerPrefix))) {
		return fail.New(fail.NotFound, "it has no checkpoint %s", c.id)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if memory {
		key, err := d.StateKey(ctx, m.Arch, m.CPUs, m.Memory)
		if err != nil {
			return err
		}
		if !is.Memory || is.Key != key {
			return fmt.Errorf("%w: the checkpoint has no memory, or it was saved with another QEMU, kernel or processor", vm.ErrNotWoken)
		}
	}
	if err := errors.Join(tidyDisks(c.dir), removeFile(filepath.Join(c.dir, resumedFile))); err != nil {
		return err
	}
	if m.VMType == limayaml.VZ {
		if err := clone(c.path(layerPrefix), c.path(newPrefix)); err != nil {
			return err
		}
		return os.Rename(c.path(newPrefix), c.diffDisk())
	}
	c.flatten(ctx)
	if memory {
		b, err := json.Marshal(fork{State: c.path(statePrefix), Base: layerPrefix + c.id, HostKey: is.HostKey, Key: is.Key})
		if err != nil {
			return err
		}
		// From here on, each start makes the disk again, until the guest has resumed.
		if err := atomicfile.Write(filepath.Join(c.dir, forkFile), b, 0o600); err != nil {
			return err
		}
		return ignoreUnused(removeLayers(c.dir))
	}
	if err := c.replaceDisk(ctx); err != nil {
		return err
	}
	if err := removeFile(filepath.Join(c.dir, forkFile)); err != nil {
		return err
	}
	return ignoreUnused(removeLayers(c.dir))
}

// ignoreUnused logs that layers which nothing needs stay: they take space, and the next removal
// tries again.
func ignoreUnused(err error) error {
	if err != nil {
		logrus.WithError(err).Warn("removing unused layers failed")
	}
	return nil
}

// flattenDisk merges the layers of a stopped VM's disk if it has too many. A disk of vz has none,
// whatever its guest wrote into its first bytes.
func flattenDisk(ctx context.Context, dir string, m meta) {
	if m.VMType == limayaml.VZ || isFork(dir) {
		return
	}
	if layers, err := layersOf(dir, filenames.DiffDisk); err == nil && len(layers) > maxLayers {
		checkpoint{dir: dir, id: strings.TrimPrefix(layers[0], layerPrefix)}.flatten(ctx)
	}
}

// flatten gives the checkpoint's disk a single layer if it has too many. Its content stays. If that
// fails, for example because the host's disk is full, it stays as it is, which works as well.
func (c checkpoint) flatten(ctx context.Context) {
	layers, err := layersOf(c.dir, layerPrefix+c.id)
	if err == nil && len(layers) < maxLayers {
		return
	}
	flat := c.path(newPrefix)
	if err == nil {
		err = clone(c.path(layerPrefix), flat)
	}
	if err == nil { // copies what the layers below have, and the base has not
		err = qemuImg(ctx, "rebase", "-q", "-f", "qcow2", "-F", baseFormat(c.dir), "-b", filenames.BaseDisk, flat)
	}
	if err == nil {
		err = flush(flat)
	}
	if err == nil {
		err = renameSynced(flat, c.path(layerPrefix))
	}
	if err != nil {
		logrus.WithError(err).Warn("merging the layers of a disk failed")
		_ = removeFile(flat)
	}
}

// RemoveCheckpoint implements vm.Checkpointer.
func (d *Driver) RemoveCheckpoint(ctx context.Context, name, id string) error {
	c, m, err := d.checkpoint(name, id)
	if isNotFound(err) {
		return nil
	}
	if f, forkErr := readFork(c.dir); err == nil && forkErr == nil && f != nil && f.State == c.path(statePrefix) {
		err = fail.New(fail.Conflict, "the VM is about to resume from the checkpoint")
	}
	switch {
	case err != nil:
	case m.VMType == limayaml.VZ:
		err = c.discardCopy()
	default:
		err = c.discard()
	}
	if err != nil {
		return fmt.Errorf("remove a checkpoint of VM %s: %w", name, explainOS(err))
	}
	return ctx.Err()
}
