//go:build fault

// Package fault kills what a task consists of, at every line that it writes to
// the store, and looks whether anything is lost, leaked, or done twice. The VMs
// are fake ones; everything else is the program as it is.
package fault

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "modernc.org/sqlite"
)

var binary string

// What is counted over all tests; the last line tells of it.
var injected, lost, leaked atomic.Int64

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "asz-fault")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "agent-sessionizer")
	code := 1
	if out, err := exec.Command("go", "build", "-tags", "fakevm", "-o", binary, "../../cmd/agent-sessionizer").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the test binary: %v\n%s", err, out)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	fmt.Printf("%d faults injected, %d lost, %d leaked\n", injected.Load(), lost.Load(), leaked.Load())
	if lost.Load()+leaked.Load() > 0 {
		code = 1
	}
	os.Exit(code)
}

// world is a user's account with a repository and fake VMs.
type world struct {
	t    *testing.T
	home string
	env  []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	home, err := os.MkdirTemp("", "f") // short: there are sockets below it
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, home: home, env: []string{
		"HOME=" + home, "PATH=" + filepath.Dir(binary) + ":" + os.Getenv("PATH"), "TMUX_TMPDIR=" + home,
		"AGENT_SESSIONIZER_FAULTS=" + filepath.Join(home, "faults.json"), "AGENT_SESSIONIZER_PREPARE=none",
		"AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_DISK_RESERVE=1MiB", "AGENT_SESSIONIZER_LIMITS_RUNNING=100",
		"GIT_CONFIG_GLOBAL=" + filepath.Join(home, "gitconfig"),
		"GIT_AUTHOR_DATE=2026-01-02T03:04:05Z", "GIT_COMMITTER_DATE=2026-01-02T03:04:05Z",
	}}
	t.Cleanup(w.remove)
	w.write("gitconfig", "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n")
	w.write("repo/input.txt", "as it was\n")
	w.must("git", "init", "-q", "repo")
	w.must("git", "-C", "repo", "add", "-A")
	w.must("git", "-C", "repo", "commit", "-qm", "first")
	return w
}

// remove ends what is left of the world. It may be called twice.
func (w *world) remove() {
	w.endProcesses()
	os.RemoveAll(w.home)
}

