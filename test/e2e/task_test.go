//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// taskView holds the fields of a task that these tests check.
type taskView struct {
	ID       string
	State    string
	Session  string
	Attempt  int
	Progress struct {
		ToolCalls int `json:"tool_calls"`
	}
	Outcome struct {
		Result   string
		ExitCode *int `json:"exit_code"`
		Reason   string
	}
}

func (b *box) task(id string) (v taskView) {
	b.t.Helper()
	if err := json.Unmarshal([]byte(b.Asz("task", "show", "--json", id)), &v); err != nil {
		b.t.Fatal(err)
	}
	return v
}

// submit submits a task for the repository project.
func (b *box) submit(agent, lifecycle string) string {
	b.t.Helper()
	b.manifest(agent, lifecycle)
	return strings.TrimSpace(b.Asz("task", "submit", "-f", "task.yaml"))
}

// manifest writes task.yaml.
func (b *box) manifest(agent, lifecycle string) {
	b.Write("task.yaml", fmt.Sprintf(`
version: "1"
kind: Task
metadata: {name: "a task"}
repository: {url: ./project}
vm: {cpus: 2, memory: 1536M, disk: 8G}
agent: %s
lifecycle: {%s}
`, agent, lifecycle))
}

// shell returns an agent that runs a script.
func shell(script string) string {
	text, _ := json.Marshal(script)
	return fmt.Sprintf(`{kind: command, command: [bash, -c, %s]}`, text)
}

// until waits until the task is in that state, or has ended in another.
func (b *box) until(id, state string) taskView {
	b.t.Helper()
	over := map[string]bool{"COMPLETED": true, "FAILED": true, "FAILED_PRESERVED": true, "CANCELLED": true}
	var v taskView
	testenv.WaitFor(b.t, "task "+id+" in "+state, func() bool { v = b.task(id); return v.State == state || over[v.State] })
	if v.State != state {
		b.t.Fatalf("state of task %s = %s, want %s: %+v\n%s\n%s", id, v.State, state, v, b.Asz("task", "logs", "--of", "events", id), b.Logs())
	}
	return v
}

// printed waits until the agent's output contains what.
func (b *box) printed(id, what string) {
	b.t.Helper()
	testenv.WaitFor(b.t, fmt.Sprintf("%q of task %s", what, id), func() bool { return strings.Contains(b.Asz("task", "logs", id), what) })
}

func (b *box) taskDir(id string) string {
	return filepath.Join(b.Home, ".local", "state", "agent-sessionizer", "tasks", id)
}

// nothingLeft checks that no session and no process of the box is left.
func (b *box) nothingLeft() {
	b.t.Helper()
	testenv.WaitFor(b.t, "the end of all processes", func() bool { return len(b.Leftovers()) == 0 })
	if l := b.List(); len(l) != 0 {
		b.t.Errorf("sessions at the end = %+v, want none", l)
	}
}

