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
		waitFor(t, func() bool { return g.runner("") == 0 })
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
	waitFor(a.T, func() bool { s = a.ask(); return s.State != guestproto.TaskRunning && s.State != guestproto.TaskNone })
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
	waitFor(a.T, func() bool { _, err := os.Stat(filepath.Join(a.work, name)); return err == nil })
}

func alive(pid string) bool {
	text, err := os.ReadFile("/proc/" + strings.TrimSpace(pid) + "/stat")
	return err == nil && !strings.Contains(string(text), ") Z ")
}

func TestTask(t *testing.T) {
	g := newTaskGuest(t)
	g.write("run/agent/env", "export SECRET='s e c r e t'\nexport EMPTY=''\n")

	t.Run("runs as a login shell would", func(t *testing.T) {
		a := g.attempt()
		if s := a.ask(); s.State != guestproto.TaskNone || s.Result != nil {
			t.Errorf("before: %+v", s)
		}
		script := `pwd; printf '%s|' "$SECRET" "$EMPTY" "$FROM_SPEC" "$AGENT_TASK" "$AGENT_TASK_ATTEMPT" "$(cat "$AGENT_TASK_BRIEF")" "$@"; readlink /proc/self/fd/0; echo oops >&2; exit 3`
		a.start("sh", "-c", script, "x", "", "a b\n*")
		s := a.end()
		want := fmt.Sprintf("%s\ns e c r e t||it's \"quoted\"\nand long|%s|%d|do it||a b\n*|/dev/null\n", g.work, taskID, g.n)
		if got := a.read("stdout.log"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		r := s.Result
		if s.State != guestproto.TaskExited || r == nil || r.ExitCode != 3 || r.Signal != "" || r.Error != "" || a.read("stderr.log") != "oops\n" ||
			r.Stdout != int64(len(want)) || r.Stderr != 5 || r.Ended.Before(r.Started) || r.MaxRSS < 100<<10 {
			t.Errorf("%+v %+v", s, r)
		}
		for _, file := range []string{"start.json", "stdout.log", "result.json"} {
			if info, err := os.Stat(filepath.Join(a.dir, file)); err != nil || info.Mode().Perm() != 0o600 {
				t.Error(info, err)
			}
			if strings.Contains(a.read(file), "s e c r e t") && file != "stdout.log" {
				t.Error("a secret is on the disk:", file)
			}
		}
	})

	t.Run("has its own environment only", func(t *testing.T) {
		a := g.attempt()
		a.start("env")
		a.end()
		for _, name := range []string{"INVOCATION_ID=", "SSH_CONNECTION=", "_=", "SHLVL="} {
			if strings.Contains("\n"+a.read("stdout.log"), "\n"+name) {
				t.Errorf("%q of something else in %s", name, a.read("stdout.log"))
			}
		}
	})

	t.Run("once", func(t *testing.T) {
		a := g.attempt()
		script := "echo ran >>" + filepath.Join(g.work, "ran") + "; exec sleep 1000"
		var all sync.WaitGroup
		for range 5 {
			all.Go(func() { a.run(a.spec("sh", "-c", script), "task", "start", a.name) })
		}
		all.Wait()
		if s := a.start("sh", "-c", "echo again >>"+filepath.Join(g.work, "ran")); s.State != guestproto.TaskRunning {
			t.Errorf("%+v", s)
		}
		if _, _, code := a.run("", "task", "run", a.name); code == 0 {
			t.Error("a second one runs beside the first")
		}
		a.there("ran")
		a.signal("KILL")
		if s := a.end(); s.Result == nil || s.Result.Signal != "KILL" || s.Result.ExitCode != 137 {
			t.Errorf("%+v", s)
		}
		// Nor after it has ended.
		if s := a.start("sh", "-c", script); s.State != guestproto.TaskExited || s.Result.Signal != "KILL" {
			t.Errorf("%+v", s)
		}
		if _, _, code := a.run("", "task", "run", a.name); code == 0 {
			t.Error("it runs again")
		}
		if text, err := os.ReadFile(filepath.Join(g.work, "ran")); string(text) != "ran\n" {
			t.Errorf("%q, %v", text, err)
		}
	})

	t.Run("though whoever started it died", func(t *testing.T) {
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
				waitFor(t, func() bool {
					entries, _ := os.ReadDir(a.dir)
					return len(entries) >= min(i, 5) || !alive(strconv.Itoa(cmd.Process.Pid))
				})
			}
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
			_ = cmd.Wait()
		}
		a.start("sh", "-c", "echo once >>"+out)
		if s := a.end(); s.Result == nil || s.Result.ExitCode != 0 {
			t.Errorf("%+v, %s", s, a.read("run.log"))
		}
		if text, err := os.ReadFile(out); string(text) != "once\n" {
			t.Errorf("%q, %v", text, err)
		}
	})

	t.Run("or says why not", func(t *testing.T) {
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
				t.Errorf("%q: %+v", c.argv, r)
			}
		}
		nowhere := *g
		nowhere.work = filepath.Join(g.work, "not there")
		a := g.attempt()
		a.ok(attempt{taskGuest: &nowhere}.spec("true"), "task", "start", a.name)
		if r := a.end().Result; r == nil || r.ExitCode != 126 || !strings.Contains(r.Error, "no such file or directory") {
			t.Errorf("%+v", r)
		}
		for _, bad := range []string{"", "{}", `{"version":1,"argv":["x"],"dir":"relative"}`} {
			if _, errs, code := a.run(bad, "task", "start", guestproto.TaskName(taskID, 999)); code != 2 || errs == "" {
				t.Errorf("%q: %d %s", bad, code, errs)
			}
		}
		for _, bad := range [][]string{{}, {"start"}, {"start", "../x"}, {"start", taskID}, {"signal", a.name}, {"signal", a.name, "HUP"}, {"signal", a.name, "9"}, {"nonsense", a.name}, {"watch", "--stdout=-1", a.name}, {"watch", "--stdout=x", a.name}} {
			if _, _, code := a.run("", append([]string{"task"}, bad...)...); code != 2 {
				t.Errorf("%q: %d", bad, code)
			}
		}
	})

	t.Run("from its checkout", func(t *testing.T) {
		a := g.attempt()
		if err := os.WriteFile(filepath.Join(g.work, "own.sh"), []byte("#!/bin/sh\necho own\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		a.start("./own.sh")
		if s := a.end(); s.Result.ExitCode != 0 || a.read("stdout.log") != "own\n" {
			t.Errorf("%+v", s.Result)
		}
	})

	t.Run("ends with all its children", func(t *testing.T) {
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
					t.Fatal(file, string(text), err)
				}
				pids = append(pids, string(text))
			}
			if s := a.ask(); s.State != guestproto.TaskRunning || s.Memory == 0 {
				t.Errorf("%+v", s)
			}
			a.signal(name)
			if s := a.end(); s.Result == nil || s.Result.Signal != name {
				t.Errorf("%+v", s.Result)
			}
			waitFor(t, func() bool { return !slices.ContainsFunc(pids, alive) })
			for _, file := range []string{"up", "p4"} { // the next iteration waits for these files
				if err := os.Remove(filepath.Join(g.work, file)); err != nil {
					t.Fatal(err)
				}
			}
		}
	})

	t.Run("leaves none behind", func(t *testing.T) {
		a := g.attempt()
		a.start("sh", "-c", "setsid sh -c 'trap \"\" TERM; echo $$ >p5; while :; do sleep 0.05; done' & while ! [ -s p5 ]; do sleep 0.01; done")
		if s := a.end(); s.Result == nil || s.Result.ExitCode != 0 {
			t.Errorf("%+v", s)
		}
		text, err := os.ReadFile(filepath.Join(g.work, "p5"))
		if err != nil || alive(string(text)) {
			t.Errorf("%s lives, %v", text, err)
		}
	})

	t.Run("may not heed TERM", func(t *testing.T) {
		a := g.attempt()
		a.start("sh", "-c", `trap 'echo heard' TERM; touch up; while :; do sleep 0.05; done`)
		a.there("up")
		a.signal("TERM")
		waitFor(t, func() bool { return a.read("stdout.log") == "heard\n" })
		if s := a.ask(); s.State != guestproto.TaskRunning {
			t.Errorf("%+v", s)
		}
		a.signal("KILL")
		a.signal("TERM") // does not cancel the KILL
		if s := a.end(); s.Result.Signal != "KILL" {
			t.Errorf("%+v", s.Result)
		}
		if s := a.signal("KILL"); s.State != guestproto.TaskExited {
			t.Errorf("%+v", s)
		}
	})

	t.Run("is not started after a signal", func(t *testing.T) {
		a := g.attempt()
		if s := a.signal("TERM"); s.State != guestproto.TaskNone {
			t.Errorf("%+v", s)
		}
		if _, err := os.Stat(a.dir); err == nil {
			t.Error("a directory was made")
		}
		g.write(filepath.Join("var/lib/agent-task", a.name, "signal"), "TERM") // as if the signal arrived in between
		a.start("touch", "too-late")
		if s := a.end(); s.Result == nil || s.Result.Signal != "TERM" || s.Result.ExitCode != 143 {
			t.Errorf("%+v", s.Result)
		}
		if _, err := os.Stat(filepath.Join(g.work, "too-late")); err == nil {
			t.Error("it ran")
		}
	})

	t.Run("is lost with what runs it", func(t *testing.T) {
		a := g.attempt()
		a.start("sh", "-c", "echo $$ >p6; touch up6; exec sleep 1006")
		a.there("up6")
		a.killWrapper()
		if s := a.end(); s.State != guestproto.TaskLost || s.Result != nil {
			t.Errorf("%+v", s)
		}
		if s := a.start("touch", "again"); s.State != guestproto.TaskLost {
			t.Errorf("%+v", s)
		}
		a.signal("KILL")
		text, err := os.ReadFile(filepath.Join(g.work, "p6"))
		if err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return !alive(string(text)) })
		if _, err := os.Stat(filepath.Join(g.work, "again")); err == nil {
			t.Error("it ran")
		}
	})

	t.Run("is lost when the machine goes down", func(t *testing.T) {
		a := g.attempt()
		a.start("sh", "-c", "touch up7; exec sleep 1007")
		a.there("up7")
		// In systemd's order: first the wrapper, then the agent.
		if err := syscall.Kill(a.wrapper(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		waitFor(t, func() bool { return a.read("agent") != "" })
		agent, err := strconv.Atoi(a.read("agent"))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(agent, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if s := a.end(); s.State != guestproto.TaskLost || a.read("result.json") != "" {
			t.Errorf("%+v", s)
		}
		// An attempt from another boot is lost too, even if its lock is held.
		b := g.attempt()
		b.start("sh", "-c", "touch up8; exec sleep 1008")
		b.there("up8")
		if err := os.WriteFile(filepath.Join(b.dir, "begun"), []byte("another boot\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if s := b.ask(); s.State != guestproto.TaskLost {
			t.Errorf("%+v", s)
		}
	})
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
		a.Fatal("nothing runs the agent")
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
			a.Fatal("nothing comes")
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
			w.Fatalf("a frame %q", rune(f.Kind))
		}
	}
}

func (w *follower) end() {
	w.Helper()
	w.until(func() bool { return false })
	if err := w.cmd.Wait(); err != nil {
		w.Error(err)
	}
}

func TestTaskWatch(t *testing.T) {
	g := newTaskGuest(t)

	t.Run("as it comes", func(t *testing.T) {
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
				t.Errorf("%+v", w.status)
			}
		}
		if string(again.errs) != "" {
			t.Errorf("%q", again.errs)
		}
		late := a.watch("--max=5")
		late.end()
		if string(late.out) != want[:5] || string(late.errs) != want[:5] || len(late.status) != 1 {
			t.Errorf("%q %q %+v", late.out, late.errs, late.status)
		}
	})

	t.Run("of a flood", func(t *testing.T) {
		a := g.attempt()
		const size = 30 << 20
		a.start("sh", "-c", fmt.Sprintf("yes 0123456789 | head -c %d; yes x | head -c 100000 >&2", size))
		w := a.watch()
		w.until(func() bool { return len(w.out) > 0 })
		w.end()
		if len(w.out) != size || len(w.errs) != 100000 || !bytes.Equal(w.out[:22], []byte("0123456789\n0123456789\n")) {
			t.Errorf("%d and %d bytes", len(w.out), len(w.errs))
		}
		if r := w.status[len(w.status)-1].Result; r == nil || r.Stdout != size || r.Stderr != 100000 {
			t.Errorf("%+v", r)
		}
	})

	t.Run("of one that is no more", func(t *testing.T) {
		none := g.attempt().watch()
		none.end()
		if len(none.status) != 1 || none.status[0].State != guestproto.TaskNone {
			t.Errorf("%+v", none.status)
		}
		a := g.attempt()
		a.start("sh", "-c", "echo last words; touch upw; exec sleep 1009")
		a.there("upw")
		w := a.watch()
		w.until(func() bool { return len(w.status) > 0 })
		a.killWrapper()
		w.end() // must end within the test's own timeout, although nothing writes
		if string(w.out) != "last words\n" || w.status[len(w.status)-1].State != guestproto.TaskLost {
			t.Errorf("%q %+v", w.out, w.status)
		}
	})

	t.Run("of what was cut", func(t *testing.T) {
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
			t.Errorf("%q", w.failed)
		}
		for _, args := range [][]string{{"--stdout=6"}, {"--stderr=1"}} {
			w := a.watch(args...)
			w.end()
			if w.failed != guestproto.FailureTruncated || len(w.out) > 5 {
				t.Errorf("%q: %q", args, w.failed)
			}
		}
		// The watch does not block on a file that is not regular.
		if err := errors.Join(os.Remove(filepath.Join(a.dir, "stdout.log")), syscall.Mkfifo(filepath.Join(a.dir, "stdout.log"), 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, errs, code := a.run("", "task", "watch", a.name); code == 0 || !strings.Contains(errs, "no longer in a regular file") {
			t.Errorf("%d %s", code, errs)
		}
	})

	t.Run("until nobody reads", func(t *testing.T) {
		a := g.attempt()
		a.start("sleep", "1011")
		w := a.watch()
		w.until(func() bool { return len(w.status) > 0 })
		if err := w.stdin.Close(); err != nil {
			t.Fatal(err)
		}
		w.end()
		if s := a.ask(); s.State != guestproto.TaskRunning {
			t.Errorf("%+v", s)
		}
	})

	t.Run("of what was written down badly", func(t *testing.T) {
		a := g.attempt()
		a.start("true")
		a.end()
		for _, text := range []string{"", "{", `{"exit_code":"0"}`} {
			g.write(filepath.Join("var/lib/agent-task", a.name, "result.json"), text)
			if s := a.ask(); s.State != guestproto.TaskLost {
				t.Errorf("%q: %+v", text, s)
			}
		}
		text, err := json.Marshal(guestproto.TaskResult{ExitCode: 7})
		if err != nil {
			t.Fatal(err)
		}
		g.write(filepath.Join("var/lib/agent-task", a.name, "result.json"), string(text))
		if s := a.ask(); s.State != guestproto.TaskExited || s.Result.ExitCode != 7 {
			t.Errorf("%+v", s)
		}
	})
}
