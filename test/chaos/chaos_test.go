//go:build chaos

// Package chaos runs tasks on a cluster of five hosts while its processes are killed and frozen, its
// links are cut and slow, its clocks are wrong, its disks are full, and its hosts are upgraded one after
// the other. The VMs are fake; hosts, networks and NATS are real.
// Every agent reports where it runs to a file outside of the cluster.
package chaos

import (
	"bufio"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fleet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Environment variables that change the run.
const (
	tasksVariable = "CHAOS_TASKS" // their number
	seedVariable  = "CHAOS_SEED"  // of the random faults
	coresVariable = "CHAOS_CORES" // of the five hosts: 1, or 3
	fromVariable  = "CHAOS_FROM"  // revision that hosts are upgraded from; empty: the present source
)

const patience = 2 * time.Hour // a bound for machines of all speeds

func number(variable string, usual int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return usual
}

// waitFor polls f until it is true.
func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// cluster starts five hosts, of which the first ones are cores.
func cluster(t *testing.T, cores int) []*host {
	t.Helper()
	var all []*host
	for i := range 5 {
		all = append(all, newHost(t, i))
	}
	for _, h := range all {
		repository(t, h, all[0].home)
	}
	all[0].start("", "--cluster", "--name", all[0].name, "--cluster-address", all[0].addr+":7422")
	waitFor(t, "the first host", func() bool { return up(all[0], 1) })
	for i, h := range all[1:] {
		role, args := "member", []string{"--join", "-", "--name", h.name}
		if i+1 < cores {
			role, args = "core", append(args, "--cluster-address", h.addr+":7422")
		}
		token, err := all[0].run("cluster", "token", "--role", role)
		if err != nil {
			t.Fatal(err)
		}
		h.start(token, args...)
		waitFor(t, "host "+h.name, func() bool { return up(all[0], i+2) })
	}
	waitFor(t, "copies of the streams", func() bool {
		log, err := os.ReadFile(filepath.Join(all[0].home, "serve.log"))
		return err == nil && (cores < 3 || strings.Contains(string(log), "the cluster has three cores"))
	})
	return all
}

func up(h *host, n int) bool {
	out, err := h.run("cluster", "list", "--json")
	return err == nil && strings.Count(out, `"state": "up"`) == n
}

// repository makes the repository that tasks name as acme/app, which is below first's home.
func repository(t *testing.T, h *host, first string) {
	t.Helper()
	config := "[user]\n\tname = Test\n\temail = test@example.invalid\n[init]\n\tdefaultBranch = main\n[url \"file://" + first + "/app\"]\n\tinsteadOf = https://github.com/acme/app.git\n"
	if err := os.WriteFile(filepath.Join(h.home, "gitconfig"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	if h.home != first {
		return
	}
	app := filepath.Join(first, "app")
	for _, argv := range [][]string{{"git", "init", "-q", app}, {"git", "-C", app, "commit", "-q", "--allow-empty", "-m", "first"}} {
		if err := command(h.env, argv...); err != nil {
			t.Fatal(err)
		}
	}
}

// Kinds of tasks, by their policy.
var reruns = []task.Rerun{task.RerunIfNotStarted, task.RerunNever, task.RerunAlways}

// manifest describes a task whose agent adds lines to a file: where it starts, lives and ends.
func manifest(oracle string, rerun task.Rerun, seconds float64) string {
	script := fmt.Sprintf(`say() { echo "$AGENT_TASK_ID $1 $AGENT_GUEST_ROOT $$ $(cut -d" " -f1 /proc/uptime)" >>%s; }
say start; i=0; while [ $i -lt %d ]; do sleep 0.2; say lives; i=$((i+1)); done; say end`, oracle, int(seconds*5))
	return fmt.Sprintf(`{"version": "1", "kind": "Task", "repository": {"url": "acme/app"}, "vm": {"cpus": 1, "memory": "512M", "disk": "4G"},
"agent": {"kind": "command", "command": ["sh", "-c", %q]}, "lifecycle": {"rerun": %q, "retries": {"connect": "5s"}}}`, script, rerun)
}

// fault is one kind of trouble. It lasts until the function that it returns is called.
type fault struct {
	name string
	most time.Duration
	do   func(t *testing.T, h *host, r *rand.Rand) (end func())
}

var faults = []fault{
	{"kill -9", 0, func(_ *testing.T, h *host, r *rand.Rand) func() {
		hit(h, r, syscall.SIGKILL, "")
		return nil
	}},
	{"kill -9 of serve", 0, func(_ *testing.T, h *host, r *rand.Rand) func() {
		hit(h, r, syscall.SIGKILL, " serve")
		return nil
	}},
	{"frozen process", time.Minute, func(_ *testing.T, h *host, r *rand.Rand) func() {
		pid := hit(h, r, syscall.SIGSTOP, "")
		return func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
	}},
	{"frozen serve", 2 * time.Minute, func(_ *testing.T, h *host, r *rand.Rand) func() {
		pid := hit(h, r, syscall.SIGSTOP, " serve")
		return func() { _ = syscall.Kill(pid, syscall.SIGCONT) }
	}},
	{"partition", 3 * time.Minute, func(t *testing.T, h *host, _ *rand.Rand) func() {
		link(t, "link set v"+h.name+" down")
		return func() { link(t, "link set v"+h.name+" up") }
	}},
	{"slow link", time.Minute, func(t *testing.T, h *host, _ *rand.Rand) func() {
		qdisc(t, "qdisc add dev v"+h.name+" root tbf rate 128kbit burst 4kb latency 2s")
		return func() { qdisc(t, "qdisc del dev v"+h.name+" root") }
	}},
	{"full disk", time.Minute, func(_ *testing.T, h *host, _ *rand.Rand) func() { return h.fillDisk() }},
	{"wrong clock", time.Minute, func(_ *testing.T, h *host, r *rand.Rand) func() {
		h.skew(time.Duration(r.IntN(7201)-3600) * time.Second)
		return func() { h.skew(0) }
	}},
}

func link(t *testing.T, line string) {
	if err := ip(line); err != nil {
		t.Error(err)
	}
}

func qdisc(t *testing.T, line string) {
	if err := command(nil, append([]string{"tc"}, strings.Fields(line)...)...); err != nil {
		t.Error(err)
	}
}

// hit sends a signal to one process of the host whose command line has a text, and returns its id.
func hit(h *host, r *rand.Rand, sig syscall.Signal, text string) int {
	var pids []int
	for pid, line := range h.processes() {
		if strings.Contains(line, h.program+text) {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		return 1 << 30 // no process has it
	}
	slices.Sort(pids)
	pid := pids[r.IntN(len(pids))]
	_ = syscall.Kill(pid, sig)
	return pid
}

// trouble causes faults until stop is closed, and returns their number once all have ended.
func trouble(t *testing.T, all []*host, cores, seed int, stop <-chan struct{}) map[string]int {
	counts := map[string]int{}
	var mu sync.Mutex
	var ending sync.WaitGroup
	busy := map[string]bool{} // hosts with a lasting fault, at most two of them
	r := rand.New(rand.NewPCG(uint64(seed), 1))
	for {
		select {
		case <-stop:
			ending.Wait()
			return counts
		case <-time.After(time.Duration(200+r.IntN(3000)) * time.Millisecond):
		}
		f, at := faults[r.IntN(len(faults))], r.IntN(len(all))
		h := all[at]
		if cores == 1 && at == 0 { // without the only core, all of them stop
			f.most = min(f.most, 20*time.Second)
		}
		mu.Lock()
		skip := f.most > 0 && (busy[h.name] || len(busy) >= 2)
		for _, other := range all[:cores] { // of three cores, two are needed
			skip = skip || f.most > 0 && at < cores && busy[other.name]
		}
		if !skip && f.most > 0 {
			busy[h.name] = true
		}
		mu.Unlock()
		if skip {
			continue
		}
		counts[f.name]++
		end := f.do(t, h, r)
		if end == nil {
			continue
		}
		lasts := time.Duration(r.Int64N(int64(f.most)))
		ending.Go(func() {
			select {
			case <-time.After(lasts):
			case <-stop:
			}
			end()
			mu.Lock()
			delete(busy, h.name)
			mu.Unlock()
		})
	}
}

// TestChaos submits tasks on all hosts while they have trouble.
func TestChaos(t *testing.T) {
	n, seed := number(tasksVariable, 2000), number(seedVariable, int(time.Now().UnixNano()&0xffff))
	t.Logf("%d tasks, seed %d", n, seed)
	cores := number(coresVariable, 3)
	all := cluster(t, cores)
	oracle := filepath.Join(t.TempDir(), "oracle") // no disk there is ever full
	stop := make(chan struct{})
	counts := make(chan map[string]int, 1)
	go func() { counts <- trouble(t, all, cores, seed, stop) }()
	submitted := submit(t, all, n, oracle, seed)
	report := time.Now()
	waitFor(t, "the end of all tasks", func() bool {
		over := 0
		for id := range submitted {
			if p, err := phase(t, all[0], id); err == nil && p.Over() {
				over++
			}
		}
		if time.Since(report) > time.Minute {
			report = time.Now()
			t.Logf("%d of %d tasks have ended", over, len(submitted))
		}
		return over == len(submitted)
	})
	close(stop)
	injected := len(all) // upgrades
	for what, n := range <-counts {
		injected += n
		t.Logf("%s: %d", what, n)
	}
	lost, ends := compare(t, all, submitted)
	duplicated := duplicates(t, oracle, submitted, ends)
	byPhase := map[task.Phase]int{}
	for _, p := range ends {
		byPhase[p]++
	}
	t.Logf("ends: %v", byPhase)
	fmt.Printf("%d tasks, %d faults, %d lost, %d duplicated\n", len(submitted), injected, lost, duplicated)
	if lost > 0 || duplicated > 0 || injected == 0 || byPhase[task.Completed] == 0 {
		t.Errorf("lost = %d, duplicated = %d of %d tasks with %d faults, ends = %v; want none lost or duplicated", lost, duplicated, len(submitted), injected, byPhase)
	}
}

// submit submits n tasks on random hosts, and returns those that were accepted. Meanwhile, it upgrades all
// hosts, one after the other.
func submit(t *testing.T, all []*host, n int, oracle string, seed int) map[string]task.Rerun {
	t.Helper()
	submitted := map[string]task.Rerun{}
	var mu sync.Mutex
	var submitting sync.WaitGroup
	next, dir := make(chan int), t.TempDir() // the disk of a host may be full
	for worker := range 4 {
		submitting.Go(func() {
			r := rand.New(rand.NewPCG(uint64(seed), uint64(worker+2)))
			for i := range next {
				rerun := reruns[i%len(reruns)]
				h := all[r.IntN(len(all))]
				file := filepath.Join(dir, fmt.Sprintf("task%d.json", i))
				if err := os.WriteFile(file, []byte(manifest(oracle, rerun, 5*r.Float64())), 0o600); err != nil {
					t.Error(err)
					return
				}
				out, err := h.run("task", "submit", "-f", file)
				if err != nil { // killed, or the host had no time: it was not accepted, or the answer was lost
					t.Logf("submit on %s: %v", h.name, err)
					continue
				}
				mu.Lock()
				submitted[strings.TrimSpace(out)] = rerun
				mu.Unlock()
			}
		})
	}
	order := rand.New(rand.NewPCG(uint64(seed), 0)).Perm(len(all))
	for i := range n {
		if step := n / (len(all) + 1); step > 0 && i%step == 0 && i > 0 && i/step <= len(all) {
			all[order[i/step-1]].upgrade()
		}
		next <- i
	}
	close(next)
	submitting.Wait()
	return submitted
}

func open(t *testing.T, h *host) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), filepath.Join(h.home, ".local/state/agent-sessionizer/store.db"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func phase(t *testing.T, h *host, id string) (task.Phase, error) {
	s := opened(t, h)
	row, err := s.Task(t.Context(), id)
	return task.Phase(row.Phase), err
}

var stores sync.Map

// opened returns the store of a host, which stays open until the test ends.
func opened(t *testing.T, h *host) *store.Store {
	if s, ok := stores.Load(h); ok {
		return s.(*store.Store)
	}
	s := open(t, h)
	stores.Store(h, s)
	t.Cleanup(func() { s.Close() })
	return s
}

// compare checks that every host has the same rows and events of all tasks, without gaps, and returns how
// many tasks are lost, and the phase of each.
func compare(t *testing.T, all []*host, submitted map[string]task.Rerun) (lost int, ends map[string]task.Phase) {
	t.Helper()
	ends = map[string]task.Phase{}
	for id := range submitted {
		var first []store.Event
		for i, h := range all {
			var evs []store.Event
			waitFor(t, "task "+id+" on "+h.name, func() bool {
				var err error
				evs, err = opened(t, h).Events(t.Context(), id, 0, 10_000)
				return err == nil && len(evs) > 0 && (i == 0 || len(evs) >= len(first))
			})
			row, err := opened(t, h).Task(t.Context(), id)
			if i == 0 {
				first, ends[id] = evs, task.Phase(row.Phase)
			}
			if i == 0 && submitted[id] != task.RerunAlways && startedBefore(evs) {
				t.Errorf("task %s with rerun %s was given to a host after its start", id, submitted[id])
			}
			bad := err != nil || task.Phase(row.Phase) != ends[id] || len(evs) != len(first)
			for j := range min(len(evs), len(first)) {
				bad = bad || evs[j].Seq != int64(j)+1 || evs[j].Kind != first[j].Kind || string(evs[j].Data) != string(first[j].Data)
			}
			if bad {
				lost++
				t.Errorf("task %s on %s: %s with %d events, %v, want %s with the %d events of %s", id, h.name, row.Phase, len(evs), err, ends[id], len(first), all[0].name)
			}
		}
	}
	return lost, ends
}

// hostOf returns the home directory of the host of a guest. On one host, a VM may be rebuilt.
func hostOf(root string) string {
	home, _, _ := strings.Cut(root, "/.agent-vms/")
	return home
}

// startedBefore reports whether the agent of a task had started when another host, or the same one again,
// took the task.
func startedBefore(evs []store.Event) bool {
	started := false
	for _, ev := range evs {
		started = started || ev.Kind == task.EventPhase && strings.Contains(string(ev.Data), `"to":"RUNNING"`)
		if started && ev.Kind == fleet.EventHost {
			return true
		}
	}
	return false
}

// life is an agent on one host: from its first line to its last, in seconds since the machine booted.
type life struct {
	from, to float64
	ended    bool
}

// duplicates returns how many tasks ran where their policy does not allow it, or in two places at once.
func duplicates(t *testing.T, oracle string, submitted map[string]task.Rerun, ends map[string]task.Phase) (n int) {
	t.Helper()
	f, err := os.Open(oracle)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lives := map[string]map[string]*life{} // by task and guest
	for lines := bufio.NewScanner(f); lines.Scan(); {
		words := strings.Fields(lines.Text())
		if len(words) != 5 {
			t.Errorf("line of an agent = %q, want five words", lines.Text())
			continue
		}
		id, what, guest := words[0], words[1], hostOf(words[2])
		at, err := strconv.ParseFloat(words[4], 64)
		if err != nil {
			t.Error(err)
		}
		if lives[id] == nil {
			lives[id] = map[string]*life{}
		}
		l := lives[id][guest]
		if l == nil {
			l = &life{from: at}
			lives[id][guest] = l
		}
		l.to, l.ended = at, l.ended || what == "end"
	}
	for id, rerun := range submitted {
		all := slices.Collect(maps.Values(lives[id]))
		slices.SortFunc(all, func(a, b *life) int { return int(1000 * (a.from - b.from)) })
		bad := len(all) > 1 && rerun != task.RerunAlways
		for i := 1; i < len(all); i++ {
			bad = bad || all[i].from < all[i-1].to
		}
		if ends[id] == task.Completed {
			bad = bad || !slices.ContainsFunc(all, func(l *life) bool { return l.ended })
		}
		if bad {
			n++
			t.Errorf("task %s with rerun %s ran on %d hosts and is %s: %+v", id, rerun, len(all), ends[id], lives[id])
		}
	}
	return n
}
