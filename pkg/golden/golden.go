// Package golden makes sessions start fast. It boots and provisions an image once and
// makes a golden image of its disk after a test has shown that the disk works. It also
// saves a VM booted from the golden image. A session is then a clone of the disk or a
// fork of the running VM.
//
// It decides which of them a new session can start from. It never touches a session; it
// boots only its own VMs, which have a gateway like a session's and hold no secrets.
package golden

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Maker makes golden images and saved states for one image store. Makers in several
// processes wait for each other.
type Maker struct {
	VMs      VMs
	Images   *image.Store
	Scripts  fs.FS          // provision/
	Template []byte         // of the VMs
	Policy   *policy.Policy // what a VM may reach while it is provisioned behind an enforcing gateway
	Pool     Pool
}

// cmdline returns what boots a golden image whose kernel the host loads. The image's initial RAM
// disk knows its only disk. It names Debian's security modules, except those for
// which nothing in the guest has a policy, because they take a second under TCG.
//
// Other builders of small VMs leave out more (i8042, cryptomgr.notests,
// rcupdate.rcu_expedited). That saves little, and makes QEMU 7.2's emulated processors
// panic occasionally: in one boot out of a hundred, while the kernel patches itself.
func cmdline(arch string) string {
	return "root=/dev/vda rw console=" + vm.Console(arch) + " no_timer_check panic=1 net.ifnames=0 quiet loglevel=3 systemd.show_status=0" +
		" lsm=lockdown,capability,landlock,yama,apparmor"
}

const (
	bootTimeout  = 10 * time.Minute // emulated, from the generic image
	bakeTimeout  = 60 * time.Minute // includes provisioning from the network
	haltTimeout  = 3 * time.Minute
	statePoll    = 100 * time.Millisecond
	bakeMemory   = 2 << 30
	needForImage = 8 << 30
	debianDisk   = 6 << 30  // the size that image.Build makes
	downloadDisk = 12 << 30 // a cloud image grows to this; sessions' disks are larger
)

// VMPrefix begins the names of the VMs in which images are made.
const VMPrefix = "golden-"

// vmName returns the name of the VM in which things are made for an image. The holder
// of the image's lock owns that VM.
func vmName(source string) string { return VMPrefix + source }

