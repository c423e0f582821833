package task

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// The metadata of a task that has ended says what it started from and how it ended.
func TestMetadata(t *testing.T) {
	w, task := running(t, `, "ended_at": "2026-01-01T00:00:03Z", "repository": "https://example.com/r",
		"artifacts": [{"name": "files/x", "size": 3, "sha256": "ab"}], "skipped": [{"name": "y", "reason": "z"}],
		"outcome": {"result": "failure", "reason": "r", "at": "2026-01-01T00:00:03Z"}`)
	if err := w.Tasks.Dir(task.ID).writeMetadata(task, "cafe", nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(w.Tasks.Dir(task.ID).metadata())
	if err != nil {
		t.Fatal(err)
	}
	var md Metadata
	if err := json.Unmarshal(text, &md); err != nil {
		t.Fatal(err)
	}
	if md.ID != task.ID || md.Repository.URL != "acme/app" || md.Repository.Base != "cafe" || md.DurationMS != 3000 || md.Attempts != 1 ||
		len(md.Artifacts) != 1 || md.Artifacts[0].SHA256 != "ab" || len(md.Skipped) != 1 || md.Outcome == nil || md.Outcome.Result != Failure {
		t.Errorf("metadata = %s, want the task's repository, duration, attempts, artifacts and outcome", text)
	}
	task.Manifest.Repository.URL = "" // as for a task in an existing session
	if err := w.Tasks.Dir(task.ID).writeMetadata(task, "", nil); err != nil {
		t.Fatal(err)
	}
	if text, err = os.ReadFile(w.Tasks.Dir(task.ID).metadata()); err != nil || !strings.Contains(string(text), `"url": "https://example.com/r"`) {
		t.Errorf("metadata = %s, %v, want the URL unescaped", text, err)
	}
}

// A change of phase resets what belonged to the previous phase, and adds up the
// agent's running time. A transition that is not in the table, or from an outdated
// row, changes nothing.
func TestAdvance(t *testing.T) {
	w, task := running(t, `, "tries": 3, "next_try": "2026-01-01T00:00:00Z", "ran": 1000000000, "spent": {"for": 5000000000, "at": "2999-01-01T00:00:00Z"}`)
	old := task
	if err := w.rec.advance(t.Context(), &task, Completed, PhaseChange{}, nil); err == nil || task.Phase != Running {
		t.Errorf("advance from %s to %s = %v, phase %s, want an error, no change", Running, Completed, err, task.Phase)
	}
	if err := w.rec.advance(t.Context(), &task, Ready, PhaseChange{}, nil); err != nil {
		t.Fatal(err)
	}
	if f := task.Status; f.Tries != 0 || !f.NextTry.IsZero() || f.Spent != (Spent{}) || f.Ran != 6*time.Second {
		t.Errorf("status of a new phase = %+v, want no tries, nothing spent, 6s run", f)
	}
	if err := w.rec.advance(t.Context(), &old, Completing, PhaseChange{}, nil); err == nil {
		t.Error("advance of an outdated row = nil, want an error")
	}
	if cur, err := w.Tasks.Get(t.Context(), task.ID); err != nil || cur.Phase != Ready {
		t.Errorf("phase = %s, %v, want %s", cur.Phase, err, Ready)
	}
}

// Tries are counted in the row, and no more are made than allowed.
func TestAgain(t *testing.T) {
	w, task := running(t, "")
	cause := os.ErrDeadlineExceeded
	for try := 1; try <= 2; try++ {
		if err := w.rec.retryLater(t.Context(), &task, cause, 2, time.Millisecond); err != nil || task.Status.Tries != try {
			t.Fatalf("retryLater %d = %v, tries %d, want nil, %d", try, err, task.Status.Tries, try)
		}
	}
	if err := w.rec.retryLater(t.Context(), &task, cause, 2, time.Millisecond); err != cause || task.Status.Tries != 2 { //nolint:errorlint // exactly this error
		t.Errorf("retryLater after the last try = %v, tries %d, want %v, 2", err, task.Status.Tries, cause)
	}
}

// A keeper continues where the previous keeper's events end, also in the log.
func TestEventsComeOnce(t *testing.T) {
	w, task := running(t, "")
	task = print(t, w, task, toolCall("one"), 0)
	task = print(t, w, task, toolCall("two"), 0)
	if n := len(kinds(t, w.Tasks, task.ID)[EventTool]); n != 2 {
		t.Errorf("%s events = %d, want 2", EventTool, n)
	}
	if text, err := os.ReadFile(w.Tasks.Dir(task.ID).Stdout()); err != nil || string(text) != toolCall("one")+toolCall("two") {
		t.Errorf("stdout = %q, %v, want both calls", text, err)
	}
	// Output that a keeper wrote to the log and did not count is counted by the next
	// one.
	f, err := os.OpenFile(w.Tasks.Dir(task.ID).Stdout(), os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(toolCall("three")); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	task = print(t, w, task, "", 0)
	if n := len(kinds(t, w.Tasks, task.ID)[EventTool]); n != 3 || task.Status.Progress.ToolCalls != 3 {
		t.Errorf("%s events = %d, tool calls %d, want 3, 3", EventTool, n, task.Status.Progress.ToolCalls)
	}
}

// Secrets that an agent prints are neither in its events nor in its progress.
func TestEventsAreRedacted(t *testing.T) {
	w, task := running(t, "")
	w.rec.Redact = secret.NewRedactor(secret.NewValue("sw0rdfish-0123456789"))
	task = print(t, w, task, toolCall("echo sw0rdfish-0123456789")+`{"type":"result","subtype":"success","result":"it is sw0rdfish-0123456789"}`+"\n", 0)
	row, err := w.Tasks.store().Task(t.Context(), task.ID)
	if err != nil {
		t.Fatal(err)
	}
	evs, err := w.Tasks.store().Events(t.Context(), task.ID, store.Oldest, 100)
	if err != nil || len(evs) < 3 {
		t.Fatalf("Events = %+v, %v, want at least 3", evs, err)
	}
	text, err := json.Marshal(evs)
	if err != nil {
		t.Fatal(err)
	}
	if all := string(text) + string(row.Status); strings.Contains(all, "sw0rdfish") || !strings.Contains(all, "it is [redacted]") {
		t.Errorf("stored texts = %s, want \"it is [redacted]\", no secret", all)
	}
}

// The desired state is never weakened, and a retry uses what was submitted.
func TestDesiredStateOnlyGrows(t *testing.T) {
	w, task := running(t, "")
	for _, c := range []struct{ desired, is DesiredPhase }{{Cancel, Cancel}, {Destroyed, Destroyed}, {Cancel, Destroyed}} {
		got, err := w.Tasks.SetDesired(t.Context(), task, c.desired, Client{})
		if err != nil || got.Desired != c.is {
			t.Errorf("SetDesired(%s) = desired phase %s, %v, want %s", c.desired, got.Desired, err, c.is)
		}
	}
	if _, _, err := w.Tasks.Retry(t.Context(), task, Submission{}); err == nil {
		t.Error("Retry of a running task = nil, want an error")
	}
}
