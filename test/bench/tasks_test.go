//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

const (
	submitters = 20
	readers    = 50
	slots      = 10

	oneClient    = "one client"
	manyClients  = "20 clients at once"
	onePlain     = "plain inserts"
	manyPlain    = "plain inserts, 20 at once"
	oneWriter    = "50 readers of one task"
	plainAndPipe = "plain insert, and a pipe"
	serveAtRest  = "serve at rest"
	serveBusy    = "serve, 50 readers and 10,000 events"
	theThousand  = "1,000 tasks"

	rowSubmit   = "submit, median, ms"
	rowSubmit95 = "submit, p95, ms"
	rowEvent    = "event to reader, median, ms"
	rowEvent95  = "event to reader, p95, ms"
	rowSent     = "events sent to readers, 1/s"
	rowResident = "memory (RSS), MB"
	rowShare    = "memory (PSS), MB"

	rowPerMinute = "tasks a minute"
	rowEvents    = "events"
	rowRead      = "events read by the 50 readers"
	rowLost      = "tasks or events lost, twice, or out of order"
	rowMost      = "memory of serve at its peak (RSS), MB"
	rowMostShare = "memory of serve at its peak (PSS), MB"

	aimSubmit, aimEvent, aimMemory = 10, 20, 100 // ms, ms, MB
)

// waiting is a task that stays queued, because its farm has no capacity for it.
const waiting = `{"version": "1", "kind": "Task", "metadata": {"name": "load", "labels": {"team": "platform"}},
"repository": {"url": "acme/app"}, "agent": {"kind": "command", "command": ["make", "test"]}}`

// TestTasksServe submits tasks that stay queued. Then fifty readers follow one of
// them while its events are written. It compares the time of serve with that of the
// disk and the database alone.
func TestTasksServe(t *testing.T) {
	const alone, atOnce = 200, 1000
	table := results.table(table{title: titleServe, rows: []row{
		{name: rowSubmit, unit: "ms", comparisons: []comparison{
			{key: "task_submit_median", mine: oneClient, other: onePlain},
			{key: "task_submit_20_median", mine: manyClients, other: manyPlain},
		}},
		{name: rowSubmit95, unit: "ms", comparisons: []comparison{
			{key: "task_submit_p95", mine: oneClient, other: onePlain, aim: aim{absolute, aimSubmit}},
			{key: "task_submit_20_p95", mine: manyClients, other: manyPlain, aim: aim{absolute, aimSubmit}},
		}},
		{name: rowEvent, unit: "ms", comparisons: []comparison{{key: "event_ingest_median", mine: oneWriter, other: plainAndPipe}}},
		{name: rowEvent95, unit: "ms", comparisons: []comparison{{key: "event_ingest_p95", mine: oneWriter, other: plainAndPipe, aim: aim{absolute, aimEvent}}}},
		{name: rowSent, unit: "1/s", whole: true, comparisons: []comparison{{key: "events_sent_per_second", mine: oneWriter}}},
		{name: rowResident, unit: "MB", comparisons: []comparison{
			{key: "serve_rest_rss", mine: serveAtRest}, {key: "serve_peak_rss", mine: serveBusy, aim: aim{absolute, aimMemory}},
		}},
		{name: rowShare, unit: "MB", comparisons: []comparison{{key: "serve_rest_pss", mine: serveAtRest}, {key: "serve_busy_pss", mine: serveBusy}}},
	}})
	program := fakes(t)
	for range runs() {
		f := newFarm(t, program, "AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE=1000TiB")
		table.add(serveAtRest, f.resident())
		one := f.submit(alone, 1, waiting)
		table.add(oneClient, sample{rowSubmit: one.took.at(.5), rowSubmit95: one.took.at(.95)})
		many := f.submit(atOnce, submitters, waiting)
		table.add(manyClients, sample{rowSubmit: many.took.at(.5), rowSubmit95: many.took.at(.95)})
		f.waits(alone + atOnce)
		table.add(oneWriter, f.follow(one.ids[0]))
		table.add(serveBusy, f.resident())
		f.stop()

		plain := newPlain(t)
		took := plain.insert(alone, 1)
		table.add(onePlain, sample{rowSubmit: took.at(.5), rowSubmit95: took.at(.95)})
		took = plain.insert(atOnce, submitters)
		table.add(manyPlain, sample{rowSubmit: took.at(.5), rowSubmit95: took.at(.95)})
		took = plain.tell(paced)
		table.add(plainAndPipe, sample{rowEvent: took.at(.5), rowEvent95: took.at(.95)})
		plain.close()
	}
	table.done(t, runs(), serveAtRest, oneClient, manyClients, oneWriter, serveBusy, onePlain, manyPlain, plainAndPipe)
}

// resident returns serve's memory, at its peak if it had one.
func (f *farm) resident() sample {
	f.t.Helper()
	m, err := memoryOf(f.serve.Process.Pid)
	if err != nil {
		f.t.Fatal(err)
	}
	return sample{rowResident: mostResident(f.t, f.serve.Process.Pid), rowShare: m.pss}
}