func (w *world) write(name, text string) {
	w.t.Helper()
	path := filepath.Join(w.home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) run(env []string, argv ...string) (string, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir, cmd.Env = w.home, append(append([]string{}, w.env...), env...)
	if argv[0] == "agent-sessionizer" {
		cmd.Path, cmd.Err = binary, nil
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%v: %w\n%s", argv, err, stderr.String())
	}
	return string(out), err
}

func (w *world) must(argv ...string) string {
	w.t.Helper()
	out, err := w.run(nil, argv...)
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// processes are those of this world: its home is in their environment.
func (w *world) processes() map[int]string {
	found := map[int]string{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		env, _ := os.ReadFile(filepath.Join(dir, "environ"))
		if !strings.Contains("\x00"+string(env), "\x00HOME="+w.home+"\x00") {
			continue
		}
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && len(args) > 0 {
			found[pid] = strings.ReplaceAll(string(args), "\x00", " ")
		}
	}
	return found
}

func (w *world) endProcesses() {
	for range 50 {
		left := w.processes()
		if len(left) == 0 {
			return
		}
		for pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// A kase is one kind of task and how it ends.
type kase struct {
	name      string
	agent     string // a shell script; each of its runs adds a line to RUNS
	lifecycle string
	running   func(w *world, id string) error // done once, while it runs
	end       string
	runs      int
}

// crash ends the VM as a broken host or a panic would.
func crash(w *world, _ string) error {
	for pid, line := range w.processes() {
		if strings.Contains(line, " fake-vm ") {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	return nil
}

func cancel(w *world, id string) error {
	_, err := w.run(nil, "agent-sessionizer", "task", "cancel", id)
	return err
}

const commit = `git commit -qam "by the agent"`

var cases = []kase{
	{"success", "echo work >>input.txt; " + commit + "; echo more >new.txt; echo done", "", nil, "COMPLETED", 1},
	{"failure", "echo work >>input.txt; exit 3", "", nil, "FAILED", 1},
	{"preserved", "echo work >>input.txt; exit 3", "failure_action: preserve", nil, "FAILED_PRESERVED", 1},
	{"cancel", "echo up; sleep 600", "cancel_grace: 1s", cancel, "CANCELLED", 1},
	{"timeout", "echo up; sleep 600", "timeout: 2s", nil, "FAILED", 1},
	// The VM goes away under the first run; the second is on the same disk.
	{"crash", `echo work >input.txt; [ $(wc -l <"$RUNS") -gt 1 ] || sleep 600; ` + commit, "", crash, "COMPLETED", 2},
}

// manifest is the case's.
func (k kase) manifest(home string) string {
	script, _ := json.Marshal("RUNS=" + home + `/RUNS; echo run >>"$RUNS"; ` + k.agent)
	return fmt.Sprintf(`{"version": "1", "kind": "Task", "metadata": {"name": %q}, "repository": {"url": "./repo"},
"agent": {"kind": "command", "command": ["sh", "-c", %s]}, "lifecycle": {%s}}`, k.name, script, jsonFields(k.lifecycle))
}

func jsonFields(s string) string {
	if s == "" {
		return ""
	}
	key, value, _ := strings.Cut(s, ": ")
	return fmt.Sprintf("%q: %q", key, value)
}

// ending is what is compared between an undisturbed run and a disturbed one.
type ending struct {
	State     string
	Result    string
	ExitCode  int
	Artifacts string
	Runs      int
}

type view struct {
	ID      string
	State   string
	Outcome *struct {
		Result   string
		ExitCode int `json:"exit_code"`
	}
}

func (w *world) view(id string) (v view, err error) {
	out, err := w.run(nil, "agent-sessionizer", "task", "show", "--json", id)
	if err != nil {
		return v, err
	}
	return v, json.Unmarshal([]byte(out), &v)
}

// play runs a case to its end, with kill in the environment of its first command,
// and so of what that starts. Every look at it is a command like a user's, which
// sees to what has died.
func (w *world) play(k kase, kill ...string) (ending, error) {
	w.write("task.json", k.manifest(w.home))
	id := ""
	out, err := w.run(kill, "agent-sessionizer", "task", "submit", "-f", "task.json")
	if err == nil {
		id = strings.TrimSpace(out)
	}
	if id == "" { // killed: either it is in the queue, and everything, or it is nowhere
		var all []view
		list, err := w.run(nil, "agent-sessionizer", "task", "list", "--all", "--json")
		if err != nil {
			return ending{}, err
		}
		if err := json.Unmarshal([]byte(list), &all); err != nil {
			return ending{}, err
		}
		switch len(all) {
		case 0:
			out, err := w.run(nil, "agent-sessionizer", "task", "submit", "-f", "task.json")
			if err != nil {
				return ending{}, err
			}
			id = strings.TrimSpace(out)
		case 1:
			id = all[0].ID
		default:
			return ending{}, fmt.Errorf("one submission made %d tasks", len(all))
		}
	}
	done := k.running == nil
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(30 * time.Millisecond) {
		v, err := w.view(id)
		if err != nil {
			return ending{}, err
		}
		// Once the agent has run, not merely been told to: what it did counts.
		if !done && v.State == "RUNNING" && w.runs() > 0 {
			if err := k.running(w, id); err != nil {
				return ending{}, err
			}
			done = true
		}
		if v.State == "COMPLETED" || v.State == "FAILED" || v.State == "CANCELLED" || v.State == "FAILED_PRESERVED" {
			e, err := w.ending(id, v)
			if err == nil && v.State == "FAILED_PRESERVED" {
				_, err = w.run(nil, "agent-sessionizer", "task", "destroy", "--wait", id)
			}
			return e, err
		}
		if time.Now().After(deadline) {
			return ending{}, fmt.Errorf("task %s is still %s\n%s", id, v.State, w.logs(id))
		}
	}
}

func (w *world) logs(id string) string {
	out, _ := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "events", id)
	keeper, _ := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "keeper", id)
	return out + keeper
}

// ending looks at a task that has ended, and at its events.
func (w *world) ending(id string, v view) (ending, error) {
	e := ending{State: v.State}
	if v.Outcome != nil {
		e.Result, e.ExitCode = v.Outcome.Result, v.Outcome.ExitCode
	}
	e.Runs = w.runs()
	var arts []struct{ Name, SHA256 string }
	out, err := w.run(nil, "agent-sessionizer", "task", "artifacts", "--json", id)
	if err == nil {
		err = json.Unmarshal([]byte(out), &arts)
	}
	if err != nil {
		return e, err
	}
	var names []string
	for _, a := range arts {
		names = append(names, strings.ReplaceAll(a.Name, id, "ID")+" "+a.SHA256)
	}
	sort.Strings(names)
	e.Artifacts = strings.Join(names, "\n")
	return e, w.events(id)
}

// runs is how often the agent was started.
func (w *world) runs() int {
	text, _ := os.ReadFile(filepath.Join(w.home, "RUNS"))
	return strings.Count(string(text), "\n")
}

// events wants them numbered without a gap, and phases that follow each other.
func (w *world) events(id string) error {
	out, err := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "events", "--json", id)
	if err != nil {
		return err
	}
	seq, phase := int64(0), ""
	for line := range strings.Lines(out) {
		var ev struct {
			Seq  int64
			Kind string
			Data struct{ From, To string }
		}
		if err := json.Unmarshal([]byte(line), &ev); err != nil {
			return err
		}
		if seq++; ev.Seq != seq {
			return fmt.Errorf("event %d follows %d", ev.Seq, seq-1)
		}
		if ev.Kind == "phase" {
			if ev.Data.From != phase {
				return fmt.Errorf("event %d goes from %s, where it was %s", ev.Seq, ev.Data.From, phase)
			}
			phase = ev.Data.To
		}
	}
	return nil
}

// leftovers are processes, VMs and files that should not be there any more.
func (w *world) leftovers() (left []string) {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if len(w.processes()) == 0 {
			break
		}
	}
	for pid, line := range w.processes() {
		left = append(left, fmt.Sprintf("process %d %s", pid, line))
	}
	for _, pattern := range []string{".agent-vms/agent-*", ".local/state/agent-sessionizer/sessions/*", ".local/state/agent-sessionizer/tasks/*/outbox/artifacts/.part", ".cache/agent-sessionizer/mirrors/.tmp/*"} {
		found, _ := filepath.Glob(filepath.Join(w.home, pattern))
		left = append(left, found...)
	}
	if out, err := w.run(nil, "agent-sessionizer", "list", "--json"); err != nil || strings.TrimSpace(out) != "[]" {
		left = append(left, "sessions: "+out)
	}
	return left
}

// calmly is how a case ends when nobody disturbs it, and how long that takes.
func calmly(t *testing.T, k kase) (ending, time.Duration) {
	t.Helper()
	w := newWorld(t)
	began := time.Now()
	e, err := w.play(k)
	if err != nil || e.State != k.end || e.Runs != k.runs {
		t.Fatalf("%s, undisturbed: %+v, %v", k.name, e, err)
	}
	took := time.Since(began)
	if left := w.leftovers(); len(left) > 0 {
		t.Fatalf("%s, undisturbed, leaves %v", k.name, left)
	}
	return e, took
}

// disturbed is one run that was disturbed; it must end as if it had not been.
func disturbed(t *testing.T, w *world, what string, got, want ending, err error) {
	injected.Add(1)
	if err != nil || got != want {
		lost.Add(1)
		id, _ := w.run(nil, "sh", "-c", "ls .local/state/agent-sessionizer/tasks")
		t.Errorf("%s: %v\ngot  %+v\nwant %+v\n%s", what, err, got, want, w.logs(strings.TrimSpace(id)))
	}
	if left := w.leftovers(); len(left) > 0 {
		leaked.Add(1)
		t.Errorf("%s leaves %v", what, left)
	}
}

// atOnce is how many worlds live at the same time.
const atOnce = 4

// TestKilledAtEveryWrite kills each kind of process before and after each of its
// writes to the store, in each case; the first process of its kind that gets there.
func TestKilledAtEveryWrite(t *testing.T) {
	all := cases
	if testing.Short() {
		all = cases[:1]
	}
	for _, k := range all {
		want, _ := calmly(t, k)
		for _, process := range []string{"task", "task-keeper", "keeper"} {
			for _, when := range []string{"before", "after"} {
				t.Run(strings.Join([]string{k.name, process, when}, "/"), func(t *testing.T) {
					// Three in a row that were not reached: it never writes so often. One may
					// be missed when a command's look starts the keeper that does the work.
					var missed atomic.Int64
					eachAtOnce(500, func() bool { return missed.Load() >= 3 }, func(n int) {
						w := newWorld(t)
						defer w.remove()
						marker := filepath.Join(w.home, "killed")
						got, err := w.play(k, fmt.Sprintf("AGENT_SESSIONIZER_KILL=%s:%s:%d:%s", process, when, n+1, marker))
						if _, none := os.Stat(marker); none != nil {
							missed.Add(1)
							if err != nil {
								t.Errorf("%s, undisturbed: %v", k.name, err)
							}
							return
						}
						missed.Store(0)
						disturbed(t, w, fmt.Sprintf("%s: %s killed %s its write %d", k.name, process, when, n+1), got, want, err)
					})
				})
			}
		}
	}
}

// eachAtOnce calls f with 0 to n-1, atOnce at a time, until over.
func eachAtOnce(n int, over func() bool, f func(int)) {
	slots := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for i := 0; i < n && !over(); i++ {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			f(i)
		})
	}
	running.Wait()
}

