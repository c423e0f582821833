package boot

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// holderEnv makes this binary hold the lock at a path until its input ends.
const holderEnv = "AGENT_TEST_HOLD_BOOT"

func TestHoldBootHelper(t *testing.T) {
	path := os.Getenv(holderEnv)
	if path == "" {
		return // only TestBootGoesOnAfterTheSeed runs it, in a separate process
	}
	f, err := holdBoot(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// agentLogin returns the command of agent-login.service with another lock.
func agentLogin(ctx context.Context, t *testing.T, lock string) *exec.Cmd {
	t.Helper()
	unit, err := os.ReadFile("../../../provision/golden/units/agent-login.service")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(unit), "Timeout") {
		t.Error("agent-login.service has a timeout, want it to wait for the seed however long that takes")
	}
	_, line, ok := strings.Cut(string(unit), "\nExecStart=-")
	line, _, _ = strings.Cut(line, "\n")
	if !ok || !strings.Contains(line, loginLock) {
		t.Fatalf("agent-login.service runs %q, want a command on %s", line, loginLock)
	}
	return exec.CommandContext(ctx, "/bin/sh", "-c", "exec "+strings.ReplaceAll(line, loginLock, lock))
}

// On a loaded host, the seed and agent-login.service may start arbitrarily far
// apart. The service waits as long as the seed holds the boot, and never
// afterwards.
func TestBootGoesOnAfterTheSeed(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only for failures
	defer cancel()
	for name, c := range map[string]struct {
		after bool // the service starts after the seed has released the boot
		kill  bool // the seed is killed
	}{
		"the service starts first":                  {},
		"the service starts long after the release": {after: true},
		"the seed dies while the service waits":     {kill: true},
		"the service starts after the seed's death": {after: true, kill: true},
	} {
		t.Run(name, func(t *testing.T) {
			lock := filepath.Join(t.TempDir(), "login")
			seed := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestHoldBootHelper$")
			seed.Env = append(os.Environ(), holderEnv+"="+lock)
			in, err1 := seed.StdinPipe()
			out, err2 := seed.StdoutPipe()
			if err1 != nil || err2 != nil {
				t.Fatal(err1, err2)
			}
			if err := seed.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "held\n" {
				t.Fatalf("the seed printed %q, %v, want %q", line, err, "held\n")
			}
			release := func() {
				if c.kill {
					_ = seed.Process.Kill()
				}
				in.Close()
				_ = seed.Wait() // killed, or already ended
			}
			service := agentLogin(ctx, t, lock)
			if c.after {
				release()
			}
			if err := service.Start(); err != nil {
				t.Fatal(err)
			}
			if !c.after {
				awaitBlocked(ctx, t, lock)
				release()
			}
			if err := service.Wait(); err != nil {
				t.Errorf("agent-login.service: %v, want it to end once the boot is released", err)
			}
		})
	}
}

// awaitBlocked waits until a process waits for the lock on a file.
func awaitBlocked(ctx context.Context, t *testing.T, file string) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		t.Fatal(err)
	}
	for ctx.Err() == nil {
		locks, err := os.ReadFile("/proc/locks")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(locks)) {
			if strings.Contains(line, "-> FLOCK") && strings.Contains(line, fmt.Sprintf(":%d ", st.Ino)) {
				return
			}
		}
	}
	t.Fatalf("no process waits for the lock on %s within a minute, want agent-login.service to wait", file)
}
