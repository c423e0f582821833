// Package script tests the real binary with fake VMs, through scripts that read like a
// terminal session. It covers behaviour visible to users, errors with their hints, and exit
// codes.
package script

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// binary is the path of the program, built once with the tag for the fake driver.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "asz-script")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "agent-sessionizer")
	out, err := exec.Command("go", "build", "-tags", "fakevm", "-o", binary, "../../cmd/agent-sessionizer").CombinedOutput()
	code := 1
	if err != nil {
		fmt.Fprintf(os.Stderr, "build the test binary: %v\n%s", err, out)
	} else {
		code = testenv.Run(m)
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:   "testdata",
		Setup: setup,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"waitfor": waitFor,
			"killall": signalAll(syscall.SIGKILL),
			"freeze":  signalAll(syscall.SIGSTOP),
			"runs":    waitProcess,
			"gone":    waitGone,
		},
		RequireExplicitExec: false,
	})
}

// setup gives each script its own home directory, with a path short enough for sockets, and
// ensures that none of its processes survive.
func setup(env *testscript.Env) error {
	home, err := os.MkdirTemp("", "s")
	if err != nil {
		return err
	}
	env.Defer(func() {
		endTmux(home)
		endProcesses(home, syscall.SIGKILL)
		os.RemoveAll(home)
	})
	env.Setenv("HOME", home)
	for _, v := range []string{"XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "TMUX", "GITHUB_TOKEN"} {
		env.Setenv(v, "")
	}
	env.Setenv("TMUX_TMPDIR", home)
	env.Setenv("PATH", filepath.Dir(binary)+string(os.PathListSeparator)+os.Getenv("PATH"))
	env.Setenv("AGENT_SESSIONIZER_FAULTS", filepath.Join(home, "faults.json"))
	env.Setenv("AGENT_SESSIONIZER_PREPARE", "none") // golden.txtar overrides it
	env.Setenv("AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE", "1MiB")
	env.Setenv("AGENT_SESSIONIZER_LIMITS_DISK_RESERVE", "1MiB")
	env.Setenv("CONFIG", filepath.Join(home, ".config", "agent-sessionizer"))
	env.Setenv("GIT_CONFIG_GLOBAL", filepath.Join(home, "gitconfig"))
	if err := os.WriteFile(filepath.Join(home, "gitconfig"), []byte("[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n"), 0o600); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Join(home, ".config", "agent-sessionizer"), 0o700)
}

// endTmux stops the tmux servers whose sockets are in home, which is TMUX_TMPDIR.
func endTmux(home string) {
	sockets, _ := filepath.Glob(filepath.Join(home, "tmux-*", "*"))
	for _, socket := range sockets {
		_ = exec.Command("tmux", "-S", socket, "kill-server").Run() // it may have ended
	}
}

// waitFor implements "waitfor TEXT CMD ARG…": it repeats a command until its output
// contains the text.
func waitFor(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: waitfor TEXT COMMAND [ARG…]")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var last []byte
	for tick := time.NewTicker(50 * time.Millisecond); ; {
		cmd := exec.CommandContext(ctx, args[1], args[2:]...)
		if args[1] == "agent-sessionizer" {
			cmd.Path, cmd.Err = binary, nil
		}
		cmd.Dir = ts.MkAbs(".")
		cmd.Env = append(os.Environ(), envOf(ts)...)
		last, _ = cmd.CombinedOutput()
		if strings.Contains(string(last), args[0]) {
			tick.Stop()
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			ts.Fatalf("%q did not come within two minutes; last output:\n%s", args[0], last)
		}
	}
}

func envOf(ts *testscript.TestScript) []string {
	var env []string
	for _, k := range []string{"HOME", "PATH", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "TMUX_TMPDIR", "AGENT_SESSIONIZER_FAULTS", "GIT_CONFIG_GLOBAL", "AGENT_SESSIONIZER_PREPARE", "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE"} {
		env = append(env, k+"="+ts.Getenv(k))
	}
	return env
}

// signalAll implements "killall KIND" and "freeze KIND". It sends a signal to all processes
// of one kind in this script's home: killall keeper|fake-vm|gateway kills them as a crash
// would, and freeze stops them.
func signalAll(sig syscall.Signal) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) != 1 {
			ts.Fatalf("usage: killall KIND, freeze KIND")
		}
		n := 0
		for _, pid := range processes(ts.Getenv("HOME"), args[0]) {
			if syscall.Kill(pid, sig) == nil {
				n++
			}
		}
		ts.Logf("%v to %d %s", sig, n, args[0])
		if n == 0 {
			ts.Fatalf("no %s to signal", args[0])
		}
	}
}

// waitGone implements "gone KIND", such as "gone gateway": it waits until no process of
// that kind runs in this script's home.
func waitGone(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: gone KIND")
	}
	for end := time.Now().Add(2 * time.Minute); len(processes(ts.Getenv("HOME"), args[0])) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("a %s is left", args[0])
		}
	}
}

// waitProcess implements "runs keeper|fake-vm": it waits until a process of that kind runs
// in this script's home.
func waitProcess(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: runs KIND")
	}
	for end := time.Now().Add(2 * time.Minute); len(processes(ts.Getenv("HOME"), args[0])) == 0; time.Sleep(50 * time.Millisecond) { // poll: other processes send no event
		if time.Now().After(end) {
			ts.Fatalf("no %s within two minutes", args[0])
		}
	}
}

func endProcesses(home string, sig syscall.Signal) {
	for _, pid := range processes(home, "") {
		_ = syscall.Kill(pid, sig)
	}
}

// processes returns the processes of our binary that run with HOME=home.
func processes(home, kind string) []int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	var pids []int
	for _, dir := range dirs {
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || exe != binary {
			continue
		}
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		argv := strings.Split(string(args), "\x00")
		if !strings.Contains("\x00"+string(env), "\x00HOME="+home+"\x00") && !strings.Contains(string(args), home) {
			continue
		}
		if kind != "" && (len(argv) < 2 || argv[1] != kind) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}
