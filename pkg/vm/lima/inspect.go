package lima

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Inspect implements vm.Driver. It reads a few small files and communicates with no
// process, so that a frozen host agent cannot delay it.
func (d *Driver) Inspect(ctx context.Context, name string) (vm.Machine, error) {
	if err := ctx.Err(); err != nil {
		return vm.Machine{}, err
	}
	dir, err := d.dir(name)
	if err != nil {
		return vm.Machine{}, err
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return vm.Machine{}, notFound(name)
	}
	return inspect(name, dir), nil
}

func inspect(name, dir string) vm.Machine {
	out := vm.Machine{Name: name, Dir: dir, State: vm.Stopped, DiskUsed: diskUsed(dir)}
	m, err := readMeta(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		out.State, out.Reason = vm.Broken, "its directory was not created by agent-sessionizer, or is incomplete"
		return out
	case err != nil:
		out.State, out.Reason = vm.Broken, err.Error()
		return out
	}
	out.Arch, out.CPUs, out.Memory, out.Disk = m.Arch, m.CPUs, m.Memory, m.Disk
	if _, err := os.Stat(filepath.Join(dir, filenames.LimaYAML)); err != nil {
		out.State, out.Reason = vm.Broken, "lima.yaml is missing"
		return out
	}
	out.Resumes = isFork(dir)
	r := readProcesses(dir, m)
	if !r.any() {
		return out
	}
	out.State = vm.Running
	if r.driver {
		// While a driver runs, the file belongs to the current run.
		if e, err := readEndpoint(dir); err == nil {
			out.Endpoint = e
		}
		if !r.agent {
			// QEMU itself forwards the SSH port; the agent is needed only for
			// starting.
			out.Reason = "its host agent died"
		}
	}
	return out
}

// List implements vm.Driver.
func (d *Driver) List(ctx context.Context) ([]vm.Machine, error) {
	entries, err := os.ReadDir(d.home)
	if err != nil {
		return nil, err
	}
	var out []vm.Machine
	for _, e := range entries {
		if !e.IsDir() || strings.HasPrefix(e.Name(), ".") || strings.HasPrefix(e.Name(), "_") {
			continue
		}
		m, err := d.Inspect(ctx, e.Name())
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case isNotFound(err): // deleted meanwhile
			continue
		case err != nil: // not a valid name for our VMs
			m = vm.Machine{Name: e.Name(), State: vm.Broken, Reason: err.Error(), Dir: filepath.Join(d.home, e.Name())}
		}
		out = append(out, m)
	}
	return out, nil
}

// diskUsed returns the space used by the VM's own files; shared images do not count.
func diskUsed(dir string) int64 {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	var sum int64
	seen := map[uint64]bool{} // a disk can have several names
	for _, e := range entries {
		if size, inode := used(filepath.Join(dir, e.Name())); !seen[inode] {
			seen[inode] = true
			sum += size
		}
	}
	return sum
}

// used returns the space that a regular file takes, 0 for others, and its inode.
func used(path string) (size int64, inode uint64) {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() {
		return 0, 0
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512, st.Ino
	}
	return 0, 0
}
