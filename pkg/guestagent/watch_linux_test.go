package guestagent_test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// patience is long enough for a loaded machine.
const patience = 2 * time.Minute

// watched is a stream of snapshots.
type watched struct {
	*testing.T
	stdin io.WriteCloser
	seen  chan guestproto.Observation
	ended chan error
	last  guestproto.Observation
}

func (g *fakeGuest) watch(env []string, args ...string) *watched {
	g.Helper()
	cmd := exec.Command(g.program, append([]string{"watch"}, args...)...)
	cmd.Env = append(append(os.Environ(), "AGENT_GUEST_ROOT="+g.root, "TMUX=", "TMUX_TMPDIR="+g.root), env...)
	stdin, err1 := cmd.StdinPipe()
	stdout, err2 := cmd.StdoutPipe()
	cmd.Stderr = os.Stderr
	if err1 != nil || err2 != nil {
		g.Fatal(err1, err2)
	}
	if err := cmd.Start(); err != nil {
		g.Fatal(err)
	}
	w := &watched{T: g.T, stdin: stdin, seen: make(chan guestproto.Observation, 1000), ended: make(chan error, 1)}
	go func() {
		defer close(w.seen)
		for seen, err := range guestproto.ReadObservations(stdout) {
			if err != nil {
				g.Errorf("read an observation: %v", err)
				break
			}
			w.seen <- seen
		}
		w.ended <- cmd.Wait()
	}()
	g.Cleanup(w.stop)
	return w
}

// stop closes the input; the command must then end.
func (w *watched) stop() {
	w.Helper()
	_ = w.stdin.Close() // closing it twice is harmless
	select {
	case err := <-w.ended:
		if err != nil {
			w.Errorf("watch ended with %v, want success", err)
		}
		w.ended <- nil
	case <-time.After(patience):
		w.Errorf("watch is running %v after its input was closed, want that it ends", patience)
	}
}

// until waits for a matching snapshot.
func (w *watched) until(what string, ok func(guestproto.Observation) bool) guestproto.Observation {
	w.Helper()
	deadline := time.After(patience)
	for {
		select {
		case seen, open := <-w.seen:
			if !open {
				w.Fatalf("the stream ended before %s; last observation %+v", what, w.last)
			}
			w.last = seen
			if ok(seen) {
				return seen
			}
		case <-deadline:
			w.Fatalf("no observation of %s within %v; last observation %+v", what, patience, w.last)
		}
	}
}

// agent waits until there is exactly one agent in the given state.
func (w *watched) agent(state guestproto.AgentState, on string) guestproto.Agent {
	w.Helper()
	return w.until(fmt.Sprintf("%s %q", state, on), func(g guestproto.Observation) bool {
		return len(g.Agents) == 1 && g.Agents[0].State == state && g.Agents[0].On == on
	}).Agents[0]
}

// shellNamed returns the path of a shell with an agent's name, in a new directory.
func shellNamed(t *testing.T, name string) (path string) {
	t.Helper()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(sh)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, program, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// pretender is a program with the name of an agent that runs given commands.
type pretender struct {
	*testing.T
	stdin io.WriteCloser
	pid   int
	dir   string
}

func (g *fakeGuest) pretend(name string) *pretender {
	g.Helper()
	program := shellNamed(g.T, name)
	dir := filepath.Dir(program)
	cmd := exec.Command(program, "-s")
	cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root, "CLAUDE_CONFIG_DIR="+dir, "GUEST="+g.program)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		g.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		g.Fatal(err)
	}
	p := &pretender{T: g.T, stdin: stdin, pid: cmd.Process.Pid, dir: dir}
	g.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait() // it may have been made to fail
	})
	return p
}

func (p *pretender) run(line string) {
	p.Helper()
	if _, err := io.WriteString(p.stdin, line+"\n"); err != nil {
		p.Fatal(err)
	}
}

// hook reports an event through a hook from within a shell, as Codex does.
func (p *pretender) hook(agent, event string, fields ...string) {
	p.Helper()
	file := filepath.Join(p.dir, "event")
	text := fmt.Sprintf(`{"session_id":"s","hook_event_name":%q%s}`, event, strings.Join(append([]string{""}, fields...), ","))
	aside := ""
	if agent == "claude" && event == "PermissionRequest" {
		aside = " >" + filepath.Join(p.dir, "decision") + " &" // Claude Code goes on while it waits for the hook
	}
	p.run("cat >" + file + " <<'EOF'\n" + text + "\nEOF\nsh -c '\"$GUEST\" hook " + agent + "; :' <" + file + aside)
}

