package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/audit"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestclient"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/fake"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// vm creates a session's VM, which runs commands for real on this host.
func (r *rig) vm(id string) (checkout string) {
	t := r.t
	t.Helper()
	key, authorized, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	dir := testenv.ShortDir(t)
	d, err := fake.New(fake.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	name := "agent-acme-app-" + id[:6]
	if err := d.Create(t.Context(), vm.Spec{
		Name: name, CPUs: 1, Memory: 1 << 30, Disk: 4 << 30, User: "agent", AuthorizedKey: authorized, Image: vm.Image{Arch: "x86_64", Location: "/dev/null"},
	}); err != nil {
		t.Fatal(err)
	}
	ep, err := d.Start(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Delete(t.Context(), name); err != nil && t.Context().Err() == nil {
			t.Error(err)
		}
	})
	m, err := d.Inspect(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	checkout = filepath.Join(m.Root, "home", "agent", "app")
	paths := r.tasks.Sessions.Config.Paths
	for _, dir := range []string{checkout, filepath.Join(checkout, "sub"), paths.SessionDir(id)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(paths.SessionDir(id), "ssh_key"), key, 0o600); err != nil {
		t.Fatal(err)
	}
	status, err := json.Marshal(session.Status{Dir: checkout, Root: m.Root, Endpoint: ep, Secrets: guestclient.Delivered{Values: 2, Bytes: 1000}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Status = status
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	return checkout
}

// run starts a command and waits for its end.
func (r *rig) run(id, body string) ops.Exec {
	r.t.Helper()
	e := r.startExec(id, body)
	return r.awaitExec(e)
}

func (r *rig) startExec(id, body string) (e ops.Exec) {
	r.t.Helper()
	resp := r.get(call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: body, header: []string{"Content-Type", "application/json"}}, &e)
	if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != e.Location() {
		r.t.Fatalf("exec = %s, headers %v, want %d with Location %s", resp.Status, resp.Header, http.StatusAccepted, e.Location())
	}
	return e
}

func (r *rig) awaitExec(e ops.Exec) ops.Exec {
	r.t.Helper()
	testenv.WaitFor(r.t, "the command ends", func() bool {
		r.get(call{path: e.Location(), as: ops.Read}, &e)
		return e.State != ops.ExecRunning
	})
	return e
}

func (r *rig) execLog(e ops.Exec, stream string) string {
	r.t.Helper()
	_, body := r.do(call{path: e.Location() + "/logs?stream=" + stream, as: ops.Read})
	return string(body)
}

func TestExec(t *testing.T) {
	const id = "aaaa11112222"
	r := newRig(t, Limits{ExecBytes: 1000})
	r.session(id)
	checkout := r.vm(id)
	var audited []audit.Record
	r.tasks.Sessions.Audit = func(_ context.Context, a audit.Record) { audited = append(audited, a) }

	for _, c := range []struct {
		name, body     string
		state          ops.ExecState
		code           int
		stdout, stderr string
	}{
		{"argv", `{"argv":["sh","-c","echo out; echo err >&2; exit 3"]}`, ops.ExecExited, 3, "out\n", "err\n"},
		{"a command line", `{"command":"printf '%s' \"$A$B\"; pwd","env":{"A":"it's $HOME;","B":"\n"}}`, ops.ExecExited, 0, "it's $HOME;\n" + checkout + "\n", ""},
		{"arguments stay arguments", `{"argv":["printf","%s|","a b","$HOME","; id","'"]}`, ops.ExecExited, 0, "a b|$HOME|; id|'|", ""},
		{"a directory", `{"argv":["pwd"],"cwd":"sub"}`, ops.ExecExited, 0, checkout + "/sub\n", ""},
		{"a directory that looks like an option", `{"argv":["pwd"],"cwd":"-"}`, ops.ExecExited, 0, "", "*"},
		{"too much output", `{"command":"head -c 100000 /dev/zero | tr '\\0' x"}`, ops.ExecExited, 0, strings.Repeat("x", 1000), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := r.run(id, c.body)
			if c.stderr == "*" { // the shell's own message and code
				if e.ExitCode == nil || *e.ExitCode == 0 || r.execLog(e, "stderr") == "" {
					t.Errorf("exec = %+v, stderr %q, want a failure with a message", e, r.execLog(e, "stderr"))
				}
				return
			}
			if e.State != c.state || e.ExitCode == nil || *e.ExitCode != c.code || e.EndedAt == nil || e.Actor != "token:admin" || e.TraceID == "" {
				t.Fatalf("exec = %+v, stderr %q, want state %s, code %d, its end, actor token:admin, a trace id", e, r.execLog(e, "stderr"), c.state, c.code)
			}
			if out := r.execLog(e, "stdout"); out != c.stdout || e.Stdout.Bytes != int64(len(c.stdout)) || e.Stdout.Truncated != (len(c.stdout) == 1000) {
				t.Errorf("stdout = %q (%+v), want %q", out, e.Stdout, c.stdout)
			}
			if out := r.execLog(e, "stderr"); out != c.stderr {
				t.Errorf("stderr = %q, want %q", out, c.stderr)
			}
		})
	}

	// The values of its environment are not stored. The two logs are separate
	// files.
	e := r.run(id, `{"command":"true","env":{"TOKEN":"s3cret-value"}}`)
	dir := r.execs.dir(id, e.ID)
	for _, name := range []string{dir.stdout(), dir.stderr(), dir.file(".json")} {
		text, err := os.ReadFile(name)
		st, err2 := os.Stat(name)
		if err != nil || err2 != nil || st.Mode().Perm() != 0o600 || strings.Contains(string(text), "s3cret") {
			t.Errorf("%s = %q, %v, %v, want mode 0600 without the secret", name, text, err, err2)
		}
	}
	if !strings.HasSuffix(dir.stdout(), e.ID+".stdout.log") || !strings.HasSuffix(dir.stderr(), e.ID+".stderr.log") {
		t.Errorf("log files = %s, %s, want names that begin with %s", dir.stdout(), dir.stderr(), e.ID)
	}
	if strings.Contains(r.log.String(), "s3cret") {
		t.Errorf("log = %s, want no value of the environment", r.log.String())
	}
	testenv.WaitFor(t, "the end is logged", func() bool {
		return strings.Contains(r.log.String(), `"exec":"`+e.ID+`","state":"exited"`)
	})
	if strings.Contains(r.log.String(), "failed to record") {
		t.Errorf("log = %s, want no failure", r.log.String())
	}

	if a := audited[len(audited)-1]; a.Type != audit.ExecStarted || a.Actor != "token:admin" || a.Resource != "session:"+id || strings.Contains(fmt.Sprint(a.Details), "s3cret") {
		t.Errorf("audit record = %+v, want %s by token:admin for session:%s without the secret", a, audit.ExecStarted, id)
	}

	// Its events belong to the session, and last_event is the position to read
	// from.
	slow := r.startExec(id, `{"command":"echo begun; exec sleep 600"}`)
	testenv.WaitFor(t, "it has begun", func() bool { return r.execLog(slow, "stdout") == "begun\n" })
	var p ops.EventPage
	r.get(call{path: ops.SessionsPath + "/" + id + "/events?after=" + slow.LastEvent, as: ops.Read}, &p)
	if len(p.Events) != 0 {
		t.Errorf("events after last_event = %+v, want none", p.Events)
	}
	var got ops.Exec
	resp := r.get(call{method: http.MethodDelete, path: slow.Location()}, &got)
	if resp.StatusCode != http.StatusAccepted {
		t.Errorf("DELETE of the exec = %s, want %d", resp.Status, http.StatusAccepted)
	}
	if ended := r.awaitExec(slow); ended.State != ops.ExecCancelled || ended.ExitCode != nil {
		t.Errorf("cancelled exec = %+v, want state %s without an exit code", ended, ops.ExecCancelled)
	}
	r.get(call{path: ops.SessionsPath + "/" + id + "/events?after=" + slow.LastEvent}, &p)
	var change ExecChange
	if len(p.Events) != 1 || p.Events[0].Kind != EventExec || json.Unmarshal(p.Events[0].Data, &change) != nil || change.Exec != slow.ID || change.State != ops.ExecCancelled {
		t.Errorf("events after the cancel = %+v, want one, exec %s is %s", p.Events, slow.ID, ops.ExecCancelled)
	}
	if resp, _ := r.do(call{method: http.MethodDelete, path: slow.Location()}); resp.StatusCode != http.StatusAccepted {
		t.Errorf("second DELETE of the exec = %s, want %d", resp.Status, http.StatusAccepted)
	}

	if e := r.run(id, `{"command":"exec sleep 600","timeout":"100ms"}`); e.State != ops.ExecTimeout {
		t.Errorf("exec with a timeout = %+v, want state %s", e, ops.ExecTimeout)
	}

	// If serve is killed, the next one marks the command as lost. If serve ends
	// normally, it ends the command.
	left := r.startExec(id, `{"command":"exec sleep 600"}`)
	other := newExecs(r.Server, "another")
	if e, err := other.Get(id, left.ID); err != nil || e.State != ops.ExecLost {
		t.Errorf("exec of a killed server = %+v, %v, want state %s", e, err, ops.ExecLost)
	}
	r.shutdown()
	r.execs.wait(t.Context())
	if e, err := r.execs.Get(id, left.ID); err != nil || e.State != ops.ExecCancelled {
		t.Errorf("exec of a server that ended = %+v, %v, want state %s", e, err, ops.ExecCancelled)
	}
	if resp, _ := r.do(call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}}); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("exec after the end of the server = %s, want %d", resp.Status, http.StatusServiceUnavailable)
	}
}

