package lima

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/lima-vm/lima/pkg/instance/hostname"
	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// A saved VM is QEMU's migration stream, with the VM's disk as it was at that moment.
// A fork is a VM whose first start reads the stream instead of booting. QEMU waits
// for the stream (-incoming defer). The host agent feeds it, resumes the guest, and
// writes the guest's new identity to the virtio console, where the guest waits for
// it. From then on it is an ordinary VM that boots.

const (
	// forkFile holds what the first start of a fork needs. It is removed once the
	// guest has woken, before logins are possible: what a fork has written to its
	// disk since then would not match the saved memory any more.
	forkFile = "agent-sessionizer-fork"

	// resumedFile exists once a restored VM has resumed, or a fork has its identity. It contains the
	// host key, and belongs to that run. The forkFile of a restored VM stays until the VM can be
	// reached: if the run ends before, nothing is lost by resuming again.
	resumedFile = "agent-sessionizer-resumed"

	// bootDisk is QEMU's name of the disk that the guest boots from.
	bootDisk = "virtio0"

	// downtimeLimit is how long a VM may be paused for the last part of its memory.
	downtimeLimit = 300 * time.Millisecond

	// wakeTimeout limits the guest's change of identity.
	wakeTimeout = 3 * time.Minute

	// saveTimeout limits writing and reading a state.
	saveTimeout = 10 * time.Minute
)

// fork is the content of forkFile. A restored VM has one as well, with a host key: its guest keeps
// its identity.
type fork struct {
	State         string `json:"state"`
	Base          string `json:"base,omitempty"` // the disk that the state matches; "" for the VM's base disk
	Disk          int64  `json:"disk,omitempty"` // bytes, the final size of the guest's disk, 0 for what it is
	User          string `json:"user,omitempty"`
	AuthorizedKey string `json:"authorized_key,omitempty"`
	HostKey       string `json:"host_key,omitempty"`
	Key           string `json:"key,omitempty"` // of Driver.StateKey, for a restored VM
}

// isFork reports whether the VM in dir has not woken yet.
func isFork(dir string) bool {
	return exists(filepath.Join(dir, forkFile)) && !exists(filepath.Join(dir, resumedFile))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func readFork(dir string) (*fork, error) { return readForkFile(filepath.Join(dir, forkFile)) }

func readForkFile(path string) (*fork, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f := new(fork)
	if err := json.Unmarshal(b, f); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return f, nil
}

// overlay makes the fork's disk again, because the saved memory matches no other
// content. The disk keeps the size that the saved VM had; wake lets it grow.
func (f *fork) overlay(ctx context.Context, dir string) error {
	disk := filepath.Join(dir, filenames.DiffDisk)
	if err := os.Remove(disk); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return overlay(ctx, cmp.Or(f.Base, filenames.BaseDisk), disk)
}

// overlay makes a disk that contains what base does. A base without a directory is in that of the
// disk.
func overlay(ctx context.Context, base, disk string) error {
	return qemuImg(ctx, "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, disk)
}

// wake resumes the QEMU that waits in dir, gives the guest its identity, and returns
// once it is an ordinary VM.
func (f *fork) wake(ctx context.Context, name, dir string) error {
	if f.HostKey != "" { // its identity stays
		ctx, cancel := context.WithTimeout(ctx, saveTimeout)
		defer cancel()
		if err := f.resume(ctx, dir); err != nil {
			return err
		}
		b, err := json.Marshal(f)
		if err != nil {
			return err
		}
		return atomicfile.Write(filepath.Join(dir, resumedFile), b, 0o600)
	}
	identity, public, err := f.identity(name, dir)
	if err != nil {
		return err
	}
	reading, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	if err := f.resume(reading, dir); err != nil {
		return err
	}
	ctx, cancel = context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	console, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, filenames.SerialVirtioSock))
	if err != nil {
		return fmt.Errorf("connect to the guest's console: %w", err)
	}
	defer console.Close()
	deadline, _ := ctx.Deadline()
	if err := console.SetWriteDeadline(deadline); err != nil {
		return err
	}
	identity.Time = time.Now()
	if err := identity.Encode(console); err != nil {
		return err
	}
	for w := newWatcher(dir); ; {
		if err := w.readNew(); err != nil {
			return err
		}
		switch {
		case w.panic != "":
			return fmt.Errorf("the guest's kernel panicked: %s", w.panic)
		case w.hostKey != "" && w.hostKey != public:
			return errors.New("the guest's host key differs from the one in its identity")
		case w.hostKey != "":
			woken, err := json.Marshal(fork{HostKey: public})
			if err == nil {
				err = atomicfile.Write(filepath.Join(dir, resumedFile), woken, 0o600)
			}
			if err == nil {
				err = removeSynced(filepath.Join(dir, forkFile))
			}
			return err
		}
		if err := sleep(ctx, consolePoll); err != nil {
			return fmt.Errorf("the guest did not take its identity in time: %w", err)
		}
	}
}