// says writes Claude Code's own file.
func (p *pretender) says(status string, at time.Time) {
	p.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	if err != nil {
		p.Fatal(err)
	}
	start := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[19]
	text := fmt.Sprintf(`{"pid":%d,"sessionId":"s","procStart":%q,"status":%q,"waitingFor":"approve plan","statusUpdatedAt":%d}`, p.pid, start, status, at.UnixMilli())
	if err := os.MkdirAll(filepath.Join(p.dir, "sessions"), 0o700); err != nil {
		p.Fatal(err)
	}
	file := filepath.Join(p.dir, "sessions", strconv.Itoa(p.pid)+".json")
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		p.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		p.Fatal(err)
	}
}

func TestWatchAnAgent(t *testing.T) {
	g := newFakeGuest(t)
	w := g.watch(nil)
	first := w.until("the machine", func(g guestproto.Observation) bool { return g.Machine != nil })
	if m := first.Machine; len(first.Agents) != 0 || m.MemTotal <= 0 || m.MemUsed <= 0 || m.DiskTotal <= 0 || first.Changes != nil {
		t.Errorf("first observation = %+v, machine %+v, want memory and disk, no agents, no changes", first, m)
	}
	touch := `"tool_name":"Bash","tool_input":{"command":"touch x"}`

	p := g.pretend("claude")
	p.hook("claude", "SessionStart")
	if a := w.agent(guestproto.AgentIdle, ""); a.Name != "claude" || a.PID != p.pid || time.Since(a.Since) > patience {
		t.Errorf("agent = %+v, want claude with process id %d and a recent Since", a, p.pid)
	}
	p.hook("claude", "UserPromptSubmit")
	w.agent(guestproto.AgentWorking, "")
	p.hook("claude", "PermissionRequest", touch)
	blocked := w.agent(guestproto.AgentBlocked, "permission: Bash: touch x")
	// Esc fires no hook.
	p.says("waiting", blocked.Since)
	esc := blocked.Since.Add(time.Second).Truncate(time.Millisecond)
	p.says("idle", esc)
	if a := w.agent(guestproto.AgentIdle, ""); !a.Since.Equal(esc) {
		t.Errorf("Since after Esc = %s, want %s", a.Since, esc)
	}
	testenv.WaitFor(t, "the time of Esc is over", func() bool { return time.Now().After(esc) })
	p.hook("claude", "UserPromptSubmit")
	w.agent(guestproto.AgentWorking, "")
	p.says("waiting", time.Now())
	w.agent(guestproto.AgentBlocked, "approve plan")
	p.says("busy", time.Now())
	w.agent(guestproto.AgentWorking, "")
	p.hook("claude", "Stop")
	p.says("idle", time.Now()) // in either order
	w.agent(guestproto.AgentDone, "")

	// Start a second agent that ends without a report.
	q := g.pretend("codex")
	q.run(`"$GUEST" hook codex '{"type":"agent-turn-complete","thread-id":"t"}' </dev/null`)
	w.until("two agents", func(g guestproto.Observation) bool { return len(g.Agents) == 2 })
	q.run("exit")
	seen := w.until("one that is gone", func(g guestproto.Observation) bool {
		return len(g.Agents) == 2 && g.Agents[1].State == guestproto.AgentGone
	})
	if a := seen.Agents; a[0].PID != p.pid || a[1].PID != q.pid || a[1].Name != "codex" {
		t.Errorf("agents = %+v, want process ids %d, then %d of codex", a, p.pid, q.pid)
	}
	w.stop()

	// A later watcher sees the same.
	late := g.watch(nil)
	again := late.until("the agents", func(g guestproto.Observation) bool { return true })
	if len(again.Agents) != 2 || again.Agents[1] != seen.Agents[1] {
		t.Errorf("agents that a later watch reports = %+v, want two, the second %+v", again.Agents, seen.Agents[1])
	}
}