// A client with the scope read sees neither the command lines of an admin nor the
// guest's secrets.
func TestExecHidesSecretsFromReaders(t *testing.T) {
	const id, value = "aaaa11112222", "hunter2-hunter2"
	r := newRig(t, Limits{})
	r.session(id)
	checkout := r.vm(id)
	root := strings.TrimSuffix(checkout, "/home/agent/app")
	dir := filepath.Join(root, "run", "agent", "secrets")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "TOKEN"), []byte(value), 0o600); err != nil {
		t.Fatal(err)
	}
	e := r.run(id, `{"command":"printf 'out %s\\n' hunter2-; printf hunter2-; printf 'hunter2 %s' \"$A\"; echo err hunter2-hunter2 >&2","cwd":"sub","env":{"A":"b"}}`)
	for stream, want := range map[string]string{"stdout": "out hunter2-\n*************** b", "stderr": "err ***************\n"} {
		if got := r.execLog(e, stream); got != want {
			t.Errorf("%s = %q, want %q", stream, got, want)
		}
	}
	for as, shown := range map[ops.Scope]bool{ops.Read: false, ops.Submit: false, ops.Admin: true} {
		_, body := r.do(call{path: e.Location(), as: as})
		for _, word := range []string{"printf", `"cwd"`, `"env"`} {
			if strings.Contains(string(body), word) != shown {
				t.Errorf("exec as %s = %s, want %s shown: %t", as, body, word, shown)
			}
		}
	}
	// The session's token is a secret, too.
	if err := os.Rename(filepath.Join(dir, "TOKEN"), filepath.Join(dir, "..", "token")); err != nil {
		t.Fatal(err)
	}
	if e := r.run(id, `{"command":"echo hunter2-hunter2"}`); r.execLog(e, "stdout") != "***************\n" {
		t.Errorf("stdout with the session's token = %q, want it masked", r.execLog(e, "stdout"))
	}
}

