package realvm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Box is a user's account: it has its own home directory, and shares only the guest
// image with other tests.
type Box struct {
	Home     string
	Env      []string
	Binary   string            // the program under test, Binary() by default
	Deadline time.Time         // of every command; by default each may take 15 minutes
	Progress func(line string) // gets standard error line by line while a command runs; may be nil
	t        *testing.T
}

// NewBox makes an account for a test. At the test's end its sessions are destroyed; a
// process that is left fails the test and is killed.
func NewBox(t *testing.T) *Box {
	t.Helper()
	home, err := os.MkdirTemp("", "e") // short, because socket paths start with it
	if err != nil {
		t.Fatal(err)
	}
	b := &Box{t: t, Home: home, Binary: Binary()}
	b.Env = append(os.Environ(),
		"HOME="+home, "XDG_CONFIG_HOME=", "XDG_STATE_HOME=", "XDG_CACHE_HOME=", "XDG_DATA_HOME="+DataHome(),
		"AGENT_SESSIONIZER_IMAGE=debian", "AGENT_SESSIONIZER_PREPARE="+cmp.Or(os.Getenv(envPrepare), "none"), "TMUX=", "TMUX_TMPDIR="+home, "TERM=xterm-256color",
		"PATH="+filepath.Dir(Binary())+":"+os.Getenv("PATH"),
		"GIT_CONFIG_GLOBAL="+filepath.Join(home, "gitconfig"),
	)
	b.Write("gitconfig", "[user]\n\tname = Tester\n\temail = tester@example.invalid\n[init]\n\tdefaultBranch = main\n")
	t.Cleanup(func() {
		b.Run("sh", "-c", `for s in $(agent-sessionizer list --json | jq -r '.[].name'); do agent-sessionizer destroy --force "$s"; done`)
		if left := b.Leftovers(); len(left) > 0 {
			t.Errorf("processes at the end = %v, want none", left)
			for pid := range left {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		b.Run("tmux", "kill-server")
		os.RemoveAll(home)
	})
	return b
}

// Write writes a file in the home directory.
func (b *Box) Write(name, text string) {
	b.t.Helper()
	path := filepath.Join(b.Home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// Result is a command's output and exit status.
type Result struct {
	Stdout, Stderr string
	Code           int
}

// All returns the whole output.
func (r Result) All() string { return r.Stdout + r.Stderr }

// Run runs a command in the home directory; the limit of 15 minutes allows for
// emulated guests.
func (b *Box) Run(argv ...string) Result {
	b.t.Helper()
	return b.RunIn(b.Home, argv...)
}

// RunIn works like Run, in another directory.
func (b *Box) RunIn(dir string, argv ...string) Result {
	b.t.Helper()
	deadline := b.Deadline
	if deadline.IsZero() {
		deadline = time.Now().Add(15 * time.Minute)
	}
	ctx, cancel := context.WithDeadlineCause(context.Background(), deadline, errors.New("the command ran past the deadline"))
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	if argv[0] == "agent-sessionizer" {
		cmd.Path, cmd.Err = b.Binary, nil
	}
	cmd.Env, cmd.Dir = b.Env, dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if b.Progress != nil {
		cmd.Stderr = io.MultiWriter(&errs, &lineWriter{report: b.Progress})
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it removes the VMs that it works on
	cmd.WaitDelay = 30 * time.Second
	err := cmd.Run()
	r := Result{Stdout: out.String(), Stderr: errs.String()}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		r.Code = exit.ExitCode()
	} else if err != nil {
		r.Code, r.Stderr = -1, r.Stderr+err.Error()
	}
	if err := context.Cause(ctx); err != nil {
		r.Stderr += err.Error()
	}
	return r
}

// lineWriter reports each complete line.
type lineWriter struct {
	report func(line string)
	rest   []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, ok := bytes.Cut(w.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		w.report(string(line))
		w.rest = rest
	}
}

// Asz runs the program, which must succeed.
func (b *Box) Asz(args ...string) string {
	b.t.Helper()
	r := b.Run(append([]string{"agent-sessionizer"}, args...)...)
	if r.Code != 0 {
		b.t.Fatalf("agent-sessionizer %s = exit %d, want 0\n%s%s\nlogs:\n%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr, b.Logs())
	}
	return r.Stdout
}

// Fails runs the program, which must fail with code and print text.
func (b *Box) Fails(code int, text string, args ...string) {
	b.t.Helper()
	r := b.Run(append([]string{"agent-sessionizer"}, args...)...)
	if r.Code != code || !strings.Contains(r.All(), text) {
		b.t.Errorf("agent-sessionizer %s: exit %d, want %d and %q\n%s", strings.Join(args, " "), r.Code, code, text, r.All())
	}
}

// In runs a shell line in the session as the agent.
func (b *Box) In(session, line string) Result {
	b.t.Helper()
	return b.Run("agent-sessionizer", "exec", session, "--", "sh", "-c", line)
}

// MustIn works like In, requires success, and returns what the line printed.
func (b *Box) MustIn(session, line string) string {
	b.t.Helper()
	r := b.In(session, line)
	if r.Code != 0 {
		b.t.Fatalf("%s in the guest = exit %d, want 0\n%s", line, r.Code, r.All())
	}
	return strings.TrimSpace(r.Stdout)
}

// View is a session as `list` shows it.
type View struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Repo  string `json:"repo"`
	State string `json:"state"`
	From  string `json:"from"`
	SSH   string `json:"ssh"`
}

// List returns all sessions.
func (b *Box) List() []View {
	b.t.Helper()
	var v []View
	if err := json.Unmarshal([]byte(b.Asz("list", "--json")), &v); err != nil {
		b.t.Fatal(err)
	}
	return v
}

// WaitState waits until the only session is in a state.
func (b *Box) WaitState(state string) {
	b.t.Helper()
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(200 * time.Millisecond) { // the store has no other signal for another process
		if l := b.List(); len(l) == 1 && l[0].State == state {
			return
		}
	}
	b.t.Fatalf("sessions = %+v, want one in state %s in time\n%s", b.List(), state, b.Logs())
}

// Logs returns the ends of all logs of the account.
func (b *Box) Logs() string {
	var out strings.Builder
	for _, glob := range []string{".local/state/agent-sessionizer/sessions/*/*.log", ".local/state/agent-sessionizer/sessions/*/*/*.log", ".agent-vms/agent-*/*.log"} {
		logs, _ := filepath.Glob(filepath.Join(b.Home, glob))
		for _, name := range logs {
			text, _ := os.ReadFile(name)
			if len(text) > 3000 {
				text = text[len(text)-3000:]
			}
			out.WriteString("== " + name + "\n" + string(text) + "\n")
		}
	}
	return out.String()
}

// Processes returns the box's processes whose command line contains what, by pid. A process that
// was forked and has not started its program yet still has the command line of its parent. It is
// left out, because a test that stops or kills it would stop or kill another program.
func (b *Box) Processes(what string) map[int]string {
	found, parents := map[int]string{}, map[int]int{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		line := strings.ReplaceAll(string(args), "\x00", " ")
		ours := strings.Contains(line, b.Home+"/") || strings.Contains("\x00"+string(env), "\x00HOME="+b.Home+"\x00")
		if !ours || line == "" || strings.Contains(line, "tmux") || !strings.Contains(line, what) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err == nil && pid != os.Getpid() {
			found[pid], parents[pid] = line, parent(dir)
		}
	}
	all := maps.Clone(found)
	maps.DeleteFunc(found, func(pid int, line string) bool { return all[parents[pid]] == line })
	return found
}

// parent returns the parent of the process with that directory in /proc.
func parent(dir string) (pid int) {
	status, _ := os.ReadFile(filepath.Join(dir, "status"))
	_, after, _ := strings.Cut(string(status), "\nPPid:")
	_, _ = fmt.Sscan(after, &pid) // 0 if the process has ended
	return pid
}

// Leftovers returns the processes that have not ended within two minutes. It waits,
// because a keeper ends a moment after the command that waited for it.
func (b *Box) Leftovers() map[int]string {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if left := b.Processes(""); len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// Repo makes a git repository with two commits.
func (b *Box) Repo(name string) string {
	b.t.Helper()
	dir := filepath.Join(b.Home, name)
	for _, argv := range [][]string{
		{"git", "init", "-q", dir},
		{"git", "-C", dir, "commit", "-q", "--allow-empty", "-m", "first"},
	} {
		if r := b.Run(argv...); r.Code != 0 {
			b.t.Fatalf("%q = exit %d, want 0\n%s", argv, r.Code, r.All())
		}
	}
	b.Write(name+"/hello.txt", "hello\n")
	if r := b.RunIn(dir, "sh", "-c", "git add . && git commit -qm hello"); r.Code != 0 {
		b.t.Fatalf("git commit in %s = exit %d, want 0\n%s", dir, r.Code, r.All())
	}
	return dir
}
