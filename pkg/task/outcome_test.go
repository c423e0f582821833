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
		if err := w.recordExit(t.Context(), &task, c.result); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		task, err := w.Get(t.Context(), task.ID)
		if err != nil {
			t.Fatal(err)
		}
		o := task.Status.Outcome
		exit := -1
		if o.ExitCode != nil {
			exit = *o.ExitCode
		}
		if o.Result != c.want || o.Reason != c.reason || task.ErrorMessage != c.reason || exit != c.exit || o.Signal != c.result.Signal || o.At.IsZero() {
			t.Errorf("%s: %+v with exit code %d, and the row says %q", c.name, o, exit, task.ErrorMessage)
		}
		if want := "agent-sessionizer task logs " + task.ID; c.want == Failure && (o.Code != "FAILURE" || o.Hint != want || task.ErrorHint != want) {
			t.Errorf("%s: code %q and hint %q", c.name, o.Code, o.Hint)
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
		want            DesiredPhase
		last            Phase
	}{
		{name: "success", result: Success, session: "s", action: "preserve", last: Completed},
		{name: "cancelled", result: CancelledByUser, session: "s", action: "preserve", last: Cancelled},
		{name: "failure", result: Failure, session: "s", last: Failed},
		{name: "failure whose VM is kept", result: Failure, session: "s", action: "preserve", last: FailedPreserved},
		{name: "work that could not be collected", result: Failure, preserve: true, session: "s", last: FailedPreserved},
		{name: "nothing is to be kept", result: Failure, preserve: true, session: "s", want: Destroyed, last: Failed},
		{name: "no VM", result: Failure, preserve: true, action: "preserve", last: Failed},
		{name: "a session that was there before", result: Failure, preserve: true, session: "s", given: "s", last: Failed},
	} {
		task := Task{Task: store.Task{SessionID: c.session}, Phase: Completing, Desired: c.want, Manifest: &manifest.Task{}, Status: Status{Outcome: &Outcome{Result: c.result, Preserve: c.preserve}}}
		task.Manifest.Lifecycle.FailureAction, task.Manifest.VM.Session = c.action, c.given
		if got := task.last(); got != c.last {
			t.Errorf("%s: %s, want %s", c.name, got, c.last)
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
	w.Sessions.Self = writeProgram(t, "") // the session's keeper
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.finish(ctx, &task) }()
	for w.wanted(t, task) != session.Gone {
		select {
		case err := <-ended:
			t.Fatalf("it is over, and its VM is to be %s: %v", w.wanted(t, task), err)
		default:
		}
	}
	if cur, err := w.Get(t.Context(), task.ID); err != nil || cur.Phase != Completing {
		t.Errorf("while its VM is removed it is %s, %v", cur.Phase, err)
	}
	become(t, w.Manager, task.SessionID, session.Gone)
	if err := <-ended; err != nil || task.Phase != Completed {
		t.Errorf("then it is %s, %v", task.Phase, err)
	}
	cancel(nil)
	if err := w.discard(t.Context(), &task); err != nil { // for a VM that is gone, nothing is left to do
		t.Error(err)
	}
	task.SessionID = ""
	if err := w.discard(t.Context(), &task); err != nil {
		t.Errorf("without a VM: %v", err)
	}
	task.SessionID = "000000000000"
	if err := w.discard(t.Context(), &task); fail.CodeOf(err) != fail.NotFound {
		t.Errorf("a session that the store lacks: %v", err)
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
		until  time.Duration
		want   DesiredPhase
		reason string
	}{
		"its time is over":     {-time.Hour, Run, "its retention time ended"},
		"the user destroys it": {time.Hour, Destroyed, "a user requested it"},
	} {
		w, task := running(t, fmt.Sprintf(`, "outcome": {"result": "failure"}, "preserved_until": %q`, time.Now().Add(c.until).UTC().Format(time.RFC3339)))
		row, err := w.store().UpdateTask(t.Context(), task.ID, func(row *store.Task) ([]store.Event, error) {
			row.Phase, row.Desired = string(FailedPreserved), string(c.want)
			return nil, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if task, err = read(row); err != nil {
			t.Fatal(err)
		}
		task, err = w.next(t, task)
		var change PhaseChange
		all := kinds(t, w.Manager, task.ID)[EventPhase]
		if uerr := json.Unmarshal(all[len(all)-1].Data, &change); err != nil || uerr != nil || task.Phase != Failed || !strings.Contains(change.Reason, c.reason) {
			t.Errorf("%s: it is %s because %q; %v", name, task.Phase, change.Reason, err)
		}
	}
	w, task := running(t, `, "outcome": {"result": "failure"}, "preserved_until": "2999-01-01T00:00:00Z"`)
	task.Phase = FailedPreserved
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := w.preserve(ctx, task); err != nil || got.Phase != FailedPreserved {
		t.Errorf("called off while it waits: %s, %v", got.Phase, err)
	}
}

// A stuck agent is reported, and its watching ends if the manifest says to end it.
func TestAttend(t *testing.T) {
	for _, action := range []string{"terminate", "notify"} {
		w, task := running(t, "")
		task.Manifest.Lifecycle.HangTimeout, task.Manifest.Lifecycle.HangAction = d("3s"), action
		task.Manifest.Lifecycle.Hang = manifest.Hang{NoOutput: d("2s")}
		synctest.Test(t, func(t *testing.T) {
			r, err := w.newCollector(t.Context(), &task)
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
				t.Errorf("%s: after %v it ends with %v", action, took, context.Cause(ctx))
			}
			cancel(nil)
			if err := r.close(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		var told []string
		for _, ev := range kinds(t, w.Manager, task.ID)[EventHang] {
			var h Hang
			if err := json.Unmarshal(ev.Data, &h); err != nil {
				t.Fatal(err)
			}
			told = append(told, h.Sign+":"+h.Action)
		}
		if want := "no_output: timeout:" + action; strings.Join(told, " ") != want {
			t.Errorf("%s: the events are %q, want %q", action, told, want)
		}
	}
}

// The guest's report about the agent either ends the watching or is recorded.
func TestStands(t *testing.T) {
	w, task := running(t, "")
	r, err := w.newCollector(t.Context(), &task)
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range []guestproto.TaskState{guestproto.TaskLost, guestproto.TaskNone} {
		if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: state}); !errors.Is(err, errAgentLost) {
			t.Errorf("%s: %v", state, err)
		}
	}
	if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: guestproto.TaskExited, Result: &guestproto.TaskResult{ExitCode: 7}}); err != nil || r.result.ExitCode != 7 {
		t.Errorf("exited: %+v, %v", r.result, err)
	}
	if err := r.recordStatus(t.Context(), guestproto.TaskStatus{State: guestproto.TaskRunning, CPU: 5, Memory: 6}); err != nil || r.cpu != 5 || r.memory != 6 {
		t.Errorf("running: %d %d, %v", r.cpu, r.memory, err)
	}
	if err := r.close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.closeLogs(); err == nil {
		t.Error("the logs were left open")
	}
}

