package server

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// A submission that is repeated with its key creates one task and gets the same
// response, even after a crash of serve. Another body under the same key is
// refused.
func TestIdempotencyKey(t *testing.T) {
	r := newRig(t, Limits{})
	post := func(key, body string, as ops.Scope) (*http.Response, []byte) {
		t.Helper()
		return r.do(call{method: http.MethodPost, path: ops.TasksPath, body: body, header: []string{"Content-Type", "application/yaml", "Idempotency-Key", key}, as: as})
	}
	first, answer := post("one", manifestYAML, ops.Submit)
	var made ops.TaskAnswer
	if err := json.Unmarshal(answer, &made); err != nil || first.StatusCode != http.StatusAccepted || made.TaskID != made.ID || !made.Accepted {
		t.Fatalf("first submit = %s %s, %v, want %d, accepted", first.Status, answer, err, http.StatusAccepted)
	}
	r.move(made.ID, task.Failed, func(f *task.Status) { f.Attempt = 3 }) // the response is that of the acceptance
	again, err := New(Options{Engine: ops.Engine{Tasks: r.tasks}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Server{r.Server, again} { // as after a restart: the state is in the store
		r.Server = s
		resp, body := post("one", manifestYAML, ops.Submit)
		if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != first.Header.Get("Location") || !bytes.Equal(body, answer) {
			t.Errorf("second submit with the same key = %s %s, want the first answer %s", resp.Status, body, answer)
		}
	}
	resp, body := post("one", manifestYAML+"# other\n", ops.Submit)
	if resp.StatusCode != http.StatusUnprocessableEntity || !strings.Contains(string(body), codeKeyReused) {
		t.Errorf("same key with another body = %s %s, want %d, %s", resp.Status, body, http.StatusUnprocessableEntity, codeKeyReused)
	}
	if resp, body := r.do(call{method: http.MethodPost, path: ops.TasksPath + "/" + made.ID + "/retry", header: []string{"Idempotency-Key", "one"}, as: ops.Submit}); resp.StatusCode != http.StatusUnprocessableEntity {
		t.Errorf("same key on another route = %s %s, want %d", resp.Status, body, http.StatusUnprocessableEntity)
	}
	if _, body := post("one", manifestYAML, ops.Admin); bytes.Contains(body, []byte(made.ID)) {
		t.Errorf("same key of another client = %s, want another task than %s", body, made.ID)
	}
	if resp, _ := post("bad", "nonsense", ops.Submit); resp.StatusCode != http.StatusBadRequest {
		t.Errorf("submit of a bad manifest = %s, want %d", resp.Status, http.StatusBadRequest)
	}
	if resp, body := post("bad", manifestYAML, ops.Submit); resp.StatusCode != http.StatusAccepted {
		t.Errorf("key of a refused request = %s %s, want %d", resp.Status, body, http.StatusAccepted)
	}

	// Concurrent requests create a single task.
	var all sync.WaitGroup
	locations := make([]string, 8)
	for i := range locations {
		all.Go(func() {
			resp, _ := post("many", manifestYAML, ops.Submit)
			locations[i] = resp.Header.Get("Location")
		})
	}
	all.Wait()
	for _, l := range locations {
		if l == "" || l != locations[0] {
			t.Errorf("locations of the same key = %q, want one", locations)
		}
	}

	// If serve was killed between recording the key and creating the task, the
	// repetition creates it.
	_, lost := post("lost", manifestYAML, ops.Submit)
	if err := json.Unmarshal(lost, &made); err != nil {
		t.Fatal(err)
	}
	kept, found, err := r.store.Request(t.Context(), "token:submit", "lost")
	if err != nil || !found || kept.Subject != made.ID {
		t.Fatalf("Request(lost) = %+v, %t, %v, want subject %s", kept, found, err, made.ID)
	}
	kept.Key, kept.Subject = "reserved", "0123456789ab"
	if _, err := r.store.Reserve(t.Context(), kept); err != nil {
		t.Fatal(err)
	}
	resp, body = post("reserved", manifestYAML, ops.Submit)
	if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != ops.TasksPath+"/0123456789ab" {
		t.Errorf("submit with a reserved key = %s %s, Location %q, want %d, task 0123456789ab", resp.Status, body, resp.Header.Get("Location"), http.StatusAccepted)
	}

	// The same holds for a retry.
	var ids []string
	for range 2 {
		var retried ops.TaskAnswer
		r.get(call{method: http.MethodPost, path: strings.TrimPrefix(first.Header.Get("Location"), "") + "/retry", header: []string{"Idempotency-Key", "retry"}, as: ops.Submit}, &retried)
		ids = append(ids, retried.TaskID)
	}
	if ids[0] == "" || ids[0] != ids[1] {
		t.Errorf("ids of a repeated retry = %q, want one", ids)
	}
}

func TestIdempotencyKeyOfExec(t *testing.T) {
	const id = "aaaa11112222"
	r := newRig(t, Limits{})
	r.session(id)
	r.vm(id)
	post := func(key, body string) (*http.Response, ops.Exec) {
		t.Helper()
		resp, text := r.do(call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: body, header: []string{"Content-Type", "application/json", "Idempotency-Key", key}})
		var e ops.Exec
		if err := json.Unmarshal(text, &e); err != nil {
			t.Fatal(err)
		}
		return resp, e
	}
	const body = `{"command":"echo run >>../runs"}`
	resp, e := post("one", body)
	if resp.StatusCode != http.StatusAccepted {
		t.Fatalf("exec = %s, want %d", resp.Status, http.StatusAccepted)
	}
	r.awaitExec(e)
	if resp, again := post("one", body); resp.StatusCode != http.StatusAccepted || again.ID != e.ID || resp.Header.Get("Location") != e.Location() {
		t.Errorf("exec with the same key = %s, %+v, want %d, exec %s", resp.Status, again, http.StatusAccepted, e.ID)
	}
	if resp, _ := post("one", `{"argv":["id"]}`); resp.StatusCode != http.StatusUnprocessableEntity {
		t.Errorf("same key with another command = %s, want %d", resp.Status, http.StatusUnprocessableEntity)
	}
	if entries, err := os.ReadDir(r.execs.sessionDir(id)); err != nil || len(entries) != 1 {
		t.Errorf("stored execs = %v, %v, want 1", entries, err)
	}
	// A command without a record is not started a second time.
	if err := os.RemoveAll(r.execs.dir(id, e.ID).dir); err != nil {
		t.Fatal(err)
	}
	if resp, _ := post("one", body); resp.StatusCode != http.StatusConflict {
		t.Errorf("key of a removed exec = %s, want %d", resp.Status, http.StatusConflict)
	}
}

// The responses to POST and DELETE have the fields that clients of similar APIs
// expect.
func TestAnswersOfTasks(t *testing.T) {
	r := newRig(t, Limits{})
	fields := func(c call) map[string]any {
		t.Helper()
		got := map[string]any{}
		r.get(c, &got)
		return got
	}
	made := fields(call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: []string{"Content-Type", "application/yaml"}})
	one := ops.TasksPath + "/" + made["id"].(string)
	if got := fields(call{method: http.MethodDelete, path: one}); got["success"] != true || got["state"] != "CANCELLED" {
		t.Errorf("cancel = %v, want success, state CANCELLED", got)
	}
	for what, got := range map[string]map[string]any{
		"submit": made, "retry": fields(call{method: http.MethodPost, path: one + "/retry"}), "destroy": fields(call{method: http.MethodPost, path: one + "/destroy"}),
	} {
		if got["accepted"] != true || got["task_id"] != got["id"] || got["id"] == "" {
			t.Errorf("%s = %v, want accepted, with task_id as id", what, got)
		}
	}
	for _, c := range []call{{method: http.MethodDelete, path: ops.TasksPath + "/000000000000"}, {method: http.MethodPost, path: ops.TasksPath + "/000000000000/destroy"}} {
		if resp, body := r.do(c); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s %s of an unknown task = %s, want %d: %s", c.method, c.path, resp.Status, http.StatusNotFound, body)
		}
	}
	// Clients get only their part of the progress.
	id := r.submit().ID
	r.move(id, task.Running, func(f *task.Status) {
		f.Started = f.Started.AddDate(2026, 0, 0)
		f.Progress.Turns, f.Progress.Run.Turns = 7, 3
		f.Progress.Seen = []string{"x"}
	})
	progress := fields(call{path: ops.TasksPath + "/" + id})["progress"].(map[string]any)
	for _, name := range []string{"run", "seen", "calls"} {
		if _, ok := progress[name]; ok {
			t.Errorf("progress = %v, want no %s, which belongs to the parser", progress, name)
		}
	}
	if progress["turns"] != 7.0 {
		t.Errorf("progress = %v, want 7 turns", progress)
	}
}

