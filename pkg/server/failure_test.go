package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/lockfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// Removing a token ends its streams: a followed log then does not look complete,
// and a WebSocket reports the reason.
func TestRemovedTokenEndsFollowing(t *testing.T) {
	r := newRig(t, Limits{Beat: 20 * time.Millisecond})
	id := r.submit().ID
	r.move(id, task.Running, nil)
	if err := os.WriteFile(r.tasks.Dir(id).Stdout(), []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	c := call{path: ops.TasksPath + "/" + id + "/logs?follow=true", as: ops.Read}
	resp, err := r.client(c).Do(r.request(ctx, c))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	if line, err := in.ReadString('\n'); err != nil || line != "one\n" {
		t.Fatalf("line of the log = %q, %v, want \"one\\n\"", line, err)
	}
	ws, _, err := r.dial(ctx, "/ws/tasks/"+id+"/stream", ops.Read)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.CloseNow() }()
	if err := r.tokens.Remove(string(ops.Read)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(in); err == nil {
		t.Error("end of the log of a removed token = nil, want an error")
	}
	for {
		m, err := nextMessage(ctx, ws)
		if err != nil {
			t.Fatal(err)
		}
		if m.Type == messageProblem {
			if m.Problem.Code != codeUnauthorized {
				t.Errorf("problem = %+v, want code %s", m.Problem, codeUnauthorized)
			}
			break
		}
	}
	if _, _, err := ws.Read(ctx); websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("end of the WebSocket = %v, want status %d", err, websocket.StatusGoingAway)
	}
}

// wordless fails the test unless the response is a server error that reveals
// nothing about the host.
func (r *rig) wordless(c call) {
	r.t.Helper()
	resp, body := r.do(c)
	var p Problem
	if err := json.Unmarshal(body, &p); err != nil || resp.StatusCode < 500 || p.Hint == "" {
		r.t.Errorf("%s %s = %s %s, %v, want a server error with a hint", c.method, c.path, resp.Status, body, err)
	}
	for _, word := range []string{"sql", "database", r.tasks.Sessions.Config.Paths.State, "is a directory"} {
		if strings.Contains(string(body), word) {
			r.t.Errorf("%s %s = %s, want no %q", c.method, c.path, body, word)
		}
	}
}

// A read error is an error, never an empty or complete response.
func TestFilesThatCannotBeRead(t *testing.T) {
	r := newRig(t, Limits{Beat: 20 * time.Millisecond})
	const session, exec = "aaaa11112222", "0123456789ab"
	r.session(session)
	id := r.submit().ID
	r.bring(id, map[string][]byte{"a": []byte("x")})
	dir := r.tasks.Dir(id)
	artifact := filepath.Join(string(dir), "outbox", "artifacts", "a")
	record := r.execs.dir(session, exec)
	if err := errors.Join(
		os.Remove(artifact), os.MkdirAll(artifact, 0o700), os.MkdirAll(filepath.Join(dir.Stdout(), "x"), 0o700), os.MkdirAll(dir.Bundle(), 0o700),
		os.MkdirAll(record.dir, 0o700), os.WriteFile(record.file(".json"), []byte("{"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	one := ops.TasksPath + "/" + id
	for _, path := range []string{one + "/artifacts/a", one + "/bundle"} {
		if resp, body := r.do(call{path: path}); resp.StatusCode != http.StatusNotFound {
			t.Errorf("GET %s = %s %s, want %d", path, resp.Status, body, http.StatusNotFound)
		}
	}
	c := call{path: one + "/logs?follow=true"}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	for _, path := range []string{one + "/logs", one + "/logs?follow=true"} {
		c.path = path
		resp, err := r.client(c).Do(r.request(ctx, c))
		if err != nil {
			continue
		}
		if text, err := io.ReadAll(resp.Body); err == nil && resp.StatusCode == http.StatusOK {
			t.Errorf("GET %s = %s %q, nil, want an error: it looks complete", path, resp.Status, text)
		}
		_ = resp.Body.Close()
	}
	r.wordless(call{path: ops.SessionsPath + "/" + session + "/exec/" + exec})
	r.wordless(call{path: ops.SessionsPath + "/" + session + "/exec/" + exec + "/logs"})
	if err := r.execs.recordLost(t.Context()); err != nil { // the others count
		t.Errorf("recordLost with a damaged record = %v, want nil", err)
	}
}

func TestAStoreThatFails(t *testing.T) {
	r := newRig(t, Limits{Beat: 20 * time.Millisecond})
	const session = "aaaa11112222"
	r.session(session)
	id := r.submit().ID
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	resp, next := r.sse(ctx, call{path: ops.TasksPath + "/" + id + "/events"})
	defer resp.Body.Close()
	if ev, ok := next(); !ok || ev.id != anchor(id, 1) {
		t.Fatalf("first event = %v, %t, want %s", ev, ok, anchor(id, 1))
	}
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	ev, ok := next()
	var p Problem
	if err := json.Unmarshal([]byte(ev.data), &p); !ok || err != nil || ev.name != messageProblem || p.Status < 500 || p.Last == nil || *p.Last != 1 || strings.Contains(ev.data, "sql") {
		t.Errorf("event of a failing store = %v, %t, %v, want a server error after event 1 without the cause", ev, ok, err)
	}
	one := ops.TasksPath + "/" + id
	for _, path := range []string{
		ops.TasksPath, one, one + "/events", one + "/artifacts", one + "/logs", one + "/bundle", ops.SessionsPath, ops.SessionsPath + "/" + session, ops.SessionsPath + "/" + session + "/events", healthPath,
	} {
		r.wordless(call{path: path})
	}
	yaml := []string{"Content-Type", "application/yaml"}
	r.wordless(call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: yaml})
	r.wordless(call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: append(yaml, "Idempotency-Key", "k")})
	r.wordless(call{method: http.MethodDelete, path: one})
	r.wordless(call{method: http.MethodPost, path: one + "/retry"})
	r.wordless(call{method: http.MethodPost, path: one + "/destroy"})
	r.wordless(call{method: http.MethodPost, path: ops.SessionsPath + "/" + session + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}})
	if entries, err := os.ReadDir(r.execs.sessionDir(session)); err == nil && len(entries) > 0 {
		t.Errorf("files of a command that was refused = %v, want none", entries)
	}
}

