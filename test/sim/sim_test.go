//go:build sim

// Package sim measures what tasks cost a cluster as its fleet grows. The core is a process of its own,
// with its streams on this machine's disk. The hosts are in the process of the test: they join,
// renew their leases, take tasks and send events with the code and the times of serve. Their
// stores are in memory, and of a VM only the time that it takes is simulated.
package sim

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testcluster"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// Environment variables that change the run.
const (
	hostsVariable = "SIM_HOSTS" // sizes of the fleet, as text; N/F: of N hosts, F follow the whole log; N:T: N hosts run T tasks; N:T@R: R of them are submitted each second, and none wait
	tasksVariable = "SIM_TASKS" // of each fleet without a number of its own
	coresVariable = "SIM_CORES" // 1 or 3
	idleVariable  = "SIM_IDLE"  // seconds for which the idle fleet is measured
	rateVariable  = "SIM_RATE"  // tasks per second that are submitted while hosts have room
	docsVariable  = "SIM_DOCS"  // directory of the documents that get the result
	dirVariable   = "SIM_DIR"   // of the hosts' stores
)

// followers is how many hosts follow the whole log, like the cores, unless SIM_HOSTS has another
// number. All hosts of a real fleet do, each with CPUs of its own.
const followers = 1

func number(variable string, usual int) int {
	if n, err := strconv.Atoi(os.Getenv(variable)); err == nil {
		return n
	}
	return usual
}

func TestMain(m *testing.M) { testenv.Main(m, testenv.Commands{coreCommand: runCore}) }

// size is a fleet to measure.
type size struct {
	hosts, followers, tasks int
	rate                    int // tasks per second, 0: as many as wait for hosts
}

func sizes(text string) (all []size, err error) {
	for _, word := range strings.Fields(text) {
		word, tasks, ownTasks := strings.Cut(word, ":")
		n, f, split := strings.Cut(word, "/")
		s := size{tasks: number(tasksVariable, 1000)}
		if s.hosts, err = strconv.Atoi(n); err != nil {
			return nil, err
		}
		s.followers = min(s.hosts, followers)
		if split {
			if s.followers, err = strconv.Atoi(f); err != nil {
				return nil, err
			}
		}
		if ownTasks {
			tasks, rate, paced := strings.Cut(tasks, "@")
			if s.tasks, err = strconv.Atoi(tasks); err != nil {
				return nil, err
			}
			if paced {
				if s.rate, err = strconv.Atoi(rate); err != nil {
					return nil, err
				}
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// TestSim measures fleets one after the other.
func TestSim(t *testing.T) {
	text := os.Getenv(hostsVariable)
	if text == "" {
		text = "10 30"
	}
	all, err := sizes(text)
	if err != nil {
		t.Fatalf("%s=%q: %v", hostsVariable, text, err)
	}
	var results []result
	for _, s := range all {
		t.Run(fmt.Sprintf("%d hosts", s.hosts), func(t *testing.T) { results = append(results, measure(t, s)) })
	}
	if t.Failed() {
		return
	}
	slices.SortStableFunc(results, func(a, b result) int { return cmp.Compare(a.hosts, b.hosts) })
	fmt.Print(table(results))
	if dir := os.Getenv(docsVariable); dir != "" {
		if err := document(dir, results); err != nil {
			t.Fatal(err)
		}
	}
}

// measure runs one fleet.
func measure(t *testing.T, s size) result {
	tasks, cores := s.tasks, number(coresVariable, 1)
	r := result{size: s, cores: cores}
	c := newCores(t, cores)
	began := time.Now()
	fleet := newFleet(t, c, s)
	r.join = time.Since(began)
	began = time.Now()
	fleet.start(t)
	r.start = time.Since(began)
	t.Logf("%d hosts joined in %v and started in %v", s.hosts, r.join.Round(time.Millisecond), r.start.Round(time.Millisecond))

	// The first task opens a line of the queue.
	fleet.open.Store(true)
	fleet.submit(t)
	fleet.wait(t, 1)

	// Hosts have room for each of these when it is submitted.
	rate := number(rateVariable, 20)
	trickle := min(tasks/10, 60*rate)
	if s.rate > 0 {
		rate, trickle = s.rate, tasks-1
	}
	before := c.usage(t)
	tick := time.NewTicker(time.Second / time.Duration(rate))
	defer tick.Stop()
	for range trickle {
		<-tick.C
		fleet.submit(t)
	}
	fleet.wait(t, 1+trickle)

	// The hosts ask for tasks, and there are none.
	idle := c.usage(t)
	time.Sleep(time.Duration(number(idleVariable, 15)) * time.Second) // that is what is measured
	r.idle = c.usage(t).since(idle)
	t.Logf("idle: %v", r.idle)

	if s.rate > 0 {
		r.busy, r.ran, r.submitted = idle.since(before).beyond(r.idle), trickle, float64(rate)
		t.Logf("beyond that, %d tasks used %v", r.ran, r.busy)
	} else {
		r.crowd(t, c, fleet, tasks-trickle-1)
	}
	r.log = c.readLog(t, fleet.ids(), 1, 1+trickle)
	r.rss = c.memory(t)
	fleet.stop()
	return r
}

// crowd measures tasks that wait before a host takes the first of them.
func (r *result) crowd(t *testing.T, c *cores, fleet *simFleet, tasks int) {
	t.Helper()
	fleet.open.Store(false)
	was, began := c.usage(t), time.Now()
	r.ran = tasks
	fleet.submitAll(t, tasks, 64)
	fleet.waitSent(t)
	r.submitted = float64(tasks) / time.Since(began).Seconds()
	t.Logf("%d tasks wait: %.0f submitted per second", tasks, r.submitted)
	began = time.Now()
	fleet.open.Store(true)
	fleet.wait(t, int(fleet.submits.Load()))
	r.busy = c.usage(t).since(was)
	t.Logf("they ended %v later; busy: %v", time.Since(began).Round(time.Millisecond), r.busy)
}

// newCores starts the cores of a cluster, each in a process of its own.
func newCores(t *testing.T, n int) *cores {
	t.Helper()
	c := &cores{t: t}
	first := filepath.Join(t.TempDir(), "a")
	listen := testcluster.FreeAddr(t)
	if _, err := cluster.Found(first, "sim", "a", listen, testcluster.FreeAddr(t), testcluster.FreeAddr(t), nil); err != nil {
		t.Fatal(err)
	}
	c.start(first)
	c.login(first)
	for _, name := range []string{"b", "c"}[:n-1] {
		dir := filepath.Join(t.TempDir(), name)
		if err := c.join(dir, cluster.CoreOf, cluster.Applicant{Name: name, Addr: testcluster.FreeAddr(t), Route: testcluster.FreeAddr(t)}); err != nil {
			t.Fatal(err)
		}
		c.start(dir)
	}
	if n > 1 {
		testenv.WaitFor(t, "copies of all streams", c.spread)
	}
	return c
}

func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, len(sorted)*p/100)]
}

func sorted(all []time.Duration) []time.Duration {
	slices.Sort(all)
	return all
}
