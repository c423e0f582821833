//go:build fault

package fault

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
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

var program string

// These count over all tests; the last line reports them.
var injected, lost, leaked atomic.Int64

// inside says that this process has its own mounts.
const inside = "FAULT_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		os.Exit(alone())
	}
	dir, err := os.MkdirTemp("", "asz-fault")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-stop
		stopping.Store(true)
		far := sum() // failures from here on are only due to the interruption
		worlds.Range(func(w, _ any) bool { w.(*world).remove(); return true })
		os.RemoveAll(dir)
		fmt.Printf("stopped after %s\n", far)
		os.Exit(1)
	}()
	code := 1
	if program, err = build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	fmt.Println(sum())
	if lost.Load()+leaked.Load() > 0 {
		code = 1
	}
	os.Exit(code)
}

func sum() string {
	return fmt.Sprintf("%d faults injected, %d lost, %d leaked", injected.Load(), lost.Load(), leaked.Load())
}

// worlds are the existing ones; they are removed when the tests are stopped.
var (
	worlds   sync.Map
	stopping atomic.Bool
)

// alone runs these tests again in a process with private mounts, which disappear with
// the process, however it ends.
func alone() int {
	runtime.LockOSThread() // the child gets a signal when this thread dies
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if uid := os.Getuid(); uid != 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM) // a terminal's signal also reaches the child
	err := cmd.Start()
	if err == nil {
		go func() { <-stop; _ = cmd.Process.Signal(syscall.SIGTERM) }()
		err = cmd.Wait()
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return max(1, exit.ExitCode())
	} else if err != nil {
		fmt.Fprintf(os.Stderr, "the tests need a mount namespace of their own: %v\n", err)
		return 1
	}
	return 0
}

// build makes the program for fake VMs, with an adjustable clock.
func build(dir string) (string, error) {
	over := map[string]string{}
	for _, name := range []string{"clock_linux_amd64.go", "clock_linux_amd64.s"} {
		from, err := filepath.Abs(filepath.Join("testdata", "clock", name))
		if err != nil {
			return "", err
		}
		over[filepath.Join(filepath.Dir(from), "../../../../cmd/agent-sessionizer", name)] = from
	}
	text, err := json.Marshal(map[string]any{"Replace": over})
	if err != nil {
		return "", err
	}
	overlay, out := filepath.Join(dir, "overlay.json"), filepath.Join(dir, "agent-sessionizer")
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-tags", "fakevm", "-overlay", overlay, "-o", out, "../../cmd/agent-sessionizer")
	if told, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the program: %w\n%s", err, told)
	}
	return out, nil
}

// world is a user's account with a repository and fake VMs.
type world struct {
	t    *testing.T
	home string
	env  []string
	full bool         // whether its state is on its own disk
	ill  atomic.Int64 // odd while the host has a fault, and commands may fail because of it
	plan []string     // in the environment of the commands that a case has killed, besides its first
	// A case calls begin and finish around what it is about.
	begin, finish func()
	answer        string // to the case's question, if it has one

	mu   sync.Mutex
	gone bool
}

// later changes the world after d, unless it is removed before.
func (w *world) later(d time.Duration, f func()) {
	time.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.gone {
			f()
		}
	})
}

// patience allows for a task on a loaded machine; it limits nothing that is tested.
const patience = 15 * time.Minute

// wait polls f until it is true, which must happen.
func (w *world) wait(what string, f func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Errorf("%s: not within %v", what, patience)
			return
		}
	}
}

