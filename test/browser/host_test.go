//go:build browser

package browser

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// host is a home directory with fake VMs, and a serve that listens on a port of the loopback.
type host struct {
	t   *testing.T
	dir string
	env []string
}

func newHost(t *testing.T) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "w") // t.TempDir is too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, dir: dir}
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); !strings.HasPrefix(name, "XDG_") && !strings.HasPrefix(name, "TMUX") && name != "HOME" {
			h.env = append(h.env, kv)
		}
	}
	h.env = append(h.env, "HOME="+dir, "AGENT_SESSIONIZER_FAULTS="+filepath.Join(dir, "faults.json"),
		"AGENT_SESSIONIZER_PREPARE=none", "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@example.invalid", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@example.invalid", "GIT_CONFIG_GLOBAL=/dev/null")
	t.Cleanup(func() {
		sockets, _ := filepath.Glob(filepath.Join(dir, ".agent-vms/*/root/tmp/tmux-*/*"))
		for _, socket := range sockets {
			_ = exec.Command("tmux", "-S", socket, "kill-server").Run()
		}
		h.endProcesses()
		_ = os.RemoveAll(dir)
	})
	return h
}

// endProcesses kills what runs in this home, such as keepers.
func (h *host) endProcesses() {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err == nil && (bytes.Contains(append([]byte{0}, env...), []byte("\x00HOME="+h.dir)) || bytes.Contains(args, []byte(h.dir+"/"))) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// serve starts serve on a free port, with more arguments.
func (h *host) serve(args ...string) {
	h.t.Helper()
	cmd := exec.Command(binary, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...)...)
	cmd.Dir, cmd.Env = h.dir, h.env
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(15*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // killed by a signal
		late.Stop()
	})
	testenv.WaitFor(h.t, "serve answers", func() bool { _, err := h.run("dashboard", "--no-open"); return err == nil })
}

// link returns a new one-time link to the dashboard.
func (h *host) link() string {
	h.t.Helper()
	return strings.TrimSpace(h.must("dashboard", "--no-open"))
}

func (h *host) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = h.dir, h.env, 5*time.Second
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out) + stderr.String(), err
	}
	return string(out), nil
}

func (h *host) must(args ...string) string {
	h.t.Helper()
	out, err := h.run(args...)
	if err != nil {
		h.t.Fatalf("agent-sessionizer %q = %v, want nil\n%s", args, err, out)
	}
	return out
}

// command runs a program of the host in the home directory.
func (h *host) command(name string, args ...string) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), name, args...)
	cmd.Dir, cmd.Env = h.dir, h.env
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("%s %q = %v, want nil\n%s", name, args, err, out)
	}
}

func (h *host) write(name, text string, mode os.FileMode) {
	h.t.Helper()
	if !filepath.IsAbs(name) {
		name = filepath.Join(h.dir, name)
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.RemoveAll(name), os.WriteFile(name, []byte(text), mode)); err != nil {
		h.t.Fatal(err)
	}
}

// guest is a session and the directory of its fake VM.
type guest struct {
	*host
	repo, id, name, root string
}

// open makes a repository with a commit, and opens its session.
func (h *host) open(repo string) guest {
	h.t.Helper()
	h.command("git", "init", "-q", "-b", "main", repo)
	h.write(repo+"/greeting.txt", "good morning\ngood evening\n", 0o600)
	h.command("git", "-C", repo, "add", "-A")
	h.command("git", "-C", repo, "commit", "-q", "-m", "first")
	h.must("open", "-d", "./"+repo)
	var list []struct{ ID, Name, Repo string }
	if err := json.Unmarshal([]byte(h.must("list", "--json")), &list); err != nil {
		h.t.Fatal(err)
	}
	for _, s := range list {
		if s.Repo == repo {
			return guest{h, repo, s.ID, s.Name, filepath.Join(h.dir, ".agent-vms", s.Name, "root")}
		}
	}
	h.t.Fatalf("sessions = %v, want one of %s", list, repo)
	return guest{}
}

// exec runs a shell script in the guest's repository.
func (g guest) exec(script string, args ...string) string {
	g.t.Helper()
	return g.must(append([]string{"exec", g.repo, "--", "sh", "-ec", script, "sh"}, args...)...)
}

// tmux starts the guest's tmux, with a window for each name.
func (g guest) tmux(windows ...string) {
	g.t.Helper()
	g.exec(`printf '%s\n' "set -g default-command 'PS1=\"guest$ \" exec sh'" 'set -g status off' 'set -g escape-time 0' 'set -g automatic-rename off' >../.tmux.conf
tmux -u new-session -d -s agent -x 100 -y 30 -n "$1"
shift
for name; do tmux new-window -d -t agent: -n "$name"; done`, windows...)
}

// ask runs agent-guest ask in the guest, which writes the answer to the file answer.
func (g guest) ask(args ...string) {
	g.t.Helper()
	g.exec(`setsid "$AGENT_GUEST_ROOT/usr/local/bin/agent-guest" ask "$@" >../answer 2>&1 </dev/null &`, args...)
}

// answer waits for the answer that ask has written.
func (g guest) answer() (text string) {
	g.t.Helper()
	testenv.WaitFor(g.t, "the answer in the guest", func() bool {
		content, err := os.ReadFile(filepath.Join(g.root, "home/agent/answer"))
		text = strings.TrimSpace(string(content))
		return err == nil && text != ""
	})
	return text
}

// observe makes the guest report an observation, given as JSON, in place of a real one.
func (g guest) observe(observation string) {
	g.t.Helper()
	program := filepath.Join(g.root, "usr/local/bin/agent-guest")
	g.add("observation", strings.ReplaceAll(observation, "\n", " ")+"\n")
	if _, err := os.Stat(program + ".real"); err == nil {
		return
	}
	if err := os.Rename(program, program+".real"); err != nil {
		g.t.Fatal(err)
	}
	g.write(program, "#!/bin/sh\ncase $1 in\nwatch) exec tail -n 1 -f \"$AGENT_GUEST_ROOT/observation\" 2>/dev/null ;;\n*) exec \"$0.real\" \"$@\" ;;\nesac\n", 0o755)
	g.exec(`pkill -f "^$AGENT_GUEST_ROOT/usr/local/bin/agent-guest watch" || :`)
}

// add appends text to a file of the guest.
func (g guest) add(name, text string) {
	g.t.Helper()
	f, err := os.OpenFile(filepath.Join(g.root, name), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err == nil {
		_, err = f.WriteString(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// decide adds a decision, given as JSON, to the log of the session's gateway.
func (g guest) decide(decision string) {
	g.t.Helper()
	name := filepath.Join(g.dir, ".local/state/agent-sessionizer/sessions", g.id, "gateway/decisions.jsonl")
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err == nil {
		_, err = f.WriteString(decision + "\n")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// axe returns the source of axe-core.
func axe(t *testing.T) string {
	t.Helper()
	source, err := os.ReadFile("../../pkg/dashboard/web/node_modules/axe-core/axe.min.js")
	if err != nil {
		t.Fatalf("read axe-core: %v; run: make web", err)
	}
	return string(source)
}
