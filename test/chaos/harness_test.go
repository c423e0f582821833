//go:build chaos

package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The programs before and after the upgrade of a host.
var before, after string

// inside says that this process has its own mounts and networks.
const inside = "CHAOS_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		os.Exit(alone())
	}
	if err := settle(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	dir, err := os.MkdirTemp("", "asz-chaos")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-stop
		hosts.Range(func(h, _ any) bool { h.(*host).remove(); return true })
		os.RemoveAll(dir)
		os.Exit(1)
	}()
	code := 1
	if before, after, err = programs(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// alone runs these tests again with mounts and networks of their own: nothing that they send leaves
// this machine.
func alone() int {
	runtime.LockOSThread() // the child gets a signal when this thread dies
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if uid := os.Getuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	err := cmd.Start()
	if err == nil {
		go func() { <-stop; _ = cmd.Process.Signal(syscall.SIGTERM) }()
		err = cmd.Wait()
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(1, exit.ExitCode())
	} else if err != nil {
		fmt.Fprintf(os.Stderr, "the tests need namespaces of their own: %v\n", err)
		return 1
	}
	return 0
}

// settle makes the namespaces usable.
func settle() error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("none", "/run", "tmpfs", 0, ""); err != nil { // for ip netns
		return fmt.Errorf("mount /run: %w", err)
	}
	return ip("link set lo up", "link add br0 type bridge", "link set br0 up", "addr add 10.77.0.1/24 dev br0")
}

func ip(lines ...string) error {
	for _, line := range lines {
		if err := command(nil, append([]string{"ip"}, strings.Fields(line)...)...); err != nil {
			return err
		}
	}
	return nil
}

// command runs a program and returns its output in an error.
func command(env []string, argv ...string) error {
	_, err := output(env, argv...)
	return err
}

func output(env []string, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin"), env...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%v: %w\n%s", argv, err, stderr.String())
	}
	return string(out), nil
}

// programs makes the program of an earlier revision, if there is one to upgrade from, and that of this one.
func programs(dir string) (before, after string, err error) {
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		return "", "", err
	}
	after = filepath.Join(dir, "after")
	if err := build(root, after); err != nil {
		return "", "", err
	}
	from := os.Getenv(fromVariable)
	if from == "" {
		return after, after, nil
	}
	source, archive := filepath.Join(dir, "source"), filepath.Join(dir, "source.tar")
	before = filepath.Join(dir, "before")
	pages := filepath.Join("pkg", "dashboard", "dist") // they take long to make, and no test here looks at them
	for _, argv := range [][]string{
		{"git", "-C", root, "archive", "--output", archive, "--prefix", "source/", from},
		{"tar", "-C", dir, "-xf", archive},
		{"cp", "-R", filepath.Join(root, pages), filepath.Join(source, filepath.Dir(pages))},
		{"make", "-C", source, "guest"},
	} {
		if err := command(nil, argv...); err != nil {
			return "", "", fmt.Errorf("make the program of %s: %w", from, err)
		}
	}
	return before, after, build(source, before)
}

// build makes the program for fake VMs, with an adjustable clock, from the source in root.
func build(root, out string) error {
	over := map[string]string{}
	for _, name := range []string{"clock_linux_amd64.go", "clock_linux_amd64.s"} {
		over[filepath.Join(root, "cmd", "agent-sessionizer", name)] = filepath.Join(root, "test", "fault", "testdata", "clock", name)
	}
	text, err := json.Marshal(map[string]any{"Replace": over})
	if err != nil {
		return err
	}
	overlay := out + ".json"
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return err
	}
	if told, err := exec.Command("go", "build", "-C", root, "-tags", "fakevm", "-overlay", overlay, "-o", out, "./cmd/agent-sessionizer").CombinedOutput(); err != nil {
		return fmt.Errorf("build the program: %w\n%s", err, told)
	}
	return nil
}

// host is a host of the cluster, with a network namespace and a home directory of its own.
type host struct {
	t       *testing.T
	name    string
	home    string
	addr    string
	env     []string
	clock   string // file: by how many seconds its wall clock is wrong
	program string // on a disk that is never full

	mu    sync.Mutex
	serve *exec.Cmd
	args  []string // of serve, the first time
	over  bool     // the test ends: serve is not started again
}

