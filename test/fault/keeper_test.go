//go:build fault

// Package fault kills the processes of a task at every line that they write to the
// store and to files. It also takes away what a task depends on: disk space, the
// clock, its guest, and the connections to it. Then it checks that nothing is lost,
// leaked, or done twice. The VMs are fake; everything else is the real program.
package fault

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "modernc.org/sqlite"
)

// A kase is one kind of task and how it ends.
type kase struct {
	name      string
	agent     string // a shell script; each of its runs adds a line to RUNS
	lifecycle string
	running   func(w *world, id string) error // called once, while the task runs
	end       string
	runs      int
}

// crash ends the VM as a broken host or a panic would.
func crash(w *world, _ string) error {
	w.vanish()
	return nil
}

func cancel(w *world, id string) error {
	_, err := w.run(nil, "agent-sessionizer", "task", "cancel", id)
	return err
}

// cancelTree cancels the task when the leaf below it runs, and waits until all have ended. A cancel whose
// process is killed is repeated if it had no effect.
func cancelTree(w *world, id string) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		out, err := w.run(nil, "agent-sessionizer", "task", "list", "--all", "--json")
		if err != nil {
			return err
		}
		var all []view
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			return err
		}
		states := map[string]string{}
		for _, v := range all {
			if states[v.Name] != "" {
				return fmt.Errorf("one submission made two tasks %s", v.Name)
			}
			states[v.Name] = v.State
			if v.ID == id && v.Desired == "run" && states["leaf"] == "RUNNING" { // the newest is listed first
				w.begin()
				_, err := w.run(w.plan, "agent-sessionizer", "task", "cancel", id)
				if err != nil && !strings.Contains(err.Error(), "signal: killed") {
					return err
				}
			}
		}
		if states["leaf"] == "CANCELLED" && states["middle"] == "CANCELLED" && states["cascade"] == "CANCELLED" {
			w.finish()
			for _, v := range all {
				if err := w.events(v.ID); err != nil {
					return fmt.Errorf("%s: %w", v.Name, err)
				}
			}
			return nil
		}
	}
	return errors.New("the subtasks do not end with their task")
}

const guestAgent = `"$AGENT_GUEST_ROOT/usr/local/bin/agent-guest"`

// With its own identity: a fake guest does not know the host's user.
const commit = `git -c user.name=Agent -c user.email=agent@example.invalid commit -qam "by the agent"`

var cases = []kase{
	{"success", "echo work >>input.txt; " + commit + "; echo more >new.txt; echo done", "", nil, "COMPLETED", 1},
	{"failure", "echo work >>input.txt; exit 3", "", nil, "FAILED", 1},
	{"preserved", "echo work >>input.txt; exit 3", "failure_action: preserve", nil, "FAILED_PRESERVED", 1},
	{"cancel", "echo up; sleep 600", "cancel_grace: 1s", cancel, "CANCELLED", 1},
	{"timeout", "echo up; sleep 600", "timeout: 2s", nil, "FAILED", 1},
	{"subtasks", `id=$(` + guestAgent + ` task submit -- sh -c "echo child >child.txt"); ` + guestAgent + ` task wait "$id" || exit 9
` + guestAgent + ` task artifacts "$id" --get untracked/child.txt >>input.txt; [ $(` + guestAgent + ` task list | wc -l) = 1 ] || exit 8; ` + commit, "", nil, "COMPLETED", 1},
	cascade,
	// The VM goes away during the first run; the second run uses the same disk.
	{"crash", `echo work >input.txt; [ $(wc -l <"$RUNS") -gt 1 ] || exec sleep 600; ` + commit, "", crash, "COMPLETED", 2},
}

// cascade is a task with a subtask that has a subtask. It is cancelled.
var cascade = kase{"cascade", guestAgent + ` task submit --name middle -- sh -c '` + guestAgent + ` task submit --name leaf -- sleep 600; sleep 600'; sleep 600`, "cancel_grace: 1s", cancelTree, "CANCELLED", 1}

