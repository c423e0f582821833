package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

const traceID = "4bf92f3577b34da6a3ce929d0e0e4736"

// An invalid id is ignored, and appears neither in the response nor in the log.
func TestTraceIDs(t *testing.T) {
	r := newRig(t, Limits{})
	for in, taken := range map[string]bool{
		traceID: true, strings.ToUpper(traceID): true, "": false, "a b": false, strings.Repeat("a", 65): false, `","level":"ERROR`: false, strings.Repeat("0", 32): false,
	} {
		c := call{path: ops.TasksPath}
		if in != "" {
			c.header = []string{"X-Trace-Id", in}
		}
		resp, _ := r.do(c)
		if got := resp.Header.Get("X-Trace-Id"); (got == traceID) != taken || len(got) != 32 {
			t.Errorf("X-Trace-Id of a request with %q = %q, want it taken: %t, 32 digits", in, got, taken)
		}
	}
	resp, _ := r.do(call{path: ops.TasksPath, header: []string{"Traceparent", "00-" + traceID + "-00f067aa0ba902b7-01"}})
	if resp.Header.Get("X-Trace-Id") != traceID {
		t.Errorf("X-Trace-Id of a request with Traceparent = %q, want %q", resp.Header.Get("X-Trace-Id"), traceID)
	}
}

func TestATaskOverTheAPI(t *testing.T) {
	r := newRig(t, Limits{})
	quoted, err := json.Marshal(manifestYAML)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for kind, body := range map[string]string{
		"application/yaml":                manifestYAML,
		"text/yaml; charset=utf-8":        manifestYAML,
		"application/json":                `{"version":"1","kind":"Task","repository":{"url":"acme/app"},"claude":{"prompt":"do it"}}`,
		"application/json; charset=UTF-8": `{"manifest_yaml":` + string(quoted) + `}`,
	} {
		var made ops.TaskAnswer
		resp := r.get(call{method: http.MethodPost, path: ops.TasksPath, body: body, header: []string{"Content-Type", kind, "X-Trace-Id", traceID}, as: ops.Submit}, &made)
		if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != ops.TasksPath+"/"+made.ID || resp.Header.Get("X-Trace-Id") != traceID {
			t.Fatalf("submit as %s = %s, headers %v, want %d with Location and X-Trace-Id %s", kind, resp.Status, resp.Header, http.StatusAccepted, traceID)
		}
		if made.TraceID != traceID || made.Actor != "token:submit" || made.Desired != task.Run {
			t.Errorf("task submitted as %s = %+v, want trace id %s, actor token:submit, desired %s", kind, made, traceID, task.Run)
		}
		var shown task.View
		r.get(call{path: ops.TasksPath + "/" + made.ID, as: ops.Read}, &shown)
		if shown.ID != made.ID || shown.Repository != "acme/app" {
			t.Errorf("task = %+v, want id %s, repository acme/app", shown, made.ID)
		}
		ids = append(ids, made.ID)
	}
	text, err := r.store.TaskText(t.Context(), ids[0])
	if err != nil || len(text) == 0 {
		t.Fatalf("TaskText(%s) = %q, %v, want the manifest", ids[0], text, err)
	}

	// Pages contain every task once, the newest first, for any page size.
	for _, size := range []int{1, 3, 4, 50} {
		var seen []string
		for after := ""; ; {
			path := fmt.Sprintf("%s?limit=%d", ops.TasksPath, size)
			if after != "" {
				path += "&after=" + after
			}
			var p ops.TaskPage
			r.get(call{path: path, as: ops.Read}, &p)
			for _, v := range p.Tasks {
				seen = append(seen, v.ID)
			}
			if after = p.Next; after == "" {
				break
			}
		}
		slices.Reverse(seen)
		if !slices.Equal(seen, ids) {
			t.Errorf("tasks of all pages of %d = %v, want %v", size, seen, ids)
		}
	}
	count := func(query string, want int) {
		t.Helper()
		var p ops.TaskPage
		r.get(call{path: ops.TasksPath + "?" + query}, &p)
		if len(p.Tasks) != want {
			t.Errorf("tasks for %s = %d, want %d", query, len(p.Tasks), want)
		}
	}
	count("label=team=platform", 3)
	count("label=team=other", 0)
	count("state=PENDING,running", 4)
	count("state=COMPLETED", 0)
	count("state=PENDING&label=team=platform", 3)

	// Cancelling is idempotent and takes effect immediately for a waiting task. An
	// ended task can be retried.
	for range 2 {
		var v task.View
		resp := r.get(call{method: http.MethodDelete, path: ops.TasksPath + "/" + ids[0], as: ops.Submit}, &v)
		if resp.StatusCode != http.StatusAccepted || v.State != task.Cancelled {
			t.Fatalf("DELETE of task 0 = %s, state %s, want %d, %s", resp.Status, v.State, http.StatusAccepted, task.Cancelled)
		}
	}
	var again ops.TaskAnswer
	resp := r.get(call{method: http.MethodPost, path: ops.TasksPath + "/" + ids[0] + "/retry", as: ops.Submit}, &again)
	if again.RetryOf != ids[0] || resp.Header.Get("Location") != ops.TasksPath+"/"+again.ID {
		t.Errorf("retry = %+v, Location %q, want a retry of %s at its own path", again, resp.Header.Get("Location"), ids[0])
	}
	if resp, _ := r.do(call{method: http.MethodPost, path: ops.TasksPath + "/" + ids[1] + "/retry"}); resp.StatusCode != http.StatusConflict {
		t.Errorf("retry of a waiting task = %s, want %d", resp.Status, http.StatusConflict)
	}
	var v task.View
	r.get(call{method: http.MethodPost, path: ops.TasksPath + "/" + ids[1] + "/destroy"}, &v)
	if v.State != task.Cancelled {
		t.Errorf("state after destroying task 1 = %s, want %s", v.State, task.Cancelled)
	}
}

