package task

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/lifecycle"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// running returns a task in phase Running whose agent is Claude Code, and a worker
// for it. more is added to the JSON of its status.
func running(t *testing.T, more string) (*Worker, Task) {
	t.Helper()
	m := newManager(t, 1, 100)
	asked, _, err := manifest.Parse("m", []byte(`{"version": "1", "kind": "Task", "repository": {"url": "acme/app"}, "claude": {"prompt": "x"}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	task, _, err := m.Submit(t.Context(), asked, Submission{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.prepareDir(t.Context(), task); err != nil {
		t.Fatal(err)
	}
	row, err := m.store().UpdateTask(t.Context(), task.ID, func(row *store.Task) ([]store.Event, error) {
		row.Phase, row.Status = string(Running), json.RawMessage(`{"attempt": 1, "started_at": "2026-01-01T00:00:00Z"`+more+`}`)
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if task, err = read(row, nil); err != nil {
		t.Fatal(err)
	}
	return NewWorker(m, nil, slog.New(slog.DiscardHandler), secret.NewRedactor()), task
}

// print makes the agent print some text, as over one connection of one keeper.
func print(t *testing.T, w *Worker, task Task, text string, most int64) Task {
	t.Helper()
	r, err := w.rec.newCollector(t.Context(), &task)
	if err != nil {
		t.Fatal(err)
	}
	if most > 0 {
		r.most = most
	}
	if _, err := (logWriter{r, 0}).Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := r.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r.task
}

func toolCall(text string) string {
	command, _ := json.Marshal(text)
	return `{"type":"assistant","message":{"id":"m","content":[{"type":"tool_use","id":"c","name":"Bash","input":{"command":` + string(command) + `}}]}}` + "\n"
}

func kinds(t *testing.T, m *Manager, id string) map[string][]store.Event {
	t.Helper()
	evs, err := m.store().Events(t.Context(), id, 0, 10_000)
	if err != nil {
		t.Fatal(err)
	}
	by := map[string][]store.Event{}
	for _, ev := range evs {
		by[ev.Kind] = append(by[ev.Kind], ev)
	}
	return by
}

// The total that an agent can add to the store is limited, across keepers and time.
// Beyond the limit its events are only counted, and one event says so.
func TestEventsInAll(t *testing.T) {
	w, task := running(t, fmt.Sprintf(`, "events": {"bytes": %d}`, store.MaxGuestEvents-10_000))
	const each = 50
	for range 3 { // three keepers, one after the other
		task = print(t, w, task, strings.Repeat(toolCall(strings.Repeat("x", 1000)), each), 0)
		var err error
		if task, err = w.Tasks.Get(t.Context(), task.ID); err != nil {
			t.Fatal(err)
		}
	}
	by := kinds(t, w.Tasks, task.ID)
	if n := len(by[EventTool]); n == 0 || n > 10 {
		t.Errorf("%s events stored = %d, want 1 to 10", EventTool, n)
	}
	if all := by[EventWarning]; len(all) != 1 || !strings.Contains(string(all[0].Data), "64 MiB") {
		t.Errorf("warnings = %v, want one with \"64 MiB\"", all)
	}
	view, err := json.Marshal(task.View())
	if err != nil {
		t.Fatal(err)
	}
	var shown struct {
		Dropped int `json:"events_dropped"`
	}
	if err := json.Unmarshal(view, &shown); err != nil || shown.Dropped != 3*each-len(by[EventTool]) {
		t.Errorf("events dropped = %d, %v, want %d (%d stored of %d)", shown.Dropped, err, 3*each-len(by[EventTool]), len(by[EventTool]), 3*each)
	}
	// The task's own events are still stored.
	if err := w.rec.advance(t.Context(), &task, Completing, PhaseChange{}, nil); err != nil {
		t.Fatal(err)
	}
	if n := len(kinds(t, w.Tasks, task.ID)[EventPhase]); n != 2 {
		t.Errorf("%s events = %d, want 2", EventPhase, n)
	}
}

// An event takes as much space as its text, and so does its line in events.jsonl.
func TestEventsAreAsLongAsTheirText(t *testing.T) {
	w, task := running(t, "")
	task = print(t, w, task, toolCall(strings.Repeat("<&>", 500)), 0)
	all := kinds(t, w.Tasks, task.ID)[EventTool]
	if len(all) != 1 || len(all[0].Data) > 1600 {
		t.Errorf("%s events = %d, the first of %d bytes, want 1 of at most 1600", EventTool, len(all), len(all[0].Data))
	}
	text, err := os.ReadFile(w.Tasks.Dir(task.ID).events())
	if err != nil || !strings.Contains(string(text), "<&><&>") {
		t.Errorf("events file = %.300s, %v, want <, & and > unescaped", text, err)
	}
}

// A log is limited over all attempts, and shows where it was cut.
func TestLogsInAll(t *testing.T) {
	w, task := running(t, "")
	d := w.Tasks.Dir(task.ID)
	for attempt := range 3 {
		task = print(t, w, task, strings.Repeat("0123456789abcde\n", 50), 1000)
		if got := size(d.Stdout()); got > 1000 || attempt > 0 && got != 1000 {
			t.Errorf("log after attempt %d = %d bytes, want 1000", attempt, got)
		}
		// The next attempt's output comes after this one's.
		row, err := w.Tasks.store().UpdateTask(t.Context(), task.ID, func(row *store.Task) ([]store.Event, error) {
			task.Status.LogBase.Stdout = size(d.Stdout())
			var err error
			row.Status, err = json.Marshal(task.Status)
			return nil, err
		})
		if err != nil {
			t.Fatal(err)
		}
		if task, err = read(row, nil); err != nil {
			t.Fatal(err)
		}
	}
	var says lifecycle.Warning
	all := kinds(t, w.Tasks, task.ID)[EventWarning]
	if len(all) == 0 || json.Unmarshal(all[0].Data, &says) != nil || !strings.Contains(says.Message, "stdout.log reached its limit of 1000 bytes") {
		t.Errorf("warnings = %v, want \"stdout.log reached its limit of 1000 bytes\" first", all)
	}
}