// manifest returns the manifest of the case.
func (k kase) manifest(home string) string {
	script, _ := json.Marshal("RUNS=" + home + `/RUNS; echo run >>"$RUNS"; ` + k.agent)
	return fmt.Sprintf(`{"version": "1", "kind": "Task", "metadata": {"name": %q}, "repository": {"url": "./repo"}, "vm": {"cpus": 1, "memory": "512M", "disk": "4G"},
"agent": {"kind": "command", "command": ["sh", "-c", %s]}, "lifecycle": {%s}}`, k.name, script, jsonFields(k.lifecycle))
}

func jsonFields(s string) string {
	if s == "" || s[0] == '"' { // it is JSON already
		return s
	}
	key, value, _ := strings.Cut(s, ": ")
	return fmt.Sprintf("%q: %q", key, value)
}

// ending is what is compared between an undisturbed and a disturbed run.
type ending struct {
	State     string
	Result    string
	ExitCode  int
	Artifacts string
	Runs      int
}

type view struct {
	ID      string
	Name    string
	State   string
	Desired string
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

// play runs a case to its end. kill is in the environment of its first command, and
// therefore of the processes that the command starts. Each check is a command like a
// user's, which restarts what has died.
func (w *world) play(k kase, kill ...string) (ending, error) {
	w.write("task.json", k.manifest(w.home))
	id := ""
	out, err := w.run(kill, "agent-sessionizer", "task", "submit", "-f", "task.json")
	if err == nil {
		id = strings.TrimSpace(out)
	} else if ill := w.ill.Load(); ill > 0 {
		if !strings.Contains(err.Error(), "exit status 5") || !strings.Contains(err.Error(), "df -h") {
			return ending{}, fmt.Errorf("on a full disk: %w", err)
		}
		w.wait("the host to be well", func() bool { return w.ill.Load()%2 == 0 })
	}
	if id == "" { // killed: the task is either completely in the queue or nowhere
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
			if left, _ := os.ReadDir(filepath.Join(w.state(), "agent-sessionizer/tasks")); len(left) > 0 && w.full {
				return ending{}, fmt.Errorf("a task that was refused left %v", left)
			}
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
	return w.follow(k, id)
}

// follow watches a task until its end; with id "" it is the only task.
func (w *world) follow(k kase, id string) (ending, error) {
	if id == "" {
		dirs, _ := os.ReadDir(filepath.Join(w.state(), "agent-sessionizer/tasks"))
		if len(dirs) != 1 {
			return ending{}, fmt.Errorf("there are %d tasks", len(dirs))
		}
		id = dirs[0].Name()
	}
	done := k.running == nil
	for deadline := time.Now().Add(patience); ; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			return ending{}, fmt.Errorf("task %s does not end\n%s", id, w.logs(id))
		}
		ill := w.ill.Load()
		v, err := w.view(id)
		if err != nil {
			if now := w.ill.Load(); now%2 == 1 || now != ill {
				continue
			}
			return ending{}, err
		}
		// Only after the agent has started to run, because its work counts.
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
	}
}

func (w *world) logs(id string) string {
	out, _ := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "events", id)
	keeper, _ := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "keeper", id)
	return out + keeper
}

// ending returns the result of a task that has ended, and checks its events.
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
	if err := w.checkAnswer(); err != nil {
		return e, err
	}
	return e, w.events(id)
}

// runs returns how often the agent was started.
func (w *world) runs() int {
	text, _ := os.ReadFile(filepath.Join(w.home, "RUNS"))
	return strings.Count(string(text), "\n")
}

// events checks that the events are numbered without a gap, and that the phases
// follow each other. After the outcome is decided, no phase may occur in which the
// agent runs.
func (w *world) events(id string) error {
	out, err := w.run(nil, "agent-sessionizer", "task", "logs", "--of", "events", "--json", id)
	if err != nil {
		return err
	}
	seq, phase, decided := int64(0), "", false
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
			if phase = ev.Data.To; decided && slices.Contains([]string{"STAGING", "PROVISIONING", "READY", "RUNNING"}, phase) {
				return fmt.Errorf("event %d: %s, after its outcome", ev.Seq, phase)
			}
		}
		decided = decided || ev.Kind == "outcome"
	}
	return nil
}

