//go:build bench

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

const (
	envLimactl  = "BENCH_LIMACTL"
	limaVersion = "v1.2.2" // the version that the product uses as a library

	// limactl refuses root, so it gets a user of its own: a user namespace in which
	// the test's user has this id, and a line in the test's own /etc/passwd, where
	// ssh looks it up.
	limaUID = 2000
)

// buildLimactl builds limactl from its module, outside the namespace, where modules
// are available.
func buildLimactl(ctx context.Context, dir string) ([]string, error) {
	if part := os.Getenv("BENCH"); part == partDNS || part == partPicker {
		return nil, nil
	}
	program := filepath.Join(dir, "limactl")
	const module = "github.com/lima-vm/lima"
	if err := buildModule(ctx, program, module, limaVersion, module+"/cmd/limactl", module+"/pkg/version.Version"); err != nil {
		return nil, err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // it runs as another user
		return nil, err
	}
	return []string{envLimactl + "=" + program}, nil
}

// buildModule builds a program of a module that is not in go.mod. The variable gets its
// version.
func buildModule(ctx context.Context, program, module, version, pkg, variable string) error {
	src := program + "-src"
	if err := os.Mkdir(src, 0o700); err != nil {
		return err
	}
	mod := "module build\n\ngo 1.24\n\nrequire " + module + " " + version + "\n"
	if err := os.WriteFile(filepath.Join(src, "go.mod"), []byte(mod), 0o600); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-mod=mod", "-trimpath", "-ldflags=-s -w -X "+variable+"="+version, "-o", program, pkg)
	cmd.Dir, cmd.Env = src, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, out)
	}
	return nil
}

// limactl is a user's account with stock Lima, and one instance.
type limactl struct {
	t    *testing.T
	home string
	lima string // LIMA_HOME
	env  []string
}

const instance = "bench"

// newLimactl makes the account. accel says how QEMU runs guests here. limactl does
// not detect that: it insists on KVM.
func newLimactl(t *testing.T, accel string) *limactl {
	t.Helper()
	home, err := os.MkdirTemp("", "b") // short, because of the sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(home) })
	l := &limactl{t: t, home: home, lima: filepath.Join(home, "l")}
	l.env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "USER=limactl", "LIMA_HOME=" + l.lima, "TERM=dumb"}
	if accel == "tcg" {
		l.env = append(l.env, emulated())
	}
	addUser(t, home)
	l.write("bench.yaml", l.template(realvm.Image(t)))
	t.Cleanup(func() {
		_, _ = l.try("delete", "--force", instance) // already gone if all went well
		l.sweep()
	})
	return l
}

// emulated returns the variable that lets Lima start QEMU without KVM, with the
// arguments that the product uses (pkg/vm/lima).
func emulated() string {
	if runtime.GOARCH == "arm64" {
		return "QEMU_SYSTEM_AARCH64=qemu-system-aarch64 -machine virt -accel tcg,thread=multi,tb-size=512 -cpu max,pauth-impdef=on"
	}
	return "QEMU_SYSTEM_X86_64=qemu-system-x86_64 -machine q35,vmport=off -accel tcg,thread=multi,tb-size=512 -cpu max"
}

// addUser adds limactl's user to this mount namespace's /etc/passwd.
func addUser(t *testing.T, home string) {
	t.Helper()
	users, err := os.ReadFile("/etc/passwd")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "passwd")
	mine := fmt.Sprintf("limactl:x:%d:%d::%s:/bin/sh\n", limaUID, limaUID, home)
	if err := os.WriteFile(file, append([]byte(mine), users...), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(file, "/etc/passwd", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/etc/passwd", 0); err != nil {
			t.Error(err)
		}
	})
}

// template gives the instance the settings of a session's VM, and leaves the rest to
// Lima. Plain means without mounts, port forwards and guest agent, as in our VMs.
func (l *limactl) template(img vm.Image) string {
	quote := strconv.Quote
	return strings.Join([]string{
		"vmType: qemu", "arch: " + img.Arch,
		"images:",
		"- location: " + quote(img.Location), "  arch: " + img.Arch,
		"  kernel: {location: " + quote(img.Kernel) + ", cmdline: " + quote(img.Cmdline) + "}",
		"  initrd: {location: " + quote(img.Initrd) + "}",
		"firmware: {legacyBIOS: true}",
		"cpus: " + realvm.CPUs, "memory: " + realvm.Memory, "disk: " + diskSize,
		"plain: true",
		"user: {name: agent, comment: agent, uid: 1000, home: /home/agent}", "",
	}, "\n")
}

func (l *limactl) write(name, text string) {
	l.t.Helper()
	if err := os.WriteFile(filepath.Join(l.home, name), []byte(text), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// notRoot runs a command as a user other than root, and kills it when this process
// dies.
func notRoot(cmd *exec.Cmd) *exec.Cmd {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: limaUID, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: limaUID, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	return cmd
}

func (l *limactl) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Getenv(envLimactl), args...)
	cmd.Env, cmd.Dir = l.env, l.home
	cmd.WaitDelay = 5 * time.Second // its children keep its output open
	return notRoot(cmd)
}