// After its files were removed, a task reports that for every request for them.
func TestRemovedFiles(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.bring(id, map[string][]byte{"a": []byte("x")})
	one := ops.TasksPath + "/" + id
	if resp, _ := r.do(call{path: one + "/artifacts/a"}); resp.StatusCode != http.StatusOK {
		t.Fatalf("artifact = %s, want %d", resp.Status, http.StatusOK)
	}
	if err := os.RemoveAll(string(r.tasks.Dir(id))); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{one + "/artifacts", one + "/artifacts/a", one + "/artifacts/b", one + "/bundle", one + "/logs", one + "/logs?follow=true", "/ws/tasks/" + id + "/stream"} {
		resp, body := r.do(call{path: path})
		if resp.StatusCode != http.StatusGone || !strings.Contains(string(body), codePruned) || !strings.Contains(string(body), "cleanup_ttl") {
			t.Errorf("%s after cleanup = %s %s, want %d, %s, cleanup_ttl", path, resp.Status, body, http.StatusGone, codePruned)
		}
	}
	if resp, _ := r.do(call{path: one}); resp.StatusCode != http.StatusOK {
		t.Errorf("task after cleanup = %s, want %d", resp.Status, http.StatusOK)
	}
}

// HEAD works like GET without the body, on every GET route.
func TestHead(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	for _, path := range []string{
		ops.TasksPath, ops.TasksPath + "/" + id, ops.TasksPath + "/" + id + "/events", ops.TasksPath + "/" + id + "/artifacts", ops.TasksPath + "/" + id + "/logs",
		ops.SessionsPath, "/api/health", "/metrics", "/openapi.json", "/openapi.yaml", "/api/v1/manifest/schema",
	} {
		for _, header := range [][]string{nil, {"Accept", "text/event-stream"}} {
			get, _ := r.do(call{path: path, header: nil})
			resp, body := r.do(call{method: http.MethodHead, path: path, header: header})
			if resp.StatusCode != http.StatusOK || len(body) != 0 || resp.Header.Get("Content-Type") != get.Header.Get("Content-Type") {
				t.Errorf("HEAD %s = %s, headers %v, body %q, want %d, type %s, none", path, resp.Status, resp.Header, body, http.StatusOK, get.Header.Get("Content-Type"))
			}
		}
	}
}

// A change of only the mode, which does not change the modification time, is
// noticed.
func TestTokensOfAnOpenFile(t *testing.T) {
	r := newRig(t, Limits{})
	for _, mode := range []os.FileMode{0o666, 0o640, 0o604} {
		if resp, _ := r.do(call{path: ops.TasksPath}); resp.StatusCode != http.StatusOK {
			t.Fatalf("request = %s, want %d", resp.Status, http.StatusOK)
		}
		if err := os.Chmod(r.tokens.Path, mode); err != nil {
			t.Fatal(err)
		}
		if resp, _ := r.do(call{path: ops.TasksPath}); resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("request with file mode %v = %s, want %d", mode, resp.Status, http.StatusServiceUnavailable)
		}
		if err := os.Chmod(r.tokens.Path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