// Key returns a key that changes whenever an input of source's golden image changes.
func (m *Maker) Key(source image.Info) (string, error) {
	scripts, err := guestclient.ScriptsKey(m.Scripts)
	if err != nil {
		return "", err
	}
	program, err := guestclient.ProgramKey(source.Arch)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	// Include the directory, because a rebuilt image has the same key but newer
	// packages.
	for _, part := range []string{"1", source.Name, source.Arch, source.Key, filepath.Base(source.Path), scripts, cmdline(source.Arch), string(m.Template), program, guestclient.BootScript()} {
		fmt.Fprintf(h, "%d:%s\n", len(part), part)
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// Image returns the golden image of the image source. It makes the golden image unless
// it exists.
func (m *Maker) Image(ctx context.Context, source, arch string, p vm.Progress) (image.Info, error) {
	from, err := m.Images.Find(source, arch)
	if err != nil {
		return image.Info{}, err
	}
	key, err := m.Key(from)
	if err != nil {
		return image.Info{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, bakeTimeout)
	defer cancel()
	i := image.Info{Name: image.Golden(source), Arch: arch, Source: source, Key: key}
	o := m.options(from.Name, needForImage, p)
	tell := m.Images.Reporter(i.Name, time.Now(), p)
	o.Prove = func(ctx context.Context, dir string, files []string) error {
		report(tell, "testing the image")
		err := m.prove(ctx, from.Name, image.Info{Path: dir, Arch: arch, Files: files}, tell)
		if err = errors.Join(err, m.VMs.clear(context.WithoutCancel(ctx), vmName(from.Name), dir)); err != nil {
			return fmt.Errorf("test image: %w", err)
		}
		return nil
	}
	return m.Images.Make(ctx, i, o, func(ctx context.Context, dir string) ([]string, error) {
		return m.bake(ctx, source, from, dir, tell)
	})
}

func (m *Maker) options(source string, space int64, p vm.Progress) image.MakeOptions {
	return image.MakeOptions{
		Space: space, Progress: p,
		Sweep: func(work string) error { return m.VMs.clear(context.Background(), vmName(source), work) },
	}
}

// originFile lies beside a disk that has not been tested yet, and describes the machine
// that the disk comes from.
const originFile = "origin.json"

// origin is the identity of the machine that a golden image was made from.
type origin struct {
	guestclient.Identity
	HostKey string
}

// bake boots the image, provisions and generalises it, and exports its disk.
func (m *Maker) bake(ctx context.Context, source string, from image.Info, dir string, p vm.Progress) (files []string, err error) {
	// Also remove what a failed attempt leaves running, and what an attempt left that
	// ended without calling clear.
	defer func() { err = errors.Join(err, m.VMs.clear(context.WithoutCancel(ctx), vmName(from.Name), dir)) }()
	img, err := m.Images.Lookup(source, from.Arch)
	if err != nil {
		return nil, err
	}
	report(p, "booting %s", from.Name)
	b, err := m.VMs.boot(ctx, buildSpec(from.Name, img), dir, m.Policy, p)
	if err != nil {
		return nil, err
	}
	defer b.close()
	before := origin{HostKey: b.endpoint.HostKey}
	var initrd []byte
	if b.guest.Root == "" { // otherwise the root is a directory on this host, whose tools must not be changed
		if before.Identity, err = b.guest.Identity(ctx); err != nil {
			return nil, err
		}
		provisioner := m.provisioner(b.guest, from.Name, p)
		if err := provisioner.Provision(ctx); err != nil {
			return nil, err
		}
		report(p, "removing its identity")
		if initrd, err = provisioner.Generalise(ctx); err != nil {
			return nil, err
		}
	}
	if err := b.shutdown(ctx); err != nil {
		return nil, err
	}
	if err := m.VMs.Driver.Export(ctx, b.name, filepath.Join(dir, vm.DiskFile), p); err != nil {
		return nil, err
	}
	text, err := json.Marshal(before)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, originFile), text, 0o600); err != nil {
		return nil, err
	}
	return bootFiles(dir, img, initrd)
}

func (m *Maker) provisioner(g guestclient.Guest, source string, p vm.Progress) guestclient.Provisioner {
	return guestclient.Provisioner{Guest: g, Scripts: m.Scripts, Source: image.Distribution(source), Report: p}
}

// bootFiles writes the files that the disk boots with beside it, and returns the names
// of all files.
func bootFiles(dir string, img vm.Image, initrd []byte) ([]string, error) {
	files := []string{vm.DiskFile}
	if img.Kernel == "" {
		return files, nil
	}
	kernel, err := os.ReadFile(img.Kernel)
	if err != nil {
		return nil, err
	}
	args := cmdline(img.Arch)
	if len(initrd) == 0 {
		args = img.Cmdline
		if initrd, err = os.ReadFile(img.Initrd); err != nil {
			return nil, err
		}
	}
	for name, content := range map[string][]byte{image.KernelFile: kernel, image.InitrdFile: initrd, image.CmdlineFile: []byte(args + "\n")} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return nil, err
		}
	}
	return append(files, image.KernelFile, image.InitrdFile, image.CmdlineFile), nil
}

// prove boots a clone of the image that is to be published and checks everything that a
// session needs. The clone must not share any identity with the machine that the image
// was made from.
func (m *Maker) prove(ctx context.Context, source string, made image.Info, p vm.Progress) error {
	var before origin
	text, err := os.ReadFile(filepath.Join(made.Path, originFile))
	if err == nil {
		err = json.Unmarshal(text, &before)
	}
	if err != nil {
		return err
	}
	img, err := made.Image()
	if err != nil {
		return err
	}
	b, err := m.VMs.boot(ctx, buildSpec(source, img), made.Path, nowhere(), p)
	if err != nil {
		return err
	}
	defer b.close()
	if b.guest.Root == "" {
		now, err := b.guest.Identity(ctx)
		if err != nil {
			return err
		}
		if now.MachineID == before.MachineID || now.BootID == before.BootID || b.endpoint.HostKey == before.HostKey {
			return fail.New(fail.Failure, "clones of the image would share an identity")
		}
		if err := m.provisioner(b.guest, source, p).Verify(ctx); err != nil {
			return err
		}
	}
	return b.shutdown(ctx)
}