func (l *limactl) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), boot)
	defer cancel()
	out, err := l.command(ctx, args...).CombinedOutput()
	return string(out), err
}

// run runs limactl and returns how long it took, in seconds.
func (l *limactl) run(args ...string) float64 {
	l.t.Helper()
	began := time.Now()
	out, err := l.try(args...)
	took := time.Since(began)
	if err != nil {
		l.t.Fatalf("limactl %s: %v\n%s%s", strings.Join(args, " "), err, out, l.logs())
	}
	return took.Seconds()
}

func (l *limactl) logs() string {
	var b strings.Builder
	for _, name := range []string{"ha.stderr.log", "serial.log"} {
		text, _ := os.ReadFile(filepath.Join(l.lima, instance, name))
		b.WriteString("== " + name + "\n" + string(text[max(0, len(text)-3000):]) + "\n")
	}
	return b.String()
}

// start starts the instance. It returns after how many seconds a user's first ssh
// succeeds, and after how many limactl reports READY.
func (l *limactl) start(args ...string) (ssh, ready float64) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), boot)
	defer cancel()
	began := time.Now()
	cmd := l.command(ctx, append([]string{"start", "--tty=false"}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	ended := make(chan error, 1)
	readyAfter := make(chan time.Duration, 1)
	go func() {
		err := cmd.Wait()
		readyAfter <- time.Since(began)
		if err != nil {
			cancel() // ssh can never succeed now
		}
		ended <- err
	}()
	sshErr := l.login(ctx, began)
	sshAfter := time.Since(began)
	if err := errors.Join(<-ended, sshErr); err != nil {
		l.t.Fatalf("limactl start: %v\n%s\n%s", err, out.String(), l.logs())
	}
	return sshAfter.Seconds(), (<-readyAfter).Seconds()
}

// login waits until a user who keeps trying logs in by ssh. While the guest boots,
// QEMU accepts connections that lead nowhere. So it first waits for the guest's sshd,
// with a new connection each second.
func (l *limactl) login(ctx context.Context, since time.Time) error {
	config := filepath.Join(l.lima, instance, "ssh.config")
	for {
		if at, ok := portOf(config, since); ok && greets(at) {
			if exec.CommandContext(ctx, "ssh", l.ssh("true")...).Run() == nil {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// ssh returns the arguments of a fresh ssh that shares no connection.
func (l *limactl) ssh(command ...string) []string {
	return append([]string{"-F", filepath.Join(l.lima, instance, "ssh.config"), "-o", "ControlMaster=no", "-o", "ControlPath=none", "lima-" + instance}, command...)
}

// portOf reads the instance's address from the file that this start wrote.
func portOf(config string, since time.Time) (string, bool) {
	info, err := os.Stat(config)
	if err != nil || info.ModTime().Before(since) {
		return "", false
	}
	text, err := os.ReadFile(config)
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "Port" && f[1] != "0" {
			return net.JoinHostPort("127.0.0.1", f[1]), true
		}
	}
	return "", false
}

// greets reports whether an SSH server sends its greeting within a second.
func greets(addr string) bool {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return false
	}
	defer c.Close()
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	hello := make([]byte, 4)
	n, _ := c.Read(hello) // no answer is a result too
	return string(hello[:n]) == "SSH-"
}

// powerOff shuts the guest down from inside: limactl stop presses its power button,
// and waits for minutes when the guest does not react.
func (l *limactl) powerOff() {
	l.t.Helper()
	_ = exec.CommandContext(l.t.Context(), "ssh", l.ssh("sudo systemctl poweroff")...).Run() // it closes its own connection
	waitLong(l.t, boot, "limactl's VM is shut down", func() bool {
		_, agent := os.Stat(filepath.Join(l.lima, instance, "ha.pid"))
		_, qemu := os.Stat(filepath.Join(l.lima, instance, "qemu.pid"))
		return errors.Is(agent, fs.ErrNotExist) && errors.Is(qemu, fs.ErrNotExist)
	})
}

// hostAgent returns the process that limactl leaves beside a running VM.
func (l *limactl) hostAgent() int {
	l.t.Helper()
	text, err := os.ReadFile(filepath.Join(l.lima, instance, "ha.pid"))
	if err != nil {
		l.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		l.t.Fatal(err)
	}
	return pid
}

// sweep kills what is left of the instance and fails the test if there was anything.
func (l *limactl) sweep() {
	left := func() map[int]string {
		found := map[int]string{}
		dirs, _ := filepath.Glob("/proc/[0-9]*")
		for _, dir := range dirs {
			args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
			if line := strings.ReplaceAll(string(args), "\x00", " "); strings.Contains(line, l.home+"/") {
				if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil {
					found[pid] = line
				}
			}
		}
		return found
	}
	for end := time.Now().Add(patience); len(left()) > 0 && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
	}
	for pid, line := range left() {
		l.t.Errorf("process left by limactl: %s, want none", line)
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}