// TestTask runs tasks in real VMs: their normal use, and one that fails.
func TestTask(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	clone := b.Repo("project")
	secret := "pretend-" + random()
	m := newModel(t)
	b.Write("token", secret)
	b.Write(".config/agent-sessionizer/config.yaml", fmt.Sprintf(`
network: {host_services: ["localhost:%d"]}
secrets:
  ANTHROPIC_BASE_URL: {from: "cmd:printf http://host.lima.internal:%d", guest: true}
  ANTHROPIC_AUTH_TOKEN: {from: "file:%s/token", guest: true}
`, m.port, m.port, b.Home))

	t.Run("a script", func(t *testing.T) {
		id := b.submit(shell(`set -e
echo "the token has ${#ANTHROPIC_AUTH_TOKEN} letters: $ANTHROPIC_AUTH_TOKEN"
git config user.email a@example.invalid; git config user.name a
echo committed >>hello.txt; git commit -qam work
echo staged >staged.txt; git add staged.txt
printf 'a\0b' >binary; git add binary
echo untracked >"new
file.txt"
mkdir -p out; echo '{}' >out/report.json; head -c 8000000 /dev/urandom >out/large.bin
echo out >>.git/info/exclude
cat /proc/self/cgroup`), `artifact_patterns: ["out/**"]`)
		v := b.until(id, "COMPLETED")
		if v.Outcome.Result != "success" || v.Outcome.ExitCode == nil || *v.Outcome.ExitCode != 0 {
			t.Errorf("completed task = %+v, want success with exit code 0", v)
		}
		log := b.Asz("task", "logs", id)
		if !strings.Contains(log, fmt.Sprintf("has %d letters: %s", len(secret), strings.Repeat("*", len(secret)))) || !strings.Contains(log, "agent-task-"+id) {
			t.Errorf("log = %q, want the secret masked, and session agent-task-%s", log, id)
		}
		var md struct {
			Artifacts []struct {
				Name   string
				Size   int64
				SHA256 string
			}
		}
		text, err := os.ReadFile(filepath.Join(b.taskDir(id), "outbox", "metadata.json"))
		if err != nil || json.Unmarshal(text, &md) != nil || len(md.Artifacts) < 5 {
			t.Fatalf("metadata = %s, %v, want at least 5 artifacts", text, err)
		}
		for _, a := range md.Artifacts {
			out, err := exec.Command("sha256sum", filepath.Join(b.taskDir(id), "outbox", "artifacts", a.Name)).Output()
			if err != nil || !strings.Contains(string(out), a.SHA256) {
				t.Errorf("digest of %s = %s, %v, want %s", a.Name, out, err, a.SHA256)
			}
		}
		patch := filepath.Join(b.taskDir(id), "outbox", "artifacts", id+".patch")
		if out, err := exec.Command("git", "-C", clone, "apply", "--index", patch).CombinedOutput(); err != nil {
			t.Errorf("git apply %s = %v, want nil\n%s", patch, err, out)
		}
		for name, want := range map[string]string{"staged.txt": "staged\n", "binary": "a\x00b"} {
			if got, err := os.ReadFile(filepath.Join(clone, name)); err != nil || string(got) != want {
				t.Errorf("%s = %q, %v, want %q", name, got, err, want)
			}
		}
		if out, err := exec.Command("git", "-C", clone, "reset", "-q", "--hard").CombinedOutput(); err != nil {
			t.Fatalf("git reset = %v, want nil\n%s", err, out)
		}
		if out, err := exec.Command("git", "-C", clone, "for-each-ref", "--format=%(subject)", "refs/agents").Output(); err != nil || !strings.Contains(string(out), "work") {
			t.Errorf("subjects below refs/agents = %q, %v, want work", out, err)
		}
		if out, err := exec.Command("tar", "-tzf", filepath.Join(b.taskDir(id), id+".tar.gz")).Output(); err != nil || !strings.Contains(string(out), "artifacts/"+id+".patch") {
			t.Errorf("bundle = %s, %v, want artifacts/%s.patch", out, err, id)
		}
		searchHome(t, b, secret, "token")
		b.nothingLeft()
	})
	t.Run("Claude Code", func(t *testing.T) {
		b.Write("claude.yaml", `
version: "1"
kind: Task
metadata: {name: "with a model"}
repository: {url: ./project}
vm: {cpus: 2, memory: 1536M, disk: 8G}
claude: {prompt: "RUNBASH please"}
`)
		r := b.Run("agent-sessionizer", "task", "run", "-f", "claude.yaml")
		if r.Code != 0 || !strings.Contains(r.Stderr, "Bash") || !strings.Contains(r.Stderr, "All done.") {
			t.Fatalf("task run -f claude.yaml = exit %d, stdout %s, stderr %s, want exit 0, Bash, \"All done.\"", r.Code, r.Stdout, r.Stderr)
		}
		var all []taskView
		if err := json.Unmarshal([]byte(b.Asz("task", "list", "--json")), &all); err != nil || len(all) == 0 {
			t.Fatalf("task list = %+v, %v, want some", all, err)
		}
		if all[0].Progress.ToolCalls != 1 {
			t.Errorf("progress = %+v, want 1 tool call", all[0])
		}
		if !strings.Contains(b.Asz("task", "artifacts", all[0].ID), "untracked/made-by-the-agent") {
			t.Errorf("artifacts = %s, want untracked/made-by-the-agent", b.Asz("task", "artifacts", all[0].ID))
		}
		b.nothingLeft()
	})
	t.Run("failure is kept", func(t *testing.T) {
		long(t)
		b.manifest(shell("exit 3"), "failure_action: preserve")
		r := b.Run("agent-sessionizer", "task", "run", "-f", "task.yaml")
		if r.Code != 8 || !strings.Contains(r.Stderr, "exit code 3") {
			t.Fatalf("task run -f task.yaml = exit %d, stderr %s, want exit 8, \"exit code 3\"", r.Code, r.Stderr)
		}
		b.MustIn(b.List()[0].Name, "test -d /var/lib/agent-task")
		var all []taskView
		if err := json.Unmarshal([]byte(b.Asz("task", "list", "--json", "--state", "FAILED_PRESERVED")), &all); err != nil || len(all) != 1 {
			t.Fatalf("preserved tasks = %+v, %v, want 1", all, err)
		}
		b.Asz("task", "destroy", "--wait", all[0].ID)
		b.nothingLeft()
	})
}