// resume feeds the state to QEMU and resumes the guest.
func (f *fork) resume(ctx context.Context, dir string) error {
	m, err := dialMonitor(ctx, dir)
	if err != nil {
		return err
	}
	defer m.Close()
	// No other machine needs to learn where the VM is now. Linux 6.12 can block for ever if its
	// card is taken down while it announces that.
	if _, err := m.do("migrate-set-parameters", map[string]any{"announce-rounds": 0}); err != nil {
		return err
	}
	// Through a program, because QEMU before 8.2 cannot read a file itself.
	if _, err := m.do("migrate-incoming", map[string]any{"uri": "exec:cat " + ssh.Quote(f.State)}); err != nil {
		return err
	}
	err = until(ctx, m, "query-status", func(s struct{ Status string }) (bool, error) {
		return s.Status != "inmigrate", nil
	})
	if err != nil {
		return err
	}
	if f.Disk != 0 {
		if _, err := m.do("block_resize", map[string]any{"device": bootDisk, "size": f.Disk}); err != nil {
			return err
		}
	}
	_, err = m.do("cont", nil)
	return err
}

// identity makes a new identity, and returns the public half of its host key as well.
func (f *fork) identity(name, dir string) (guestproto.Identity, string, error) {
	private, public, err := ssh.NewKey()
	if err != nil {
		return guestproto.Identity{}, "", err
	}
	seed := make([]byte, 64)
	_, _ = rand.Read(seed) // crypto/rand documents that it never fails
	return guestproto.Identity{
		Hostname: hostname.FromInstName(name), MachineID: strings.ReplaceAll(uuid.NewString(), "-", ""), BootID: uuid.NewString(),
		User: f.User, AuthorizedKey: f.AuthorizedKey, HostKey: string(private), MAC: limayaml.MACAddress(dir), Seed: seed,
	}, public, nil
}

