package lima

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/lima-vm/lima/pkg/limayaml"
	"github.com/lima-vm/lima/pkg/store/filenames"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// These tests check on any host what the driver does for VMs of vz, which only a Mac can start: its
// decisions and its files.

// newMacDriver returns a driver that decides as it does on a Mac.
func newMacDriver(t *testing.T) *Driver {
	t.Helper()
	d := newDriver(t)
	d.goos, d.accel.goos = "darwin", "darwin"
	return d
}

// newMacVM creates a VM of vz whose disk has the given content.
func newMacVM(t *testing.T, d *Driver, name, content string) (dir string) {
	t.Helper()
	s := testSpec(name)
	s.Image = vm.Image{Arch: hostArch(), Location: "/images/disk.raw"}
	if err := d.Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(d.home, name)
	for file, text := range map[string]string{filenames.DiffDisk: content, filenames.BaseDisk: "base", disksFile: ""} {
		writeFile(t, filepath.Join(dir, file), text)
	}
	return dir
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func checkContent(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("content of %s = %.100q, %v, want %.100q", filepath.Base(path), got, err, want)
	}
}

func TestVMTypes(t *testing.T) {
	foreign := foreignArch()
	for _, c := range []struct{ goos, arch, want string }{
		{"linux", hostArch(), limayaml.QEMU},
		{"linux", foreign, limayaml.QEMU},
		{"darwin", hostArch(), limayaml.VZ},
		{"darwin", foreign, limayaml.QEMU},
	} {
		if got := vmType(c.goos, c.arch); got != c.want {
			t.Errorf("vmType(%s, %s) = %s, want %s", c.goos, c.arch, got, c.want)
		}
	}
}

func TestMacDecisions(t *testing.T) {
	d := newMacDriver(t)
	if a, err := d.Accel(t.Context(), hostArch()); err != nil || a.Name != "vz" || a.Reason != "" {
		t.Errorf("Accel = %+v, %v, want vz without a reason", a, err)
	}
	if _, err := d.StateKey(t.Context(), hostArch(), 2, 1<<30); err == nil || !strings.Contains(err.Error(), "cannot be saved") {
		t.Errorf("StateKey = %v, want \"cannot be saved\"", err)
	}
	if w, err := d.NetSockets("one"); err != nil || w.MTU != datagramMTU {
		t.Errorf("NetSockets = %+v, %v, want the MTU %d", w, err, datagramMTU)
	}
	dir := newMacVM(t, d, "one", "disk")
	m, err := readMeta(dir)
	if err != nil || m.VMType != limayaml.VZ {
		t.Errorf("manager of the VM = %+v, %v, want %s", m, err, limayaml.VZ)
	}
	if b, err := os.ReadFile(filepath.Join(dir, filenames.LimaYAML)); err != nil || !strings.Contains(string(b), "vmType: vz\n") {
		t.Errorf("lima.yaml = %s, %v, want vmType: vz", b, err)
	}
	if _, err := d.Suspend(t.Context(), "one", "x", nil); !errors.Is(err, vm.ErrNoMemory) {
		t.Errorf("Suspend = %v, want %v", err, vm.ErrNoMemory)
	}

	only(t, "ssh", "ssh-keygen")
	if missing := d.Check(t.Context(), foreignArch()); len(missing) != 1 || fail.HintOf(missing[0]) == "" {
		t.Errorf("Check(%s) = %v, want one problem with a hint", foreignArch(), missing)
	}
	if missing := d.Check(t.Context(), hostArch()); len(missing) > 0 {
		t.Errorf("Check without QEMU = %v, want nothing missing", missing)
	}
}