// waits checks that there are n tasks, all of them queued.
func (f *farm) waits(n int) {
	f.t.Helper()
	states, err := f.states()
	if err != nil || len(states) != 1 || states["PENDING"] != n {
		f.t.Fatalf("states = %v, %v, want PENDING for all %d", states, err, n)
	}
}

// states counts the tasks that serve lists, by state.
func (f *farm) states() (map[string]int, error) {
	states := map[string]int{}
	for after := ""; ; {
		var page struct {
			Tasks []struct{ State string }
			Next  string
		}
		if err := f.get("/api/v1/tasks?limit=500"+after, &page); err != nil {
			return nil, err
		}
		for _, t := range page.Tasks {
			states[t.State]++
		}
		if page.Next == "" {
			return states, nil
		}
		after = "&after=" + url.QueryEscape(page.Next)
	}
}

const (
	paced     = 200                   // events written one by one
	pace      = 20 * time.Millisecond // between two of them
	burst     = 10000                 // events written as fast as possible
	perCommit = 500                   // of these, as a task's keeper groups an agent's output
)

// follow makes the crowd follow a task whose events another process than serve
// writes: this one, in place of a keeper.
func (f *farm) follow(id string) sample {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), longest)
	defer cancel()
	st, err := store.Open(ctx, filepath.Join(f.state(), "store.db"))
	if err != nil {
		f.t.Fatal(err)
	}
	defer st.Close()
	all := crowd(f, 50*time.Millisecond, 100, 1000)
	var ready, reading sync.WaitGroup
	quick := 0
	ready.Add(len(all))
	for _, r := range all {
		follow := func() {
			events, err := r.follow(ctx, id, 1+paced+burst, ready.Done)
			if err != nil {
				f.t.Error(err)
			} else if len(events) != 1+paced+burst {
				f.t.Errorf("events of the followed task = %d, want %d", len(events), 1+paced+burst)
			}
		}
		reading.Go(follow)
		if r.keepsUp() {
			quick++
		}
	}
	there := make(chan struct{})
	go func() { ready.Wait(); close(there) }()
	select {
	case <-there:
	case <-ctx.Done():
		f.t.Fatalf("readers: %v, want all of them to follow", ctx.Err())
	}
	one := store.Event{Kind: "message", Data: json.RawMessage(`{"text": "the agent says one thing after another, at the length of an ordinary line"}`)}
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for range paced {
		<-tick.C
		if err := st.Append(ctx, id, one); err != nil {
			f.t.Fatal(err)
		}
	}
	// Only the events written one by one are measured; for the burst the figure would
	// be how long fifty readers take to read ten thousand.
	for len(live(all)) < paced*quick {
		select {
		case <-tick.C:
		case <-ctx.Done():
			f.t.Fatalf("events of the fast readers = not all of them, %v, want all", ctx.Err())
		}
	}
	took := live(all)
	began := time.Now()
	for range burst / perCommit {
		if err := st.AppendAll(ctx, id, slices.Repeat([]store.Event{one}, perCommit)); err != nil {
			f.t.Fatal(err)
		}
	}
	reading.Wait()
	return sample{rowEvent: took.at(.5), rowEvent95: took.at(.95), rowSent: float64(burst*len(all)) / time.Since(began).Seconds()}
}

// work is an agent that prints, and adds a line for each of its runs.
const work = `echo "$AGENT_TASK_ID" >>%s; for n in 1 2 3 4 5 6 7 8 9 10; do echo "$AGENT_TASK_ID $n"; done`