func newHost(t *testing.T, i int) *host {
	t.Helper()
	home, err := os.MkdirTemp("", "h") // short, because sockets are created below it
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, name: fmt.Sprintf("h%d", i), home: home, addr: fmt.Sprintf("10.77.0.%d", 10+i), clock: filepath.Join(home, "clock")}
	h.program = filepath.Join(t.TempDir(), "agent-sessionizer")
	if err := h.install(before); err != nil {
		t.Fatal(err)
	}
	hosts.Store(h, nil)
	t.Cleanup(h.remove)
	if err := unix.Mount("tmpfs", home, "tmpfs", 0, "size="+diskSize); err != nil {
		t.Fatal(err)
	}
	h.env = []string{
		"HOME=" + home, "XDG_CONFIG_HOME=", "XDG_STATE_HOME=", "XDG_DATA_HOME=", "XDG_CACHE_HOME=", "TMUX_TMPDIR=" + home, "FAULT_CLOCK=" + h.clock,
		"AGENT_SESSIONIZER_FAULTS=" + filepath.Join(home, "faults.json"), "AGENT_SESSIONIZER_PREPARE=none", "AGENT_SESSIONIZER_TASKS_SLOTS=3",
		"AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_RUNNING=100",
		"GIT_CONFIG_GLOBAL=" + filepath.Join(home, "gitconfig"),
	}
	h.skew(0)
	if err := ip("netns add "+h.name, "link add v"+h.name+" type veth peer name eth0 netns "+h.name, "link set v"+h.name+" master br0 up",
		"-n "+h.name+" link set lo up", "-n "+h.name+" link set eth0 up", "-n "+h.name+" addr add "+h.addr+"/24 dev eth0"); err != nil {
		t.Fatal(err)
	}
	return h
}

// diskSize is how much a host can store.
const diskSize = "2g"

// fillDisk takes all space of the host's disk. release gives it back.
func (h *host) fillDisk() (release func()) {
	f, err := os.CreateTemp(h.home, "filler")
	if err != nil {
		return func() {} // it is full already
	}
	for size := 16 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
	return func() {
		if err := errors.Join(f.Close(), os.Remove(f.Name())); err != nil {
			h.t.Error(err)
		}
	}
}

// skew makes the host's wall clock wrong.
func (h *host) skew(d time.Duration) {
	seconds := int64(d / time.Second)
	b := make([]byte, 8)
	for i := range b {
		b[i] = byte(seconds >> (8 * i))
	}
	f, err := os.OpenFile(h.clock, os.O_CREATE|os.O_WRONLY, 0o600) // in place: it is mapped
	if err == nil {
		_, err = f.WriteAt(b, 0)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		h.t.Error(err)
	}
}

// install replaces the host's program, as a package does.
func (h *host) install(program string) error {
	next := h.program + ".next"
	return errors.Join(os.Link(program, next), os.Rename(next, h.program))
}

// upgrade installs the later program, and ends serve as a unit of systemd does before it starts that.
func (h *host) upgrade() {
	if err := h.install(after); err != nil {
		h.t.Error(err)
	}
	for pid, line := range h.processes() {
		if strings.Contains(line, h.program+" serve") {
			_ = syscall.Kill(pid, syscall.SIGTERM)
		}
	}
}

// run runs the program on the host.
func (h *host) run(args ...string) (string, error) {
	return output(h.env, append([]string{"ip", "netns", "exec", h.name, h.program}, args...)...)
}

// start starts serve, and starts it again whenever it ends, as a unit of systemd does.
func (h *host) start(stdin string, args ...string) {
	h.args = args
	go func() {
		for {
			h.mu.Lock()
			if h.over {
				h.mu.Unlock()
				return
			}
			log, err := os.OpenFile(filepath.Join(h.home, "serve.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err != nil {
				h.t.Error(err)
				return
			}
			cmd := exec.Command("ip", append([]string{"netns", "exec", h.name, h.program, "serve"}, h.args...)...)
			cmd.Env = append(append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin"), h.env...)
			cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), log, log
			err = cmd.Start()
			h.serve = cmd
			h.mu.Unlock()
			if err != nil {
				h.t.Error(err)
				return
			}
			_ = cmd.Wait()
			log.Close()
			time.Sleep(time.Second)
			h.mu.Lock()
			if _, err := os.Stat(filepath.Join(h.home, ".local/state/agent-sessionizer/cluster/host.json")); err == nil && stdin != "" {
				h.args, stdin = nil, "" // it has joined
			}
			h.mu.Unlock()
		}
	}()
}

func (h *host) stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	if h.serve != nil && h.serve.Process != nil {
		_ = h.serve.Process.Kill()
	}
}

// processes returns the host's processes outside of its guests.
func (h *host) processes() map[int]string {
	found := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if !strings.Contains(string(env)+string(args), h.home) || strings.Contains(string(env), "AGENT_GUEST_ROOT=") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && len(args) > 0 {
			found[pid] = strings.ReplaceAll(string(args), "\x00", " ")
		}
	}
	return found
}

// hosts are the existing ones; they are removed when the tests are stopped.
var hosts sync.Map

// remove ends all processes of the host, also in its guests. It may be called twice.
func (h *host) remove() {
	h.stop()
	for range 100 {
		n := 0
		dirs, _ := filepath.Glob("/proc/[0-9]*")
		for _, dir := range dirs {
			env, _ := os.ReadFile(filepath.Join(dir, "environ"))
			args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
			pid, err := strconv.Atoi(filepath.Base(dir))
			if err == nil && len(args) > 0 && strings.Contains(string(env)+string(args), h.home+"/") && syscall.Kill(pid, syscall.SIGKILL) == nil {
				n++
			}
		}
		if n == 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	_ = unix.Unmount(h.home, unix.MNT_DETACH) // not mounted if newHost failed
	os.RemoveAll(h.home)
	hosts.Delete(h)
}
