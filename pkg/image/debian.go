package image

import (
	"bufio"
	"context"
	_ "embed" // the scripts
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

//go:embed customize.sh
var customizeScript string

//go:embed initramfs-hook.sh
var initramfsHook string

//go:embed disk.sh
var diskScript string

// cmdline returns the kernel command line of the disks built here. The VM manager appends
// nothing to it.
func cmdline(arch string) string {
	return "root=LABEL=cloudimg-rootfs rw console=" + vm.Console(arch) + " ds=nocloud no_timer_check panic=1 net.ifnames=0 quiet loglevel=3 systemd.show_status=0"
}

// debianArch returns Debian's name of an architecture.
func debianArch(arch string) string {
	if arch == vm.AArch64 {
		return "arm64"
	}
	return "amd64"
}

// packages returns the packages that the image needs to boot and to run provision/.
func packages(arch string) []string {
	return []string{
		"systemd", "systemd-sysv", "systemd-resolved", "dbus", "udev", "linux-image-cloud-" + debianArch(arch), "initramfs-tools", "zstd",
		"cloud-init", "openssh-server", "sudo", "iproute2", "iptables", "kmod", "netbase", "procps",
		"ca-certificates", "e2fsprogs", "passwd", "login", "util-linux",
	}
}

const (
	installHint = "sudo apt-get install mmdebstrap qemu-utils e2fsprogs debian-archive-keyring"
	foreignHint = "sudo apt-get install qemu-user-static binfmt-support"
)

// makeDebian builds an image with mmdebstrap in its own namespaces. As root it
// separates only mounts and processes, so that an interrupted build leaves no mount of
// the host's /dev that the next build's clean-up could descend into. As another user it
// also separates user ids, which needs newuidmap.
func makeDebian(ctx context.Context, dir string, o BuildOptions) error {
	if err := checkHost(); err != nil {
		return err
	}
	if o.Arch != vm.HostArch() {
		if err := checkForeign(ctx, dir, o); err != nil {
			return err
		}
	}
	return buildDebian(ctx, dir, o)
}

// checkForeign runs the guest program, to find out whether the kernel emulates the programs
// of the image's architecture. The packages' own scripts run while they are installed.
func checkForeign(ctx context.Context, dir string, o BuildOptions) error {
	program := filepath.Join(dir, "agent-guest")
	if err := os.WriteFile(program, o.GuestProgram, 0o700); err != nil {
		return err
	}
	defer os.Remove(program)
	if err := exec.CommandContext(ctx, program, "version").Run(); err != nil {
		return fail.New(fail.Host, "this host cannot run programs for %s, which building an image for it requires: %w", o.Arch, err).WithHint("%s", foreignHint)
	}
	return nil
}

// buildDebian does the work of makeDebian on a host that has all the programs. Only the
// caller can write to the work directory. Its subdirectory root belongs to the namespace's
// root, which also makes the disk there.
func buildDebian(ctx context.Context, dir string, o BuildOptions) error {
	b := debianBuild{out: dir, work: dir, opts: o, userns: os.Geteuid() != 0}
	if b.userns {
		// The namespace's root is an unknown user to the host. It must be able to reach
		// the work directory, which a home directory's permissions rarely allow.
		tmp, lock, err := lockfile.TempDir("", "agent-image-", func(dead string) error {
			return (&debianBuild{work: dead, opts: o, userns: true}).removeWork()
		})
		if err != nil {
			return fmt.Errorf("create build directory: %w", err)
		}
		b.work = tmp
		defer func() {
			_ = b.removeWork() // the next build tries again
			_ = lock.Unlock()
		}()
	}
	if err := os.Chmod(b.work, 0o711); err != nil {
		return fmt.Errorf("create build directory: %w", err)
	}
	steps := []struct {
		name string
		run  func(context.Context) error
	}{
		{"prepare", b.prepare},
		{"install packages and tools", b.rootfs},
		{"make disk", b.disk},
		{"extract kernel", b.kernel},
		{"convert disk", b.convert},
	}
	for _, s := range steps {
		begin := time.Now()
		o.Progress(s.name)
		if err := s.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		o.Progress(fmt.Sprintf("%s done in %.0fs", s.name, time.Since(begin).Seconds()))
	}
	return nil
}

// checkHost reports what the host lacks, before the build begins.
func checkHost() error {
	if runtime.GOOS != "linux" {
		return fail.New(fail.Host, "images are built from Debian packages only on Linux; use the image %q on this system", Ubuntu)
	}
	tools := []string{"mmdebstrap", "qemu-img", "mkfs.ext4", "debugfs"}
	if os.Geteuid() != 0 {
		tools = append(tools, "newuidmap", "newgidmap")
	}
	for _, t := range tools {
		if _, err := tool(t); err != nil {
			return err
		}
	}
	if _, err := os.Stat("/usr/share/keyrings/debian-archive-keyring.gpg"); err != nil {
		return fail.New(fail.Host, "building an image requires Debian's archive keys").WithHint(installHint)
	}
	return nil
}

// tool finds a program, also in the sbin directories, which are not in users' PATH.
func tool(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, d := range []string{"/usr/sbin", "/sbin"} {
		if p, err := exec.LookPath(filepath.Join(d, name)); err == nil {
			return p, nil
		}
	}
	hint := installHint
	if os.Geteuid() != 0 {
		hint += " uidmap"
	}
	return "", fail.New(fail.Host, "building an image requires %s", name).WithHint("%s", hint)
}

// debianBuild is one run of makeDebian.
type debianBuild struct {
	out, work string
	userns    bool // not running as root: the files' owners exist only in a user namespace
	opts      BuildOptions
}

func (b *debianBuild) path(name string) string { return filepath.Join(b.work, name) }

// prepare writes the files that the hooks read.
func (b *debianBuild) prepare(context.Context) error {
	in := b.path("in")
	if err := os.Mkdir(in, 0o755); err != nil {
		return err
	}
	if err := os.CopyFS(filepath.Join(in, "provision"), b.opts.Provision); err != nil {
		return err
	}
	files := map[string][]byte{
		"customize.sh":      []byte(customizeScript),
		"initramfs-hook.sh": []byte(initramfsHook),
		"disk.sh":           []byte(diskScript),
		"agent-guest":       b.opts.GuestProgram,
	}
	if ca := b.caFile(); ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return err
		}
		files["ca.pem"] = pem
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(in, name), content, 0o755); err != nil {
			return err
		}
	}
	// Copies may have the caller's restrictive umask, but the namespace must read them.
	return filepath.WalkDir(in, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Chmod(p, 0o755)
	})
}

