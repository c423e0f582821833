package lima

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	continuity "github.com/containerd/continuity/fs"
	"github.com/lima-vm/go-qcow2reader"
	"github.com/lima-vm/go-qcow2reader/image/raw"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store"
	"github.com/lima-vm/lima/pkg/store/filenames"
	"github.com/opencontainers/go-digest"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// prepare makes the VM's disks at its first start. Lima assumes that existing files
// are complete, so prepare discards all of them until disksFile exists.
func (d *Driver) prepare(ctx context.Context, name, dir string, m meta, p vm.Progress) error {
	if m.ExternalNet {
		if err := connect(name); err != nil {
			return err
		}
	}
	var inst *store.Instance
	if err := catchFatal("read the VM's configuration", func() (err error) {
		if inst, err = store.Inspect(name); err == nil && inst.Config == nil {
			err = errors.Join(inst.Errors...)
		}
		return err
	}); err != nil {
		return err
	}
	if err := checkSealed(inst, d.home); err != nil {
		return err
	}
	if err := errors.Join(checkExternalNet(inst, m.ExternalNet), d.checkDataDisks(inst.Config)); err != nil {
		return err
	}
	done := filepath.Join(dir, disksFile)
	if _, err := os.Stat(done); err != nil {
		if err := d.images.materialise(ctx, inst, p); err != nil {
			return explainOS(err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, filenames.BaseDisk)); err != nil { // otherwise Lima would fetch another one
		return fail.New(fail.NotFound, "the VM's disk needs a base image that is gone: %w", err).WithHint("agent-sessionizer destroy %s", name)
	}
	if err := catchFatal("prepare the VM's disks", func() error { return prepareInstance(ctx, inst) }); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return explain(err.Error(), err)
	}
	return atomicfile.Write(done, nil, 0o600)
}

// imageCache puts images into VMs' directories. It keeps downloads in a directory.
type imageCache struct{ dir string }

// materialise puts the image where Lima looks for it, so that Lima has nothing left
// to copy.
func (c imageCache) materialise(ctx context.Context, inst *store.Instance, p vm.Progress) error {
	for _, f := range []string{filenames.BaseDisk, filenames.DiffDisk, filenames.Kernel, filenames.KernelCmdline, filenames.Initrd} {
		if err := os.Remove(filepath.Join(inst.Dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, img := range inst.Config.Images {
		if img.Arch != inst.Arch {
			continue
		}
		base := filepath.Join(inst.Dir, filenames.BaseDisk)
		if err := c.placeDisk(ctx, img.File, base, p); err != nil {
			return err
		}
		if err := fits(base, inst.Disk); err != nil {
			return err
		}
		if inst.VMType == limayaml.VZ {
			if err := share(base, filepath.Join(inst.Dir, filenames.DiffDisk), inst.Disk); err != nil {
				return err
			}
		}
		if img.Kernel != nil {
			if err := c.placeDisk(ctx, img.Kernel.File, filepath.Join(inst.Dir, filenames.Kernel), p); err != nil {
				return err
			}
			if err := atomicfile.Write(filepath.Join(inst.Dir, filenames.KernelCmdline), []byte(img.Kernel.Cmdline), 0o600); err != nil {
				return err
			}
		}
		if img.Initrd != nil {
			if err := c.placeDisk(ctx, *img.Initrd, filepath.Join(inst.Dir, filenames.Initrd), p); err != nil {
				return err
			}
		}
		// Lima accepts no base that has a base itself, unless the disk already
		// exists.
		if f, err := readFork(inst.Dir); f != nil || err != nil {
			if err == nil {
				err = f.overlay(ctx, inst.Dir)
			}
			return err
		}
		return nil
	}
	return fail.New(fail.Usage, "VM %s has no image for %s", inst.Name, inst.Arch)
}

// fits refuses a disk smaller than the image: its guest would find half a file system
// and reboot forever.
func fits(base string, disk int64) error {
	f, err := os.Open(base)
	if err != nil {
		return err
	}
	defer f.Close()
	img, err := qcow2reader.Open(f)
	if err != nil {
		return fail.New(fail.Failure, "read the image's size: %w", err)
	}
	if size := img.Size(); disk < size {
		return fail.New(fail.Usage, "a disk of %s is smaller than the image of %s", measure.Size(disk).Human(), measure.Size(size).Human()).
			WithHint("agent-sessionizer open --disk %s REPO # after agent-sessionizer destroy SESSION", measure.Size(size).Human())
	}
	return nil
}

// share makes disk a copy of the raw image base, of the given size, that shares its
// blocks. It leaves other formats to Lima, which converts them.
func share(base, disk string, size int64) error {
	f, err := os.Open(base)
	if err != nil {
		return err
	}
	defer f.Close()
	img, err := qcow2reader.Open(f)
	if err != nil {
		return fail.New(fail.Failure, "read the image: %w", err)
	}
	if img.Type() != raw.Type {
		return nil
	}
	tmp := disk + ".tmp" // Lima assumes that a disk it finds is complete
	if err := clone(base, tmp); err != nil {
		return err
	}
	if err := os.Truncate(tmp, size); err != nil {
		return err
	}
	return os.Rename(tmp, disk)
}

// clone copies a file, in the place of what an interrupted call left. It shares the blocks where
// the file system supports that (APFS, Btrfs, XFS).
func clone(from, to string) error { return cloneWith(continuity.CopyFile, from, to) }

// cloneWith does what clone does, with a function that copies. On macOS that function is
// clonefile(2), which refuses an existing target, copies a symbolic link instead of its file, and
// keeps the mode of a read-only file.
func cloneWith(copyFile func(to, from string) error, from, to string) error {
	from, err := filepath.EvalSymlinks(from)
	if err == nil {
		err = removeFile(to)
	}
	if err == nil {
		err = copyFile(to, from)
	}
	if err == nil {
		err = os.Chmod(to, 0o600)
	}
	if err != nil {
		return fmt.Errorf("copy a disk: %w", err)
	}
	return nil
}

// placeDisk puts the file f at dest. It links one of our images, which have no digest,
// instead of copying it: they are read-only and outlive their VMs. Therefore a clone
// takes milliseconds. A download is copied from the cache, and another file from its
// own location, because either may be removed or change.
func (c imageCache) placeDisk(ctx context.Context, f limayaml.File, dest string, p vm.Progress) error {
	if isURL(f.Location) {
		return c.download(ctx, f, dest, p)
	}
	r, err := os.Open(f.Location)
	if err != nil {
		return fail.New(fail.NotFound, "open the image: %w", err).WithHint("agent-sessionizer image build --from debian")
	}
	defer r.Close()
	if f.Digest == "" {
		return os.Symlink(f.Location, dest)
	}
	report(p, "copying %s", filepath.Base(f.Location))
	if err := clone(f.Location, dest); err != nil {
		return err
	}
	copied, err := os.Open(dest)
	if err != nil {
		return err
	}
	defer copied.Close()
	if err := verify(ctx, copied, f.Digest); err != nil {
		return fmt.Errorf("image %s: %w", f.Location, err)
	}
	return nil
}

func verify(ctx context.Context, r io.Reader, want digest.Digest) error {
	v := want.Verifier()
	for {
		switch _, err := io.CopyN(v, r, 64<<20); {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF):
			if !v.Verified() {
				return fail.New(fail.Failure, "the content's digest is not %s", want).WithHint("sha256sum FILE # then pass --image with that digest, or the right file")
			}
			return nil
		case err != nil:
			return err
		}
	}
}

func report(p vm.Progress, format string, args ...any) {
	if p != nil {
		p(fmt.Sprintf(format, args...))
	}
}