// A hook must not disturb its agent: it prints nothing in any case.
func TestHookIsSilent(t *testing.T) {
	g := newFakeGuest(t)
	dir := filepath.Join(g.root, "run/agent/attention")
	good := `{"hook_event_name":"Stop"}`
	for name, c := range map[string]struct {
		stdin string
		args  []string
	}{
		"nobody":          {good, []string{"hook"}},
		"a path":          {good, []string{"hook", "../../x"}},
		"no event":        {"", []string{"hook", "claude"}},
		"not JSON":        {"\x00\xff", []string{"hook", "claude"}},
		"unknown":         {`{"hook_event_name":"New"}`, []string{"hook", "claude"}},
		"an option":       {good, []string{"hook", "--help"}},
		"no window":       {"", []string{"bell", "4"}},
		"a window's path": {"", []string{"bell", "@../../x"}},
	} {
		if out, errs, code := g.run(c.stdin, c.args...); code != 0 || out+errs != "" {
			t.Errorf("%s: agent-guest %q: exit %d, stdout %q, stderr %q, want 0 and no output", name, c.args, code, out, errs)
		}
	}
	entries, err := os.ReadDir(dir)
	if err == nil && slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !strings.HasPrefix(e.Name(), ".") }) {
		t.Errorf("ReadDir(%s) = %v, want no reports", dir, entries)
	}
	// A truncated event still yields the fields before the cut. This process does
	// not have the name of an agent.
	if out, errs, code := g.run(good[:len(good)-1]+`,"prompt":"`+strings.Repeat("x", 9<<20), "hook", "claude"); code != 0 || out+errs != "" {
		t.Errorf("hook with a truncated event: exit %d, stdout %q, stderr %q, want 0 and no output", code, out, errs)
	}
	if found, _ := filepath.Glob(filepath.Join(dir, "claude-*.json")); len(found) != 1 {
		t.Errorf("reports after a truncated event = %v, want one", found)
	}
	// The directory cannot be created.
	if err := os.RemoveAll(filepath.Join(g.root, "run")); err != nil {
		t.Fatal(err)
	}
	g.write("run", "a file")
	for _, args := range [][]string{{"hook", "claude"}, {"bell", "@1"}} {
		if out, errs, code := g.run(good, args...); code != 0 || out+errs != "" {
			t.Errorf("agent-guest %v without a directory: exit %d, stdout %q, stderr %q, want 0 and no output", args, code, out, errs)
		}
	}
}

// session is the test's own tmux server.
type session struct {
	*testing.T
	env []string
}

func newSession(g *fakeGuest, conf string) *session {
	g.Helper()
	dir, err := os.MkdirTemp("", "t") // short, because it contains a socket
	if err != nil {
		g.Fatal(err)
	}
	s := &session{T: g.T, env: append(os.Environ(), "TMUX=", "TMUX_TMPDIR="+dir, "AGENT_GUEST_ROOT="+g.root, "LC_ALL=C.UTF-8")}
	g.write("tmux.conf", conf)
	g.Cleanup(func() {
		s.tmux("kill-server")
		os.RemoveAll(dir)
	})
	s.tmux("-f", filepath.Join(g.root, "tmux.conf"), "new-session", "-d", "-s", "agent", "-n", "vim", "-x", "100", "-y", "30", "sh")
	return s
}

