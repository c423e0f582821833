//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// path returns the phases that a task went through.
func (b *box) path(id string) (phases []string) {
	b.t.Helper()
	text, err := os.ReadFile(filepath.Join(b.taskDir(id), "outbox", "progress", "events.jsonl"))
	if err != nil {
		b.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var ev struct {
			Kind string
			Data struct{ From, To string }
		}
		if err := json.Unmarshal([]byte(line), &ev); err != nil {
			b.t.Fatalf("event = %s, want JSON: %v", line, err)
		}
		if ev.Kind == "phase" && ev.Data.From != ev.Data.To {
			phases = append(phases, ev.Data.To)
		}
	}
	return phases
}

// cancel cancels the task. It checks that the task got no further than its current
// phase, and that nothing is left.
func (b *box) cancel(id, phase string) {
	b.t.Helper()
	b.Asz("task", "cancel", "--wait", id)
	if v := b.task(id); v.State != "CANCELLED" || v.Outcome.Result != "cancelled" {
		b.t.Errorf("task cancelled in %s = %+v, want CANCELLED", phase, v)
	}
	want := []string{"PENDING", "STAGING", "PROVISIONING", "READY"}
	want = append(slices.Clone(want[:slices.Index(want, phase)+1]), "CANCELLED")
	if got := b.path(id); !slices.Equal(got, want) {
		b.t.Errorf("path of the task cancelled in %s = %v, want %v", phase, got, want)
	}
	b.nothingLeft()
}

// signal sends a signal to the box's processes of one kind.
func (b *box) signal(what string, sig syscall.Signal) {
	b.t.Helper()
	pids := b.Processes(what)
	if len(pids) == 0 {
		b.t.Fatalf("processes %q = none of %v, want some", what, b.Processes(""))
	}
	for pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil {
			b.t.Fatal(err)
		}
	}
}

// TestTaskPhases cancels tasks in each phase; TestTask covers RUNNING. There is one
// slot, so each task that runs also shows that those before it released theirs.
func TestTaskPhases(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")
	b.Write(".config/agent-sessionizer/config.yaml", "tasks: {slots: 1}\n")

	t.Run("PENDING and STAGING", func(t *testing.T) {
		// A host that accepts connections, and sends nothing.
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		called := make(chan net.Conn, 10)
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				called <- c
			}
		}()
		b.Write("silent.yaml", fmt.Sprintf(`
version: "1"
kind: Task
repository: {url: "git://localhost:%d/team/project"}
vm: {cpus: 2, memory: 1536M, disk: 8G}
agent: {kind: command, command: ["true"]}
`, ln.Addr().(*net.TCPAddr).Port))
		id := strings.TrimSpace(b.Asz("task", "submit", "-f", "silent.yaml"))
		conn := <-called
		defer conn.Close()
		b.until(id, "STAGING")

		waits := b.submit(shell("true"), "")
		b.Asz("task", "cancel", waits)
		if v := b.task(waits); v.State != "CANCELLED" || v.Outcome.Result != "cancelled" {
			t.Errorf("cancelled task = %+v, want CANCELLED", v)
		}
		b.cancel(id, "STAGING")
	})
	t.Run("PROVISIONING", func(t *testing.T) {
		id := b.submit(shell("true"), "")
		b.until(id, "PROVISIONING")
		b.cancel(id, "PROVISIONING")
	})
	t.Run("PROVISIONING with a VM", func(t *testing.T) {
		long(t)
		id := b.submit(shell("true"), "")
		testenv.WaitFor(t, "QEMU", func() bool { return len(b.Processes(qemu)) > 0 })
		b.cancel(id, "PROVISIONING")
	})
	t.Run("READY", func(t *testing.T) {
		long(t)
		id := b.submit(shell("true"), "")
		// The guest freezes before the agent is started in it. From this step on the keeper only
		// waits; stopped in a transaction, it would block all others.
		testenv.WaitFor(t, "the task to wait for its session", func() bool {
			return strings.Contains(b.Asz("task", "logs", "--of", "events", id), "prepare the VM")
		})
		b.signal(" task-keeper ", syscall.SIGSTOP)
		testenv.WaitFor(t, "a session that is ready", func() bool { l := b.List(); return len(l) == 1 && l[0].State == "ready" })
		b.signal(qemu, syscall.SIGSTOP)
		b.signal(" task-keeper ", syscall.SIGCONT)
		b.until(id, "READY")
		b.cancel(id, "READY")
	})
	t.Run("COMPLETING", func(t *testing.T) {
		id := b.submit(shell(`mkdir out; head -c 40000000 /dev/urandom >out/large.bin; sha256sum <out/large.bin; echo out >>.git/info/exclude`), `artifact_patterns: ["out/**"]`)
		received := func() (n int64) {
			parts, _ := filepath.Glob(filepath.Join(b.taskDir(id), "outbox", "artifacts", ".part", "*"))
			for _, part := range parts {
				if st, err := os.Stat(part); err == nil { // it is moved away when it is complete
					n = max(n, st.Size())
				}
			}
			return n
		}
		var keepers map[int]string
		testenv.WaitFor(t, "the task's keeper", func() bool { keepers = b.Processes(" task-keeper "); return len(keepers) > 0 })
		for end := time.Now().Add(5 * time.Minute); received() < 10e6; time.Sleep(time.Millisecond) { // a real machine sends all of it in a moment
			if time.Now().After(end) {
				t.Fatalf("artifact bytes after 5 minutes = %d, want 10e6\n%s", received(), b.Logs())
			}
		}
		for pid := range keepers {
			_ = syscall.Kill(pid, syscall.SIGSTOP)
		}
		// The outcome is decided: cancelling changes nothing any more.
		b.Asz("task", "cancel", id)
		b.kill(" task-keeper ")
		there := received()
		if there < 10e6 || there >= 40e6 {
			t.Fatalf("artifact bytes = %d, want 10e6 to 40e6, to be continued", there)
		}
		b.Asz("task", "list") // starts a keeper
		testenv.WaitFor(t, "the end of the task", func() bool {
			if n := received(); n > 0 && n < there {
				t.Errorf("artifact bytes after the interruption = %d, want at least %d: it must be continued", n, there)
				there = n
			}
			text, err := os.ReadFile(filepath.Join(b.taskDir(id), "state.json"))
			return err == nil && !strings.Contains(string(text), `"state": "COMPLETING"`)
		})
		want := []string{"PENDING", "STAGING", "PROVISIONING", "READY", "RUNNING", "COMPLETING", "COMPLETED"}
		if got := b.path(id); !slices.Equal(got, want) {
			t.Fatalf("path of the task = %v, want %v\n%s", got, want, b.Asz("task", "logs", "--of", "events", id))
		}
		sum, _, _ := strings.Cut(b.Asz("task", "logs", id), " ")
		out := b.RunIn(filepath.Join(b.taskDir(id), "outbox", "artifacts"), "sh", "-c", "find . -name large.bin -exec sha256sum {} +").Stdout
		if !strings.HasPrefix(out, sum+" ") {
			t.Errorf("digest of large.bin = %s, want %s as in the guest", out, sum)
		}
		b.nothingLeft()
	})
}
