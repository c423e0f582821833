package guestagent_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const taskID = "0123456789ab"

// taskGuest is a fake guest with a checkout, and tasks in it.
type taskGuest struct {
	*fakeGuest
	work string
	n    int
}

func newTaskGuest(t *testing.T) *taskGuest {
	g := &taskGuest{fakeGuest: newFakeGuest(t), work: t.TempDir()}
	t.Cleanup(func() { // no process may run on or write after the test
		for n := 1; n <= g.n; n++ {
			g.run("", "task", "signal", guestproto.TaskName(taskID, n), "KILL")
		}
		testenv.WaitFor(t, "every task has ended", func() bool { return g.runner("") == 0 })
	})
	return g
}

// attempt is one attempt at a task.
type attempt struct {
	*taskGuest
	name, dir string
}

func (g *taskGuest) attempt() attempt {
	g.n++
	name := guestproto.TaskName(taskID, g.n)
	return attempt{taskGuest: g, name: name, dir: filepath.Join(g.root, "var/lib/agent-task", name)}
}

func (a attempt) spec(argv ...string) string {
	a.Helper()
	var b strings.Builder
	if err := (guestproto.TaskStart{Argv: argv, Dir: a.work, Env: map[string]string{"FROM_SPEC": "it's \"quoted\"\nand long"}, Brief: "do it"}).Encode(&b); err != nil {
		a.Fatal(err)
	}
	return b.String()
}

func (a attempt) status(text string) guestproto.TaskStatus {
	a.Helper()
	s, err := guestproto.DecodeTaskStatus(strings.NewReader(text))
	if err != nil {
		a.Fatal(err)
	}
	return s
}

func (a attempt) start(argv ...string) guestproto.TaskStatus {
	a.Helper()
	return a.status(a.ok(a.spec(argv...), "task", "start", a.name))
}

func (a attempt) ask() guestproto.TaskStatus {
	a.Helper()
	return a.status(a.ok("", "task", "status", a.name))
}

func (a attempt) signal(name string) guestproto.TaskStatus {
	a.Helper()
	return a.status(a.ok("", "task", "signal", a.name, name))
}

// end waits until the agent has ended.
func (a attempt) end() guestproto.TaskStatus {
	a.Helper()
	var s guestproto.TaskStatus
	testenv.WaitFor(a.T, a.name+" has ended", func() bool { s = a.ask(); return s.State != guestproto.TaskRunning && s.State != guestproto.TaskNone })
	return s
}

