package lima

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lima-vm/lima/pkg/identifiers"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Data disks are Lima's additional disks, as "limactl disk create" makes them: _disks/NAME/datadisk.
// While a VM runs, the link in_use_by beside it names the VM's directory.
//
// A guest can write anything into its disk, also the header of another image format that names files of
// the host. So QEMU's disks are qcow2, whose header no guest can reach, and vz's, which must be raw, are
// checked before each start.

var _ vm.DataDisks = (*Driver)(nil)

// dataDiskPrefix begins the names of our disks, so that a template's own disks are not touched.
const dataDiskPrefix = "agent-"

func (d *Driver) dataDiskDir(name string) (string, error) {
	if err := identifiers.Validate(name); err != nil {
		return "", fail.New(fail.Usage, "disk name: %w", err)
	}
	return filepath.Join(d.home, filenames.DisksDir, dataDiskPrefix+name), nil
}

// CreateDataDisk implements vm.DataDisks.
func (d *Driver) CreateDataDisk(ctx context.Context, name string, size int64) error {
	dir, err := d.dataDiskDir(name)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, filenames.DataDisk)
	if _, err := os.Stat(file); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return explainOS(err)
	}
	tmp := file + ".tmp"
	if err := removeFile(tmp); err != nil {
		return err
	}
	if d.rawDataDisks() {
		f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			err = errors.Join(f.Truncate(size), f.Close())
		}
		if err != nil {
			return explainOS(err)
		}
	} else if err := errors.Join(qemuImg(ctx, "create", "-q", "-f", "qcow2", tmp, fmt.Sprint(size)), flush(tmp)); err != nil {
		return err
	}
	return renameSynced(tmp, file)
}

// GrowDataDisk implements vm.DataDisks.
func (d *Driver) GrowDataDisk(ctx context.Context, name string, size int64) error {
	is, err := d.InspectDataDisk(ctx, name)
	switch {
	case err != nil:
		return err
	case is.VM != "":
		return fail.New(fail.Conflict, "VM %s has the disk %s", is.VM, name)
	case size < is.Size:
		return fail.New(fail.Usage, "disk %s: must be at least %d bytes, got %d", name, is.Size, size)
	case size == is.Size:
		return nil
	}
	file := filepath.Join(is.Path, filenames.DataDisk)
	if d.rawDataDisks() {
		return explainOS(os.Truncate(file, size))
	}
	return qemuImg(ctx, "resize", "-q", "-f", "qcow2", file, fmt.Sprint(size))
}

// DeleteDataDisk implements vm.DataDisks.
func (d *Driver) DeleteDataDisk(ctx context.Context, name string) error {
	dir, err := d.dataDiskDir(name)
	if err != nil {
		return err
	}
	if holder := d.diskHolder(ctx, dir); holder != "" {
		return fail.New(fail.Conflict, "VM %s has the disk %s", holder, name)
	}
	return os.RemoveAll(dir)
}

// InspectDataDisk implements vm.DataDisks.
func (d *Driver) InspectDataDisk(ctx context.Context, name string) (vm.DataDisk, error) {
	dir, err := d.dataDiskDir(name)
	if err != nil {
		return vm.DataDisk{}, err
	}
	f, err := os.Open(filepath.Join(dir, filenames.DataDisk))
	if errors.Is(err, fs.ErrNotExist) {
		return vm.DataDisk{}, fail.New(fail.NotFound, "disk %s: %w", name, vm.ErrNotFound)
	}
	if err != nil {
		return vm.DataDisk{}, err
	}
	defer f.Close()
	is := vm.DataDisk{Used: diskUsed(dir), Path: dir, VM: d.diskHolder(ctx, dir)}
	if d.rawDataDisks() {
		st, err := f.Stat()
		if err == nil {
			is.Size = st.Size()
		}
		return is, err
	}
	size, below, err := readDisk(f.Name())
	if err == nil && below != "" {
		err = errors.New("it has a backing file")
	}
	if err != nil {
		return vm.DataDisk{}, fail.New(fail.Failure, "disk %s: %w", name, err)
	}
	is.Size = size
	return is, nil
}