// saver returns the driver as a vm.Saver, with the key of a VM's state. Its error says
// why VMs cannot be saved on this host.
func (m *Maker) saver(ctx context.Context, arch string, cpus int, memory int64) (vm.Saver, string, error) {
	s, ok := m.VMs.Driver.(vm.Saver)
	if !ok {
		return nil, "", fail.New(fail.Host, "VMs cannot be saved on this host")
	}
	key, err := s.StateKey(ctx, arch, cpus, memory)
	return s, key, err
}

// CanWarm returns why Warm would not work on this host, or nil if it would.
func (m *Maker) CanWarm(ctx context.Context, arch string) error {
	_, _, err := m.saver(ctx, arch, 1, 1)
	return err
}

// Pools reports whether sessions are given standby VMs.
func (m *Maker) Pools(ctx context.Context, want config.Prepare, arch string) bool {
	return m.pools(want, m.CanWarm(ctx, arch))
}

func (m *Maker) pools(want config.Prepare, cannotSave error) bool {
	return m.Pool.Waiting > 0 && (want == config.PreparePool || want == config.PrepareWarm && cannotSave != nil)
}

// Warm makes a saved state of a VM of that size, booted from the golden image i, unless
// it exists.
func (m *Maker) Warm(ctx context.Context, i image.Info, cpus int, memory int64, p vm.Progress) (image.Warm, error) {
	saver, key, err := m.saver(ctx, i.Arch, cpus, memory)
	if err != nil {
		return image.Warm{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, bakeTimeout)
	defer cancel()
	w := image.Warm{Key: key, CPUs: cpus, Memory: memory}
	source, _ := image.GoldenOf(i.Name)
	return m.Images.MakeWarm(ctx, i, w, m.options(source, memory, p), func(ctx context.Context, dir string) (err error) {
		defer func() { err = errors.Join(err, m.VMs.clear(context.WithoutCancel(ctx), vmName(source), dir)) }()
		img, err := i.Image()
		if err != nil {
			return err
		}
		spec := vm.Spec{
			Name: vmName(source), CPUs: cpus, Memory: memory, Disk: disk(source), Image: img,
			User: guestclient.User, Boot: guestclient.SleepScript(), ExternalNet: true,
		}
		tell := m.Images.Reporter(i.Name, time.Now(), p)
		if err = m.save(ctx, saver, spec, dir, tell); errors.Is(err, vm.ErrPanicked) {
			report(tell, "%v, starting again", vm.ErrPanicked)
			err = m.save(ctx, saver, spec, dir, tell)
		}
		return err
	})
}

// save boots a VM and saves its state in dir.
func (m *Maker) save(ctx context.Context, saver vm.Saver, spec vm.Spec, dir string, p vm.Progress) error {
	if err := m.VMs.Driver.Delete(ctx, spec.Name); err != nil {
		return err
	}
	if err := m.VMs.Driver.Create(ctx, spec); err != nil {
		return err
	}
	// The network card needs a peer to connect to. It stays down.
	if err := m.VMs.startGateway(ctx, spec.Name, dir, nowhere()); err != nil {
		return err
	}
	report(p, "booting a VM of %d CPUs and %d MiB to be saved", spec.CPUs, spec.Memory>>20)
	return saver.Save(ctx, spec.Name, dir, p)
}

// nowhere returns a policy that allows nothing.
func nowhere() *policy.Policy {
	p := policy.Default()
	p.Mode, p.Enforced = policy.Isolated, true
	return p
}

func disk(source string) int64 {
	if source == image.Debian {
		return debianDisk
	}
	return downloadDisk
}

// buildSpec returns the spec of the VM in which things are made from an image.
func buildSpec(source string, img vm.Image) vm.Spec {
	return vm.Spec{Name: vmName(source), CPUs: min(2, runtime.NumCPU()), Memory: bakeMemory, Disk: disk(source), Image: img}
}

func report(p vm.Progress, format string, args ...any) {
	if p != nil {
		p(strings.TrimSpace(fmt.Sprintf(format, args...)))
	}
}