// A command that was lost with its server ends with an event, like any other.
func TestLostExecHasATerminalEvent(t *testing.T) {
	const id = "aaaa11112222"
	m := newManager(t)
	r := &rig{Server: &Server{store: m.Sessions.Store}, t: t}
	r.session(id)
	killed, err := New(Options{Engine: ops.Engine{Tasks: m}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	rec := execRecord{Server: killed.execs.self, Exec: ops.Exec{ID: "0123456789ab", Session: id, State: ops.ExecRunning, Actor: "token:ci", TraceID: traceID}}
	stdout, stderr, err := killed.execs.prepare(t.Context(), &rec)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stdout.WriteString("partial"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stdout.Close(), stderr.Close()); err != nil {
		t.Fatal(err)
	}
	for range 2 { // and only once
		run := start(t, Options{Engine: ops.Engine{Tasks: m}})
		resp, err := run.client().Get("http://localhost" + ops.SessionsPath + "/" + id + "/events?after=" + rec.LastEvent) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		var p ops.EventPage
		err = json.NewDecoder(resp.Body).Decode(&p)
		_ = resp.Body.Close()
		var change ExecChange
		if err != nil || len(p.Events) != 1 || json.Unmarshal(p.Events[0].Data, &change) != nil || change.State != ops.ExecLost || change.Exec != rec.ID || change.Actor != "token:ci" {
			t.Fatalf("events of the lost exec = %+v, %v, want one, exec %s of token:ci is %s", p, err, rec.ID, ops.ExecLost)
		}
		if err := run.stop(); err != nil {
			t.Fatal(err)
		}
	}
	e, err := killed.execs.Get(id, rec.ID)
	if err != nil || e.State != ops.ExecLost || e.EndedAt == nil || e.Stdout.Bytes != int64(len("partial")) {
		t.Errorf("lost exec = %+v, %v, want state %s with its end and %d bytes of stdout", e, err, ops.ExecLost, len("partial"))
	}
}

// A missing VM is reported as such; a session that does not run is a conflict.
func TestExecWithoutAVM(t *testing.T) {
	r := newRig(t, Limits{Execs: 1})
	const id = "bbbb11112222"
	r.session(id)
	if e := r.run(id, `{"argv":["id"]}`); e.State != ops.ExecFailed || e.Error == nil || e.Error.Message == "" {
		t.Errorf("exec without a VM = %+v, want state %s with an error", e, ops.ExecFailed)
	}
	if _, err := r.store.Update(t.Context(), id, func(row *store.Session) (store.Event, error) {
		row.Phase = "stopped"
		return store.Event{}, nil
	}); err != nil {
		t.Fatal(err)
	}
	c := call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}}
	if resp, body := r.do(c); resp.StatusCode != http.StatusConflict || !strings.Contains(string(body), "agent-sessionizer start") {
		t.Errorf("exec in a stopped session = %s %s, want %d, agent-sessionizer start", resp.Status, body, http.StatusConflict)
	}
	r.execs.group.Wait() // a command releases its slot shortly after it has ended
	if err := r.execs.add("x", func(error) {}); err != nil {
		t.Fatal(err)
	}
	if err := r.execs.add("y", func(error) {}); problemOf(err).Status != http.StatusTooManyRequests {
		t.Errorf("exec over the limit = %v, want status %d", err, http.StatusTooManyRequests)
	}
	r.execs.remove("x")
}

