package script

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestCrash kills a process at a point in a session's life with SIGKILL. Repeating the same
// command must then succeed as if nothing had happened: with one VM, the work intact,
// events without a gap, and nothing left after destroy.
func TestCrash(t *testing.T) {
	// The keeper kills itself before and after each call of the driver.
	for _, at := range []string{"create:before", "create:after", "start:before", "start:after", "stop:before", "stop:after", "delete:before", "delete:after"} {
		t.Run("keeper at "+at, func(t *testing.T) {
			t.Parallel()
			h := newHome(t)
			h.faults(`{"kill_self_at": "` + at + `"}`)
			h.lifeWithCrash(t, func() { h.waitKeeperless(t); h.faults("") })
		})
	}
	// Both kinds of process are killed during each step.
	for _, step := range []string{"create the VM", "boot the VM", "log in", "apply the network policy", "clone into the guest", "deliver secrets"} {
		for _, kind := range []string{"keeper", "fake-vm"} {
			t.Run(kind+" during "+step, func(t *testing.T) {
				t.Parallel()
				h := newHome(t)
				open := h.start("open", "-d", "./repo")
				h.waitStep(t, step)
				for _, pid := range processes(h.dir, kind) {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
				_ = open.Process.Kill()
				_ = open.Wait()
				if kind == "fake-vm" {
					// The keeper survives. Either it finds the step failed, and the session
					// is broken; or it finds the VM gone a second later, and the session is
					// stopped. In both cases, the session can be opened again.
					h.until(t, "the session is used", func() bool {
						_, err := h.run("open", "-d", "./repo")
						if err == nil {
							_, err = h.run("exec", "repo", "--", "true")
						}
						return err == nil
					})
				}
				h.lifeWithCrash(t, nil)
			})
		}
	}
}

type home struct {
	dir string
	env []string
}

func newHome(t *testing.T) *home {
	t.Helper()
	dir, err := os.MkdirTemp("", "c")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endProcesses(dir, syscall.SIGKILL)
		os.RemoveAll(dir)
	})
	h := &home{dir: dir}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "XDG_") && !strings.HasPrefix(kv, "TMUX") && !strings.HasPrefix(kv, "HOME=") {
			h.env = append(h.env, kv)
		}
	}
	h.env = append(h.env, "HOME="+dir, "AGENT_SESSIONIZER_FAULTS="+filepath.Join(dir, "faults.json"),
		"AGENT_SESSIONIZER_PREPARE=none", "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.invalid", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.invalid")
	for _, args := range [][]string{{"init", "-q", "repo"}, {"-C", "repo", "commit", "-q", "--allow-empty", "-m", "first"}} {
		cmd := exec.CommandContext(t.Context(), "git", args...)
		cmd.Dir, cmd.Env = dir, h.env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
	}
	return h
}

func (h *home) faults(text string) {
	name := filepath.Join(h.dir, "faults.json")
	if text == "" {
		os.Remove(name)
		return
	}
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		panic(err)
	}
}

func (h *home) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir, cmd.Env = h.dir, h.env
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func (h *home) start(args ...string) *exec.Cmd {
	cmd := h.command(context.Background(), args...)
	if err := cmd.Start(); err != nil {
		panic(err)
	}
	return cmd
}

// run runs the program. Five minutes are far more than any command takes.
func (h *home) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var out bytes.Buffer
	cmd := h.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func (h *home) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := h.run(args...)
	if err != nil {
		logs, _ := filepath.Glob(filepath.Join(h.dir, ".local/state/agent-sessionizer/sessions/*/keeper.log"))
		for _, name := range logs {
			text, _ := os.ReadFile(name)
			out += "\n" + string(text)
		}
		t.Fatalf("agent-sessionizer %v = %v, want nil\n%s", args, err, out)
	}
	return out
}

// until polls for an effect of another process, because the store reports changes only when
// asked.
func (h *home) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 2 minutes", what)
		}
	}
}

// waitStep waits until a step has begun. The step may be over when the test notices, which
// makes the crash one between two steps.
func (h *home) waitStep(t *testing.T, step string) {
	t.Helper()
	h.until(t, step+" begins", func() bool {
		out, _ := h.run("logs", "repo")
		return strings.Contains(out, "start    "+step)
	})
}

// waitKeeperless waits until the injected crash has happened.
func (h *home) waitKeeperless(t *testing.T) {
	t.Helper()
	h.until(t, "the keeper dies", func() bool { return len(processes(h.dir, "keeper")) == 0 })
}

// lifeWithCrash takes a session through its whole life. If crash is set, it is called after
// the command that an injected crash left without a keeper, before the command is repeated.
func (h *home) lifeWithCrash(t *testing.T, crash func()) {
	t.Helper()
	do := func(args ...string) {
		t.Helper()
		if crash == nil {
			h.must(t, args...)
			return
		}
		switch out, err := h.run(args...); {
		case err == nil: // this command did not crash
			return
		case !strings.Contains(out, "no keeper works on it"):
			t.Fatalf("agent-sessionizer %v = %v, want nil or \"no keeper works on it\"\n%s", args, err, out)
		}
		crash()
		h.must(t, args...)
		crash = nil
	}
	do("open", "-d", "./repo")
	h.must(t, "exec", "repo", "--", "sh", "-c", "echo work >work.txt")
	do("stop", "repo")
	do("open", "-d", "./repo")
	if out := h.must(t, "exec", "repo", "--", "cat", "work.txt"); out != "work\n" {
		t.Errorf("work.txt = %q, want \"work\\n\"", out)
	}
	var list []struct{ ID, Name string }
	if err := json.Unmarshal([]byte(h.must(t, "list", "--json")), &list); err != nil || len(list) != 1 {
		t.Fatalf("sessions = %v, %v, want 1", list, err)
	}
	h.gapless(t)
	do("destroy", "--force", "repo")
	if vms, _ := filepath.Glob(filepath.Join(h.dir, ".agent-vms/agent-*")); len(vms) != 0 {
		t.Errorf("VMs at the end = %v, want none", vms)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		left := processes(h.dir, "")
		if len(left) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Errorf("processes at the end = %v, want none", left)
			break
		}
	}
}

func (h *home) gapless(t *testing.T) {
	t.Helper()
	next := int64(1)
	for line := range strings.Lines(h.must(t, "logs", "--json", "repo")) {
		var ev struct{ Seq int64 }
		if err := json.Unmarshal([]byte(line), &ev); err != nil || ev.Seq != next {
			t.Fatalf("event = %s, %v, want seq %d", line, err, next)
		}
		next++
	}
}