// An agent's output is stored once a second and its heartbeat every half minute.
// Output beyond the rate limit is counted.
func TestWhenOutputIsStored(t *testing.T) {
	w, task := running(t, "")
	synctest.Test(t, func(t *testing.T) {
		r, err := w.newCollector(t.Context(), &task)
		if err != nil {
			t.Fatal(err)
		}
		write := func(i int, text string) {
			t.Helper()
			if _, err := (logWriter{r, i}).Write([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		stored := func(kind string) int { return len(kinds(t, w.Manager, task.ID)[kind]) }
		write(0, toolCall("one"))
		if n := stored(EventTool); n != 0 {
			t.Errorf("%d events are stored at once", n)
		}
		time.Sleep(saveEvery - time.Nanosecond) // of the bubble's clock, here and below
		if err := r.save(t.Context(), false); err != nil || stored(EventTool) != 0 {
			t.Errorf("%d events are stored before a second has passed, %v", stored(EventTool), err)
		}
		time.Sleep(time.Nanosecond)
		if err := r.save(t.Context(), false); err != nil || stored(EventTool) != 1 || stored(EventHeartbeat) != 0 {
			t.Errorf("after a second: %d events, %d heartbeats, %v", stored(EventTool), stored(EventHeartbeat), err)
		}
		write(0, strings.Repeat(toolCall("many"), 499))
		if n := stored(EventTool); n != 1 {
			t.Errorf("%d events are stored early", n)
		}
		write(0, toolCall("many"))
		if n := stored(EventTool); n != 501 {
			t.Errorf("%d events of 501 are stored when there are many", n)
		}
		write(1, toolCall("to stderr"))
		time.Sleep(heartbeatEvery - saveEvery)
		write(1, "more")
		var beat Heartbeat
		all := kinds(t, w.Manager, task.ID)[EventHeartbeat]
		if len(all) != 1 || json.Unmarshal(all[0].Data, &beat) != nil || beat.Stdout != r.lengths[0] || beat.Stderr != r.lengths[1] {
			t.Errorf("%d heartbeats, the first %+v", len(all), beat)
		}
		if n := stored(EventTool); n != 501 {
			t.Errorf("%d events: stderr is read for them", n)
		}
		write(0, strings.Repeat(toolCall("a flood"), eventBurst+100))
		if err := r.close(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := stored(EventTool); n != 501+eventBurst {
			t.Errorf("%d events of a flood are stored", n-501)
		}
		if all := kinds(t, w.Manager, task.ID)[EventWarning]; len(all) != 1 || !strings.Contains(string(all[0].Data), "100 events left out") {
			t.Errorf("warnings: %v", all)
		}
	})
	if text, err := os.ReadFile(w.Dir(task.ID).Stderr()); err != nil || string(text) != toolCall("to stderr")+"more" {
		t.Errorf("stderr is %q, %v", text, err)
	}
}

// A log that cannot be opened or written is the host's fault, not the agent's.
func TestLogsThatCannotBeWritten(t *testing.T) {
	w, task := running(t, "")
	d := w.Dir(task.ID)
	if err := os.MkdirAll(d.Stderr(), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := w.newCollector(t.Context(), &task); fail.CodeOf(err) != fail.Host || !strings.HasPrefix(err.Error(), "open task log: ") {
		t.Errorf("a directory in its place: %v", err)
	}
	if err := errors.Join(os.Remove(d.Stderr()), os.RemoveAll(d.Stdout()), os.Symlink("/dev/full", d.Stdout())); err != nil {
		t.Fatal(err)
	}
	r, err := w.newCollector(t.Context(), &task)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (logWriter{r, 0}).Write([]byte("text")); fail.CodeOf(err) != fail.Host || !isDiskFull(err) {
		t.Errorf("a full disk: %v", err)
	}
	if r.lengths[0] != 0 {
		t.Errorf("%d bytes are counted that were not written", r.lengths[0])
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
		t.Fatal(task.Phase, err)
	}
	if _, err := m.SetDesired(t.Context(), task, Cancel, Client{}); err != nil { // an outdated row
		t.Fatal(err)
	}
	if got := strings.Join(told, "|"); got != "task_submitted keeper success|task_cancelled keeper success" {
		t.Errorf("told: %s", got)
	}
	again, notices, err := m.Retry(t.Context(), mustGet(t, m, task.ID), Submission{Actor: "user:x"})
	if err != nil || len(notices) != 0 || again.Status.RetryOf != task.ID || again.Name != "one" || again.Phase != Pending || again.Status.Actor != "user:x" {
		t.Errorf("another try: %+v, %v", again.View(), err)
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
	w.Sessions.Audit = func(_ context.Context, r audit.Record) { told = append(told, string(r.Type)) }
	log := w.Dir(task.ID).KeeperLog()
	lock, ok, err := store.TryLock(w.Lock(task.ID))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if err := w.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(log); !os.IsNotExist(err) || len(told) != 0 {
		t.Errorf("it has a keeper, and another was started: %v, %q", err, told)
	}
	if err := lock.Unlock(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.Lock(task.ID), []byte("1\n"), 0o600); err != nil { // the mark of a keeper that died
		t.Fatal(err)
	}
	if err := w.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(log); err != nil || strings.Join(told, " ") != "session_reconciled" {
		t.Errorf("its keeper died: %v, %q", err, told)
	}
	if err := w.Reconcile(t.Context()); err != nil || len(told) != 1 {
		t.Errorf("told twice: %q, %v", told, err)
	}
	w.Sessions.Self = "/nonexistent"
	if err := w.Reconcile(t.Context()); fail.CodeOf(err) != fail.Host {
		t.Errorf("a keeper that cannot be started: %v", err)
	}
}