// diskHolder returns the running VM that has the data disk in dir, "" for none.
func (d *Driver) diskHolder(ctx context.Context, dir string) string {
	holder, err := os.Readlink(filepath.Join(dir, filenames.InUseBy))
	if err != nil {
		return ""
	}
	if m, err := d.Inspect(ctx, filepath.Base(holder)); err == nil && m.State == vm.Running {
		return m.Name
	}
	return ""
}

// rawDataDisks reports whether data disks are raw. The guest wrote their first bytes, so that nothing may
// look there for a format.
func (d *Driver) rawDataDisks() bool { return d.vmType(hostArch()) == limayaml.VZ }

// SetDataDisk implements vm.DataDisks.
func (d *Driver) SetDataDisk(ctx context.Context, name, disk string) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, filenames.LimaYAML)
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return notFound(name)
	}
	if err != nil {
		return err
	}
	y, err := parseYAML(filenames.LimaYAML, b)
	if err != nil {
		return err
	}
	disks := withoutDataDisks(y.AdditionalDisks)
	if disk != "" {
		is, err := d.InspectDataDisk(ctx, disk)
		if err != nil {
			return err
		}
		if is.VM == "" { // Lima keeps the lock of a VM that ended with its host
			if err := removeFile(filepath.Join(is.Path, filenames.InUseBy)); err != nil {
				return err
			}
		}
		disks = append(disks, limayaml.Disk{Name: dataDiskPrefix + disk, Format: new(false)})
	}
	if slices.EqualFunc(disks, y.AdditionalDisks, func(a, b limayaml.Disk) bool { return a.Name == b.Name }) {
		return nil
	}
	m, err := d.Inspect(ctx, name)
	if err != nil {
		return err
	}
	if m.State == vm.Running {
		return fail.New(fail.Conflict, "change the disks of VM %s: it is running", name)
	}
	y.AdditionalDisks = disks
	if b, err = limayaml.Marshal(y, false); err != nil {
		return err
	}
	return atomicfile.Write(file, b, 0o600)
}

func withoutDataDisks(disks []limayaml.Disk) []limayaml.Disk {
	return slices.DeleteFunc(slices.Clone(disks), func(is limayaml.Disk) bool { return strings.HasPrefix(is.Name, dataDiskPrefix) })
}

// imageMagics begin the image formats that Lima or its tools recognise, at an offset.
var imageMagics = []struct {
	offset int64
	magic  string
}{{0, "QFI\xfb"}, {0, "KDMV"}, {0, "COWD"}, {0, "vhdxfile"}, {0, "conectix"}, {0, "QED\x00"}, {0, "WithoutFreeSpace"}, {0, "WithouFreSpacExt"}, {0, "shdw"}, {64, "\x7f\x10\xda\xbe"}}

// checkDataDisks returns an error if Lima would read one of the raw disks as an image that names other
// files.
func (d *Driver) checkDataDisks(y *limayaml.LimaYAML) error {
	for _, is := range y.AdditionalDisks {
		if !strings.HasPrefix(is.Name, dataDiskPrefix) || *y.VMType != limayaml.VZ {
			continue
		}
		file := filepath.Join(d.home, filenames.DisksDir, is.Name, filenames.DataDisk)
		if err := checkRawDisk(file); err != nil {
			return err
		}
	}
	return nil
}

func checkRawDisk(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	begin := make([]byte, 512)
	n, err := f.ReadAt(begin, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	for _, m := range imageMagics {
		if strings.HasPrefix(string(begin[min(m.offset, int64(n)):n]), m.magic) {
			return fail.New(fail.Policy, "disk %s begins like an image, which the guest wrote", file)
		}
	}
	return nil
}