// caFile returns the additional CA bundle that the host tells Node to trust, as is
// usual behind a corporate proxy.
func (b *debianBuild) caFile() string {
	if f := b.env("NPM_CONFIG_CAFILE"); f != "" {
		return f
	}
	return b.env("NODE_EXTRA_CA_CERTS")
}

func (b *debianBuild) env(name string) string {
	for _, kv := range b.opts.Environ {
		if k, v, _ := strings.Cut(kv, "="); strings.EqualFold(k, name) {
			return v
		}
	}
	return ""
}

// environ returns the environment of the build's programs: a clean one plus the host's
// registry and proxy settings, which apply to this run and never reach the image.
func (b *debianBuild) environ() []string {
	browser := "0"
	if b.opts.Browser {
		browser = "1"
	}
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root",
		"DEBIAN_FRONTEND=noninteractive",
		"SUITE=" + b.opts.Suite, "AGENT_USER=agent", "AGENT_SOURCE=debian", "IN_CHROOT=1", "AGENT_BROWSER=" + browser,
	}
	if !b.userns { // the namespace's root cannot write to our directories, and uses /tmp
		env = append(env, "TMPDIR="+b.work)
	}
	for _, name := range []string{"NPM_CONFIG_REGISTRY", "http_proxy", "https_proxy", "no_proxy"} {
		if v := b.env(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}

func (b *debianBuild) rootfs(ctx context.Context) error {
	hook := `install -m 755 "` + b.path("in/initramfs-hook.sh") + `" "$1/etc/initramfs-tools/hooks/agent"`
	args := []string{
		"--mode=unshare", "--variant=apt", "--format=directory", "--skip=check/qemu", // checkForeign knows better
		"--architectures=" + debianArch(b.opts.Arch),
		"--include=" + strings.Join(packages(b.opts.Arch), ","),
		// No one reads manuals in a session's VM, and they are a tenth of it.
		"--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/info/*",
		"--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
		"--dpkgopt=path-include=/usr/share/doc/*/copyright",
		// A crash during the build loses all of it anyway. A power cut may cost a
		// session a package, but sessions are disposable.
		"--dpkgopt=force-unsafe-io",
		"--aptopt=Acquire::Retries \"3\"", "--aptopt=APT::Install-Recommends \"0\"",
		"--essential-hook=mkdir -p \"$1/etc/initramfs-tools/hooks\" \"$1/etc/initramfs-tools/conf.d\" && printf 'MODULES=list\\nCOMPRESS=zstd\\n' >\"$1/etc/initramfs-tools/conf.d/agent\" && " + hook,
		"--customize-hook=" + b.path("in/customize.sh"),
		b.opts.Suite, b.path("root"),
	}
	if b.opts.Mirror != "" {
		args = append(args, b.opts.Mirror)
	}
	return b.run(ctx, "mmdebstrap", args...)
}

// disk makes the file system from the directory. Without root it runs in a user
// namespace again, where the files have their owners.
func (b *debianBuild) disk(ctx context.Context) error {
	mkfs, err := tool("mkfs.ext4")
	if err != nil {
		return err
	}
	args := []string{"/bin/sh", b.path("in/disk.sh"), b.path("root"), fmt.Sprint(diskSize), mkfs}
	if b.userns {
		return b.run(ctx, "mmdebstrap", append([]string{"--unshare-helper"}, args...)...)
	}
	return b.run(ctx, args[0], args[1:]...)
}

// diskSize is the size of the file system. Guests grow it to their disk at first boot.
const diskSize = 6 << 30

// kernel extracts kernel and initrd from the file system. This needs no permission for
// the files inside.
func (b *debianBuild) kernel(ctx context.Context) error {
	quiet := *b // debugfs prints its version each time
	quiet.opts.Progress = func(string) {}
	for link, name := range map[string]string{"vmlinuz": KernelFile, "initrd.img": InitrdFile} {
		target, err := os.Readlink(filepath.Join(b.path("root/fs"), link))
		if err != nil {
			return err
		}
		out := filepath.Join(b.out, name)
		if err := quiet.run(ctx, "debugfs", "-R", fmt.Sprintf("dump %q %q", "/"+strings.TrimPrefix(target, "/"), out), b.path("root/disk.raw")); err != nil {
			return err
		}
		if st, err := os.Stat(out); err != nil || st.Size() < 1<<20 {
			return fmt.Errorf("no %s in the image", name)
		}
	}
	return os.WriteFile(filepath.Join(b.out, CmdlineFile), []byte(cmdline(b.opts.Arch)+"\n"), 0o644)
}

// convert writes the qcow2 file. It uses zstd because zlib, the default compression,
// would take minutes.
func (b *debianBuild) convert(ctx context.Context) error {
	out := filepath.Join(b.out, diskFile)
	err := b.run(ctx, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", "-c", "-o", "compression_type=zstd", "-m", "4", "-W",
		b.path("root/disk.raw"), out)
	if err != nil {
		return err
	}
	return b.run(ctx, "qemu-img", "check", "-q", out)
}

// removeWork deletes the work directory outside the store. Files that belong to the
// namespace's users can be deleted only inside the namespace. It also runs when the
// build was cancelled.
func (b *debianBuild) removeWork() error {
	b.opts.Progress("removing build files")
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	_ = b.run(ctx, "mmdebstrap", "--unshare-helper", "find", b.path("root"), "-mindepth", "1", "-delete")
	return os.RemoveAll(b.work)
}

// run runs a program, passes its lines to Progress, and puts the last lines into the
// error. Cancelling ctx ends the program's whole process group: mmdebstrap removes its
// mounts on SIGTERM, and a process that ignores the signal is killed.
func (b *debianBuild) run(ctx context.Context, name string, args ...string) error {
	path, err := tool(name)
	if filepath.IsAbs(name) {
		path, err = name, nil
	}
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = b.environ()
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	read := make(chan []string, 1)
	go func() { read <- b.follow(r) }()
	err = cmd.Run()
	w.Close()
	last := <-read
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("%s: %w:\n%s", filepath.Base(name), err, strings.Join(last, "\n"))
	}
	return nil
}

// follow passes lines to Progress and returns the last ones.
func (b *debianBuild) follow(r *io.PipeReader) []string {
	var last []string
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		line := strings.TrimSpace(strings.ToValidUTF8(sc.Text(), "?"))
		if line == "" {
			continue
		}
		if len(line) > 300 {
			line = line[:300]
		}
		if last = append(last, line); len(last) > 30 {
			last = last[1:]
		}
		// mmdebstrap prints the text of its hooks, which is useless to a user.
		if line = strings.TrimPrefix(line, "I: "); !strings.HasPrefix(line, "running --") {
			b.opts.Progress(line)
		}
	}
	_, _ = io.Copy(io.Discard, r) // a line that exceeds the buffer must not block the program
	return last
}