func (a attempt) read(name string) string {
	text, err := os.ReadFile(filepath.Join(a.dir, name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		a.Fatal(err)
	}
	return string(text)
}

// there waits for a file of the checkout.
func (a attempt) there(name string) {
	a.Helper()
	testenv.WaitFor(a.T, name+" exists in the checkout", func() bool { _, err := os.Stat(filepath.Join(a.work, name)); return err == nil })
}

// asJSON formats a status or result for a failure message.
func asJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

func alive(pid string) bool {
	text, err := os.ReadFile("/proc/" + strings.TrimSpace(pid) + "/stat")
	return err == nil && !strings.Contains(string(text), ") Z ")
}

func TestTask(t *testing.T) {
	g := newTaskGuest(t)
	g.write("run/agent/env", "export SECRET='s e c r e t'\nexport EMPTY=''\n")
	for _, step := range []struct {
		name  string
		check func(*testing.T, *taskGuest)
	}{
		{"runs as a login shell would", checkLoginShell},
		{"has only its own environment", checkOwnEnvironment},
		{"runs once", checkRunsOnce},
		{"runs once although its starters die", checkDyingStarters},
		{"reports why it cannot run", checkReasons},
		{"runs a program of its checkout", checkProgramOfCheckout},
		{"ends with all its children", checkChildrenEnd},
		{"leaves no process behind", checkNoneLeft},
		{"may ignore TERM", checkIgnoredTerm},
		{"is not started after a signal", checkSignalFirst},
		{"is lost with its wrapper", checkLostWrapper},
		{"is lost when the VM shuts down", checkShutdown},
	} {
		t.Run(step.name, func(t *testing.T) { step.check(t, g) })
	}
}

// checkLoginShell checks directory, environment, output and exit code of an agent, and that
// no secret is written to the disk.
func checkLoginShell(t *testing.T, g *taskGuest) {
	a := g.attempt()
	if s := a.ask(); s.State != guestproto.TaskNone || s.Result != nil {
		t.Errorf("status before the start = %s, want %s without a result", asJSON(s), guestproto.TaskNone)
	}
	script := `pwd; printf '%s|' "$SECRET" "$EMPTY" "$FROM_SPEC" "$AGENT_TASK" "$AGENT_TASK_ATTEMPT" "$(cat "$AGENT_TASK_BRIEF")" "$@"; readlink /proc/self/fd/0; echo oops >&2; exit 3`
	a.start("sh", "-c", script, "x", "", "a b\n*")
	s := a.end()
	want := fmt.Sprintf("%s\ns e c r e t||it's \"quoted\"\nand long|%s|%d|do it||a b\n*|/dev/null\n", g.work, taskID, g.n)
	if got := a.read("stdout.log"); got != want {
		t.Errorf("stdout = %q, want %q", got, want)
	}
	r := s.Result
	if s.State != guestproto.TaskExited || r == nil || r.ExitCode != 3 || r.Signal != "" || r.Error != "" ||
		r.Stdout != int64(len(want)) || r.Stderr != 5 || r.Ended.Before(r.Started) || r.MaxRSS < 100<<10 {
		t.Errorf("status = %s, want %s with exit code 3, %d bytes of stdout, 5 of stderr, and a plausible time and memory", asJSON(s), guestproto.TaskExited, len(want))
	}
	if got := a.read("stderr.log"); got != "oops\n" {
		t.Errorf("stderr = %q, want %q", got, "oops\n")
	}
	for _, file := range []string{"start.json", "stdout.log", "result.json"} {
		info, err := os.Stat(filepath.Join(a.dir, file))
		if err != nil {
			t.Error(err)
		} else if got := info.Mode().Perm(); got != 0o600 {
			t.Errorf("mode of %s = %v, want %v", file, got, os.FileMode(0o600))
		}
		if strings.Contains(a.read(file), "s e c r e t") && file != "stdout.log" {
			t.Errorf("%s = %q, want it without the secret", file, a.read(file))
		}
	}
}

// checkOwnEnvironment checks that no variable of the wrapper's reaches the agent.
func checkOwnEnvironment(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("env")
	a.end()
	for _, name := range []string{"INVOCATION_ID=", "SSH_CONNECTION=", "_=", "SHLVL="} {
		if strings.Contains("\n"+a.read("stdout.log"), "\n"+name) {
			t.Errorf("environment = %q, want it without %s", a.read("stdout.log"), name)
		}
	}
}

// checkRunsOnce starts an attempt several times, also after it has ended.
func checkRunsOnce(t *testing.T, g *taskGuest) {
	a := g.attempt()
	script := "echo ran >>" + filepath.Join(g.work, "ran") + "; exec sleep 1000"
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() { a.run(a.spec("sh", "-c", script), "task", "start", a.name) })
	}
	all.Wait()
	if s := a.start("sh", "-c", "echo again >>"+filepath.Join(g.work, "ran")); s.State != guestproto.TaskRunning {
		t.Errorf("status after a further start = %s, want %s", asJSON(s), guestproto.TaskRunning)
	}
	if _, _, code := a.run("", "task", "run", a.name); code == 0 {
		t.Error("task run beside a running one: exit 0, want an error")
	}
	a.there("ran")
	a.signal("KILL")
	if s := a.end(); s.Result == nil || s.Result.Signal != "KILL" || s.Result.ExitCode != 137 {
		t.Errorf("status after KILL = %s, want signal KILL, exit code 137", asJSON(s))
	}
	// Nor after it has ended.
	if s := a.start("sh", "-c", script); s.State != guestproto.TaskExited || s.Result.Signal != "KILL" {
		t.Errorf("status after a start of an ended task = %s, want %s with signal KILL", asJSON(s), guestproto.TaskExited)
	}
	if _, _, code := a.run("", "task", "run", a.name); code == 0 {
		t.Error("task run of an ended task: exit 0, want an error")
	}
	if text, err := os.ReadFile(filepath.Join(g.work, "ran")); string(text) != "ran\n" {
		t.Errorf("file that each run appends to = %q, %v, want %q", text, err, "ran\n")
	}
}