// removeSynced removes a file durably. A missing one is a success: another process may remove it, too.
func removeSynced(path string) error {
	if err := removeFile(path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// renameSynced renames a file within its directory durably.
func renameSynced(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return syncDir(filepath.Dir(to))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// StateKey implements vm.Saver.
func (d *Driver) StateKey(ctx context.Context, arch string, cpus int, memory int64) (string, error) {
	if d.vmType(arch) != limayaml.QEMU {
		return "", fail.New(fail.Host, "running VMs of %s cannot be saved", d.vmType(arch))
	}
	accel, err := d.accel.find(ctx, arch)
	if err != nil {
		return "", err
	}
	exe, err := exec.LookPath("qemu-system-" + arch)
	if err != nil {
		return "", fail.New(fail.Host, "%w", err).WithHint("agent-sessionizer doctor")
	}
	st, err := os.Stat(exe)
	if err != nil {
		return "", err
	}
	// QEMU is identified by its file, because asking for its version takes longer
	// than a fork. Under KVM the guest sees the host's processor.
	parts := []string{"1", limaVersion, arch, accel.Name, fmt.Sprint(cpus, memory), fmt.Sprint(exe, st.Size(), st.ModTime().UnixNano())}
	if accel.Name == "tcg" {
		parts = append(parts, emulatedArgs)
	} else {
		parts = append(parts, kernelRelease(), processor())
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\n")))
	return hex.EncodeToString(sum[:]), nil
}

// processor returns the stable part of what the host's first processor reports about
// itself.
func processor() string {
	first, _, _ := strings.Cut(read("/proc/cpuinfo"), "\n\n")
	var keep []string
	for line := range strings.Lines(first) {
		if !strings.Contains(line, "MHz") && !strings.Contains(line, "bogomips") {
			keep = append(keep, line)
		}
	}
	return strings.Join(keep, "")
}

// Save implements vm.Saver.
func (d *Driver) Save(ctx context.Context, name, dest string, p vm.Progress) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	m, err := readMeta(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return notFound(name)
	}
	if err == nil {
		err = d.save(ctx, name, dir, dest, m, p)
	}
	if err != nil {
		return fmt.Errorf("save VM %s: %w", name, err)
	}
	return d.Delete(ctx, name)
}

func (d *Driver) save(ctx context.Context, name, dir, dest string, m meta, p vm.Progress) error {
	// An earlier call may have left the directory without its disk.
	if err := os.Remove(filepath.Join(dir, disksFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	r, err := d.launch(ctx, name, dir, m, p)
	if err != nil {
		return err
	}
	if err := r.await(ctx, func(w *watcher) (bool, error) { return w.asleep, nil }); err != nil {
		return err
	}
	report(p, "saving the VM")
	state := filepath.Join(dest, vm.StateFile)
	if err := writeState(ctx, dir, state); err != nil {
		return err
	}
	if err := kill(ctx, dir); err != nil {
		return err
	}
	// The disk's backing file is a link in the directory that is about to be removed.
	disk := filepath.Join(dir, filenames.DiffDisk)
	base, err := filepath.EvalSymlinks(filepath.Join(dir, filenames.BaseDisk))
	if err != nil {
		return err
	}
	if err := qemuImg(ctx, "rebase", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-b", base, disk); err != nil {
		return err
	}
	if err := move(ctx, disk, filepath.Join(dest, vm.DiskFile)); err != nil {
		return err
	}
	return errors.Join(flush(state), flush(filepath.Join(dest, vm.DiskFile)))
}

// writeState pauses the VM and writes its memory and devices to a file. Then it asks
// QEMU to end; the caller must check that QEMU does.
func writeState(ctx context.Context, dir, state string) error {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	m, err := dialMonitor(ctx, dir)
	if err != nil {
		return err
	}
	defer m.Close()
	if _, err := m.do("stop", nil); err != nil {
		return err
	}
	if err := m.migrate(ctx, state, func(migration) error { return nil }); err != nil {
		return err
	}
	_, err = m.do("quit", nil)
	return err
}

// migration is QEMU's answer to query-migrate.
type migration struct {
	Status    string
	TotalTime int64  `json:"total-time"` // ms
	Downtime  int64  // ms, once it is completed
	Desc      string `json:"error-desc"`
	RAM       struct {
		Transferred int64 // bytes
	}
}

// migrate writes the memory and devices of the VM to a file. Afterwards the VM is paused. It calls
// watch while that goes on.
func (m *monitor) migrate(ctx context.Context, state string, watch func(migration) error) error {
	if _, err := m.do("migrate-set-parameters", map[string]any{
		"max-bandwidth":  int64(1) << 40, // bytes/s; the default suits a network
		"downtime-limit": downtimeLimit.Milliseconds(),
	}); err != nil {
		return err
	}
	if _, err := m.do("migrate", map[string]any{"uri": "exec:cat >" + ssh.Quote(state)}); err != nil {
		return err
	}
	return until(ctx, m, "query-migrate", func(s migration) (bool, error) {
		if s.Status == "failed" || s.Status == "cancelled" {
			return false, fail.New(fail.Host, "QEMU could not write the state: %s", clean(s.Desc)).WithHint("df -h %s", filepath.Dir(state))
		}
		return s.Status == "completed", watch(s)
	})
}

// Export implements vm.Driver.
func (d *Driver) Export(ctx context.Context, name, dest string, p vm.Progress) error {
	dir, err := d.dir(name)
	if err != nil {
		return err
	}
	m, err := readMeta(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return notFound(name)
	}
	if err != nil {
		return fmt.Errorf("export the disk of VM %s: %w", name, err)
	}
	if runs, err := isRunning(ctx, dir); err != nil || runs {
		return errors.Join(err, fail.New(fail.Conflict, "VM %s is running; its disk cannot be exported", name).WithHint("agent-sessionizer stop %s", name))
	}
	if err := tidyDisks(dir); err != nil {
		return err
	}
	report(p, "writing the disk")
	disk := filepath.Join(dir, filenames.DiffDisk)
	export := func() error { return qemuImg(ctx, "convert", "-q", "-W", "-m", "4", "-O", "qcow2", disk, dest) }
	if m.VMType == limayaml.VZ { // raw, and complete
		export = func() error { return clone(disk, dest) }
	}
	if err := export(); err != nil {
		return fmt.Errorf("export the disk of VM %s: %w", name, explainOS(err))
	}
	return flush(dest)
}

// qemuImg runs the program qemu-img.
func qemuImg(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "qemu-img", args...).CombinedOutput()
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		first, _, _ := strings.Cut(string(out), "\n")
		return fail.New(fail.Host, "qemu-img %s: %w: %s", args[0], err, clean(first))
	}
	return nil
}

// move renames a file, or copies it if the two places are on different disks.
func move(ctx context.Context, from, to string) error {
	err := os.Rename(from, to)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := clone(from, to); err != nil {
		return err
	}
	return os.Remove(from)
}

// flush makes a file, and its name, durable.
func flush(path string) error {
	for _, p := range []string{path, filepath.Dir(path)} {
		f, err := os.Open(p)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return fmt.Errorf("flush %s: %w", p, err)
		}
	}
	return nil
}