// leftovers returns processes, VMs and files that should no longer exist.
func (w *world) leftovers() (left []string) {
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if len(w.processes()) == 0 {
			break
		}
	}
	for pid, line := range w.processes() {
		left = append(left, fmt.Sprintf("process %d %s", pid, line))
	}
	for _, pattern := range []string{".agent-vms/agent-*", ".agent-vms/*base-*", ".local/state/agent-sessionizer/bases/*", ".local/state/agent-sessionizer/sessions/*", ".local/state/agent-sessionizer/tasks/*/outbox/artifacts/.part", ".local/state/agent-sessionizer/tasks/*/outbox/.*.tmp", ".cache/agent-sessionizer/mirrors/.tmp/*", "tmp/*"} {
		found, _ := filepath.Glob(filepath.Join(w.home, pattern))
		left = append(left, found...)
	}
	if out, err := w.run(nil, "agent-sessionizer", "list", "--json"); err != nil || strings.TrimSpace(out) != "[]" {
		left = append(left, "sessions: "+out)
	}
	return left
}

type calmRun struct {
	ending ending
	took   time.Duration
	marks  map[string]int // how many marks a command's process reaches, by "COMMAND MARK" and "COMMAND#K MARK"
	// How many of them it had reached when world.begin and world.finish were called.
	begun, finished map[string]int
}

var (
	calmMu sync.Mutex
	calm   = map[string]calmRun{}
)

// calmly runs a case without disturbance.
func calmly(t *testing.T, k kase) calmRun {
	t.Helper()
	calmMu.Lock()
	defer calmMu.Unlock()
	if c, ok := calm[k.name]; ok {
		return c
	}
	w := newWorld(t)
	defer w.remove()
	began := time.Now()
	told := filepath.Join(w.home, "marks")
	w.env = append(w.env, "AGENT_SESSIONIZER_CRASH=:::tell:"+told)
	c := calmRun{}
	w.begin = func() { c.begun = countMarks(t, told) }
	w.finish = func() { c.finished = countMarks(t, told) }
	e, err := w.play(k)
	if err != nil || e.State != k.end || e.Runs != k.runs {
		t.Fatalf("%s, undisturbed = %+v, %v, want %s after %d runs", k.name, e, err, k.end, k.runs)
	}
	c.ending, c.took = e, time.Since(began)
	if left := w.leftovers(); len(left) > 0 {
		t.Fatalf("%s, undisturbed: leftovers = %v, want none", k.name, left)
	}
	c.marks = countMarks(t, told)
	calm[k.name] = c
	return c
}

// countMarks reads what processes reported, and returns the most that one process reached of each mark.
func countMarks(t *testing.T, told string) map[string]int {
	t.Helper()
	text, err := os.ReadFile(told)
	if err != nil {
		t.Fatal(err)
	}
	marks, each, order := map[string]int{}, map[string]int{}, map[string][]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line) // command, mark, pid
		if !slices.Contains(order[f[0]], f[2]) {
			order[f[0]] = append(order[f[0]], f[2])
		}
		each[line]++
		for _, process := range []string{f[0], fmt.Sprintf("%s#%d", f[0], slices.Index(order[f[0]], f[2])+1)} {
			place := process + " " + f[1]
			marks[place] = max(marks[place], each[line])
		}
	}
	return marks
}

// disturbed checks one disturbed run, which must end like an undisturbed one.
func disturbed(t *testing.T, w *world, what string, got, want ending, err error) {
	injected.Add(1)
	if err != nil || got != want {
		lost.Add(1)
		id, _ := w.run(nil, "sh", "-c", "ls .local/state/agent-sessionizer/tasks")
		t.Errorf("%s = %+v, %v, want %+v\n%s", what, got, err, want, w.logs(strings.TrimSpace(id)))
	}
	if left := w.leftovers(); len(left) > 0 {
		leaked.Add(1)
		t.Errorf("%s: leftovers = %v, want none", what, left)
	}
}

// atOnce is the number of concurrent worlds.
const atOnce = 6

// These are the marks at which a process can be killed or stopped; package crash
// defines them.
var (
	commits = []string{"before-commit", "after-commit"}
	files   = []string{"before-file", "after-file"}
)