// A client that may only submit cannot bring data of this host into a VM that it
// controls.
func TestSubmitScopeBringsNothingOfTheHost(t *testing.T) {
	r := newRig(t, Limits{})
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "git", "init", "-q", dir).CombinedOutput(); err != nil {
		t.Fatalf("git init = %v, want nil\n%s", err, out)
	}
	local := strings.Replace(manifestYAML, "acme/app", dir, 1)
	secret := manifestYAML + "secrets: [{name: KEY, source: env, key: HOME, guest: true}]\n"
	inside := call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML + "vm: {session: ffff00001111}\n", header: []string{"Content-Type", "application/yaml"}, as: ops.Submit}
	if resp, body := r.do(inside); resp.StatusCode != http.StatusForbidden || !strings.Contains(string(body), "scope admin") {
		t.Errorf("submit in a session with scope submit = %s %s, want %d, scope admin", resp.Status, body, http.StatusForbidden)
	}
	inside.as = ops.Admin
	if resp, body := r.do(inside); resp.StatusCode != http.StatusUnprocessableEntity || !strings.Contains(string(body), "no session") {
		t.Errorf("submit in an unknown session with scope admin = %s %s, want %d, no session", resp.Status, body, http.StatusUnprocessableEntity)
	}
	for name, text := range map[string]string{"a path": local, "a secret": secret} {
		c := call{method: http.MethodPost, path: ops.TasksPath, body: text, header: []string{"Content-Type", "application/yaml"}, as: ops.Submit}
		resp, body := r.do(c)
		if resp.StatusCode != http.StatusForbidden || !strings.Contains(string(body), "scope admin") {
			t.Errorf("%s with scope submit = %s %s, want %d, scope admin", name, resp.Status, body, http.StatusForbidden)
		}
		c.as = ops.Admin
		resp, body = r.do(c)
		if resp.StatusCode != http.StatusAccepted {
			t.Fatalf("%s with scope admin = %s %s, want %d", name, resp.Status, body, http.StatusAccepted)
		}
		// Nor by retrying the task.
		var made ops.TaskAnswer
		if err := json.Unmarshal(body, &made); err != nil {
			t.Fatal(err)
		}
		r.do(call{method: http.MethodDelete, path: ops.TasksPath + "/" + made.ID})
		if resp, _ := r.do(call{method: http.MethodPost, path: ops.TasksPath + "/" + made.ID + "/retry", as: ops.Submit}); resp.StatusCode != http.StatusForbidden {
			t.Errorf("retry of %s with scope submit = %s, want %d", name, resp.Status, http.StatusForbidden)
		}
	}
}