// checkDyingStarters kills the command that starts an attempt, each time at another point.
func checkDyingStarters(t *testing.T, g *taskGuest) {
	a := g.attempt()
	out := filepath.Join(g.work, "survived")
	for i := range 8 {
		cmd := exec.Command(g.program, "task", "start", a.name)
		cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+g.root)
		cmd.Stdin = strings.NewReader(a.spec("sh", "-c", "echo once >>"+out))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if i > 0 { // at another place each time
			testenv.WaitFor(t, fmt.Sprintf("start %d has made its files", i), func() bool {
				entries, _ := os.ReadDir(a.dir)
				return len(entries) >= min(i, 5) || !alive(strconv.Itoa(cmd.Process.Pid))
			})
		}
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	}
	a.start("sh", "-c", "echo once >>"+out)
	if s := a.end(); s.Result == nil || s.Result.ExitCode != 0 {
		t.Errorf("status = %s, want exit code 0; log of the wrapper: %s", asJSON(s), a.read("run.log"))
	}
	if text, err := os.ReadFile(out); string(text) != "once\n" {
		t.Errorf("file that each run appends to = %q, %v, want %q", text, err, "once\n")
	}
}

// checkReasons checks the errors of agents, directories and arguments that are wrong.
func checkReasons(t *testing.T, g *taskGuest) {
	for _, c := range []struct {
		argv []string
		code int
		why  string
	}{
		{[]string{"no-such-program"}, 127, "no-such-program: command not found"},
		{[]string{"/etc/passwd"}, 126, "permission denied"},
		{[]string{"./nowhere"}, 126, "no such file"},
	} {
		a := g.attempt()
		a.start(c.argv...)
		if r := a.end().Result; r == nil || r.ExitCode != c.code || !strings.Contains(r.Error, c.why) {
			t.Errorf("result of %q = %s, want exit code %d, error with %q", c.argv, asJSON(r), c.code, c.why)
		}
	}
	nowhere := *g
	nowhere.work = filepath.Join(g.work, "not there")
	a := g.attempt()
	a.ok(attempt{taskGuest: &nowhere}.spec("true"), "task", "start", a.name)
	if r := a.end().Result; r == nil || r.ExitCode != 126 || !strings.Contains(r.Error, "no such file or directory") {
		t.Errorf("result in a missing directory = %s, want exit code 126, error with %q", asJSON(r), "no such file or directory")
	}
	for _, bad := range []string{"", "{}", `{"version":1,"argv":["x"],"dir":"relative"}`} {
		if _, errs, code := a.run(bad, "task", "start", guestproto.TaskName(taskID, 999)); code != 2 || errs == "" {
			t.Errorf("task start with spec %q: exit %d, %q, want exit 2 and a message", bad, code, errs)
		}
	}
	for _, bad := range [][]string{{"start"}, {"start", "../x"}, {"start", taskID}, {"signal", a.name}, {"signal", a.name, "HUP"}, {"signal", a.name, "9"}, {"nonsense", a.name}, {"watch", "--stdout=-1", a.name}, {"watch", "--stdout=x", a.name}} {
		if _, _, code := a.run("", append([]string{"task"}, bad...)...); code != 2 {
			t.Errorf("task %q: exit %d, want 2", bad, code)
		}
	}
}