// TestTasksLoad submits a thousand tasks at once. They run on fake VMs, ten at a
// time, while fifty readers follow them: nothing is lost, done twice, or left over.
func TestTasksLoad(t *testing.T) {
	tasks := 1000
	if n, err := strconv.Atoi(os.Getenv("BENCH_TASKS")); err == nil && n > 0 {
		tasks = n
	}
	table := results.table(table{title: titleTasks, rows: []row{
		{name: rowSubmit, unit: "ms", comparisons: []comparison{{key: "load_submit_median", mine: theThousand}}},
		{name: rowSubmit95, unit: "ms", comparisons: []comparison{{key: "load_submit_p95", mine: theThousand, aim: aim{absolute, aimSubmit}}}},
		{name: rowEvent, unit: "ms", comparisons: []comparison{{key: "load_ingest_median", mine: theThousand}}},
		{name: rowEvent95, unit: "ms", comparisons: []comparison{{key: "load_ingest_p95", mine: theThousand, aim: aim{absolute, aimEvent}}}},
		{name: rowPerMinute, unit: "1/min", comparisons: []comparison{{key: "load_tasks_per_minute", mine: theThousand}}},
		{name: rowEvents, unit: "1", whole: true, comparisons: []comparison{{key: "load_events", mine: theThousand}}},
		{name: rowRead, unit: "1", whole: true, comparisons: []comparison{{key: "load_events_read", mine: theThousand}}},
		{name: rowLost, unit: "1", whole: true, comparisons: []comparison{{key: "load_lost", mine: theThousand, aim: aim{absolute, 0}}}},
		{name: rowMost, unit: "MB", comparisons: []comparison{{key: "load_serve_rss", mine: theThousand, aim: aim{absolute, aimMemory}}}},
		{name: rowMostShare, unit: "MB", comparisons: []comparison{{key: "load_serve_pss", mine: theThousand}}},
	}})
	f := newFarm(t, fakes(t), fmt.Sprint("AGENT_SESSIONIZER_TASKS_SLOTS=", slots))
	repo := f.Repo("repo")
	ran := filepath.Join(f.Home, "ran")
	manifest, err := json.Marshal(map[string]any{
		"version": "1", "kind": "Task", "metadata": map[string]any{"name": "load"}, "repository": map[string]any{"url": repo},
		"agent": map[string]any{"kind": "command", "command": []string{"sh", "-c", fmt.Sprintf(work, ran)}},
		"vm":    map[string]any{"cpus": 1, "memory": "512M", "disk": "4G"},
	})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	s := f.submit(tasks, submitters, string(manifest))
	_, most := watch(t, f.serve.Process.Pid)

	// Two readers for each task: one that keeps up, and one that is slow or comes
	// back.
	all := crowd(f, 300*time.Millisecond, 5, 4)
	events := make([][2]int, tasks)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
	defer cancel()
	var reading sync.WaitGroup
	for i, r := range all {
		reading.Go(func() {
			for n := i / 2; n < tasks; n += len(all) / 2 {
				evs, err := r.follow(ctx, s.ids[n], 0, func() {})
				if err = errors.Join(err, whole(evs)); err != nil {
					t.Errorf("events of task %s = %v, want all of them", s.ids[n], err)
					return
				}
				events[n][i%2] = len(evs)
			}
		})
	}
	reading.Wait()
	took := time.Since(began)
	resident := mostResident(t, f.serve.Process.Pid)
	live, seen := live(all), 0
	for _, r := range all {
		seen += r.seen
	}
	total := f.account(s.ids, events, ran)
	table.add(theThousand, sample{
		rowSubmit: s.took.at(.5), rowSubmit95: s.took.at(.95), rowEvent: live.at(.5), rowEvent95: live.at(.95),
		rowPerMinute: float64(tasks) / took.Minutes(), rowEvents: float64(total), rowRead: float64(seen), rowLost: 0, // otherwise the test has failed
		rowMost: resident, rowMostShare: most().pss,
	})
	if tasks != 1000 || t.Failed() {
		t.Skipf("%d tasks: shown, not written: %v", tasks, table.samples)
	}
	table.done(t, 1, theThousand)
}

// whole checks the events of a task that succeeded: the phases follow each other, and
// the task ends once.
func whole(events []event) error {
	var phases []string
	for _, ev := range events {
		if ev.Kind == "phase" && ev.Data.To != "" {
			phases = append(phases, ev.Data.To)
		}
	}
	if got := strings.Join(phases, " "); got != "PENDING STAGING PROVISIONING READY RUNNING COMPLETING COMPLETED" {
		return fmt.Errorf("it went %s", got)
	}
	return nil
}

// account compares what the readers saw with the stored events, and returns their
// number. Each task has run once and succeeded, its output is complete, and nothing
// of its VM is left.
func (f *farm) account(ids []string, seen [][2]int, ran string) (events int) {
	f.t.Helper()
	states, err := f.states()
	if err != nil || len(states) != 1 || states["COMPLETED"] != len(ids) {
		f.t.Errorf("states = %v, %v, want COMPLETED for all %d", states, err, len(ids))
	}
	for n, id := range ids {
		var page struct{ Newest int }
		if err := f.get("/api/v1/tasks/"+id+"/events?after=newest", &page); err != nil {
			f.t.Fatal(err)
		}
		if seen[n] != [2]int{page.Newest, page.Newest} {
			f.t.Errorf("events of task %s = %d, its readers saw %v, want all", id, page.Newest, seen[n])
		}
		events += page.Newest
		want := ""
		for line := range 10 {
			want += fmt.Sprintln(id, line+1)
		}
		out, err := os.ReadFile(filepath.Join(f.state(), "tasks", id, "outbox/progress/stdout.log"))
		if err != nil || string(out) != want {
			f.t.Errorf("output of task %s = %q, %v, want %q", id, out, err, want)
		}
	}
	text, err := os.ReadFile(ran)
	if err != nil {
		f.t.Fatal(err)
	}
	if got, want := slices.Sorted(strings.Lines(string(text))), slices.Sorted(func(yield func(string) bool) {
		for _, id := range ids {
			if !yield(id + "\n") {
				return
			}
		}
	}); !slices.Equal(got, want) {
		f.t.Errorf("agents run = %d, want %d, one for each task", len(got), len(want))
	}
	f.stop()
	if left := f.Leftovers(); len(left) > 0 {
		f.t.Errorf("processes at the end = %v, want none", left)
	}
	for _, pattern := range []string{".agent-vms/agent-*", ".local/state/agent-sessionizer/sessions/*"} {
		if found, _ := filepath.Glob(filepath.Join(f.Home, pattern)); len(found) > 0 {
			f.t.Errorf("files for %s at the end = %v, want none", pattern, found)
		}
	}
	return events
}
