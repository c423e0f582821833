//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// box is a user's account: a home directory of its own, and nothing shared with
// other tests but the guest image.
type box struct {
	t    *testing.T
	home string
	env  []string
}

func newBox(t *testing.T) *box {
	t.Helper()
	home, err := os.MkdirTemp("", "e") // short: socket paths start with it
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, home: home}
	b.env = append(os.Environ(),
		"HOME="+home, "XDG_CONFIG_HOME=", "XDG_STATE_HOME=", "XDG_CACHE_HOME=", "XDG_DATA_HOME="+realvm.DataHome(),
		"AGENT_SESSIONIZER_IMAGE=debian", "TMUX=", "TMUX_TMPDIR="+home, "TERM=xterm-256color",
		"PATH="+filepath.Dir(realvm.Binary())+":"+os.Getenv("PATH"),
		"GIT_CONFIG_GLOBAL="+filepath.Join(home, "gitconfig"),
	)
	b.write("gitconfig", "[user]\n\tname = Tester\n\temail = tester@example.invalid\n[init]\n\tdefaultBranch = main\n")
	t.Cleanup(func() {
		b.run("destroy everything", "sh", "-c", `for s in $(agent-sessionizer list --json | jq -r '.[].name'); do agent-sessionizer destroy --force "$s"; done`)
		if left := b.leftovers(); len(left) > 0 {
			t.Errorf("processes are left: %v", left)
			for pid := range left {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		b.run("end tmux", "tmux", "kill-server")
		os.RemoveAll(home)
	})
	return b
}

func (b *box) write(name, text string) {
	b.t.Helper()
	path := filepath.Join(b.home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

type result struct {
	stdout, stderr string
	code           int
}

func (r result) all() string { return r.stdout + r.stderr }

// run runs a command in the box; 15 minutes are for emulated guests.
func (b *box) run(_ string, argv ...string) result {
	b.t.Helper()
	return b.runIn(b.home, argv...)
}

func (b *box) runIn(dir string, argv ...string) result {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if argv[0] == "agent-sessionizer" {
		cmd.Path, cmd.Err = realvm.Binary(), nil
	}
	cmd.Env, cmd.Dir = b.env, dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	r := result{stdout: out.String(), stderr: errs.String()}
	if exit, ok := err.(*exec.ExitError); ok {
		r.code = exit.ExitCode()
	} else if err != nil {
		r.code, r.stderr = -1, r.stderr+err.Error()
	}
	return r
}

// asz runs the program and wants it to succeed.
func (b *box) asz(args ...string) string {
	b.t.Helper()
	r := b.run("", append([]string{"agent-sessionizer"}, args...)...)
	if r.code != 0 {
		b.t.Fatalf("agent-sessionizer %s: exit %d\n%s%s\nlogs:\n%s", strings.Join(args, " "), r.code, r.stdout, r.stderr, b.logs())
	}
	return r.stdout
}

// fails runs the program and wants it to fail with code and say text.
func (b *box) fails(code int, text string, args ...string) {
	b.t.Helper()
	r := b.run("", append([]string{"agent-sessionizer"}, args...)...)
	if r.code != code || !strings.Contains(r.all(), text) {
		b.t.Errorf("agent-sessionizer %s: exit %d, want %d and %q\n%s", strings.Join(args, " "), r.code, code, text, r.all())
	}
}

// in runs a shell line in the session as the agent and returns what it says.
func (b *box) in(session, line string) result {
	b.t.Helper()
	return b.run("", "agent-sessionizer", "exec", session, "--", "sh", "-c", line)
}

func (b *box) mustIn(session, line string) string {
	b.t.Helper()
	r := b.in(session, line)
	if r.code != 0 {
		b.t.Fatalf("in the guest: %s: exit %d\n%s", line, r.code, r.all())
	}
	return strings.TrimSpace(r.stdout)
}

type view struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Repo  string `json:"repo"`
	State string `json:"state"`
	SSH   string `json:"ssh"`
}

func (b *box) list() []view {
	b.t.Helper()
	var v []view
	if err := json.Unmarshal([]byte(b.asz("list", "--json")), &v); err != nil {
		b.t.Fatal(err)
	}
	return v
}

// waitState waits until the only session is in a state.
func (b *box) waitState(state string) {
	b.t.Helper()
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) { // the store has no other signal for another process
		if l := b.list(); len(l) == 1 && l[0].State == state {
			return
		}
	}
	b.t.Fatalf("not %s in time: %+v\n%s", state, b.list(), b.logs())
}

func (b *box) logs() string {
	var out strings.Builder
	logs, _ := filepath.Glob(filepath.Join(b.home, ".local/state/agent-sessionizer/sessions/*/keeper.log"))
	more, _ := filepath.Glob(filepath.Join(b.home, ".agent-vms/agent-*/*.log"))
	for _, name := range append(logs, more...) {
		text, _ := os.ReadFile(name)
		if len(text) > 3000 {
			text = text[len(text)-3000:]
		}
		out.WriteString("== " + name + "\n" + string(text) + "\n")
	}
	return out.String()
}

// processes are those of this box, by pid, whose command line contains what.
func (b *box) processes(what string) map[int]string {
	found := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		line := strings.ReplaceAll(string(args), "\x00", " ")
		ours := strings.Contains(line, b.home+"/") || strings.Contains("\x00"+string(env), "\x00HOME="+b.home+"\x00")
		if !ours || line == "" || strings.Contains(line, "tmux") || !strings.Contains(line, what) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err == nil && pid != os.Getpid() {
			found[pid] = line
		}
	}
	return found
}

// leftovers are the processes that do not end by themselves: a keeper is gone
// a moment after the command that waited for it.
func (b *box) leftovers() map[int]string {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if left := b.processes(""); len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// kill sends SIGKILL to the box's processes of one kind and wants there to be one.
func (b *box) kill(what string) {
	b.t.Helper()
	pids := b.processes(what)
	if len(pids) == 0 {
		b.t.Fatalf("no %q process to kill; there are %v", what, b.processes(""))
	}
	for pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	// A process that is being torn down holds its locks until it is gone.
	waitFor(b.t, "the end of "+what, func() bool {
		for pid := range b.processes(what) {
			if pids[pid] != "" {
				return false
			}
		}
		return true
	})
}

// repo makes a git repository with one commit.
func (b *box) repo(name string) string {
	b.t.Helper()
	dir := filepath.Join(b.home, name)
	for _, argv := range [][]string{
		{"git", "init", "-q", dir},
		{"git", "-C", dir, "commit", "-q", "--allow-empty", "-m", "first"},
	} {
		if r := b.run("", argv...); r.code != 0 {
			b.t.Fatal(r.all())
		}
	}
	b.write(name+"/hello.txt", "hello\n")
	if r := b.runIn(dir, "sh", "-c", "git add . && git commit -qm hello"); r.code != 0 {
		b.t.Fatal(r.all())
	}
	return dir
}

const small = "--cpus=2 --memory=1536MiB --disk=8GiB"

func (b *box) open(args ...string) string {
	b.t.Helper()
	return strings.TrimSpace(b.asz(append(append([]string{"open", "-d"}, strings.Fields(small)...), args...)...))
}
