package store_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

func task(id string) store.Task {
	return store.Task{
		ID: id, Name: "nightly", Phase: "PENDING", Desired: "run",
		Labels: map[string]string{"team": "a", "id": id}, Manifest: json.RawMessage(`{"version":"1"}`),
	}
}

func mustTask(t *testing.T, s *store.Store, n store.Task) store.Task {
	t.Helper()
	row, err := s.CreateTask(t.Context(), n, nil, phase("", n.Phase))
	if err != nil {
		t.Fatal(err)
	}
	return row
}

func phase(from, to string) store.Event {
	return store.Event{Kind: "phase", Data: fmt.Appendf(nil, `{"from":%q,"to":%q}`, from, to)}
}

func ids(tasks []store.Task) (all []string) {
	for _, t := range tasks {
		all = append(all, t.ID)
	}
	return all
}

func TestTaskRow(t *testing.T) {
	s, path := newStore(t)
	made := mustTask(t, s, store.Task{
		ID: "t", Name: "fix", Phase: "PENDING", Desired: "run", Priority: -3, SessionID: "x",
		Labels: map[string]string{"a": "1", "b": `"é`}, Status: json.RawMessage(`{"f":1}`), Manifest: json.RawMessage(`{"m":1}`),
	})
	got, err := reopen(t, path).Task(t.Context(), "t")
	if diff := cmp.Diff(made, got); err != nil || diff != "" {
		t.Fatalf("Task(t) after reopening = %v, mismatch (-want +got):\n%s", err, diff)
	}
	if got.Priority != -3 || got.Labels["b"] != `"é` || string(got.Status) != `{"f":1}` || string(got.Manifest) != `{"m":1}` || got.CreatedAt.IsZero() {
		t.Fatalf("Task(t) = %+v (status %s, manifest %s), want what was created", got, got.Status, got.Manifest)
	}
	changed, err := s.UpdateTask(t.Context(), "t", func(row *store.Task) ([]store.Event, error) {
		row.Phase, row.Desired, row.SessionID, row.Status = "STAGING", "cancel", "s", json.RawMessage(`{"f":2}`)
		row.Name, row.Priority, row.Labels, row.Manifest = "other", 9, nil, nil // immutable
		row.SetError("HOST", "m", "h")
		return []store.Event{event("one", 1), event("two", 2)}, nil
	})
	if err != nil || changed.StateChangedAt.Before(made.StateChangedAt) {
		t.Fatalf("Update(t) = %+v, %v, want StateChangedAt not before %v", changed, err, made.StateChangedAt)
	}
	got, err = s.Task(t.Context(), "t")
	want := made
	want.Phase, want.Desired, want.SessionID, want.Status, want.StateChangedAt = "STAGING", "cancel", "s", json.RawMessage(`{"f":2}`), changed.StateChangedAt
	want.SetError("HOST", "m", "h")
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Fatalf("Task(t) = %v, mismatch (-want +got):\n%s", err, diff)
	}
	evs, err := s.Events(t.Context(), "t", 0, 10)
	if err != nil || len(evs) != 3 || evs[1].Kind != "one" || evs[2].Kind != "two" || evs[2].Seq != 3 || evs[0].Subject != "t" {
		t.Fatalf("Events(t) = %+v, %v, want 3, then kinds one and two, seq 3", evs, err)
	}

	// Missing status and labels are stored as empty ones.
	bare := mustTask(t, s, store.Task{ID: "bare", Phase: "PENDING", Manifest: json.RawMessage(`{}`)})
	if string(bare.Status) != `{}` || len(bare.Labels) != 0 {
		t.Fatalf("task without optional columns = %+v, status %s, want no labels, status {}", bare, bare.Status)
	}
}