// trouble is a fault at a mark that a process reaches.
type trouble struct {
	name  string
	kase  kase
	who   []string       // the commands; the first process of each that gets there, or with #K its Kth process
	marks []string       // the marks
	step  int            // 1 for each such mark, 2 for every second one, and so on
	from  int            // the first mark to use; 0 is the first
	core  bool           // only marks between the case's calls of world.begin and world.finish
	ready func(w *world) // before the task is submitted; may be nil
	act   func(w *world) // while the process is stopped there; nil kills it
	may   func(got *ending, want ending)
	check func(w *world) error // after the task's end
}

// everywhere runs a case once for each mark that its processes reach, with the fault
// there.
func (x trouble) everywhere(t *testing.T) {
	t.Run(x.name+"/"+x.kase.name, func(t *testing.T) {
		calm := calmly(t, x.kase)
		type place struct {
			process, mark string
			n             int
		}
		var places []place
		for _, process := range x.who {
			came := 0
			for _, mark := range x.marks {
				most := calm.marks[process+" "+mark]
				came += most
				from := x.from
				if x.core { // a run differs from another by a mark or two
					from += max(calm.begun[process+" "+mark]-2, 0)
					most = min(most, calm.finished[process+" "+mark]+2)
				}
				for n := from + 1; n <= most; n += x.step {
					places = append(places, place{process, mark, n})
				}
			}
			if came == 0 {
				t.Errorf("%s came to none of the marks %v, want some", process, x.marks)
			}
		}
		came := atomic.Int64{}
		defer func() { t.Logf("%d marks, %d faults", len(places), came.Load()) }()
		eachAtOnce(len(places), func(i int) {
			p := places[i]
			w := newWorld(t)
			defer w.remove()
			if x.ready != nil {
				x.ready(w)
			}
			stood := w.breakAt(p.process, p.mark, p.n, x.act)
			w.plan = []string{stood.env}
			got, err := w.play(x.kase, stood.env)
			// A mark may be missed: how often a keeper writes also depends on timing,
			// and a check may have started the keeper that does the work.
			if !stood.came() {
				if err != nil {
					t.Errorf("%s, undisturbed = %v, want nil", x.kase.name, err)
				}
				return
			}
			came.Add(1)
			if x.check != nil && err == nil {
				err = x.check(w)
			}
			if x.may != nil {
				x.may(&got, calm.ending)
			}
			disturbed(t, w, fmt.Sprintf("%s: %s %s, %s %d", x.kase.name, x.name, p.process, p.mark, p.n), got, calm.ending, err)
		})
	})
}

// again allows a second run of the agent, because its VM went away.
func again(got *ending, want ending) {
	if got.Runs == want.Runs+1 {
		got.Runs = want.Runs
	}
}

// every returns n, or a much larger step in a short run, to test fewer marks.
func every(n int) int {
	if testing.Short() {
		return n * 16
	}
	return n
}

// TestKilledAtEveryWrite kills each kind of process before and after each of its
// writes to the store. The cases share most writes, so after the first, each case
// tests a different fifth.
func TestKilledAtEveryWrite(t *testing.T) {
	x := trouble{name: "killed", kase: cases[0], who: []string{"task", "task-keeper", "keeper"}, marks: commits, step: every(1)}
	x.everywhere(t)
	if testing.Short() {
		return
	}
	for i, k := range cases[1:] {
		x.kase, x.step, x.from = k, 5, i
		x.everywhere(t)
	}
}

// TestKilledAtEveryFile does the same where files get their content or their name.
func TestKilledAtEveryFile(t *testing.T) {
	trouble{name: "killed", kase: cases[0], who: []string{"task-keeper", "keeper"}, marks: files, step: every(2)}.everywhere(t)
}

// eachAtOnce calls f with 0 to n-1, atOnce at a time.
func eachAtOnce(n int, f func(int)) {
	slots := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		running.Go(func() {
			defer func() { <-slots }()
			f(i)
		})
	}
	running.Wait()
}

// place is the nth mark of that name in a process.
type place struct {
	mark string
	n    int
}