// A command that was refused may be sent again with the same key.
func TestRefusedExecIsRepeated(t *testing.T) {
	r := newRig(t, Limits{Execs: 1})
	const id = "aaaa11112222"
	r.session(id)
	if err := r.execs.add("x", func(error) {}); err != nil {
		t.Fatal(err)
	}
	c := call{method: http.MethodPost, path: ops.SessionsPath + "/" + id + "/exec", body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json", "Idempotency-Key", "once"}}
	if resp, body := r.do(c); resp.StatusCode != http.StatusTooManyRequests {
		t.Fatalf("exec over the limit = %s %s, want %d", resp.Status, body, http.StatusTooManyRequests)
	}
	r.execs.remove("x")
	dir := r.execs.sessionDir(id)
	if err := errors.Join(os.MkdirAll(filepath.Dir(dir), 0o700), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if resp, body := r.do(c); resp.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("exec without a directory = %s %s, want %d", resp.Status, body, http.StatusServiceUnavailable)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if resp, body := r.do(c); resp.StatusCode/100 != 2 {
		t.Errorf("repeated exec = %s %s, want success", resp.Status, body)
	}
}

// Only the newest commands of a session are kept.
func TestExecsArePruned(t *testing.T) {
	r := newRig(t, Limits{})
	const id = "cccc11112222"
	r.session(id)
	var first ops.Exec
	for i := range maxExecs + 3 {
		rec := execRecord{Exec: ops.Exec{ID: ids.New(), Session: id, State: ops.ExecExited}}
		rec.StartedAt = rec.StartedAt.AddDate(0, 0, i)
		if i == 0 {
			first = rec.Exec
		}
		if err := os.MkdirAll(r.execs.dir(id, rec.ID).dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := r.execs.write(rec); err != nil {
			t.Fatal(err)
		}
	}
	r.execs.prune(id)
	entries, err := os.ReadDir(r.execs.sessionDir(id))
	if err != nil || len(entries) != maxExecs-1 {
		t.Errorf("execs kept = %d, %v, want %d", len(entries), err, maxExecs-1)
	}
	if resp, _ := r.do(call{path: first.Location()}); resp.StatusCode != http.StatusNotFound {
		t.Errorf("GET of the oldest exec = %s, want %d", resp.Status, http.StatusNotFound)
	}
}
