package task

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// How the agent ended decides the outcome: an exit code in the manifest's list is a
// success, a signal never is.
func TestHowTheAgentEndedDecides(t *testing.T) {
	for _, c := range []struct {
		name   string
		codes  []int
		result guestproto.TaskResult
		want   Result
		reason string
		exit   int // -1 for none
	}{
		{"success", []int{0}, guestproto.TaskResult{}, Success, "", 0},
		{"another code of success", []int{0, 3}, guestproto.TaskResult{ExitCode: 3}, Success, "", 3},
		{"failure", []int{0}, guestproto.TaskResult{ExitCode: 3}, Failure, "the agent ended with exit code 3", 3},
		{"success is not listed", []int{3}, guestproto.TaskResult{}, Failure, "the agent ended with exit code 0", 0},
		{"it did not start", []int{0}, guestproto.TaskResult{ExitCode: 127, Error: "no such program"}, Failure, "the agent ended with exit code 127: no such program", 127},
		{"a signal", []int{0}, guestproto.TaskResult{Signal: "KILL"}, Failure, "the agent was killed by signal KILL", -1},
	} {
		w, task := running(t, "")
		task.Manifest.Lifecycle.SuccessCodes = c.codes
		if err := w.agent.recordExit(t.Context(), &task, c.result); err != nil {
			t.Fatalf("recordExit for %s = %v, want nil", c.name, err)
		}
		task, err := w.Tasks.Get(t.Context(), task.ID)
		if err != nil {
			t.Fatal(err)
		}
		o := task.Status.Outcome
		exit := -1
		if o.ExitCode != nil {
			exit = *o.ExitCode
		}
		if o.Result != c.want || o.Reason != c.reason || task.ErrorMessage != c.reason || exit != c.exit || o.Signal != c.result.Signal || o.At.IsZero() {
			t.Errorf("%s: outcome = %+v, exit code %d, error of the row %q, want %s, %d, %q", c.name, o, exit, task.ErrorMessage, c.want, c.exit, c.reason)
		}
		if want := "agent-sessionizer task logs " + task.ID; c.want == Failure && (o.Code != "FAILURE" || o.Hint != want || task.ErrorHint != want) {
			t.Errorf("%s: code = %q, hint %q, want FAILURE, %q", c.name, o.Code, o.Hint, want)
		}
	}
}

// Each outcome leads to one last phase. A VM is kept only if the task has its own.
func TestLastPhase(t *testing.T) {
	for _, c := range []struct {
		name            string
		result          Result
		preserve        bool // of the outcome
		action, session string
		given           string
		desired         DesiredPhase
		last            Phase
	}{
		{name: "success", result: Success, session: "s", action: "preserve", last: Completed},
		{name: "cancelled", result: CancelledByUser, session: "s", action: "preserve", last: Cancelled},
		{name: "failure", result: Failure, session: "s", last: Failed},
		{name: "failure whose VM is kept", result: Failure, session: "s", action: "preserve", last: FailedPreserved},
		{name: "work that could not be collected", result: Failure, preserve: true, session: "s", last: FailedPreserved},
		{name: "nothing is to be kept", result: Failure, preserve: true, session: "s", desired: Destroyed, last: Failed},
		{name: "no VM", result: Failure, preserve: true, action: "preserve", last: Failed},
		{name: "a session that was there before", result: Failure, preserve: true, session: "s", given: "s", last: Failed},
	} {
		task := Task{Task: store.Task{SessionID: c.session}, Phase: Completing, Desired: c.desired, Manifest: &manifest.Task{}, Status: Status{Outcome: &Outcome{Result: c.result, Preserve: c.preserve}}}
		task.Manifest.Lifecycle.FailureAction, task.Manifest.VM.Session = c.action, c.given
		if got := task.last(); got != c.last {
			t.Errorf("last phase for %s = %s, want %s", c.name, got, c.last)
		}
	}
}

// The VM of a task that has ended is destroyed before the task is over.
func TestFinishDestroysTheVM(t *testing.T) {
	w, task, _ := completing(t)
	task, err := w.next(t, task)
	if err != nil {
		t.Fatal(err)
	}
	w.Tasks.Sessions.Self = writeProgram(t, "") // the session's keeper
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.finish(ctx, &task) }()
	for w.wanted(t, task) != session.Gone {
		select {
		case err := <-ended:
			t.Fatalf("keeper ended with its VM to be %s: %v, want it to wait for the removal", w.wanted(t, task), err)
		default:
		}
	}
	if cur, err := w.Tasks.Get(t.Context(), task.ID); err != nil || cur.Phase != Completing {
		t.Errorf("phase while the VM is removed = %s, %v, want %s", cur.Phase, err, Completing)
	}
	become(t, w.Tasks, task.SessionID, session.Gone)
	if err := <-ended; err != nil || task.Phase != Completed {
		t.Errorf("phase after the VM is removed = %s, %v, want %s", task.Phase, err, Completed)
	}
	cancel(nil)
	if err := w.vm.discard(t.Context(), &task); err != nil { // for a VM that is gone, nothing is left to do
		t.Errorf("discard of a removed VM = %v, want nil", err)
	}
	task.SessionID = ""
	if err := w.vm.discard(t.Context(), &task); err != nil {
		t.Errorf("discard without a VM = %v, want nil", err)
	}
	task.SessionID = "000000000000"
	if err := w.vm.discard(t.Context(), &task); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("discard of an unknown session = %v, want %v", err, fail.NotFound)
	}
}