func newWorld(t *testing.T) *world {
	t.Helper()
	home, err := os.MkdirTemp("", "f") // short, because sockets are created below it
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, home: home, begin: func() {}, finish: func() {}, env: []string{
		"HOME=" + home, "PATH=" + filepath.Dir(program) + ":" + os.Getenv("PATH"), "TMUX_TMPDIR=" + home, "TMPDIR=" + filepath.Join(home, "tmp"),
		"AGENT_SESSIONIZER_FAULTS=" + filepath.Join(home, "faults.json"), "AGENT_SESSIONIZER_PREPARE=none",
		"AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_RUNNING=100",
		"GIT_CONFIG_GLOBAL=" + filepath.Join(home, "gitconfig"),
		"GIT_AUTHOR_DATE=2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z",
	}}
	worlds.Store(w, nil)
	if stopping.Load() {
		os.RemoveAll(home)
		select {} // until everything is stopped
	}
	t.Cleanup(w.remove)
	if err := os.Mkdir(filepath.Join(home, "tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	w.write("gitconfig", "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n")
	w.write("repo/input.txt", "as it was\n")
	w.write(".config/agent-sessionizer/config.yaml", "subtasks: {count: 4}\n")
	w.must("git", "init", "-q", "repo")
	w.must("git", "-C", "repo", "add", "-A")
	w.must("git", "-C", "repo", "commit", "-qm", "first")
	return w
}

// remove ends what is left of the world. It may be called twice.
func (w *world) remove() {
	w.mu.Lock()
	w.gone = true
	w.mu.Unlock()
	w.endProcesses()
	if w.full {
		_ = syscall.Unmount(w.state(), syscall.MNT_DETACH) // in a second call it is no longer a mount
	}
	os.RemoveAll(w.home)
	worlds.Delete(w)
}

// state returns where the program keeps its state.
func (w *world) state() string { return filepath.Join(w.home, ".local/state") }

func (w *world) write(name, text string) {
	w.t.Helper()
	path := filepath.Join(w.home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) run(env []string, argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = w.home, append(append([]string{}, w.env...), env...)
	if argv[0] == "agent-sessionizer" {
		cmd.Path, cmd.Err = program, nil
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%v: %w\n%s", argv, err, stderr.String())
	}
	return string(out), err
}

func (w *world) must(argv ...string) string {
	w.t.Helper()
	out, err := w.run(nil, argv...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// processes returns this world's processes: those with its home in their environment
// or arguments. Those inside the guest are marked.
func (w *world) processes() map[int]string {
	found := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if !strings.Contains(string(env)+string(args), w.home+"/") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && len(args) > 0 {
			found[pid] = strings.ReplaceAll(string(args), "\x00", " ")
			if strings.Contains(string(env), "AGENT_GUEST_ROOT=") {
				found[pid] = inGuest + found[pid]
			}
		}
	}
	return found
}

// A breakpoint is a mark in the program at which a process stops or is killed.
type breakpoint struct {
	env  string
	came func() bool // whether a process got there; called at the end
}

// breakAt makes a process stop at its nth mark of that name, and calls act while it is
// stopped; if act is nil, the process is killed.
func (w *world) breakAt(process, mark string, n int, act func(w *world)) breakpoint {
	file, how := filepath.Join(w.home, "stopped"), "kill"
	here := func() bool { _, none := os.Stat(file); return none == nil }
	came := here
	if act != nil {
		how = "stop"
		over, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for !here() {
				select {
				case <-over:
					return
				case <-time.After(2 * time.Millisecond):
				}
			}
			pid := 0
			w.wait("a process to stop", func() bool {
				text, _ := os.ReadFile(file)
				pid, _ = strconv.Atoi(string(text))
				stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				return pid > 0 && strings.Contains(string(stat), ") T ")
			})
			act(w)
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}()
		came = sync.OnceValue(func() bool { close(over); <-done; return here() })
	}
	return breakpoint{env: fmt.Sprintf("AGENT_SESSIONIZER_CRASH=%s:%s:%d:%s:%s", process, mark, n, how, file), came: came}
}

const inGuest = "[guest] "

// signal sends sig to the processes that f selects, and returns their number.
func (w *world) signal(sig syscall.Signal, f func(line string) bool) (n int) {
	for pid, line := range w.processes() {
		if f(line) && syscall.Kill(pid, sig) == nil {
			n++
		}
	}
	return n
}

func isVM(line string) bool { return strings.Contains(line, " fake-vm ") }

func isGuest(line string) bool { return isVM(line) || strings.HasPrefix(line, inGuest) }

// vanish ends the VM and everything in it at once. It stops the processes first,
// because a shell whose command is killed would continue. A process may have started others since
// they were listed.
func (w *world) vanish() {
	for n, before := w.signal(syscall.SIGSTOP, isGuest), -1; n != before; {
		n, before = w.signal(syscall.SIGSTOP, isGuest), n
	}
	w.signal(syscall.SIGKILL, isGuest)
}

func isKeeper(line string) bool {
	return strings.Contains(line, " keeper ") || strings.Contains(line, " task-keeper ")
}

func (w *world) endProcesses() {
	for range 50 {
		left := w.processes()
		if len(left) == 0 {
			return
		}
		for pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