// atEach tries each place in a world of its own, and reports those that the process came to, or that failed.
func atEach(t *testing.T, places []place, try func(w *world, p place) (came bool, err error), report func(w *world, p place, err error)) {
	t.Helper()
	var faults atomic.Int64
	eachAtOnce(len(places), func(i int) {
		w := newWorld(t)
		defer w.remove()
		came, err := try(w, places[i])
		if !came && err == nil {
			return
		}
		faults.Add(1)
		report(w, places[i], err)
	})
	t.Logf("%d marks, %d faults", len(places), faults.Load())
	if faults.Load() == 0 {
		t.Error("faults = none, want some")
	}
}

// some returns n, or fewer in a short run.
func some(n int) int {
	if testing.Short() {
		return (n + 7) / 8
	}
	return n
}

// slow is a task that takes some time, and has the same result whenever it is
// restarted.
var slow = kase{"slow", "echo work >input.txt; sleep 1; echo more >new.txt; sleep 1; echo done", "", nil, "COMPLETED", 1}

// TestPowerLoss kills everything at once, at moments throughout a task's life. The
// agent may run again, because its VM was gone; the end is the same.
func TestPowerLoss(t *testing.T) {
	calm := calmly(t, slow)
	want, took := calm.ending, calm.took
	moments := some(30)
	eachAtOnce(moments, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := took * time.Duration(i) / time.Duration(moments)
		cut := time.AfterFunc(at, func() {
			for range 3 { // including processes that are being started meanwhile
				for pid, line := range w.processes() {
					if !strings.Contains(line, "agent-sessionizer task ") { // spare our own commands, which watch the task
						_ = syscall.Kill(pid, syscall.SIGKILL)
					}
				}
			}
		})
		got, err := w.play(slow)
		cut.Stop()
		if got.Runs > 1 {
			got.Runs = want.Runs
		}
		disturbed(t, w, fmt.Sprintf("power lost after %v", at), got, want, err)
	})
}

// TestKilledAtMoments kills each kind of process at moments throughout a task's life,
// also when it writes nothing.
func TestKilledAtMoments(t *testing.T) {
	calm := calmly(t, slow)
	want, took := calm.ending, calm.took
	kinds := []string{" task-keeper ", " keeper ", " gateway "}
	each := some(8)
	eachAtOnce(len(kinds)*each, func(i int) {
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
		got, err := w.play(slow)
		kill.Stop()
		if kind == " gateway " && got.Runs == 2 {
			got.Runs = want.Runs // its VM had to be restarted
		}
		disturbed(t, w, fmt.Sprintf("%s killed after %v", kind, at), got, want, err)
	})
}

// TestStopped stops each kind of process for a while, at moments throughout a task's
// life. This is what a swapping host, a debugger or a closed laptop lid does.
func TestStopped(t *testing.T) {
	calm := calmly(t, slow)
	want, took := calm.ending, calm.took
	kinds := []string{" task-keeper ", " keeper ", " fake-vm ", " gateway ", "agent-guest task run"}
	each := some(4)
	eachAtOnce(len(kinds)*each, func(i int) {
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
		got, err := w.play(slow)
		stop.Stop()
		disturbed(t, w, fmt.Sprintf("%s stopped after %v", kind, at), got, want, err)
	})
}

// TestBusyStore holds the store's lock for seconds, at moments throughout a task's
// life.
func TestBusyStore(t *testing.T) {
	calm := calmly(t, slow)
	want, took := calm.ending, calm.took
	moments := some(10)
	eachAtOnce(moments, func(i int) {
		w := newWorld(t)
		defer w.remove()
		at := took * time.Duration(i) / time.Duration(moments)
		held := make(chan error, 1)
		hold := time.AfterFunc(at, func() { held <- w.holdStore(3 * time.Second) })
		got, err := w.play(slow)
		if !hold.Stop() {
			if herr := <-held; herr != nil {
				t.Log(herr)
			}
		}
		disturbed(t, w, fmt.Sprintf("store held after %v", at), got, want, err)
	})
}

// holdStore keeps all other processes from writing.
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
	time.Sleep(d) // the delay under test
	return tx.Rollback()
}