// A VM is destroyed also if its task's keeper was killed before it recorded the session.
func TestDiscardUnrecordedVM(t *testing.T) {
	w, task, _ := completing(t)
	id := task.SessionID
	w.Tasks.Sessions.Self = writeProgram(t, "") // the session's keeper
	_, err := w.Tasks.store().Update(t.Context(), id, func(row *store.Session) (store.Event, error) { row.Task = task.ID; return store.Event{}, nil })
	if err == nil {
		err = w.rec.update(t.Context(), &task, func(row *store.Task, _ *Status) []store.Event { row.SessionID = ""; return nil })
	}
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- w.vm.discard(t.Context(), &task) }()
	for {
		s, err := w.Tasks.Sessions.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if s.Desired == session.Gone {
			break
		}
		select {
		case err := <-ended:
			t.Fatalf("discard = %v with a VM to be %s, want it to wait for the removal", err, s.Desired)
		default:
		}
	}
	become(t, w.Tasks, id, session.Gone)
	if err := <-ended; err != nil || task.SessionID != id {
		t.Errorf("discard = %v, session %q, want nil, %s", err, task.SessionID, id)
	}
}

// writeProgram makes a shell script and returns its path.
func writeProgram(t *testing.T, script string) string {
	t.Helper()
	path := t.TempDir() + "/program"
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	return path
}

// A failed task whose VM is kept waits for the end of that time, or for the user.
func TestPreserve(t *testing.T) {
	for name, c := range map[string]struct {
		until   time.Duration
		desired DesiredPhase
		reason  string
	}{
		"its time is over":     {-time.Hour, Run, "its retention time ended"},
		"the user destroys it": {time.Hour, Destroyed, "a user requested it"},
	} {
		w, task := running(t, fmt.Sprintf(`, "outcome": {"result": "failure"}, "preserved_until": %q`, time.Now().Add(c.until).UTC().Format(time.RFC3339)))
		row, err := w.Tasks.store().UpdateTask(t.Context(), task.ID, func(row *store.Task) ([]store.Event, error) {
			row.Phase, row.Desired = string(FailedPreserved), string(c.desired)
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if task, err = read(row, nil); err != nil {
			t.Fatal(err)
		}
		task, err = w.next(t, task)
		var change PhaseChange
		all := kinds(t, w.Tasks, task.ID)[EventPhase]
		if uerr := json.Unmarshal(all[len(all)-1].Data, &change); err != nil || uerr != nil || task.Phase != Failed || !strings.Contains(change.Reason, c.reason) {
			t.Errorf("%s: phase = %s because of %q, %v, want %s because of %q", name, task.Phase, change.Reason, err, Failed, c.reason)
		}
	}
	w, task := running(t, `, "outcome": {"result": "failure"}, "preserved_until": "2999-01-01T00:00:00Z"`)
	task.Phase = FailedPreserved
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := w.preserve(ctx, task); err != nil || got.Phase != FailedPreserved {
		t.Errorf("preserve of a cancelled task = phase %s, %v, want %s", got.Phase, err, FailedPreserved)
	}
}

// A stuck agent is reported, and its watching ends if the manifest says to end it.
func TestAttend(t *testing.T) {
	for _, action := range []string{"terminate", "notify"} {
		w, task := running(t, "")
		task.Manifest.Lifecycle.HangTimeout, task.Manifest.Lifecycle.HangAction = d("3s"), action
		task.Manifest.Lifecycle.Hang = manifest.Hang{NoOutput: d("2s")}
		synctest.Test(t, func(t *testing.T) {
			r, err := w.rec.newCollector(t.Context(), &task)
			if err != nil {
				t.Fatal(err)
			}
			minute, stop := context.WithTimeout(t.Context(), time.Minute) // by the bubble's clock
			defer stop()
			ctx, cancel := context.WithCancelCause(minute)
			began := time.Now()
			r.watchLiveness(ctx, cancel, task.Manifest.Lifecycle)
			hung := errors.Is(context.Cause(ctx), errHung)
			if took := time.Since(began); hung != (action == "terminate") || hung && (took != 3*time.Second || fail.CodeOf(context.Cause(ctx)) != fail.Timeout) {
				t.Errorf("action %s: context after %v = %v, want it to end after 3s only for terminate", action, took, context.Cause(ctx))
			}
			cancel(nil)
			if err := r.close(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		var told []string
		for _, ev := range kinds(t, w.Tasks, task.ID)[EventHang] {
			var h Hang
			if err := json.Unmarshal(ev.Data, &h); err != nil {
				t.Fatal(err)
			}
			told = append(told, h.Sign+":"+h.Action)
		}
		if want := "no_output: timeout:" + action; strings.Join(told, " ") != want {
			t.Errorf("%s events with action %s = %q, want %q", EventHang, action, told, want)
		}
	}
}

// The guest's report about the agent either ends the watching or is recorded.
func TestStands(t *testing.T) {
	w, task := running(t, "")
	r, err := w.rec.newCollector(t.Context(), &task)
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range []guestproto.TaskState{guestproto.TaskLost, guestproto.TaskNone} {
		if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: state}); !errors.Is(err, errAgentLost) {
			t.Errorf("recordStatus(%s) = %v, want %v", state, err, errAgentLost)
		}
	}
	if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: guestproto.TaskExited, Result: &guestproto.TaskResult{ExitCode: 7}}); err != nil || r.result.ExitCode != 7 {
		t.Errorf("recordStatus(%s) = result %+v, %v, want exit code 7", guestproto.TaskExited, r.result, err)
	}
	if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: guestproto.TaskRunning, CPU: 5, Memory: 6}); err != nil || r.cpu != 5 || r.memory != 6 {
		t.Errorf("recordStatus(%s) = CPU %d, memory %d, %v, want 5, 6", guestproto.TaskRunning, r.cpu, r.memory, err)
	}
	if err := r.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.closeLogs(); err == nil {
		t.Error("second closeLogs = nil, want an error: the logs were left open")
	}
}