// checkProgramOfCheckout starts a program by its path in the checkout.
func checkProgramOfCheckout(t *testing.T, g *taskGuest) {
	a := g.attempt()
	if err := os.WriteFile(filepath.Join(g.work, "own.sh"), []byte("#!/bin/sh\necho own\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	a.start("./own.sh")
	if s := a.end(); s.Result.ExitCode != 0 || a.read("stdout.log") != "own\n" {
		t.Errorf("result of ./own.sh = %s, stdout %q, want exit code 0, %q", asJSON(s.Result), a.read("stdout.log"), "own\n")
	}
}

// checkChildrenEnd sends signals to an agent with children that try to escape.
func checkChildrenEnd(t *testing.T, g *taskGuest) {
	for _, name := range []string{"TERM", "KILL"} {
		a := g.attempt()
		// One process in the group, one in its own session, an orphan of the
		// latter, and one without the environment that identifies the agent's
		// processes.
		script := `sleep 1001 & echo $! >p1; setsid sh -c 'sleep 1002 & echo $! >p2; (sleep 1003 & echo $! >p3)' ; env -i setsid sh -c 'echo $$ >p4; exec sleep 1004' & while ! [ -s p4 ]; do sleep 0.01; done; touch up; wait; sleep 1005`
		a.start("sh", "-c", script)
		a.there("up")
		var pids []string
		for _, file := range []string{"p1", "p2", "p3", "p4"} {
			text, err := os.ReadFile(filepath.Join(g.work, file))
			if err != nil || !alive(string(text)) {
				t.Fatalf("process in %s = %q, %v, want a running one", file, text, err)
			}
			pids = append(pids, string(text))
		}
		if s := a.ask(); s.State != guestproto.TaskRunning || s.Memory == 0 {
			t.Errorf("status = %s, want %s with its memory", asJSON(s), guestproto.TaskRunning)
		}
		a.signal(name)
		if s := a.end(); s.Result == nil || s.Result.Signal != name {
			t.Errorf("status after %s = %s, want signal %s", name, asJSON(s), name)
		}
		testenv.WaitFor(t, "all children have ended", func() bool { return !slices.ContainsFunc(pids, alive) })
		for _, file := range []string{"up", "p4"} { // the next iteration waits for these files
			if err := os.Remove(filepath.Join(g.work, file)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// checkNoneLeft checks that a child that ignores TERM ends with its agent.
func checkNoneLeft(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sh", "-c", "setsid sh -c 'trap \"\" TERM; echo $$ >p5; while :; do sleep 0.05; done' & while ! [ -s p5 ]; do sleep 0.01; done")
	if s := a.end(); s.Result == nil || s.Result.ExitCode != 0 {
		t.Errorf("status = %s, want exit code 0", asJSON(s))
	}
	text, err := os.ReadFile(filepath.Join(g.work, "p5"))
	if err != nil || alive(string(text)) {
		t.Errorf("child %q, %v, is running: %t, want that it has ended", text, err, alive(string(text)))
	}
}

// checkIgnoredTerm checks that TERM may be ignored and that KILL may not.
func checkIgnoredTerm(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sh", "-c", `trap 'echo heard' TERM; touch up; while :; do sleep 0.05; done`)
	a.there("up")
	a.signal("TERM")
	testenv.WaitFor(t, "the agent has received TERM", func() bool { return a.read("stdout.log") == "heard\n" })
	if s := a.ask(); s.State != guestproto.TaskRunning {
		t.Errorf("status after an ignored TERM = %s, want %s", asJSON(s), guestproto.TaskRunning)
	}
	a.signal("KILL")
	a.signal("TERM") // does not cancel the KILL
	if s := a.end(); s.Result.Signal != "KILL" {
		t.Errorf("result after KILL and TERM = %s, want signal KILL", asJSON(s.Result))
	}
	if s := a.signal("KILL"); s.State != guestproto.TaskExited {
		t.Errorf("status after a second KILL = %s, want %s", asJSON(s), guestproto.TaskExited)
	}
}

// checkSignalFirst checks that a signal before the start prevents it.
func checkSignalFirst(t *testing.T, g *taskGuest) {
	a := g.attempt()
	if s := a.signal("TERM"); s.State != guestproto.TaskNone {
		t.Errorf("status after a signal to a task that was not started = %s, want %s", asJSON(s), guestproto.TaskNone)
	}
	if _, err := os.Stat(a.dir); err == nil {
		t.Errorf("%s exists, want no directory", a.dir)
	}
	g.write(filepath.Join("var/lib/agent-task", a.name, "signal"), "TERM") // as if the signal arrived in between
	a.start("touch", "too-late")
	if s := a.end(); s.Result == nil || s.Result.Signal != "TERM" || s.Result.ExitCode != 143 {
		t.Errorf("status of a start after TERM = %s, want signal TERM, exit code 143", asJSON(s))
	}
	if _, err := os.Stat(filepath.Join(g.work, "too-late")); err == nil {
		t.Error("the agent ran after TERM, want that it does not")
	}
}

// checkLostWrapper kills the wrapper of an agent.
func checkLostWrapper(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sh", "-c", "echo $$ >p6; touch up6; exec sleep 1006")
	a.there("up6")
	a.killWrapper()
	if s := a.end(); s.State != guestproto.TaskLost || s.Result != nil {
		t.Errorf("status after the wrapper was killed = %s, want %s without a result", asJSON(s), guestproto.TaskLost)
	}
	if s := a.start("touch", "again"); s.State != guestproto.TaskLost {
		t.Errorf("status after a start of a lost task = %s, want %s", asJSON(s), guestproto.TaskLost)
	}
	a.signal("KILL")
	text, err := os.ReadFile(filepath.Join(g.work, "p6"))
	if err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the agent has ended", func() bool { return !alive(string(text)) })
	if _, err := os.Stat(filepath.Join(g.work, "again")); err == nil {
		t.Error("the agent ran again, want that it does not")
	}
}

// checkShutdown ends an attempt as a shutdown does, and continues one from another boot.
func checkShutdown(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sh", "-c", "touch up7; exec sleep 1007")
	a.there("up7")
	// In systemd's order: first the wrapper, then the agent.
	if err := syscall.Kill(a.wrapper(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	testenv.WaitFor(t, "the wrapper has recorded the agent's process", func() bool { return a.read("agent") != "" })
	agent, err := strconv.Atoi(a.read("agent"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(agent, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if s := a.end(); s.State != guestproto.TaskLost || a.read("result.json") != "" {
		t.Errorf("status after a shutdown = %s, result.json %q, want %s and no file", asJSON(s), a.read("result.json"), guestproto.TaskLost)
	}
	// An attempt from another boot is lost too, even if its lock is held.
	b := g.attempt()
	b.start("sh", "-c", "touch up8; exec sleep 1008")
	b.there("up8")
	if err := os.WriteFile(filepath.Join(b.dir, "begun"), []byte("another boot\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s := b.ask(); s.State != guestproto.TaskLost {
		t.Errorf("status of an attempt from another boot = %s, want %s", asJSON(s), guestproto.TaskLost)
	}
}

// runner returns the wrapper process of an attempt, or of any attempt; 0 for none.
func (g *taskGuest) runner(name string) int {
	g.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		g.Fatal(err)
	}
	for _, file := range files {
		if text, _ := os.ReadFile(file); strings.HasPrefix(string(text), g.program+"\x00task\x00run\x00"+name) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				g.Fatal(err)
			}
			return pid
		}
	}
	return 0
}

func (a attempt) wrapper() int {
	a.Helper()
	pid := a.runner(a.name + "\x00")
	if pid == 0 {
		a.Fatalf("no process runs %s, want a wrapper", a.name)
	}
	return pid
}

func (a attempt) killWrapper() {
	a.Helper()
	if err := syscall.Kill(a.wrapper(), syscall.SIGKILL); err != nil {
		a.Fatal(err)
	}
}

// follower is a stream that a test reads at its own pace.
type follower struct {
	attempt
	cmd    *exec.Cmd
	stdin  io.Closer
	next   func() (guestproto.Frame, error, bool)
	out    []byte
	errs   []byte
	status []guestproto.TaskStatus
	failed string
}

func (a attempt) watch(args ...string) *follower {
	a.Helper()
	w := &follower{attempt: a, cmd: exec.Command(a.program, append([]string{"task", "watch"}, append(args, a.name)...)...)}
	w.cmd.Env = append(os.Environ(), "AGENT_GUEST_ROOT="+a.root)
	w.cmd.Stderr = os.Stderr
	var err error
	if w.stdin, err = w.cmd.StdinPipe(); err != nil {
		a.Fatal(err)
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		a.Fatal(err)
	}
	if err := w.cmd.Start(); err != nil {
		a.Fatal(err)
	}
	frames := make(chan guestproto.Frame)
	ended := make(chan error, 1)
	go func() {
		for f, err := range guestproto.Frames(out) {
			if err != nil {
				ended <- err
				break
			}
			f.Data = bytes.Clone(f.Data)
			frames <- f
		}
		close(frames)
	}()
	w.next = func() (guestproto.Frame, error, bool) {
		var f guestproto.Frame
		var ok bool
		select {
		case f, ok = <-frames:
		case <-time.After(2 * time.Minute):
			a.Fatal("no frame within two minutes, want one or the end of the stream")
		}
		select {
		case err := <-ended:
			return f, err, ok
		default:
			return f, nil, ok
		}
	}
	return w
}

// until reads until enough is true, or until the stream ends.
func (w *follower) until(enough func() bool) {
	w.Helper()
	for !enough() {
		f, err, ok := w.next()
		if err != nil {
			w.Fatal(err)
		}
		if !ok {
			return
		}
		switch f.Kind {
		case guestproto.FrameStdout:
			w.out = append(w.out, f.Data...)
		case guestproto.FrameStderr:
			w.errs = append(w.errs, f.Data...)
		case guestproto.FrameStatus:
			w.status = append(w.status, w.attempt.status(string(f.Data)))
		case guestproto.FrameFailure:
			why, err := guestproto.DecodeFailure(f.Data)
			if err != nil {
				w.Fatal(err)
			}
			w.failed = why.Kind
		default:
			w.Fatalf("watch sent a frame %q, want output, a status or a failure", rune(f.Kind))
		}
	}
}

func (w *follower) end() {
	w.Helper()
	w.until(func() bool { return false })
	if err := w.cmd.Wait(); err != nil {
		w.Errorf("task watch: %v", err)
	}
}

func TestTaskWatch(t *testing.T) {
	g := newTaskGuest(t)
	for _, step := range []struct {
		name  string
		check func(*testing.T, *taskGuest)
	}{
		{"sends output as it is written", checkWatchLive},
		{"sends a flood", checkWatchFlood},
		{"ends when the attempt is lost", checkWatchLost},
		{"reports truncated output", checkWatchTruncated},
		{"ends when its reader leaves", checkWatchAbandoned},
		{"takes an invalid result for a loss", checkInvalidResult},
	} {
		t.Run(step.name, func(t *testing.T) { step.check(t, g) })
	}
}

// checkWatchLive reads each part of the output before the next is written.
func checkWatchLive(t *testing.T, g *taskGuest) {
	a := g.attempt()
	if err := syscall.Mkfifo(filepath.Join(g.work, "tell"), 0o600); err != nil {
		t.Fatal(err)
	}
	a.start("sh", "-c", `while read -r line <tell && [ "$line" != end ]; do printf '%s' "$line"; printf '%s' "$line" >&2; done; exit 4`)
	w := a.watch()
	w.until(func() bool { return len(w.status) == 1 })
	pipe, err := os.OpenFile(filepath.Join(g.work, "tell"), os.O_RDWR, 0) // open for both, so that no reader sees the end of the file
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	tell := func(line string) {
		if _, err := pipe.WriteString(line + "\n"); err != nil {
			t.Fatal(err)
		}
	}
	want := ""
	for i := range 20 { // read each part before the next is written
		tell(fmt.Sprint(i, ","))
		want += fmt.Sprint(i, ",")
		w.until(func() bool { return string(w.out) == want && string(w.errs) == want })
	}
	again := a.watch("--stdout=4", fmt.Sprintf("--stderr=%d", len(want)))
	again.until(func() bool { return string(again.out) == want[4:] })
	tell("end")
	for _, w := range []*follower{w, again} {
		w.end()
		last := w.status[len(w.status)-1]
		if last.State != guestproto.TaskExited || last.Result == nil || last.Result.ExitCode != 4 || w.status[0].State != guestproto.TaskRunning {
			t.Errorf("statuses = %s, want %s first, %s with exit code 4 last", asJSON(w.status), guestproto.TaskRunning, guestproto.TaskExited)
		}
	}
	if string(again.errs) != "" {
		t.Errorf("stderr from its end on = %q, want none", again.errs)
	}
	late := a.watch("--max=5")
	late.end()
	if string(late.out) != want[:5] || string(late.errs) != want[:5] || len(late.status) != 1 {
		t.Errorf("watch --max=5: stdout %q, stderr %q, statuses %s, want %q twice and one status", late.out, late.errs, asJSON(late.status), want[:5])
	}
}

// checkWatchFlood reads more output than any buffer holds.
func checkWatchFlood(t *testing.T, g *taskGuest) {
	a := g.attempt()
	const size = 30 << 20
	a.start("sh", "-c", fmt.Sprintf("yes 0123456789 | head -c %d; yes x | head -c 100000 >&2", size))
	w := a.watch()
	w.until(func() bool { return len(w.out) > 0 })
	w.end()
	if len(w.out) != size || len(w.errs) != 100000 || !bytes.Equal(w.out[:22], []byte("0123456789\n0123456789\n")) {
		t.Errorf("watch: %d bytes of stdout that begin with %q, %d of stderr, want %d and %d", len(w.out), w.out[:min(len(w.out), 22)], len(w.errs), size, 100000)
	}
	if r := w.status[len(w.status)-1].Result; r == nil || r.Stdout != size || r.Stderr != 100000 {
		t.Errorf("result = %s, want %d bytes of stdout, 100000 of stderr", asJSON(r), size)
	}
}

// checkWatchLost watches an attempt that is missing, and one whose wrapper is killed.
func checkWatchLost(t *testing.T, g *taskGuest) {
	none := g.attempt().watch()
	none.end()
	if len(none.status) != 1 || none.status[0].State != guestproto.TaskNone {
		t.Errorf("statuses of a missing task = %s, want one, %s", asJSON(none.status), guestproto.TaskNone)
	}
	a := g.attempt()
	a.start("sh", "-c", "echo last words; touch upw; exec sleep 1009")
	a.there("upw")
	w := a.watch()
	w.until(func() bool { return len(w.status) > 0 })
	a.killWrapper()
	w.end() // must end within the test's own timeout, although nothing writes
	if string(w.out) != "last words\n" || w.status[len(w.status)-1].State != guestproto.TaskLost {
		t.Errorf("stdout %q, statuses %s, want %q, last status %s", w.out, asJSON(w.status), "last words\n", guestproto.TaskLost)
	}
}

// checkWatchTruncated truncates the output, and replaces it with a pipe.
func checkWatchTruncated(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sh", "-c", "printf 0123456789; touch upc; exec sleep 1010")
	a.there("upc")
	w := a.watch()
	w.until(func() bool { return len(w.out) == 10 && len(w.status) > 0 })
	if err := os.Truncate(filepath.Join(a.dir, "stdout.log"), 5); err != nil {
		t.Fatal(err)
	}
	w.end()
	if w.failed != guestproto.FailureTruncated {
		t.Errorf("failure of a watch of truncated output = %q, want %q", w.failed, guestproto.FailureTruncated)
	}
	for _, args := range [][]string{{"--stdout=6"}, {"--stderr=1"}} {
		w := a.watch(args...)
		w.end()
		if w.failed != guestproto.FailureTruncated || len(w.out) > 5 {
			t.Errorf("watch %q: failure %q, %d bytes, want %q, at most 5 bytes", args, w.failed, len(w.out), guestproto.FailureTruncated)
		}
	}
	// The watch does not block on a file that is not regular.
	if err := errors.Join(os.Remove(filepath.Join(a.dir, "stdout.log")), syscall.Mkfifo(filepath.Join(a.dir, "stdout.log"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, errs, code := a.run("", "task", "watch", a.name); code == 0 || !strings.Contains(errs, "no longer in a regular file") {
		t.Errorf("task watch of a pipe: exit %d, %q, want an error with %q", code, errs, "no longer in a regular file")
	}
}

// checkWatchAbandoned closes the input of a watch; the agent must continue.
func checkWatchAbandoned(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("sleep", "1011")
	w := a.watch()
	w.until(func() bool { return len(w.status) > 0 })
	if err := w.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	w.end()
	if s := a.ask(); s.State != guestproto.TaskRunning {
		t.Errorf("status after the reader has left = %s, want %s", asJSON(s), guestproto.TaskRunning)
	}
}

// checkInvalidResult replaces the recorded result of an attempt.
func checkInvalidResult(t *testing.T, g *taskGuest) {
	a := g.attempt()
	a.start("true")
	a.end()
	for _, text := range []string{"", "{", `{"exit_code":"0"}`} {
		g.write(filepath.Join("var/lib/agent-task", a.name, "result.json"), text)
		if s := a.ask(); s.State != guestproto.TaskLost {
			t.Errorf("status with result.json %q = %s, want %s", text, asJSON(s), guestproto.TaskLost)
		}
	}
	text, err := json.Marshal(guestproto.TaskResult{ExitCode: 7})
	if err != nil {
		t.Fatal(err)
	}
	g.write(filepath.Join("var/lib/agent-task", a.name, "result.json"), string(text))
	if s := a.ask(); s.State != guestproto.TaskExited || s.Result.ExitCode != 7 {
		t.Errorf("status with a result of exit code 7 = %s, want %s with it", asJSON(s), guestproto.TaskExited)
	}
}