// A command whose output cannot be written runs to its end, and reports the
// failure.
func TestExecOnAFullDisk(t *testing.T) {
	const id = "aaaa11112222"
	r := newRig(t, Limits{})
	r.session(id)
	checkout := r.vm(id)
	s, err := r.engine.Session(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	for _, full := range []string{"stdout", "stderr"} {
		rec := execRecord{Server: r.execs.self, Exec: ops.Exec{ID: ids.New(), Session: id, State: ops.ExecRunning}}
		if err := r.execs.add(rec.ID, func(error) {}); err != nil {
			t.Fatal(err)
		}
		stdout, stderr, err := r.execs.prepare(t.Context(), &rec)
		if err != nil {
			t.Fatal(err)
		}
		for name, f := range map[string]**os.File{"stdout": &stdout, "stderr": &stderr} {
			if name != full {
				continue
			}
			_ = (*f).Close()
			if *f, err = os.OpenFile("/dev/full", os.O_WRONLY, 0); err != nil {
				t.Fatal(err)
			}
		}
		r.execs.run(t.Context(), s, rec, "echo out; echo err >&2; touch "+checkout+"/"+full, time.Minute, stdout, stderr)
		e, err := r.execs.Get(id, rec.ID)
		if err != nil || e.State != ops.ExecFailed || e.Error == nil || e.Error.Code != fail.Host.String() || e.Error.Hint == "" || e.ExitCode != nil {
			t.Errorf("%s: exec = %+v, %v, want state %s, code %s with a hint", full, e, err, ops.ExecFailed, fail.Host)
		}
		if _, err := os.Stat(filepath.Join(checkout, full)); err != nil {
			t.Errorf("file that the command writes last: %v, want it: the command must not be interrupted", err)
		}
	}

	// A command that cannot even begin takes no slot, leaves nothing behind, and
	// appends no event.
	if err := errors.Join(os.RemoveAll(r.execs.sessionDir(id)), os.WriteFile(r.execs.sessionDir(id), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, before, err := r.store.EventRange(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	for range r.limits.Execs + 1 {
		resp, body := r.do(call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}})
		if resp.StatusCode != http.StatusServiceUnavailable {
			t.Fatalf("exec on a full disk = %s %s, want %d", resp.Status, body, http.StatusServiceUnavailable)
		}
	}
	if _, after, err := r.store.EventRange(t.Context(), id); err != nil || after != before || len(r.execs.running) != 0 {
		t.Errorf("events = %d, %v, running commands %d, want %d, 0", after, err, len(r.execs.running), before)
	}
}

// A change of the tokens that cannot be written is an error, and changes nothing.
func TestTokensThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	file := &Tokens{Path: filepath.Join(dir, "tokens.json")}
	token, err := file.Add("one", ops.Read, task.Permission{})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(file.Path, "tokens.json")} { // below a file that is not a directory
		if token, err := (&Tokens{Path: path}).Add("two", ops.Read, task.Permission{}); token != "" && err == nil || fail.CodeOf(err) != fail.Host {
			t.Errorf("Add(two) in %s = %q, %v, want no token, code %v", path, token, err, fail.Host)
		}
	}
	lock, ok, err := lockfile.Try(file.Path + ".lock")
	if err != nil || !ok {
		t.Fatalf("Try = %t, %v, want true, nil", ok, err)
	}
	if err := file.Remove("one"); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Remove during another change = %v, want code %v", err, fail.Conflict)
	}
	if err := lock.Unlock(); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := file.find(token); !ok || err != nil {
		t.Errorf("find = %t, %v, want true, nil", ok, err)
	}
}