// An agent's output is stored once a second and its heartbeat every half minute.
// Output beyond the rate limit is counted.
func TestWhenOutputIsStored(t *testing.T) {
	w, task := running(t, "")
	synctest.Test(t, func(t *testing.T) {
		r, err := w.rec.newCollector(t.Context(), &task)
		if err != nil {
			t.Fatal(err)
		}
		write := func(i int, text string) {
			t.Helper()
			if _, err := (logWriter{r, i}).Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		stored := func(kind string) int { return len(kinds(t, w.Tasks, task.ID)[kind]) }
		write(0, toolCall("one"))
		if n := stored(EventTool); n != 0 {
			t.Errorf("%s events stored immediately = %d, want 0", EventTool, n)
		}
		time.Sleep(saveEvery - time.Nanosecond) // of the bubble's clock, here and below
		if err := r.save(t.Context(), false); err != nil || stored(EventTool) != 0 {
			t.Errorf("%s events stored within a second = %d, %v, want 0", EventTool, stored(EventTool), err)
		}
		time.Sleep(time.Nanosecond)
		if err := r.save(t.Context(), false); err != nil || stored(EventTool) != 1 || stored(EventHeartbeat) != 0 {
			t.Errorf("events stored after a second = %d, heartbeats %d, %v, want 1, 0", stored(EventTool), stored(EventHeartbeat), err)
		}
		write(0, strings.Repeat(toolCall("many"), 499))
		if n := stored(EventTool); n != 1 {
			t.Errorf("%s events stored early = %d, want 1", EventTool, n)
		}
		write(0, toolCall("many"))
		if n := stored(EventTool); n != 501 {
			t.Errorf("%s events stored of many = %d, want 501", EventTool, n)
		}
		write(1, toolCall("to stderr"))
		time.Sleep(heartbeatEvery - saveEvery)
		write(1, "more")
		var beat Heartbeat
		all := kinds(t, w.Tasks, task.ID)[EventHeartbeat]
		if len(all) != 1 || json.Unmarshal(all[0].Data, &beat) != nil || beat.Stdout != r.lengths[0] || beat.Stderr != r.lengths[1] {
			t.Errorf("heartbeats = %d, the first %+v, want 1 with the lengths %v", len(all), beat, r.lengths)
		}
		if n := stored(EventTool); n != 501 {
			t.Errorf("%s events after output on stderr = %d, want 501", EventTool, n)
		}
		write(0, strings.Repeat(toolCall("a flood"), eventBurst+100))
		if err := r.close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := stored(EventTool); n != 501+eventBurst {
			t.Errorf("%s events stored of a flood = %d, want %d", EventTool, n-501, eventBurst)
		}
		if all := kinds(t, w.Tasks, task.ID)[EventWarning]; len(all) != 1 || !strings.Contains(string(all[0].Data), "100 events left out") {
			t.Errorf("warnings = %v, want one with \"100 events left out\"", all)
		}
	})
	if text, err := os.ReadFile(w.Tasks.Dir(task.ID).Stderr()); err != nil || string(text) != toolCall("to stderr")+"more" {
		t.Errorf("stderr = %q, %v, want %q", text, err, toolCall("to stderr")+"more")
	}
}

// A log that cannot be opened or written is the host's fault, not the agent's.
func TestLogsThatCannotBeWritten(t *testing.T) {
	w, task := running(t, "")
	d := w.Tasks.Dir(task.ID)
	if err := os.MkdirAll(d.Stderr(), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := w.rec.newCollector(t.Context(), &task); fail.CodeOf(err) != fail.Host || !strings.HasPrefix(err.Error(), "open task log: ") {
		t.Errorf("newCollector with a directory in place of the log = %v, want \"open task log: …\" (code %v)", err, fail.Host)
	}
	if err := errors.Join(os.Remove(d.Stderr()), os.RemoveAll(d.Stdout()), os.Symlink("/dev/full", d.Stdout())); err != nil {
		t.Fatal(err)
	}
	r, err := w.rec.newCollector(t.Context(), &task)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (logWriter{r, 0}).Write([]byte("text")); fail.CodeOf(err) != fail.Host || !isDiskFull(err) {
		t.Errorf("Write on a full disk = %v, want a full disk with code %v", err, fail.Host)
	}
	if r.lengths[0] != 0 {
		t.Errorf("bytes counted = %d, want 0, as none were written", r.lengths[0])
	}
	if err := r.close(t.Context()); err != nil {
		t.Error(err)
	}
}

// Every change to a task is recorded once in the audit log.
func TestTasksAreAudited(t *testing.T) {
	m := newManager(t, 1, 100)
	var told []string
	m.Sessions.Audit = func(_ context.Context, r audit.Record) {
		told = append(told, fmt.Sprintf("%s %s %s", r.Type, r.Actor, r.Outcome))
	}
	task := submit(t, m, "one", "small", 0)
	if task, err := m.SetDesired(t.Context(), task, Cancel, Client{}); err != nil || task.Phase != Cancelled {
		t.Fatalf("SetDesired(%s) = phase %s, %v, want %s", Cancel, task.Phase, err, Cancelled)
	}
	if _, err := m.SetDesired(t.Context(), task, Cancel, Client{}); err != nil { // an outdated row
		t.Fatal(err)
	}
	if got := strings.Join(told, "|"); got != "task_submitted keeper success|task_cancelled keeper success" {
		t.Errorf("audit records = %q, want %q", got, "task_submitted keeper success|task_cancelled keeper success")
	}
	again, notices, err := m.Retry(t.Context(), mustGet(t, m, task.ID), Submission{Actor: "user:x"})
	if err != nil || len(notices) != 0 || again.Status.RetryOf != task.ID || again.Name != "one" || again.Phase != Pending || again.Status.Actor != "user:x" {
		t.Errorf("Retry = %+v, notices %q, %v, want a pending task of user:x", again.View(), notices, err)
	}
}

func mustGet(t *testing.T, m *Manager, id string) Task {
	t.Helper()
	task, err := m.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return task
}

// A task without a keeper gets one, and a task with a keeper does not get another.
func TestReconcile(t *testing.T) {
	w, task := running(t, "")
	var told []string
	w.Tasks.Sessions.Audit = func(_ context.Context, r audit.Record) { told = append(told, string(r.Type)) }
	log := w.Tasks.Dir(task.ID).KeeperLog()
	lock, ok, err := lockfile.Try(w.Tasks.LockPath(task.ID))
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	if err := w.Tasks.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(log); !os.IsNotExist(err) || len(told) != 0 {
		t.Errorf("with a keeper: log %v, records %q, want no other keeper, none", err, told)
	}
	if err := lock.Unlock(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.Tasks.LockPath(task.ID), []byte("1\n"), 0o600); err != nil { // the mark of a keeper that died
		t.Fatal(err)
	}
	if err := w.Tasks.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(log); err != nil || strings.Join(told, " ") != "session_reconciled" {
		t.Errorf("after the keeper died: log %v, records %q, want a new keeper, session_reconciled", err, told)
	}
	if err := w.Tasks.Reconcile(t.Context()); err != nil || len(told) != 1 {
		t.Errorf("second Reconcile = %v, records %q, want nil, no other record", err, told)
	}
	w.Tasks.Sessions.Self = "/nonexistent"
	if err := w.Tasks.Reconcile(t.Context()); fail.CodeOf(err) != fail.Host {
		t.Errorf("Reconcile when no keeper can be started = %v, want code %v", err, fail.Host)
	}
}