func never() bool { return false }

// some is n, or, of a short run, a few.
func some(n int) int {
	if testing.Short() {
		return (n + 7) / 8
	}
	return n
}

// stand is a task that takes its time, and comes to the same whenever it is begun
// anew.
var stand = kase{"stand", "echo work >input.txt; sleep 1; echo more >new.txt; sleep 1; echo done", "", nil, "COMPLETED", 1}

// TestPowerLoss ends everything at once, at moments all over a task's life. The
// agent may run again, since its VM was gone; the end is the same.
func TestPowerLoss(t *testing.T) {
	want, took := calmly(t, stand)
	moments := some(60)
	eachAtOnce(moments, never, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := took * time.Duration(i) / time.Duration(moments)
		cut := time.AfterFunc(at, func() {
			for range 3 { // those that are being started meanwhile, too
				for pid, line := range w.processes() {
					if !strings.Contains(line, "agent-sessionizer task ") { // ours, which look on
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
		})
		got, err := w.play(stand)
		cut.Stop()
		if got.Runs > 1 {
			got.Runs = want.Runs
		}
		disturbed(t, w, fmt.Sprintf("power lost after %v", at), got, want, err)
	})
}

// TestKilledAtMoments kills each kind of process at moments all over a task's life,
// also at those at which it writes nothing.
func TestKilledAtMoments(t *testing.T) {
	want, took := calmly(t, stand)
	kinds := []string{" task-keeper ", " keeper ", " gateway "}
	each := some(16)
	eachAtOnce(len(kinds)*each, never, func(i int) {
		kind, at := kinds[i%len(kinds)], took*time.Duration(i/len(kinds)+1)/time.Duration(each+1)
		w := newWorld(t)
		defer w.remove()
		kill := time.AfterFunc(at, func() {
			for pid, line := range w.processes() {
				if strings.Contains(line, kind) {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		})
		got, err := w.play(stand)
		kill.Stop()
		if kind == " gateway " && got.Runs == 2 {
			got.Runs = want.Runs // its VM had to be started anew
		}
		disturbed(t, w, fmt.Sprintf("%s killed after %v", kind, at), got, want, err)
	})
}

// TestStopped stops each kind of process for a while, at moments all over a task's
// life: a host that swaps, a debugger, a laptop whose lid is closed.
func TestStopped(t *testing.T) {
	want, took := calmly(t, stand)
	kinds := []string{" task-keeper ", " keeper ", " fake-vm ", " gateway ", "agent-guest task run"}
	each := some(8)
	eachAtOnce(len(kinds)*each, never, func(i int) {
		kind, at := kinds[i%len(kinds)], took*time.Duration(i/len(kinds)+1)/time.Duration(each+1)
		w := newWorld(t)
		defer w.remove()
		stop := time.AfterFunc(at, func() {
			for pid, line := range w.processes() {
				if strings.Contains(line, kind) {
					_ = syscall.Kill(pid, syscall.SIGSTOP)
					time.AfterFunc(2*time.Second, func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
				}
			}
		})
		got, err := w.play(stand)
		stop.Stop()
		disturbed(t, w, fmt.Sprintf("%s stopped after %v", kind, at), got, want, err)
	})
}

// TestBusyStore holds the store's lock for seconds, at moments all over a task's life.
func TestBusyStore(t *testing.T) {
	want, took := calmly(t, stand)
	moments := some(20)
	eachAtOnce(moments, never, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := took * time.Duration(i) / time.Duration(moments)
		held := make(chan error, 1)
		hold := time.AfterFunc(at, func() { held <- w.holdStore(3 * time.Second) })
		got, err := w.play(stand)
		if !hold.Stop() {
			if herr := <-held; herr != nil {
				t.Log(herr)
			}
		}
		disturbed(t, w, fmt.Sprintf("store held after %v", at), got, want, err)
	})
}

// holdStore keeps everybody else from writing.
func (w *world) holdStore(d time.Duration) error {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(w.home, ".local/state/agent-sessionizer/store.db")+"?_txlock=immediate&_pragma=busy_timeout(20000)&mode=rw")
	if err != nil {
		return err
	}
	defer db.Close()
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	time.Sleep(d) // that is what is tested
	return tx.Rollback()
}