func (s *session) tmux(args ...string) string {
	s.Helper()
	cmd := exec.Command("tmux", append([]string{"-u"}, args...)...)
	cmd.Env = s.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.Fatalf("tmux %v: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// bellHook returns the bell line of the guest's tmux.conf, for the program at a
// path.
func bellHook(t *testing.T, program string) string {
	t.Helper()
	conf, err := os.ReadFile("../../provision/files/.tmux.conf")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(conf)) {
		if strings.Contains(line, "bell") && strings.HasPrefix(line, "set") && !strings.Contains(line, "style") {
			lines = append(lines, strings.ReplaceAll(line, "/usr/local/bin/agent-guest", program))
		}
	}
	text := strings.Join(lines, "")
	if !strings.Contains(text, program) {
		t.Fatalf("bell lines of .tmux.conf = %q, want one that runs %s", text, program)
	}
	return text
}

func TestWatchWindows(t *testing.T) {
	g := newFakeGuest(t)
	s := newSession(g, bellHook(t, g.program))
	s.tmux("new-window", "-d", "-n", "claude", "sh")
	s.tmux("new-window", "-d", "-n", "my agent", "sh")
	s.tmux("send-keys", "-t", "claude", "printf 'no \\033[31mcolour\\033[0m, \\303\\251\\n'", "Enter")
	w := g.watch(s.env)
	// Keys that are typed before the shell is ready leave its prompt in front of
	// their output.
	hasOutput := func(text string) func(guestproto.Observation) bool {
		return func(g guestproto.Observation) bool {
			return slices.ContainsFunc(g.Screen, func(line string) bool { return line == text || line == "# "+text || line == "$ "+text })
		}
	}
	if seen := w.until("the screen", hasOutput("no colour, é")); seen.Window != "claude" || seen.Screen[len(seen.Screen)-1] == "" {
		t.Errorf("observation = %+v, want window claude and a screen whose last line is not empty", seen)
	}
	s.tmux("send-keys", "-t", "claude", "echo $((40+2))", "Enter")
	w.until("what is new on it", hasOutput("42"))

	// An agent without hooks rings; it is blocked until the window is visited.
	s.tmux("send-keys", "-t", "my agent", "printf '\\a'; echo $((50+2))", "Enter")
	rang := w.until("a bell, and the screen of its window", func(g guestproto.Observation) bool {
		return len(g.Agents) == 1 && g.Window == "my agent" && hasOutput("52")(g)
	})
	if a := rang.Agents[0]; a.Name != "my agent" || a.PID != 0 || a.State != guestproto.AgentBlocked || a.On != "bell in window my agent" {
		t.Errorf("agent that rang = %+v, want my agent without a process id, blocked on %q", a, "bell in window my agent")
	}
	s.tmux("select-window", "-t", "my agent")
	s.tmux("select-window", "-t", "vim")
	w.until("the end of it", func(g guestproto.Observation) bool { return len(g.Agents) == 0 })

	// A bell in the window of an agent with hooks does not count. The next window's
	// bell shows that tmux was checked.
	s.tmux("respawn-pane", "-k", "-t", "claude", "-e", "GUEST="+g.program, shellNamed(t, "claude"), "-i")
	s.tmux("send-keys", "-t", "claude", `echo '{"hook_event_name":"Stop"}' >`+g.root+`/e; "$GUEST" hook claude <`+g.root+`/e; printf '\a'`, "Enter")
	done := w.agent(guestproto.AgentDone, "")
	if pid := s.tmux("display-message", "-p", "-t", "claude", "#{pane_pid}"); strconv.Itoa(done.PID) != pid {
		t.Errorf("process id of the agent in window claude = %d, want %s", done.PID, pid)
	}
	bells := func() (n int) {
		all, _ := filepath.Glob(filepath.Join(g.root, "run/agent/attention/bell-*"))
		return len(all)
	}
	s.tmux("send-keys", "-t", "my agent", "printf '\\a'", "Enter")
	seen := w.until("the other window's bell", func(g guestproto.Observation) bool { return len(g.Agents) == 2 })
	if seen.Agents[0].Name != "my agent" || seen.Agents[1].PID != done.PID {
		t.Errorf("agents = %+v, want my agent, then process %d", seen.Agents, done.PID)
	}
	testenv.WaitFor(t, "only one bell is recorded", func() bool { return bells() == 1 })
	s.tmux("kill-window", "-t", "my agent")
	w.until("the window's end", func(g guestproto.Observation) bool { return len(g.Agents) == 1 })
	testenv.WaitFor(t, "no bell is recorded", func() bool { return bells() == 0 })
	s.tmux("kill-window", "-t", "claude")
	w.until("an agent that is gone, and no screen", func(g guestproto.Observation) bool {
		return len(g.Agents) == 1 && g.Agents[0].State == guestproto.AgentGone && g.Window == "" && len(g.Screen) == 0
	})
}

func TestWatchTheCheckout(t *testing.T) {
	g := newFakeGuest(t)
	dir := filepath.Join(g.root, "check out")
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=a", "-c", "user.email=a@example.invalid"}, args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	g.write("check out/a.txt", "1\n2\n3\n")
	g.write("check out/gone.txt", "1\n")
	git("init", "-q", "-b", "main")
	git("add", ".")
	git("commit", "-qm", "one")
	base := git("rev-parse", "HEAD")
	git("update-ref", "refs/remotes/origin/main", base)
	w := g.watch(nil, "--dir", dir, "--base", base)
	sees := func(want guestproto.Changes) {
		t.Helper()
		w.until(fmt.Sprintf("%+v", want), func(g guestproto.Observation) bool { return g.Changes != nil && *g.Changes == want })
	}
	sees(guestproto.Changes{Branch: "main"})
	g.write("check out/a.txt", "1\n2\nthree\nfour\n")
	g.write("check out/new\nfile", "a\nb\nc")
	g.write("check out/bin", "\x00\n\n")
	if err := os.Remove(filepath.Join(dir, "gone.txt")); err != nil {
		t.Fatal(err)
	}
	git("switch", "-qc", "work")
	git("commit", "-qm", "two", "--", "a.txt") // last, because the commit triggers the scan
	sees(guestproto.Changes{Branch: "work", Commits: 1, Files: 4, Insertions: 5, Deletions: 2})
	w.stop()
	if _, err := os.Stat(filepath.Join(dir, ".git/index.lock")); err == nil {
		t.Error(".git/index.lock exists after a watch, want no lock")
	}

	// A clone of an empty repository has no base and no HEAD.
	empty := filepath.Join(g.root, "empty")
	if out, err := exec.Command("git", "init", "-q", "-b", "first", empty).CombinedOutput(); err != nil {
		t.Fatalf("git init: %v: %s", err, out)
	}
	g.write("empty/new", "1\n")
	w = g.watch(nil, "--dir", empty, "--base", "")
	sees(guestproto.Changes{Branch: "first", Files: 1, Insertions: 1})

	if _, errs, code := g.run("", "watch", "--base", "--output=/x"); code != 2 {
		t.Errorf("watch with a bad option: exit %d, %q, want 2", code, errs)
	}
}