// A token with the scope submit reads every task, and changes only those that it
// submitted; the scope admin changes all.
func TestTokensChangeTheirOwnTasksOnly(t *testing.T) {
	r := newRig(t, Limits{})
	var err error
	if r.token["team"], err = r.tokens.Add("team", ops.Submit, task.Permission{Repositories: []string{"github.com/acme/app"}}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		owner, by ops.Scope
		ok        bool
	}{{ops.Submit, ops.Submit, true}, {ops.Submit, ops.Admin, true}, {ops.Submit, "team", false}, {ops.Admin, ops.Submit, false}} {
		var made ops.TaskAnswer
		r.get(call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: []string{"Content-Type", "application/yaml"}, as: c.owner}, &made)
		path := ops.TasksPath + "/" + made.ID
		for _, change := range []call{{method: http.MethodDelete, path: path}, {method: http.MethodPost, path: path + "/destroy"}, {method: http.MethodPost, path: path + "/retry"}} {
			change.as = c.by
			resp, body := r.do(change)
			if want := map[bool]int{true: http.StatusAccepted, false: http.StatusForbidden}[c.ok]; resp.StatusCode != want {
				t.Errorf("%s %s of %s by %s = %s, want %d: %s", change.method, strings.TrimPrefix(change.path, path), c.owner, c.by, resp.Status, want, body)
			}
		}
		var seen task.View
		if r.get(call{path: path, as: c.by}, &seen); seen.ID != made.ID || (seen.State == task.Cancelled) != c.ok {
			t.Errorf("task %s of %s = state %s after a request of %s, want it cancelled: %t", made.ID, c.owner, seen.State, c.by, c.ok)
		}
	}
}

// A token with the scope submit may name only the repositories and profiles that it
// was created for, none by default, and never a host on this network.
func TestSubmitPermission(t *testing.T) {
	r := newRig(t, Limits{})
	r.tasks.CheckPublic = nil // the real check; addresses need no resolver
	add := func(name string, repositories, profiles []string) ops.Scope {
		t.Helper()
		may, err := task.ParsePermission(repositories, profiles)
		if err != nil {
			t.Fatal(err)
		}
		if r.token[ops.Scope(name)], err = r.tokens.Add(name, ops.Submit, may); err != nil {
			t.Fatal(err)
		}
		return ops.Scope(name)
	}
	none, all := add("none", nil, nil), add("all", []string{"*"}, nil)
	one := add("one", []string{"https://198.51.100.7/team/app"}, []string{"small"})
	text, err := os.ReadFile(r.tokens.Path)
	if err != nil {
		t.Fatal(err)
	}
	old := r.token[ops.Read]
	if err := os.WriteFile(r.tokens.Path, bytes.Replace(text, []byte(`"scope": "read"`), []byte(`"scope": "submit"`), 1), 0o600); err != nil { // like a file from before Permission existed
		t.Fatal(err)
	}
	r.token["old"] = old

	submit := func(as ops.Scope, url, more string) (int, string) {
		t.Helper()
		resp, body := r.do(call{
			method: http.MethodPost, path: ops.TasksPath, as: as, header: []string{"Content-Type", "application/yaml"},
			body: strings.Replace(manifestYAML, "acme/app", url, 1) + more,
		})
		return resp.StatusCode, string(body)
	}
	for _, c := range []struct {
		as   ops.Scope
		url  string
		more string
		want int
	}{
		{none, "https://198.51.100.7/team/app", "", 403},
		{"old", "https://198.51.100.7/team/app", "", 403},
		{one, "https://198.51.100.7/team/app", "", 202},
		{one, "https://198.51.100.7/team/app", "vm: {profile: large}\n", 403},
		{one, "https://198.51.100.7/team/app", "vm: {profile: small}\n", 400}, // allowed, but the profile does not exist
		{one, "https://198.51.100.7/team/other", "", 403},
		{one, "https://198.51.100.8/team/app", "", 403},
		{all, "https://198.51.100.8/team/app", "", 202},
		{all, "ssh://git@198.51.100.8/team/app", "", 202},
		{all, "git@198.51.100.8.nip.invalid:team/app", "", 202}, // does not resolve: checked again when it is fetched
		{all, "git://198.51.100.8/team/app", "", 403},
		{all, "https://198.51.100.8/team/app", "vm: {profile: small}\n", 403},
		{all, "https://127.0.0.1/team/app", "", 403},
		{all, "git://127.0.0.1/team/app", "", 403},
		{all, "ssh://localhost/team/app", "", 403},
		{all, "https://169.254.169.254/team/app", "", 403},
		{all, "https://10.1.2.3/team/app", "", 403},
		{all, "https://192.168.1.1:8443/team/app", "", 403},
		{all, "file:///etc/team/app", "", 403},
		{ops.Admin, "https://127.0.0.1/team/app", "", 202},
	} {
		status, body := submit(c.as, c.url, c.more)
		if status != c.want {
			t.Errorf("submit %s as %s%s = %d, want %d: %s", c.url, c.as, c.more, status, c.want, body)
		}
	}

	// Others cannot retry an admin's task, and a client's task stays restricted
	// when the user retries it.
	rows, err := r.tasks.List(t.Context(), store.TaskFilter{})
	if err != nil {
		t.Fatal(err)
	}
	restricted := 0
	for _, row := range rows {
		admins := row.Status.Actor == "token:admin"
		if row.Status.Restricted == admins {
			t.Errorf("task of %s: restricted = %t, want %t", row.Status.Actor, row.Status.Restricted, !admins)
		}
		r.do(call{method: http.MethodDelete, path: ops.TasksPath + "/" + row.ID})
		if admins {
			if resp, body := r.do(call{method: http.MethodPost, path: ops.TasksPath + "/" + row.ID + "/retry", as: all}); resp.StatusCode != http.StatusForbidden {
				t.Errorf("retry of an admin's task = %s %s, want %d", resp.Status, body, http.StatusForbidden)
			}
			continue
		}
		restricted++
		var again ops.TaskAnswer
		r.get(call{method: http.MethodPost, path: ops.TasksPath + "/" + row.ID + "/retry"}, &again)
		if got, err := r.tasks.Get(t.Context(), again.ID); err != nil || !got.Status.Restricted {
			t.Errorf("retried task = %+v, %v, want it restricted", got.Status, err)
		}
	}
	if restricted != 4 {
		t.Errorf("restricted tasks = %d, want 4", restricted)
	}
}