func TestTaskRefusals(t *testing.T) {
	s, _ := withSession(t)
	mustTask(t, s, task("t"))
	for what, err := range map[string]error{
		"no such task":        second(s.Task(t.Context(), "no")),
		"update none":         second(s.UpdateTask(t.Context(), "no", func(*store.Task) ([]store.Event, error) { return nil, nil })),
		"page of none":        second(s.Tasks(t.Context(), store.TaskFilter{After: "no"})),
		"event of none":       s.AppendAll(t.Context(), "no", []store.Event{event("x", 1)}),
		"a session as a task": second(s.AdvanceTask(t.Context(), "one", "creating", "ready", event("x", 1), nil)),
	} {
		if fail.CodeOf(err) != fail.NotFound {
			t.Errorf("%s of an unknown task = %v, want %v", what, err, fail.NotFound)
		}
	}
	// If a session and a task had the same id, their events would mix.
	for _, id := range []string{"t", "one"} {
		if _, err := s.CreateTask(t.Context(), task(id), nil, phase("", "PENDING")); fail.CodeOf(err) != fail.Conflict {
			t.Errorf("CreateTask(%s) with a used id = %v, want %v", id, err, fail.Conflict)
		}
	}
	n := row("t")
	n.RepoKey, n.Name = "github.com/o/another", "another"
	if _, created, err := s.Create(t.Context(), n, event("made", 0), admitAll); created || fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Create(t) with the id of a task = %t, %v, want false, %v", created, err, fail.Conflict)
	}
	// A repeated creation returns the same session.
	n.ID = "one"
	if got, created, err := s.Create(t.Context(), n, event("made", 0), admitAll); err != nil || created || got.Name == n.Name {
		t.Errorf("Create(one) with the id of a session = %s, %t, %v, want that session, false, nil", got.Name, created, err)
	}
	if n := lastSeq(t, s, "t"); n != 1 {
		t.Errorf("last event of task t = %d, want 1", n)
	}
	// If an event is refused, neither its row nor the row's labels are inserted.
	if _, err := s.CreateTask(t.Context(), task("big"), nil, store.Event{Kind: "big", Data: make([]byte, 64<<10+1)}); err == nil {
		t.Error("CreateTask with an oversized event = nil, want an error")
	}
	if got, err := s.Tasks(t.Context(), store.TaskFilter{Label: store.Label{Key: "id", Value: "big"}}); err != nil || len(got) != 0 {
		t.Errorf("Tasks with the label of the refused task = %+v, %v, want none", got, err)
	}
	mustTask(t, s, task("big"))
	// Submitted text is returned byte for byte, and only for tasks that have one.
	written := []byte("a: \x00\xff # as it was\n")
	if _, err := s.CreateTask(t.Context(), task("written"), written, phase("", "PENDING")); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string][]byte{"written": written, "big": nil, "nobody": nil} {
		if got, err := s.TaskText(t.Context(), id); err != nil || !bytes.Equal(got, want) || (got == nil) != (want == nil) {
			t.Errorf("TaskText(%s) = %q, %v, want %q", id, got, err, want)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestAdvanceTask(t *testing.T) {
	s, _ := newStore(t)
	mustTask(t, s, task("t"))
	got, err := s.AdvanceTask(t.Context(), "t", "PENDING", "STAGING", phase("PENDING", "STAGING"), func(row *store.Task) { row.SessionID = "s" })
	if err != nil || got.Phase != "STAGING" || got.SessionID != "s" {
		t.Fatalf("AdvanceTask(t) = %+v, %v, want phase STAGING, session s", got, err)
	}
	_, err = s.AdvanceTask(t.Context(), "t", "PENDING", "CANCELLED", event("x", 1), func(*store.Task) { t.Errorf("stale row was passed to change, want %v before", store.ErrStale) })
	if !errors.Is(err, store.ErrStale) || !strings.Contains(err.Error(), "task t is STAGING, not PENDING") {
		t.Fatalf("AdvanceTask from a stale phase = %v, want %v: task t is STAGING, not PENDING", err, store.ErrStale)
	}
	if n := lastSeq(t, s, "t"); n != 2 {
		t.Fatalf("last event of task t = %d, want 2", n)
	}
}

// A task has its own session, whatever else runs on the same repository.
func TestSessionOfTask(t *testing.T) {
	s, _ := withSession(t)
	of := func(id, task string) store.Session {
		n := row(id)
		n.Task = task
		return n
	}
	for _, c := range []struct {
		ask     store.Session
		want    string
		created bool
	}{
		{of("s1", "t1"), "s1", true},
		{of("s2", "t2"), "s2", true},
		{of("s3", "t1"), "s1", false}, // a restarted keeper asks again
		{of("s4", ""), "one", false},
	} {
		got, created, err := s.Create(t.Context(), c.ask, event("made", 0), admitAll)
		if err != nil || got.ID != c.want || created != c.created {
			t.Fatalf("Create(%s) = session %s, %t, %v, want %s, %t", c.ask.ID, got.ID, created, err, c.want, c.created)
		}
	}
	// Once it is gone the task may have another, as a repository may.
	if _, err := s.Advance(t.Context(), "s1", "creating", "gone", event("gone", 1), nil); err != nil {
		t.Fatal(err)
	}
	got, created, err := s.Create(t.Context(), of("s5", "t1"), event("made", 0), admitAll)
	if err != nil || !created || got.ID != "s5" || got.Task != "t1" {
		t.Fatalf("Create(s5 of t1) = %+v, %t, %v, want a new session s5 of task t1", got, created, err)
	}
	rows, err := s.Sessions(t.Context(), false)
	if err != nil || len(rows) != 3 {
		t.Fatalf("Sessions(false) = %+v, %v, want 3", rows, err)
	}
}

// tenThousand makes tasks quickly; the store itself would flush for each. Task i has
// the id i in twelve digits and priority i%3. It is COMPLETED, except that every
// tenth is PENDING and every thousandth is RUNNING.
func tenThousand(t testing.TB) (*store.Store, string) {
	t.Helper()
	s, path := newStore(t)
	raw(t, path, `WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
		INSERT INTO tasks (num, id, name, phase, desired, priority, session, created_at, state_changed_at, labels, status, manifest)
		SELECT i, printf('%012d', i), 'name' || (i % 7), iif(i % 1000 = 0, 'RUNNING', iif(i % 10 = 0, 'PENDING', 'COMPLETED')), 'run', i % 3, '', i, i,
			json_object('team', 'team' || (i % 5), 'all', 'yes'), '{}', '{}' FROM n;
		INSERT INTO task_labels (key, value, task) SELECT 'team', 'team' || (num % 5), num FROM tasks;
		INSERT INTO task_labels (key, value, task) SELECT 'all', 'yes', num FROM tasks`)
	return s, path
}

func TestListOfTenThousand(t *testing.T) {
	s, _ := tenThousand(t)
	any := func(int) bool { return true }
	team0 := func(i int) bool { return i%5 == 0 }
	name0 := func(i int) bool { return i%7 == 0 }
	pending := func(i int) bool { return i%10 == 0 && i%1000 != 0 }
	both := func(a, b func(int) bool) func(int) bool { return func(i int) bool { return a(i) && b(i) } }
	label := store.Label{Key: "team", Value: "team0"}
	const byLabel = "task_labels USING PRIMARY KEY (key=? AND value=? AND task"
	for _, c := range []struct {
		name  string
		f     store.TaskFilter
		after int
		want  func(int) bool
		by    string // the index
	}{
		{"newest", store.TaskFilter{}, 0, any, "PRIMARY KEY"},
		{"oldest", store.TaskFilter{OldestFirst: true}, 0, any, "PRIMARY KEY"},
		{"next page", store.TaskFilter{}, 9951, any, "PRIMARY KEY"},
		{"next page of the oldest", store.TaskFilter{OldestFirst: true}, 50, any, "PRIMARY KEY"},
		{"phase", store.TaskFilter{Phases: []string{"PENDING"}}, 0, pending, "tasks_by_phase"},
		{"phase, next page", store.TaskFilter{Phases: []string{"COMPLETED"}}, 5000, func(i int) bool { return i%10 != 0 }, "tasks_by_phase"},
		{"phases", store.TaskFilter{Phases: []string{"RUNNING", "PENDING", "STAGING", "RUNNING"}}, 0, func(i int) bool { return i%10 == 0 }, "tasks_by_phase"},
		{"phases, oldest", store.TaskFilter{Phases: []string{"COMPLETED", "RUNNING", "PENDING", "FAILED"}, OldestFirst: true}, 0, any, "tasks_by_phase"},
		{"label", store.TaskFilter{Label: label}, 0, team0, byLabel},
		{"label, next page", store.TaskFilter{Label: label, OldestFirst: true}, 5000, team0, byLabel},
		{"label and phases", store.TaskFilter{Label: store.Label{Key: "all", Value: "yes"}, Phases: []string{"PENDING", "RUNNING"}}, 0, func(i int) bool { return i%10 == 0 }, byLabel},
		{"name", store.TaskFilter{Name: "name0"}, 0, name0, "tasks_by_name"},
		{"name and phase", store.TaskFilter{Name: "name0", Phases: []string{"PENDING"}}, 0, both(name0, pending), "tasks_by_name"},
		{"label and name", store.TaskFilter{Label: label, Name: "name0"}, 0, both(team0, name0), byLabel},
		{"id", store.TaskFilter{IDPrefix: "0000000012"}, 0, func(i int) bool { return i/100 == 12 }, "tasks_by_id"},
		{"all", store.TaskFilter{IDPrefix: "0", Label: label, Name: "name0", Phases: []string{"COMPLETED"}}, 0, both(both(team0, name0), func(i int) bool { return i%10 != 0 }), byLabel},
	} {
		t.Run(c.name, func(t *testing.T) {
			var want []string
			for i := 1; i <= 10000 && (!c.f.OldestFirst || len(want) < 50); i++ {
				if c.want(i) && (c.after == 0 || (i > c.after) == c.f.OldestFirst && i != c.after) {
					want = append(want, fmt.Sprintf("%012d", i))
				}
			}
			if !c.f.OldestFirst {
				slices.Reverse(want)
				want = want[:50]
			}
			c.f.Limit = 50
			if c.after > 0 {
				c.f.After = fmt.Sprintf("%012d", c.after)
			}
			got, err := s.Tasks(t.Context(), c.f)
			if err != nil || !slices.Equal(ids(got), want) {
				t.Fatalf("Tasks(%+v) = %v, %v, want %v", c.f, ids(got), err, want)
			}
			plan, err := s.PlanTasks(t.Context(), c.f)
			if err != nil {
				t.Fatal(err)
			}
			// Few tasks share an id prefix, so sorting them is fine.
			if !strings.Contains(plan, c.by) || strings.Contains(plan, "SCAN tasks") || strings.Contains(plan, "TEMP B-TREE") && c.name != "id" {
				t.Errorf("query plan for %s = %s, want index %q, no scan, no sort", c.name, plan, c.by)
			}
		})
	}
	all, err := s.Tasks(t.Context(), store.TaskFilter{Phases: []string{"RUNNING"}})
	if err != nil || len(all) != 10 {
		t.Errorf("Tasks without a limit = %d, %v, want 10", len(all), err)
	}
	counts, err := s.TaskCounts(t.Context())
	if diff := cmp.Diff(map[string]int{"COMPLETED": 9000, "PENDING": 990, "RUNNING": 10}, counts); err != nil || diff != "" {
		t.Errorf("TaskCounts = %v, mismatch (-want +got):\n%s", err, diff)
	}
}

// Reading all pages while tasks are created returns each task once.
func TestPages(t *testing.T) {
	s, _ := newStore(t)
	for i := range 20 {
		mustTask(t, s, task(fmt.Sprintf("old%02d", i)))
	}
	var seen []string
	after := ""
	for {
		page, err := s.Tasks(t.Context(), store.TaskFilter{Limit: 7, After: after})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		mustTask(t, s, task(fmt.Sprintf("new%d", len(seen))))
		seen = append(seen, ids(page)...)
		after = page[len(page)-1].ID
	}
	slices.Reverse(seen)
	if len(seen) != 20 || !slices.IsSorted(seen) || seen[0] != "old00" {
		t.Fatalf("tasks of all pages = %q, want 20 in order from old00", seen)
	}
}

var testQueue = store.Queue{Waiting: "PENDING", Active: []string{"STAGING", "RUNNING"}}

// slots admits as many tasks as there are free slots.
func slots(n int) func([]store.Task, iter.Seq[store.Task]) ([]store.Admission, error) {
	return func(active []store.Task, waiting iter.Seq[store.Task]) (next []store.Admission, err error) {
		if len(active) > n {
			return nil, fmt.Errorf("%d active, and %d slots", len(active), n)
		}
		for t := range waiting {
			if len(active)+len(next) == n {
				break
			}
			next = append(next, store.Admission{ID: t.ID, To: "STAGING", Event: phase("PENDING", "STAGING")})
		}
		return next, nil
	}
}

func TestAdmitInOrder(t *testing.T) {
	s, path := newStore(t)
	for i, priority := range []int{0, 5, -5, 5, 0} {
		n := task(fmt.Sprint(i))
		n.Priority = priority
		mustTask(t, s, n)
	}
	// The clock was ahead when the first tasks were created.
	raw(t, path, `UPDATE tasks SET created_at = created_at + 1000000000 WHERE num < 3`)
	if got, err := s.Tasks(t.Context(), store.TaskFilter{}); err != nil || !slices.Equal(ids(got), []string{"4", "3", "2", "1", "0"}) {
		t.Fatalf("Tasks = %q, %v, want 4 to 0", ids(got), err)
	}
	for _, c := range []struct {
		slots int
		want  []string
	}{
		{3, []string{"1", "3", "0"}},
		{3, nil},
		{5, []string{"4", "2"}},
		{9, nil},
	} {
		got, err := s.Admit(t.Context(), testQueue, slots(c.slots))
		if err != nil || !slices.Equal(got, c.want) {
			t.Fatalf("Admit with %d slots = %q, %v, want %q", c.slots, got, err, c.want)
		}
	}
	for _, id := range []string{"0", "1", "2", "3", "4"} {
		if r, err := s.Task(t.Context(), id); err != nil || r.Phase != "STAGING" || lastSeq(t, s, id) != 2 {
			t.Errorf("Task(%s) = %+v, %v, want phase STAGING with 2 events", id, r, err)
		}
	}
}

func TestAdmitRefusals(t *testing.T) {
	s, _ := newStore(t)
	for _, id := range []string{"a", "b", "c"} {
		mustTask(t, s, task(id))
	}
	if _, err := s.AdvanceTask(t.Context(), "c", "PENDING", "CANCELLED", phase("PENDING", "CANCELLED"), nil); err != nil {
		t.Fatal(err)
	}
	no := errors.New("no")
	for _, c := range []struct {
		name string
		next []string
		err  error
		want func(error) bool
	}{
		{"decide fails", []string{"a"}, no, func(err error) bool { return errors.Is(err, no) }},
		{"one does not wait", []string{"a", "c"}, nil, func(err error) bool { return errors.Is(err, store.ErrStale) }},
		{"one twice", []string{"a", "a"}, nil, func(err error) bool { return errors.Is(err, store.ErrStale) }},
		{"one is none", []string{"a", "x"}, nil, func(err error) bool { return fail.CodeOf(err) == fail.NotFound }},
	} {
		got, err := s.Admit(t.Context(), testQueue, func([]store.Task, iter.Seq[store.Task]) (next []store.Admission, _ error) {
			for _, id := range c.next {
				next = append(next, store.Admission{ID: id, To: "STAGING", Event: event("x", 1)})
			}
			return next, c.err
		})
		if len(got) != 0 || !c.want(err) {
			t.Errorf("Admit %s = %q, %v, want none, the case's error", c.name, got, err)
		}
	}
	// Nothing of the refused admission is left, and the queue may be read twice.
	got, err := s.Admit(t.Context(), testQueue, func(active []store.Task, waiting iter.Seq[store.Task]) ([]store.Admission, error) {
		for range 2 {
			if w := ids(slices.Collect(waiting)); len(active) != 0 || !slices.Equal(w, []string{"a", "b"}) {
				t.Errorf("Admit: active %v, waiting %q, want none, a and b", active, w)
			}
		}
		return nil, nil
	})
	if err != nil || got != nil {
		t.Errorf("Admit that chooses none = %q, %v, want nil, nil", got, err)
	}
}

func TestQueueOfAThousand(t *testing.T) {
	s, _ := tenThousand(t)
	looked := 0
	got, err := s.Admit(t.Context(), testQueue, func(active []store.Task, waiting iter.Seq[store.Task]) (next []store.Admission, err error) {
		if len(active) != 10 {
			t.Errorf("active tasks = %d, want 10", len(active))
		}
		for n := range waiting {
			if looked++; looked > 5 {
				break
			}
			next = append(next, store.Admission{ID: n.ID, To: "STAGING", Event: event("x", 1)})
		}
		return next, nil
	})
	want := []string{"000000000020", "000000000050", "000000000080", "000000000110", "000000000140"} // of priority 2
	if err != nil || !slices.Equal(got, want) || looked != 6 {
		t.Fatalf("Admit = %q after looking at %d tasks, %v, want %q, 6", got, looked, err, want)
	}
	for query, args := range map[string][]any{
		store.QueueQuery:    {"PENDING"},
		store.SessionsQuery: nil,
		store.ActiveQuery:   {`["RUNNING","STAGING"]`},
		`SELECT id FROM sessions WHERE phase <> 'gone' AND task = '' AND repo_key = ?`:        {"x"},
		`SELECT id FROM sessions WHERE phase <> 'gone' AND task <> '' AND task = ?`:           {"x"},
		`SELECT seq FROM events WHERE subject = ? AND seq > ? ORDER BY seq LIMIT 10`:          {"x", 1},
		`SELECT value, (SELECT max(seq) FROM events WHERE subject = value) FROM json_each(?)`: {`["x"]`},
	} {
		plan, err := s.Plan(t.Context(), query, args...)
		if err != nil {
			t.Fatalf("query plan of %s: %v", query, err)
		}
		sorts := strings.Contains(plan, "TEMP B-TREE") && query != store.ActiveQuery // few tasks hold slots, so sorting is fine
		scans := strings.Contains(strings.ReplaceAll(plan, "SCAN sessions USING INDEX sessions_that_exist", ""), "SCAN sessions") ||
			strings.Contains(plan, "SCAN tasks") || strings.Contains(plan, "SCAN events")
		if sorts || scans {
			t.Errorf("query plan of %s = %s, want no sort, no scan", query, plan)
		}
	}
}

const testSlots = 3

// admitAndRun acts as one of several processes that work off the queue.
func admitAndRun(ctx context.Context, s *store.Store) error {
	for {
		mine, err := s.Admit(ctx, testQueue, slots(testSlots))
		if err != nil {
			return err
		}
		for _, id := range mine {
			for _, step := range [][2]string{{"STAGING", "RUNNING"}, {"RUNNING", "COMPLETED"}} {
				if _, err := s.AdvanceTask(ctx, id, step[0], step[1], phase(step[0], step[1]), nil); err != nil {
					return err
				}
			}
			fmt.Println("ran", id)
		}
		left, err := s.Tasks(ctx, store.TaskFilter{Phases: []string{"PENDING"}, Limit: 1})
		if err != nil || len(left) == 0 {
			return err
		}
		runtime.Gosched() // other processes hold the slots
	}
}

func TestManyProcessesAdmit(t *testing.T) {
	s, path := newStore(t)
	const tasks = 40
	for i := range tasks {
		mustTask(t, s, task(fmt.Sprintf("t%02d", i)))
	}
	var ps []*process
	for range 4 {
		ps = append(ps, spawn(t, "admit", path))
	}
	for _, p := range ps {
		p.shoot(t)
	}
	ran := 0
	for _, p := range ps {
		out, err := p.finish()
		if err != nil {
			t.Errorf("child: %v, output %q", err, out)
		}
		ran += len(out)
	}
	if counts, err := s.TaskCounts(t.Context()); err != nil || counts["COMPLETED"] != tasks || ran != tasks {
		t.Fatalf("TaskCounts = %v, %v, %d runs, want %d completed and as many runs", counts, err, ran, tasks)
	}
	for i := range tasks { // each task ran once
		if n := lastSeq(t, s, fmt.Sprintf("t%02d", i)); n != 4 {
			t.Fatalf("last event of task %d = %d, want 4", i, n)
		}
	}
}

// life does everything that a task's successive keepers do to its rows. It continues
// from whatever state it finds.
func life(ctx context.Context, s *store.Store) error {
	if _, err := s.Task(ctx, "t"); fail.CodeOf(err) == fail.NotFound {
		if _, err := s.CreateTask(ctx, task("t"), nil, phase("", "PENDING")); err != nil {
			return err
		}
	}
	if _, err := s.Admit(ctx, testQueue, slots(1)); err != nil {
		return err
	}
	next := map[string]string{"STAGING": "PROVISIONING", "PROVISIONING": "RUNNING", "RUNNING": "COMPLETED"}
	for {
		t, err := s.Task(ctx, "t")
		if err != nil || t.Phase == "COMPLETED" {
			return err
		}
		switch t.Phase {
		case "PROVISIONING":
			n := row("s")
			n.Task = t.ID
			vm, _, err := s.Create(ctx, n, event("made", 0), admitAll)
			if err != nil {
				return err
			}
			if _, err := s.UpdateTask(ctx, t.ID, func(row *store.Task) ([]store.Event, error) {
				row.SessionID = vm.ID
				return nil, nil
			}); err != nil {
				return err
			}
		case "RUNNING":
			evs, err := s.Events(ctx, t.ID, 0, 100)
			if err != nil {
				return err
			}
			if evs[len(evs)-1].Kind != "tool" {
				if err := s.AppendAll(ctx, t.ID, []store.Event{event("tool", 0), event("tool", 1), event("tool", 2)}); err != nil {
					return err
				}
			}
		}
		if _, err := s.AdvanceTask(ctx, t.ID, t.Phase, next[t.Phase], phase(t.Phase, next[t.Phase]), nil); err != nil {
			return err
		}
	}
}

// story returns what the events of "t" report; it fails when they and the rows
// disagree.
func story(t *testing.T, s *store.Store) (all []string) {
	t.Helper()
	evs, err := s.Events(t.Context(), "t", 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	at, tools := "", 0
	for i, ev := range evs {
		if ev.Seq != int64(i+1) {
			t.Fatalf("seq of event %d = %d, want %d", i, ev.Seq, i+1)
		}
		all = append(all, ev.Kind+string(ev.Data))
		if ev.Kind == "tool" {
			tools++
			continue
		}
		var change struct{ From, To string }
		if err := json.Unmarshal(ev.Data, &change); err != nil || change.From != at {
			t.Fatalf("phase event = %s, %v, want from %q", ev.Data, err, at)
		}
		at = change.To
	}
	row, err := s.Task(t.Context(), "t")
	if at == "" && fail.CodeOf(err) == fail.NotFound {
		return nil
	}
	if err != nil || row.Phase != at || tools%3 != 0 {
		t.Fatalf("row: phase %q, %v; events: phase %q, %d tool events; want one phase, a multiple of 3 tool events", row.Phase, err, at, tools)
	}
	if labelled, err := s.Tasks(t.Context(), store.TaskFilter{Label: store.Label{Key: "team", Value: "a"}}); err != nil || len(labelled) != 1 {
		t.Fatalf("Tasks with label team=a = %+v, %v, want 1", labelled, err)
	}
	return all
}

// A process that is killed before any row change or commit has done all of a step or
// nothing. Another process then reaches the same end.
func TestKillAtEveryStepOfATask(t *testing.T) {
	undisturbed, _ := newStore(t)
	if err := life(t.Context(), undisturbed); err != nil {
		t.Fatal(err)
	}
	want := story(t, undisturbed)
	killed := 0
	for {
		s, path := newStore(t)
		p := spawn(t, fmt.Sprintf("life 0 %d", killed+1), path)
		p.shoot(t)
		out, err := p.finish()
		if err == nil {
			break
		}
		if status, ok := p.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
			t.Fatalf("child before step %d = %v, output %q, want it killed", killed+1, err, out)
		}
		killed++
		if told := story(t, s); !slices.Equal(told, want[:len(told)]) {
			t.Fatalf("story, killed before step %d, = %q, want a beginning of %q", killed, told, want)
		}
		if err := life(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		vms, err := s.Sessions(t.Context(), true)
		if row, err2 := s.Task(t.Context(), "t"); err != nil || err2 != nil || len(vms) != 1 || row.SessionID != vms[0].ID {
			t.Fatalf("Sessions = %+v, %v, Task(t) = %+v, %v, want 1 session, the task's", vms, err, row, err2)
		}
		if got := story(t, s); !slices.Equal(got, want) {
			t.Fatalf("story after killing before step %d = %q, want %q", killed, got, want)
		}
	}
	if killed < 20 { // a row, an event and a commit for each action of life
		t.Fatalf("steps at which the child was killed = %d, want at least 20", killed)
	}
}

// fill creates a task and twenty of its events.
func fill(ctx context.Context, s *store.Store, i int) error {
	id := fmt.Sprintf("t%04d", i)
	if _, err := s.CreateTask(ctx, task(id), nil, phase("", "PENDING")); err != nil {
		return err
	}
	evs := make([]store.Event, 20)
	for i := range evs {
		evs[i] = store.Event{Kind: "tool", Data: fmt.Appendf(nil, "%q", strings.Repeat("x", 300))}
	}
	return s.AppendAll(ctx, id, evs)
}

func TestFullDiskOfTasks(t *testing.T) {
	s, path := newStore(t)
	p := spawn(t, "small-files-of-tasks 600000", path)
	p.shoot(t)
	out, err := p.finish()
	if err == nil || len(out) < 2 {
		t.Fatalf("child on a full disk = %v, %d lines, want an error after some lines", err, len(out))
	}
	if last := out[len(out)-1]; !strings.HasPrefix(last, "error 5 \"df -h ") {
		t.Fatalf("last line of the child on a full disk = %q, want error 5 with hint \"df -h …\"", last)
	}
	told := len(out) - 1
	rows, err := s.Tasks(t.Context(), store.TaskFilter{OldestFirst: true})
	if err != nil || len(rows) != told && len(rows) != told+1 {
		t.Fatalf("Tasks = %d, %v, want the %d acknowledged ones or one more", len(rows), err, told)
	}
	for i, row := range rows {
		n := lastSeq(t, s, row.ID)
		if n != 21 && (i < told || n != 1) {
			t.Errorf("events of task %s = %d, want 21", row.ID, n)
		}
		if l, err := s.Tasks(t.Context(), store.TaskFilter{Label: store.Label{Key: "id", Value: row.ID}}); err != nil || len(l) != 1 {
			t.Errorf("Tasks with label id=%s = %+v, %v, want 1", row.ID, l, err)
		}
	}
	if err := fill(t.Context(), s, len(rows)); err != nil { // once space is available again, work continues
		t.Fatalf("fill after space was freed = %v, want nil", err)
	}
}

// A follower sees the events of a task's life while others write it.
func TestFollowATask(t *testing.T) {
	s, path := newStore(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	p := spawn(t, "life", path)
	p.shoot(t)
	n := int64(0)
	for ev, err := range s.Follow(ctx, "t", 0) { // before the task exists
		if err != nil {
			t.Fatal(err)
		}
		if n++; ev.Seq != n {
			t.Fatalf("followed event = %+v, want seq %d", ev, n)
		}
		if strings.Contains(string(ev.Data), `"to":"COMPLETED"`) {
			break
		}
	}
	if out, err := p.finish(); err != nil {
		t.Fatalf("child: %v, output %q", err, out)
	}
	story(t, s)
}
