package task

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/repo"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// TestMain lets this test binary also act as the process of a fake VM.
func TestMain(m *testing.M) { testenv.Main(m, testenv.Commands{"fake-vm": fake.Main}) }

// guestOf is a guest whose program answers each verb with a file, or fails.
type guestOf struct {
	t    *testing.T
	root string
}

// answer makes the program answer a verb with those bytes and exit with a code.
func (g guestOf) answer(verb string, answer []byte, code int) {
	g.t.Helper()
	for name, text := range map[string][]byte{verb: answer, verb + ".code": fmt.Append(nil, code)} {
		if err := os.WriteFile(filepath.Join(g.root, name), text, 0o600); err != nil {
			g.t.Fatal(err)
		}
	}
}

func frames(t *testing.T, kindsAndData ...any) []byte {
	t.Helper()
	var b bytes.Buffer
	for i := 0; i < len(kindsAndData); i += 2 {
		if err := guestproto.WriteFrame(&b, kindsAndData[i].(guestproto.FrameKind), []byte(kindsAndData[i+1].(string))); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

const collection = "0123456789abcdef"

// completing returns a task in phase Completing whose agent succeeded. Its own
// session is ready and has a fake VM. Its guest sends a log and one file without
// errors.
func completing(t *testing.T) (*Worker, Task, guestOf) {
	t.Helper()
	w, task := running(t, `, "outcome": {"result": "success", "exit_code": 0, "at": "2026-01-01T00:00:00Z"}`)
	const name = "agent-acme-app-012345"
	d, err := fake.New(fake.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Delete(context.WithoutCancel(t.Context()), name); err != nil {
			t.Error(err)
		}
	})
	key, authorized, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Create(t.Context(), vm.Spec{
		Name: name, CPUs: 1, Memory: 1 << 30, Disk: 4 << 30, User: "agent", AuthorizedKey: authorized, Image: vm.Image{Arch: "x86_64", Location: "/dev/null"},
	}); err != nil {
		t.Fatal(err)
	}
	ep, err := d.Start(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	machine, err := d.Inspect(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	g := guestOf{t, machine.Root}
	program := filepath.Join(g.root, "usr/local/bin/agent-guest")
	script := "#!/bin/sh\ncd " + ssh.Quote(g.root) + "\ncat >/dev/null &\ncat \"$2\"\nexit \"$(cat \"$2.code\")\"\n"
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	var exited bytes.Buffer
	if err := (guestproto.TaskStatus{State: guestproto.TaskExited, Stdout: 3, Result: &guestproto.TaskResult{Stdout: 3}}).Encode(&exited); err != nil {
		t.Fatal(err)
	}
	text := strings.TrimSpace(exited.String())
	g.answer("status", []byte(text), 0)
	g.answer("signal", []byte(text), 0)
	g.answer("watch", frames(t, guestproto.FrameStdout, "out", guestproto.FrameStatus, text), 0)
	sum := sha256.Sum256([]byte("made"))
	g.answer("artifacts", frames(t, guestproto.FrameArtifact, fmt.Sprintf(`{"name":"untracked/new","size":4,"sha256":%q}`, hex.EncodeToString(sum[:])),
		guestproto.FrameEnd, `{"id":"`+collection+`","artifacts":null}`), 0)
	g.answer("send", frames(t, guestproto.FrameItem, `{"index":0,"offset":0}`, guestproto.FrameData, "made", guestproto.FrameEnd, ""), 0)

	id := opened(t, w.Tasks, "app", task.ID, session.Ready, session.Ready)
	if err := os.MkdirAll(w.Tasks.paths().SessionDir(id), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(w.Tasks.paths().SessionDir(id), "ssh_key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	status, err := json.Marshal(session.Status{Endpoint: ep, Root: machine.Root, Dir: "/home/agent/app", Base: &repo.Base{Commit: strings.Repeat("a", 40)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Tasks.store().Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Status = status
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	row, err := w.Tasks.store().UpdateTask(t.Context(), task.ID, func(row *store.Task) ([]store.Event, error) {
		row.Phase, row.SessionID = string(Completing), id
		return nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if task, err = read(row, nil); err != nil {
		t.Fatal(err)
	}
	return w, task, g
}

func (w *Worker) next(t *testing.T, task Task) (Task, error) {
	t.Helper()
	next, err := w.Next(t.Context(), task)
	cur, gerr := w.Tasks.Get(t.Context(), task.ID)
	if gerr != nil {
		t.Fatal(gerr)
	}
	if err == nil && next.Phase != cur.Phase {
		t.Errorf("phase returned = %s, stored %s, want the same", next.Phase, cur.Phase)
	}
	return cur, err
}

// wanted returns the desired phase of the task's session.
func (w *Worker) wanted(t *testing.T, task Task) session.Phase {
	t.Helper()
	s, err := w.Tasks.Sessions.Get(t.Context(), task.SessionID)
	if err != nil {
		t.Fatal(err)
	}
	return s.Desired
}

func TestCollect(t *testing.T) {
	w, task, _ := completing(t)
	task, err := w.next(t, task)
	if err != nil {
		t.Fatal(err)
	}
	if f := task.Status; !f.Collected || f.Outcome.Result != Success || f.Outcome.Preserve || len(f.Artifacts) != 1 || f.Artifacts[0].Name != "untracked/new" || task.last() != Completed {
		t.Errorf("status after collecting = %+v, outcome %+v, last phase %s, want %s with untracked/new, last %s", f, f.Outcome, task.last(), Success, Completed)
	}
	for file, want := range map[string]string{w.Tasks.Dir(task.ID).Stdout(): "out", filepath.Join(w.Tasks.Dir(task.ID).artifacts(), "untracked/new"): "made"} {
		if text, err := os.ReadFile(file); err != nil || string(text) != want {
			t.Errorf("%s = %q, %v, want %q", file, text, err, want)
		}
	}
}

// If anything cannot be collected, the VM is kept, whatever step failed, and a
// success becomes a failure. An earlier failure stays the reason.
func TestCollectFails(t *testing.T) {
	sum := sha256.Sum256([]byte("other"))
	for name, spoil := range map[string]func(*testing.T, *Worker, Task, guestOf){
		"the agent cannot be asked": func(_ *testing.T, _ *Worker, _ Task, g guestOf) { g.answer("signal", nil, 1) },
		"the status is nonsense":    func(_ *testing.T, _ *Worker, _ Task, g guestOf) { g.answer("signal", []byte("{"), 0) },
		"the log ends early": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("watch", frames(t, guestproto.FrameStdout, "out"), 0)
		},
		"the log was cut": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("watch", frames(t, guestproto.FrameFailure, `{"kind":"truncated","text":""}`), 0)
		},
		"git fails in the guest": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("artifacts", frames(t, guestproto.FrameFailure, `{"kind":"","text":"list untracked files: git ls-files: exit status 128"}`), 1)
		},
		"the collection has no end": func(_ *testing.T, _ *Worker, _ Task, g guestOf) { g.answer("artifacts", nil, 0) },
		"the program is killed":     func(_ *testing.T, _ *Worker, _ Task, g guestOf) { g.answer("artifacts", nil, 137) },
		"the transfer ends early": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("send", frames(t, guestproto.FrameItem, `{"index":0,"offset":0}`, guestproto.FrameData, "ma"), 0)
		},
		"the collection is gone": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("send", frames(t, guestproto.FrameFailure, `{"kind":"no_collection","text":""}`), 0)
		},
		"a checksum is wrong": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("send", frames(t, guestproto.FrameItem, `{"index":0,"offset":0}`, guestproto.FrameData, "fake", guestproto.FrameEnd, ""), 0)
		},
		"a file is shorter than it was": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("send", frames(t, guestproto.FrameItem, `{"index":0,"offset":0}`, guestproto.FrameFailure, `{"kind":"item","text":"it was truncated"}`), 0)
		},
		"another file is sent": func(t *testing.T, _ *Worker, _ Task, g guestOf) {
			g.answer("send", frames(t, guestproto.FrameItem, `{"index":3,"offset":0}`), 0)
		},
		"the artifacts have no room": func(t *testing.T, w *Worker, task Task, _ guestOf) { obstruct(t, w.Tasks.Dir(task.ID).artifacts()) },
		"the log cannot be opened": func(t *testing.T, w *Worker, task Task, _ guestOf) {
			if err := os.MkdirAll(w.Tasks.Dir(task.ID).Stderr(), 0o700); err != nil {
				t.Fatal(err)
			}
		},
		"a file that is begun cannot be written": func(t *testing.T, w *Worker, task Task, g guestOf) {
			part := filepath.Join(w.Tasks.Dir(task.ID).artifacts(), partDir, hex.EncodeToString(sum[:]), "x")
			if err := os.MkdirAll(part, 0o700); err != nil {
				t.Fatal(err)
			}
			g.answer("artifacts", frames(t, guestproto.FrameArtifact, fmt.Sprintf(`{"name":"untracked/new","size":5,"sha256":%q}`, hex.EncodeToString(sum[:])),
				guestproto.FrameEnd, `{"id":"`+collection+`","artifacts":null}`), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, task, g := completing(t)
			spoil(t, w, task, g)
			task, err := w.next(t, task)
			if err != nil {
				t.Fatal(err)
			}
			o := task.Status.Outcome
			if !task.Status.Collected || !o.Preserve || o.Result != Failure || !strings.Contains(o.Reason, "could not be collected") || task.ErrorMessage != o.Reason || o.Code == "" {
				t.Errorf("outcome = %+v, error of the row %q, want a preserved %s because of the collection", o, task.ErrorMessage, Failure)
			}
			if got := task.last(); got != FailedPreserved {
				t.Fatalf("last phase = %s, want %s", got, FailedPreserved) // and would wait for the end of its session
			}
			if len(kinds(t, w.Tasks, task.ID)[EventWarning]) == 0 {
				t.Errorf("%s events = 0, want some", EventWarning)
			}
			if task, err = w.next(t, task); err != nil || task.Phase != FailedPreserved || w.wanted(t, task) != session.Ready {
				t.Errorf("phase = %s, %v, session to be %s, want %s, %s", task.Phase, err, w.wanted(t, task), FailedPreserved, session.Ready)
			}
			if task.Status.Until.Before(time.Now().Add(time.Hour)) {
				t.Errorf("preserved until %v, want at least an hour from now", task.Status.Until)
			}
		})
	}
}