// TestMacProcesses checks that the host agent of a VM of vz counts as its VM from the moment when it
// has written the VM's pid file.
func TestMacProcesses(t *testing.T) {
	d := newMacDriver(t)
	dir := newMacVM(t, d, "one", "disk")
	host := idle(t, "hostagent", "--pidfile", filepath.Join(dir, filenames.HostAgentPID), "one")
	writePID(t, filepath.Join(dir, filenames.HostAgentPID), host.Process.Pid)
	if r, err := survivors(dir); err != nil || r != (running{agent: true}) {
		t.Errorf("survivors before the VM runs = %+v, %v, want the agent alone", r, err)
	}
	writePID(t, filepath.Join(dir, filenames.PIDFile(limayaml.VZ)), host.Process.Pid)
	if r, err := survivors(dir); err != nil || r != (running{agent: true, driver: true}) {
		t.Errorf("survivors while the VM runs = %+v, %v, want agent and driver", r, err)
	}
	if m, err := d.Inspect(t.Context(), "one"); err != nil || m.State != vm.Running || m.Reason != "" {
		t.Errorf("Inspect = %+v, %v, want %s", m, err, vm.Running)
	}
	reaped := make(chan struct{})
	go func() { host.Wait(); close(reaped) }()
	if err := d.Stop(t.Context(), "one", nil, 0); err != nil {
		t.Fatal(err)
	}
	<-reaped
	if m, err := d.Inspect(t.Context(), "one"); err != nil || m.State != vm.Stopped {
		t.Errorf("Inspect after Stop = %+v, %v, want %s", m, err, vm.Stopped)
	}
}

// TestMacCheckpoints checks checkpoints of a raw disk. What a process that died left of its copy does
// not disturb the next call.
func TestMacCheckpoints(t *testing.T) {
	d := newMacDriver(t)
	ctx := t.Context()
	dir := newMacVM(t, d, "one", "first")
	disk := filepath.Join(dir, filenames.DiffDisk)
	writeFile(t, filepath.Join(dir, newPrefix+"a"), "half a copy")
	is, err := d.Checkpoint(ctx, "one", "a", nil)
	if err != nil || is.Memory || is.Size == 0 {
		t.Fatalf("Checkpoint = %+v, %v, want a disk without memory", is, err)
	}
	writeFile(t, disk, "second")
	if again, err := d.Checkpoint(ctx, "one", "a", nil); err != nil || again != is {
		t.Errorf("second Checkpoint = %+v, %v, want %+v", again, err, is)
	}

	s := testSpec("two")
	if err := d.Fork(ctx, "one", "a", s, false); err != nil {
		t.Fatal(err)
	}
	forked := filepath.Join(d.home, "two", filenames.DiffDisk)
	checkContent(t, forked, "first")
	writeFile(t, forked, "forked")

	writeFile(t, filepath.Join(dir, newPrefix+"a"), "half a copy")
	if err := d.Restore(ctx, "one", "a", false); err != nil {
		t.Fatal(err)
	}
	checkContent(t, disk, "first")
	writeFile(t, disk, "third")
	checkContent(t, filepath.Join(dir, layerPrefix+"a"), "first")
	checkContent(t, filepath.Join(d.home, "two", layerPrefix+"a"), "first")

	for range 2 {
		if err := d.RemoveCheckpoint(ctx, "one", "a"); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := filepath.Glob(filepath.Join(dir, "agent-sessionizer-*-a")); err != nil || len(left) > 0 {
		t.Errorf("files of the removed checkpoint = %v, %v, want none", left, err)
	}
	checkContent(t, disk, "third")
	if err := d.Delete(ctx, "one"); err != nil {
		t.Fatal(err)
	}
	if err := d.Restore(ctx, "two", "a", false); err != nil {
		t.Errorf("Restore of the fork after its parent was deleted = %v, want nil", err)
	}
	checkContent(t, forked, "first")

	exported := filepath.Join(t.TempDir(), "disk")
	writeFile(t, exported, "of an interrupted export, and longer")
	if err := d.Export(ctx, "two", exported, nil); err != nil {
		t.Fatal(err)
	}
	checkContent(t, exported, "first")
}

// TestMacDiskIsNoImage lets guests write headers of images with layers into their raw disks, as if
// these were QEMU's. No start may follow them: the layers name a file of the host.
func TestMacDiskIsNoImage(t *testing.T) {
	d := newMacDriver(t)
	dir := newMacVM(t, d, "one", "")
	secret := filepath.Join(t.TempDir(), "secret")
	writeFile(t, secret, strings.Repeat("secret..", 8<<10))
	create := func(file, below, format string) string {
		t.Helper()
		path := filepath.Join(dir, file)
		if err := removeFile(path); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), "qemu-img", "create", "-q", "-u", "-f", "qcow2", "-F", format, "-b", below, path, "64K").CombinedOutput()
		if err != nil {
			t.Fatalf("qemu-img create: %v: %s; apt-get install qemu-utils", err, out)
		}
		return path
	}
	below, format := secret, "raw"
	var files []string
	for n := range maxLayers + 1 {
		name := fmt.Sprint(layerPrefix, n)
		files = append(files, create(name, below, format))
		below, format = name, "qcow2"
	}
	files = append(files, create(filenames.DiffDisk, below, format))
	var before [][]byte
	read := func(path string) []byte {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, f := range files {
		before = append(before, read(f))
	}
	m, err := readMeta(dir)
	if err != nil {
		t.Fatal(err)
	}
	flattenDisk(t.Context(), dir, m)
	for i, f := range files {
		if got := read(f); !bytes.Equal(got, before[i]) || bytes.Contains(got, []byte("secret..")) {
			t.Errorf("%s after flattenDisk changed, holds the host's file: %t, want it unchanged", filepath.Base(f), bytes.Contains(got, []byte("secret..")))
		}
	}
	disk := create(filenames.DiffDisk, filepath.Join(dir, filenames.BaseDisk), "raw")
	text := read(disk)
	if err := relativeBase(t.Context(), dir, m); err != nil || !bytes.Equal(read(disk), text) {
		t.Errorf("relativeBase = %v, disk unchanged: %t, want nil, true", err, bytes.Equal(read(disk), text))
	}
}

