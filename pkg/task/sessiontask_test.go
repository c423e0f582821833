package task

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// opened adds a session of the repository acme/NAME to the store, in the given
// phases.
func opened(t *testing.T, m *Manager, name, task string, phase, desired session.Phase) string {
	t.Helper()
	id := ids.New()
	spec, err := json.Marshal(session.Spec{
		Repo:      repo.Ref{Key: "github.com/acme/" + name, Slug: "acme/" + name, URL: "https://github.com/acme/" + name},
		Resources: config.Resources{CPUs: 1, Memory: 512 << 20, Disk: 4 << 30},
	})
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = m.store().Create(t.Context(), store.Session{
		ID: id, Name: "agent-acme-" + name + "-" + id[:6], RepoKey: "github.com/acme/" + name, Repo: "acme/" + name, Task: task,
		Phase: string(phase), Desired: string(desired), Spec: spec, Status: json.RawMessage("{}"),
	}, store.Event{Kind: "phase"}, func([]store.Session) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// become puts a session into another phase.
func become(t *testing.T, m *Manager, id string, phase session.Phase) {
	t.Helper()
	_, err := m.store().Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Phase, row.Desired = string(phase), string(phase)
		return store.Event{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func asked(t *testing.T, name, in, more string) *manifest.Task {
	t.Helper()
	got, _, err := manifest.Parse("m", fmt.Appendf(nil, `{"version": "1", "kind": "Task", "metadata": {"name": %q},
		"agent": {"kind": "command", "command": ["true"]}, "vm": {"session": %q}%s}`, name, in, more), "")
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func submitIn(t *testing.T, m *Manager, name, in string) Task {
	t.Helper()
	got, _, err := m.Submit(t.Context(), asked(t, name, in, ""), Submission{})
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// end makes an admitted task end.
func end(t *testing.T, m *Manager, task Task) {
	t.Helper()
	_, err := m.store().AdvanceTask(t.Context(), task.ID, string(Staging), string(Failed), store.NewEvent(EventPhase, PhaseChange{From: Staging, To: Failed}), nil)
	if err != nil {
		t.Fatal(err)
	}
}

func TestOneAtATimeInASession(t *testing.T) {
	m := newManager(t, 3, 100)
	opened(t, m, "app", "", session.Ready, session.Ready)
	opened(t, m, "other", "", session.Ready, session.Ready)
	first := submitIn(t, m, "first", "acme/app")
	for _, name := range []string{"second", "third"} {
		submitIn(t, m, name, "app")
	}
	submitIn(t, m, "elsewhere", "other")
	submit(t, m, "own", "small", 0)
	want := []string{"first", "elsewhere", "own"}
	for range 2 {
		if got := started(t, m); !slices.Equal(got, want) {
			t.Errorf("started %v, want %v", got, want)
		}
	}
	end(t, m, first)
	if got := started(t, m); !slices.Equal(got, []string{"second", "elsewhere", "own"}) {
		t.Errorf("tasks started then = %q, want second, elsewhere, own", got)
	}
}

// A running session takes no more capacity for a task, but a stopped one does. A task
// that waits for capacity blocks those behind it.
func TestRoomForASession(t *testing.T) {
	m := newManager(t, 10, 2)
	opened(t, m, "a", "", session.Ready, session.Ready)
	b := opened(t, m, "b", "", session.Ready, session.Ready)
	stopped := opened(t, m, "c", "", session.Stopped, session.Stopped)
	submitIn(t, m, "in a", "acme/a")
	submitIn(t, m, "in b", "acme/b")
	if got := started(t, m); len(got) != 2 {
		t.Errorf("tasks started = %q, want 2", got)
	}
	submitIn(t, m, "in c", stopped)
	submit(t, m, "own", "small", 0)
	if got := started(t, m); len(got) != 2 {
		t.Errorf("tasks started with a stopped session = %q, want 2", got)
	}
	become(t, m, b, session.Gone)
	if got := started(t, m); !slices.Equal(got, []string{"in a", "in b", "in c"}) {
		t.Errorf("tasks started with capacity for one = %q, want in a, in b, in c", got)
	}
}

func TestSessionsThatTasksMayNotHave(t *testing.T) {
	m := newManager(t, 1, 100)
	id := opened(t, m, "app", "", session.Ready, session.Ready)
	own := opened(t, m, "own", "aaaabbbbcccc", session.Ready, session.Ready)
	going := opened(t, m, "going", "", session.Ready, session.Gone)
	destroyed := opened(t, m, "gone", "", session.Ready, session.Ready)
	become(t, m, destroyed, session.Gone)
	for _, c := range []struct {
		in, more string
		code     fail.Code
		says     string
	}{
		{"nobody", "", fail.NotFound, `no session "nobody"`},
		{destroyed, "", fail.NotFound, "is gone"},
		{own, "", fail.Conflict, "belongs to task aaaabbbbcccc"},
		{going, "", fail.Conflict, "is being destroyed"},
		{id, `, "repository": {"url": "acme/other"}`, fail.Usage, "is for github.com/acme/app, but the manifest's repository is github.com/acme/other"},
		{id, `, "repository": {"url": "acme/app@main"}`, fail.Usage, "names branch main"},
	} {
		_, _, err := m.Submit(t.Context(), asked(t, "x", c.in, c.more), Submission{})
		if fail.CodeOf(err) != c.code || err == nil || !strings.Contains(err.Error(), c.says) || fail.HintOf(err) == "" {
			t.Errorf("Submit in %s%s = %v (hint %q), want %q (code %v) with a hint", c.in, c.more, err, fail.HintOf(err), c.says, c.code)
		}
	}
	if all, err := m.List(t.Context(), store.TaskFilter{}); err != nil || len(all) != 0 {
		t.Errorf("tasks = %d, %v, want 0", len(all), err)
	}
	// Every name of the session works, also with its repository; the task stores the
	// id.
	for _, in := range []string{id, id[:5], "app", "acme/app"} {
		got, _, err := m.Submit(t.Context(), asked(t, in, in, `, "repository": {"url": "https://github.com/acme/app.git", "subpath": "x"}`), Submission{})
		if v := got.View(); err != nil || v.Session != id || !v.InSession || got.Manifest.VM.Session != id {
			t.Errorf("Submit in %s = %+v, %v, want a task in session %s", in, v, err, id)
		}
	}
}

// A retry runs in the same session, and not in another with the same name.
func TestRetryInASession(t *testing.T) {
	m := newManager(t, 10, 100)
	id := opened(t, m, "app", "", session.Ready, session.Ready)
	task := submitIn(t, m, "x", "app")
	if v := task.View(); v.Repository != "https://github.com/acme/app" {
		t.Errorf("repository = %q, want https://github.com/acme/app", v.Repository)
	}
	if in, err := m.In(t.Context(), id); err != nil || len(in) != 1 || in[0].ID != task.ID {
		t.Errorf("In(%s) = %v, %v, want %s alone", id, in, err, task.ID)
	}
	started(t, m)
	end(t, m, task)
	if in, err := m.In(t.Context(), id); err != nil || len(in) != 0 {
		t.Errorf("In(%s) = %v, %v, want none", id, in, err)
	}
	task, err := m.Get(t.Context(), task.ID)
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := m.Retry(t.Context(), task, Submission{})
	if err != nil || again.SessionID != id || again.Status.RetryOf != task.ID {
		t.Fatalf("Retry = %+v, %v, want a task in session %s", again.View(), err, id)
	}
	become(t, m, id, session.Gone)
	opened(t, m, "app", "", session.Ready, session.Ready)
	if _, _, err := m.Retry(t.Context(), task, Submission{}); err == nil || !strings.Contains(err.Error(), "session "+id+" is gone") {
		t.Errorf("Retry in a removed session = %v, want \"session %s is gone\"", err, id)
	}
}

// If a user's session may come back, the task waits for it; otherwise the task fails.
func TestLostSessions(t *testing.T) {
	m := newManager(t, 1, 100)
	w := NewWorker(m, nil, slog.New(slog.DiscardHandler), nil)
	id := opened(t, m, "app", "", session.Stopped, session.Stopped)
	task := submitIn(t, m, "x", id)
	down, silent := fmt.Errorf("x: %w", errNotReady), fmt.Errorf("x: %w", errSilent)
	check := func(what crashAction, cause error, result Result, says string) {
		t.Helper()
		o, err := w.agent.outcomeIfLost(t.Context(), task, what, cause)
		switch {
		case err != nil:
			t.Fatal(err)
		case result == "" && o != nil, result != "" && (o == nil || o.Result != result || !strings.Contains(o.Reason, says)):
			t.Errorf("outcome of a task whose session is %v (%v) = %+v, want %q with %q", what, cause, o, result, says)
		}
	}
	check(actionRestart, down, "", "")
	check(actionRestart, errAgentLost, "", "")
	check(actionRestart, silent, Failure, "the guest did not answer")
	check(actionRebuild, down, CrashLoop, "crashed 1 times")
	check(actionGiveUp, down, CrashLoop, "crashed 1 times")
	become(t, m, id, session.Destroying)
	check(actionRestart, down, Failure, "it was destroyed")

	task.Phase = Completing
	for _, o := range []Outcome{{Result: Failure}, {Result: Failure, Preserve: true}, {Result: Hung}} {
		task.Status.Outcome = &o
		if got := task.last(); got != Failed {
			t.Errorf("last phase with outcome %+v = %s, want %s", o, got, Failed)
		}
	}
}
