package fake

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// A data disk is the directory DIR/.disks/NAME with the files size and vm, which names the VM that last
// started with it, and the directory data. A VM's file datadisk names its disk. While the VM runs,
// root/work is a link to the data: a fake guest cannot mount anything.

var _ vm.DataDisks = (*Driver)(nil)

const dataDiskFile = "datadisk"

func (d *Driver) dataDisk(name string) (string, error) {
	if ok, _ := regexp.MatchString(nameForm, name); !ok || len(name) > 76 {
		return "", fmt.Errorf("disk name %q: must be letters and digits, with single . _ - between them, at most 76 characters", name)
	}
	return filepath.Join(d.dir, ".disks", name), nil
}

// CreateDataDisk implements vm.DataDisks.
func (d *Driver) CreateDataDisk(ctx context.Context, name string, size int64) error {
	return d.faults.around(ctx, "disk", name, func() error {
		dir, err := d.dataDisk(name)
		if err != nil {
			return err
		}
		if _, err := os.Stat(filepath.Join(dir, "size")); err == nil {
			return nil
		}
		if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
			return err
		}
		return writeSize(dir, size)
	})
}

func writeSize(dir string, size int64) error {
	return atomicfile.Write(filepath.Join(dir, "size"), []byte(strconv.FormatInt(size, 10)), 0o600)
}

// GrowDataDisk implements vm.DataDisks.
func (d *Driver) GrowDataDisk(ctx context.Context, name string, size int64) error {
	is, err := d.InspectDataDisk(ctx, name)
	switch {
	case err != nil:
		return err
	case is.VM != "":
		return fmt.Errorf("VM %s has the disk %s", is.VM, name)
	case size < is.Size:
		return fmt.Errorf("disk %s: must be at least %d bytes, got %d", name, is.Size, size)
	}
	return d.faults.around(ctx, "disk", name, func() error { return writeSize(is.Path, size) })
}

// DeleteDataDisk implements vm.DataDisks.
func (d *Driver) DeleteDataDisk(ctx context.Context, name string) error {
	is, err := d.InspectDataDisk(ctx, name)
	switch {
	case errors.Is(err, vm.ErrNotFound):
		return nil
	case err != nil:
		return err
	case is.VM != "":
		return fmt.Errorf("VM %s has the disk %s", is.VM, name)
	}
	return d.faults.around(ctx, "disk", name, func() error { return removeAll(is.Path) })
}

// InspectDataDisk implements vm.DataDisks.
func (d *Driver) InspectDataDisk(_ context.Context, name string) (vm.DataDisk, error) {
	dir, err := d.dataDisk(name)
	if err != nil {
		return vm.DataDisk{}, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "size"))
	if errors.Is(err, fs.ErrNotExist) {
		return vm.DataDisk{}, fmt.Errorf("disk %s: %w", name, vm.ErrNotFound)
	}
	if err != nil {
		return vm.DataDisk{}, err
	}
	is := vm.DataDisk{Path: dir}
	if is.Size, err = strconv.ParseInt(string(text), 10, 64); err != nil {
		return vm.DataDisk{}, err
	}
	holder, err := os.ReadFile(filepath.Join(dir, "vm"))
	if err == nil && d.hasDataDisk(string(holder), name) {
		is.VM = string(holder)
	}
	return is, nil
}

// hasDataDisk reports whether a VM is running with a disk.
func (d *Driver) hasDataDisk(name, disk string) bool {
	m, err := d.machine(name)
	if err != nil || !m.running() {
		return false
	}
	has, err := os.ReadFile(m.file(dataDiskFile))
	return err == nil && string(has) == disk
}

// SetDataDisk implements vm.DataDisks.
func (d *Driver) SetDataDisk(ctx context.Context, name, disk string) error {
	m, _, err := d.existing(name)
	if err != nil {
		return err
	}
	if disk != "" {
		if _, err := d.InspectDataDisk(ctx, disk); err != nil {
			return err
		}
	}
	has, err := os.ReadFile(m.file(dataDiskFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if string(has) == disk {
		return nil
	}
	if m.running() {
		return fmt.Errorf("change the disk of %s: it is running", name)
	}
	return d.faults.around(ctx, "disk", name, func() error {
		return atomicfile.Write(m.file(dataDiskFile), []byte(disk), 0o600)
	})
}

// plugDataDisk makes the data of the VM's disk available in its root.
func (d *Driver) plugDataDisk(ctx context.Context, m machine) error {
	work := filepath.Join(m.root(), "work")
	if is, err := os.Lstat(work); err == nil && is.Mode()&fs.ModeSymlink != 0 {
		if err := os.Remove(work); err != nil {
			return err
		}
	}
	has, err := os.ReadFile(m.file(dataDiskFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	disk := strings.TrimSpace(string(has))
	if disk == "" {
		return nil
	}
	is, err := d.InspectDataDisk(ctx, disk)
	if err != nil {
		return err
	}
	if is.VM != "" && is.VM != m.name {
		return fmt.Errorf("disk %s is in use by VM %s", disk, is.VM)
	}
	if err := atomicfile.Write(filepath.Join(is.Path, "vm"), []byte(m.name), 0o600); err != nil {
		return err
	}
	return os.Symlink(filepath.Join(is.Path, "data"), work)
}