func TestMacDataDisks(t *testing.T) {
	d := newMacDriver(t)
	ctx := t.Context()
	if err := d.CreateDataDisk(ctx, "work", 8<<20); err != nil {
		t.Fatal(err)
	}
	is, err := d.InspectDataDisk(ctx, "work")
	if err != nil || is.Size != 8<<20 || is.Used > 1<<20 {
		t.Fatalf("InspectDataDisk = %+v, %v, want 8 MiB that take no space", is, err)
	}
	// The guest decides what the disk begins with. The driver does not interpret it.
	file, err := os.OpenFile(filepath.Join(is.Path, filenames.DataDisk), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.WriteString("QFI\xfb\x00\x00\x00\x03"); err != nil {
		t.Fatal(err)
	}
	if err := d.GrowDataDisk(ctx, "work", 16<<20); err != nil {
		t.Fatal(err)
	}
	if is, err := d.InspectDataDisk(ctx, "work"); err != nil || is.Size != 16<<20 {
		t.Errorf("InspectDataDisk after GrowDataDisk = %+v, %v, want 16 MiB", is, err)
	}
	if err := d.GrowDataDisk(ctx, "work", 8<<20); err == nil {
		t.Error("GrowDataDisk to a smaller size = nil, want an error")
	}
	if err := d.DeleteDataDisk(ctx, "work"); err != nil {
		t.Fatal(err)
	}
}

// clonefile copies as clonefile(2) does with CLONE_NOFOLLOW, apart from sharing blocks.
func clonefile(to, from string) error {
	if _, err := os.Lstat(to); err == nil {
		return syscall.EEXIST
	}
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSymlink != 0 {
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	}
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err == nil {
		err = os.Chmod(to, info.Mode())
	}
	return err
}

func TestClone(t *testing.T) {
	dir := t.TempDir()
	image, link := filepath.Join(dir, "image"), filepath.Join(dir, "link")
	writeFile(t, image, "image")
	if err := errors.Join(os.Chmod(image, 0o400), os.Symlink("image", link)); err != nil {
		t.Fatal(err)
	}
	for name, copyFile := range map[string]func(to, from string) error{
		"clonefile":     clonefile,
		"of this host":  nil,
		"interrupted":   func(to, from string) error { writeFile(t, to, "im"); return syscall.ENOSPC },
		"without files": func(string, string) error { return nil },
	} {
		to := filepath.Join(dir, "copy of "+name)
		writeFile(t, to, "what an interrupted call left")
		call := func() error { return clone(link, to) }
		if copyFile != nil {
			call = func() error { return cloneWith(copyFile, link, to) }
		}
		err := call()
		if name == "interrupted" && errors.Is(err, syscall.ENOSPC) || name == "without files" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			t.Errorf("clone by %s = %v, want nil", name, err)
			continue
		}
		info, err := os.Lstat(to)
		if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o600 {
			t.Errorf("clone by %s: mode %v, %v, want a regular file, 0600", name, info.Mode(), err)
		}
		checkContent(t, to, "image")
	}
	if err := clone(filepath.Join(dir, "missing"), filepath.Join(dir, "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("clone of a missing file = %v, want %v", err, fs.ErrNotExist)
	}
}

// TestShare makes the disk of a VM of vz from a raw image, and leaves other formats to Lima.
func TestShare(t *testing.T) {
	dir := t.TempDir()
	image, base, disk := filepath.Join(dir, "image"), filepath.Join(dir, "basedisk"), filepath.Join(dir, "diffdisk")
	writeFile(t, image, strings.Repeat("raw", 1000))
	if err := os.Symlink(image, base); err != nil {
		t.Fatal(err)
	}
	writeFile(t, disk+".tmp", "half a copy")
	if err := share(base, disk, 1<<20); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(disk)
	if err != nil || len(b) != 1<<20 || !bytes.HasPrefix(b, []byte(strings.Repeat("raw", 1000)+"\x00")) {
		t.Errorf("disk = %d bytes, %v, want the image's content and 1 MiB", len(b), err)
	}
	checkContent(t, image, strings.Repeat("raw", 1000))

	if out, err := exec.CommandContext(t.Context(), "qemu-img", "create", "-q", "-f", "qcow2", image+".qcow2", "1M").CombinedOutput(); err != nil {
		t.Fatalf("qemu-img create: %v: %s; apt-get install qemu-utils", err, out)
	}
	if err := share(image+".qcow2", disk+"2", 1<<20); err != nil || exists(disk+"2") {
		t.Errorf("share of a qcow2 image = %v, disk made: %t, want nil, false", err, exists(disk+"2"))
	}
}

// TestMacCheckpointIsRead checks that the description of a checkpoint of vz claims no memory, so that
// no caller tries to resume it.
func TestMacCheckpointIsRead(t *testing.T) {
	d := newMacDriver(t)
	dir := newMacVM(t, d, "one", "disk")
	if _, err := d.Checkpoint(t.Context(), "one", "a", nil); err != nil {
		t.Fatal(err)
	}
	var is description
	b, err := os.ReadFile(filepath.Join(dir, checkpointPrefix+"a"))
	if err == nil {
		err = json.Unmarshal(b, &is)
	}
	if err != nil || is.Memory || is.Key != "" {
		t.Errorf("description = %+v, %v, want no memory and no key", is, err)
	}
	if err := d.Restore(t.Context(), "one", "a", true); err == nil {
		t.Error("Restore with memory = nil, want an error")
	}
	if err := d.Fork(t.Context(), "one", "a", testSpec("two"), true); err == nil || exists(filepath.Join(d.home, "two")) {
		t.Errorf("Fork with memory = %v, VM made: %t, want an error, false", err, exists(filepath.Join(d.home, "two")))
	}
}