// TestTaskDisturbed disturbs running tasks: their session is shared, they are ended,
// or their processes are killed.
func TestTaskDisturbed(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.Repo("project")
	t.Run("in an existing session", func(t *testing.T) {
		name := b.open("./project")
		b.MustIn(name, "echo mine >>hello.txt")
		b.Write("given.yaml", `
version: "1"
kind: Task
agent: `+shell(`echo theirs >>hello.txt; echo new >new.txt`)+`
`)
		if r := b.Run("agent-sessionizer", "task", "run", "-f", "given.yaml", "--session", name); r.Code != 0 {
			t.Fatalf("task run --session %s = exit %d\n%s\n%s\nwant exit 0", name, r.Code, r.All(), b.Logs())
		}
		var all []taskView
		if err := json.Unmarshal([]byte(b.Asz("task", "list", "--json")), &all); err != nil || len(all) == 0 {
			t.Fatalf("task list = %+v, %v, want some", all, err)
		}
		id := all[0].ID
		if patch := b.Asz("task", "artifacts", id, "--get", id+".patch"); !strings.Contains(patch, "+mine\n+theirs\n") {
			t.Errorf("patch = %s, want mine and theirs", patch)
		}
		if got := b.Asz("task", "artifacts", id, "--get", "untracked/new.txt"); got != "new\n" {
			t.Errorf("untracked/new.txt = %q, want \"new\\n\"", got)
		}
		if l := b.List(); len(l) != 1 || l[0].State != "ready" {
			t.Errorf("sessions = %+v, want 1, ready", l)
		}
		if got := b.MustIn(name, "tail -n 2 hello.txt; sudo ls /var/lib/agent-task"); got != "mine\ntheirs" {
			t.Errorf("hello.txt and task files in the session = %q, want \"mine\\ntheirs\" and none", got)
		}
		b.Asz("destroy", "--force", name)
		b.nothingLeft()
	})
	t.Run("cancel", func(t *testing.T) {
		id := b.submit(shell(`trap 'echo polite >left.txt; exit 9' TERM; echo up; sleep 600 & wait`), "cancel_grace: 20s")
		b.until(id, "RUNNING")
		b.printed(id, "up")
		b.Asz("task", "cancel", "--wait", id)
		if v := b.task(id); v.State != "CANCELLED" || !strings.Contains(b.Asz("task", "artifacts", id), "untracked/left.txt") {
			t.Errorf("cancelled task = %+v, artifacts %s, want CANCELLED with untracked/left.txt", v, b.Asz("task", "artifacts", id))
		}
		b.nothingLeft()
	})
	t.Run("timeout and hang", func(t *testing.T) {
		long(t)
		id := b.submit(shell(`trap '' TERM; echo up; while :; do echo more; sleep 1; done`), "timeout: 5s, cancel_grace: 2s")
		if v := b.until(id, "FAILED"); v.Outcome.Result != "timeout" {
			t.Errorf("task = %+v, want result timeout", v)
		}
		id = b.submit(shell(`echo up; sleep 600`), "hang_timeout: 5s, cancel_grace: 2s")
		if v := b.until(id, "FAILED"); v.Outcome.Result != "hung" {
			t.Errorf("task = %+v, want result hung", v)
		}
		b.nothingLeft()
	})
	t.Run("killed and stopped", func(t *testing.T) {
		// The disk records how often the agent ran; each run prints until the test
		// has disturbed it.
		script := `echo run >>runs.txt; sync; echo up $(wc -l <runs.txt); until [ -e /tmp/go ]; do echo .; sleep 0.2; done; echo over`
		id := b.submit(shell(script), "")
		b.until(id, "RUNNING")
		b.printed(id, "up 1")
		name := b.List()[0].Name
		for _, what := range []string{"task-keeper", "keeper", "hostagent"} {
			b.kill(" " + what + " ")
			if got := b.MustIn(name, "wc -l <runs.txt"); got != "1" {
				t.Errorf("runs of the agent after killing %s = %s, want 1", what, got)
			}
		}
		for _, what := range []string{" task-keeper ", " keeper ", " gateway ", qemu} {
			for pid := range b.Processes(what) {
				_ = syscall.Kill(pid, syscall.SIGSTOP)
				time.AfterFunc(3*time.Second, func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
			}
			before := len(b.Asz("task", "logs", id))
			testenv.WaitFor(t, "more output after "+what, func() bool { return len(b.Asz("task", "logs", id)) > before+20 })
		}
		if v := b.task(id); v.Attempt != 1 || v.State != "RUNNING" {
			t.Errorf("task = %+v, want RUNNING in attempt 1", v)
		}
		// The VM dies while the agent runs: it is started again, on the same disk.
		b.kill(qemu)
		b.printed(id, "up 2")
		if v := b.until(id, "RUNNING"); v.Attempt != 2 {
			t.Errorf("task = %+v, want attempt 2", v)
		}
		b.MustIn(b.List()[0].Name, "touch /tmp/go")
		b.until(id, "COMPLETED")
		log := b.Asz("task", "logs", id)
		if strings.Count(log, "up ") != 2 || !strings.HasSuffix(strings.TrimSpace(log), "over") {
			t.Errorf("log = %q, want \"up\" twice, \"over\" last", log)
		}
		if out := b.Asz("task", "artifacts", id, "--get", "untracked/runs.txt"); out != "run\nrun\n" {
			t.Errorf("untracked/runs.txt = %q, want 2 runs", out)
		}
		b.nothingLeft()
	})
}