// obstruct puts a file where a directory belongs.
func obstruct(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// If a task failed before, failing to collect does not replace its reason.
func TestCollectFailsAfterAFailure(t *testing.T) {
	w, task, g := completing(t)
	if err := w.rec.update(t.Context(), &task, func(row *store.Task, status *Status) []store.Event {
		status.Outcome = &Outcome{Result: Hung, Code: "TIMEOUT", Reason: "the agent printed nothing"}
		row.SetError("TIMEOUT", status.Outcome.Reason, "")
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	g.answer("artifacts", nil, 1)
	task, err := w.next(t, task)
	if o := task.Status.Outcome; err != nil || o.Result != Hung || o.Reason != "the agent printed nothing" || task.ErrorMessage != o.Reason || !o.Preserve {
		t.Errorf("outcome = %+v, error of the row %q, %v, want a preserved %s", o, task.ErrorMessage, err, Hung)
	}
}

// The VM of a cancelled task is kept, too, if its results cannot be collected.
func TestCollectFailsAfterACancellation(t *testing.T) {
	w, task, g := completing(t)
	if err := w.rec.update(t.Context(), &task, func(_ *store.Task, status *Status) []store.Event {
		status.Outcome = &Outcome{Result: CancelledByUser}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	g.answer("artifacts", nil, 1)
	task, err := w.next(t, task)
	if o := task.Status.Outcome; err != nil || !o.Preserve || !strings.Contains(o.Reason, "could not be collected") || task.last() != FailedPreserved {
		t.Errorf("outcome = %+v, %v, last phase %s, want a reason and %s", o, err, task.last(), FailedPreserved)
	}
}

// A full disk is waited for: nothing is decided, and the VM is not touched.
func TestCollectOnAFullDisk(t *testing.T) {
	w, task, _ := completing(t)
	if err := os.Symlink("/dev/full", w.Tasks.Dir(task.ID).Stdout()); err != nil {
		t.Fatal(err)
	}
	task, err := w.next(t, task)
	if err != nil || task.Status.Collected || task.Status.Outcome.Preserve || task.Status.Tries != 1 || len(kinds(t, w.Tasks, task.ID)[EventRetry]) != 1 {
		t.Errorf("status on a full disk = %+v, outcome %+v, %v, want 1 try, not collected, and a %s event", task.Status, task.Status.Outcome, err, EventRetry)
	}
	if err := os.Remove(w.Tasks.Dir(task.ID).Stdout()); err != nil {
		t.Fatal(err)
	}
	if task, err = w.next(t, task); err != nil || !task.Status.Collected || task.Status.Outcome.Result != Success {
		t.Errorf("outcome with free space = %+v, %v, want %s, collected", task.Status.Outcome, err, Success)
	}
}

// If the final files of a task cannot be written, its VM is kept until they can.
func TestFinishFails(t *testing.T) {
	for name, file := range map[string]func(Dir) string{
		"metadata": Dir.metadata, "bundle": Dir.Bundle, "events": Dir.events, "state": func(d Dir) string { return d.path("state.json") },
	} {
		t.Run(name, func(t *testing.T) {
			w, task, _ := completing(t)
			task, err := w.next(t, task)
			if err != nil || !task.Status.Collected {
				t.Fatalf("collecting: %v, collected %t, want nil, true", err, task.Status.Collected)
			}
			in := filepath.Join(file(w.Tasks.Dir(task.ID)), "in the way") // no file can replace a nonempty directory
			if err := os.RemoveAll(filepath.Dir(in)); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(in, 0o700); err != nil {
				t.Fatal(err)
			}
			task, err = w.next(t, task)
			if err == nil || task.Phase != Completing || task.Status.Outcome.Result != Success || w.wanted(t, task) != session.Ready {
				t.Errorf("phase = %s, outcome %+v, %v, session to be %s, want %s, %s, an error, %s", task.Phase, task.Status.Outcome, err, w.wanted(t, task), Completing, Success, session.Ready)
			}
			if name != "events" && name != "state" && fail.CodeOf(err) != fail.Host {
				t.Errorf("finish = %v (code %v), want code %v", err, fail.CodeOf(err), fail.Host)
			}
			if err := os.RemoveAll(filepath.Dir(in)); err != nil {
				t.Fatal(err)
			}
			become(t, w.Tasks, task.SessionID, session.Gone)
			if task, err = w.next(t, task); err != nil || task.Phase != Completed {
				t.Errorf("phase after finishing = %s, %v, want %s", task.Phase, err, Completed)
			}
			for _, file := range []string{w.Tasks.Dir(task.ID).metadata(), w.Tasks.Dir(task.ID).Bundle()} {
				if size(file) == 0 {
					t.Errorf("%s = empty or missing, want content", filepath.Base(file))
				}
			}
		})
	}
}

// The first outcome stays, even if a keeper that has not read it writes another.
func TestTheFirstOutcomeStays(t *testing.T) {
	w, task := running(t, "")
	code := 3
	first := task
	if err := w.rec.decide(t.Context(), &first, Outcome{Result: Failure, ExitCode: &code, Reason: "the agent ended with exit code 3", Hint: "x"}); err != nil {
		t.Fatal(err)
	}
	for _, late := range []Outcome{{Result: Success}, {Result: CancelledByUser}, {Result: TimedOut, Reason: "late", Preserve: true}} {
		got := task
		err := w.rec.decide(t.Context(), &got, late) // with the task as it was before the first outcome
		if err != nil || got.Status.Outcome.Result != Failure || got.Status.Outcome.Preserve || *got.Status.Outcome.ExitCode != 3 || got.ErrorMessage != first.ErrorMessage || got.ErrorMessage == "" {
			t.Errorf("outcome after %s = %+v, error of the row %q, %v, want the first, %s with exit code 3", late.Result, got.Status.Outcome, got.ErrorMessage, err, Failure)
		}
	}
	if n := len(kinds(t, w.Tasks, task.ID)[EventOutcome]); n != 1 {
		t.Errorf("%s events = %d, want 1", EventOutcome, n)
	}
}

// A failing store decides nothing about a task.
func TestTheStoreFails(t *testing.T) {
	w, task, _ := completing(t)
	if err := w.Tasks.store().Close(); err != nil {
		t.Fatal(err)
	}
	got, err := w.Next(t.Context(), task)
	if err == nil || got.Phase != Completing || got.Status.Collected || got.Status.Outcome.Result != Success {
		t.Errorf("Next with a failing store = phase %s, status %+v, %v, want %s, not collected, an error", got.Phase, got.Status, err, Completing)
	}
}