func TestScopes(t *testing.T) {
	r := newRig(t, Limits{})
	var made ops.TaskAnswer // a client with the scope submit changes only what it submitted
	r.get(call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: []string{"Content-Type", "application/yaml"}, as: ops.Submit}, &made)
	id := made.ID
	s := r.schemas()
	rank := map[ops.Scope]int{"-": 0, ops.Read: 1, ops.Submit: 2, ops.Admin: 3}
	seen := 0
	for template, item := range s.doc["paths"].(map[string]any) {
		for method, op := range item.(map[string]any) {
			var need ops.Scope = "-"
			for _, scope := range ops.Scopes() {
				if about, _ := op.(map[string]any)["description"].(string); strings.Contains(about, "Needs the scope `"+string(scope)+"`") {
					need = scope
				}
			}
			path := strings.NewReplacer("{id}", id, "{name}", "x", "{exec}", "0123456789ab").Replace(template)
			for as := range rank {
				if template == "/api/v1/sessions/{id}/events" || rank[as] >= rank[need] && strings.HasPrefix(template, "/ws/") {
					continue
				}
				seen++
				resp, body := r.do(call{method: strings.ToUpper(method), path: path, as: as})
				refused := resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden || resp.StatusCode == http.StatusTooManyRequests
				if refused != (rank[as] < rank[need]) {
					t.Errorf("%s %s with scope %s = %s %s, want it refused: %t, as it needs %s", method, path, as, resp.Status, body, rank[as] < rank[need], need)
				}
			}
		}
	}
	if seen < 50 {
		t.Fatalf("routes checked = %d, want at least 50", seen)
	}
}

// Each request is logged with these fields.
func TestRequestLog(t *testing.T) {
	r := newRig(t, Limits{})
	r.do(call{path: ops.TasksPath})
	var got map[string]any
	testenv.WaitFor(t, "the request is logged", func() bool { // after its answer
		for line := range strings.Lines(r.log.String()) {
			got = nil
			if err := json.Unmarshal([]byte(line), &got); err == nil && got["msg"] == "request" {
				return true
			}
		}
		return false
	})
	want := []string{"actor", "bytes", "level", "ms", "msg", "route", "status", "time"}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(got))); diff != "" {
		t.Errorf("fields of a request's record mismatch (-want +got):\n%s", diff)
	}
}

// The document matches the router: it contains everything that is served, in both
// forms.
func TestDocument(t *testing.T) {
	r := newRig(t, Limits{})
	var doc struct {
		OpenAPI string
		Paths   map[string]map[string]struct{ OperationID, Summary string }
	}
	r.get(call{path: "/openapi.json"}, &doc)
	if doc.OpenAPI != "3.1.0" {
		t.Errorf("openapi = %q, want \"3.1.0\"", doc.OpenAPI)
	}
	ids := map[string]bool{}
	for path, item := range doc.Paths {
		if strings.Contains(path, "...") {
			t.Errorf("documented path = %s, want no \"...\"", path)
		}
		for _, op := range item {
			if op.OperationID == "" || ids[op.OperationID] {
				t.Errorf("operation id of %s = %q, want a unique one", path, op.OperationID)
			}
			ids[op.OperationID] = true
			if op.Summary == "" || strings.HasSuffix(op.Summary, ".") {
				t.Errorf("summary of %s = %q, want a phrase", op.OperationID, op.Summary)
			}
		}
	}
	for _, path := range []string{
		"/api/v1/tasks", "/api/v1/tasks/{id}", "/api/v1/tasks/{id}/logs", "/api/v1/tasks/{id}/artifacts", "/api/v1/tasks/{id}/artifacts/{name}",
		"/api/v1/tasks/{id}/events", "/api/v1/tasks/{id}/bundle", "/api/v1/tasks/{id}/retry", "/api/v1/tasks/{id}/destroy", "/ws/tasks/{id}/stream",
		"/api/v1/sessions", "/api/v1/sessions/{id}", "/api/v1/sessions/{id}/exec", "/api/health", "/metrics", "/openapi.json", "/openapi.yaml", "/api/v1/manifest/schema",
	} {
		if doc.Paths[path] == nil {
			t.Errorf("documentation of %s = none, want it documented", path)
		}
	}
	_, asJSON := r.do(call{path: "/openapi.json"})
	_, asYAML := r.do(call{path: "/openapi.yaml"})
	var a, b any
	if err := json.Unmarshal(asJSON, &a); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(asYAML, &b); err != nil {
		t.Fatal(err)
	}
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	if err1 != nil || err2 != nil || string(x) != string(y) {
		t.Errorf("JSON form = %s, %v, YAML form %s, %v, want the same", x, err1, y, err2)
	}
	// Every schema of the document compiles and is therefore usable.
	s := r.schemas()
	for name := range s.doc["components"].(map[string]any)["schemas"].(map[string]any) {
		if _, err := s.compile("/components/schemas/" + name); err != nil {
			t.Error(err)
		}
	}
	var schema map[string]any
	r.get(call{path: "/api/v1/manifest/schema", as: ops.Read}, &schema)
	if schema["$schema"] == nil {
		t.Errorf("schema = %v, want $schema", schema)
	}
}

func TestHealthSaysNothingElse(t *testing.T) {
	r := newRig(t, Limits{})
	for _, socket := range []bool{false, true} {
		resp, body := r.do(call{path: healthPath, as: "-", socket: socket})
		if resp.StatusCode != http.StatusOK || strings.TrimSpace(string(body)) != `{"status":"ok"}` {
			t.Errorf("health = %s %s, want %d, {\"status\":\"ok\"}", resp.Status, body, http.StatusOK)
		}
	}
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	resp, body := r.do(call{path: healthPath, as: "-"})
	if resp.StatusCode != http.StatusServiceUnavailable || strings.Contains(string(body), "sql") || strings.Contains(string(body), "/") && !strings.Contains(string(body), "about:blank") {
		t.Errorf("health with a failing store = %s %s, want %d without a cause", resp.Status, body, http.StatusServiceUnavailable)
	}
}
