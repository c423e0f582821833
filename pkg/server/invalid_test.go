package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// bad is a request that must be refused.
type bad struct {
	name string
	call
	want int
	code string // "" for any
}

// yamlCall submits a YAML manifest.
func yamlCall(name, body string, want int, code string) bad {
	return bad{"manifest: " + name, call{method: http.MethodPost, path: ops.TasksPath, body: body, header: []string{"Content-Type", "application/yaml"}}, want, code}
}

// jsonCall submits a JSON manifest.
func jsonCall(name, body string, want int, code string) bad {
	return bad{"JSON: " + name, call{method: http.MethodPost, path: ops.TasksPath, body: body, header: []string{"Content-Type", "application/json"}}, want, code}
}

// getCall reads a path.
func getCall(name, path string, want int, code string, header ...string) bad {
	return bad{name, call{path: path, header: header}, want, code}
}

// bodyCall sends a body with any method.
func bodyCall(name, method, path, body string, want int, code string, header ...string) bad {
	return bad{name, call{method: method, path: path, body: body, header: header}, want, code}
}

// badCalls returns every request that must be refused. The task gone has expired
// events.
func badCalls(id, session, gone string) []bad {
	return slices.Concat(
		badManifests(), badMethods(id), badPaths(id, session), badArtifacts(id), badParameters(), badAnchors(id, session, gone),
		badLogs(id), badWebSockets(id), badHeaders(), badTokens(id, session), badExecs(session),
	)
}

// badManifests returns submissions of invalid manifests.
func badManifests() []bad {
	bombs := "a: &a [x,x,x,x,x,x,x,x,x]\n"
	for c := 'b'; c <= 'i'; c++ {
		bombs += fmt.Sprintf("%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n", c, c, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	with := func(more string) string { return manifestYAML + more }
	return []bad{
		yamlCall("nothing but a comment", "# nothing", 400, "USAGE"),
		yamlCall("a list", "- a\n- b", 400, "USAGE"),
		yamlCall("a number", "42", 400, "USAGE"),
		yamlCall("a text", "hello", 400, "USAGE"),
		yamlCall("not YAML", "a: [", 400, "USAGE"),
		yamlCall("tabs", "a:\n\t- b", 400, "USAGE"),
		yamlCall("another version", strings.Replace(manifestYAML, `"1"`, `"2"`, 1), 400, "USAGE"),
		yamlCall("another kind", strings.Replace(manifestYAML, "kind: Task", "kind: Pod", 1), 400, "USAGE"),
		yamlCall("an unknown key", with("colour: blue\n"), 400, "USAGE"),
		yamlCall("a key twice", with("kind: Task\n"), 400, "USAGE"),
		yamlCall("two documents", with("---\n")+manifestYAML, 400, "USAGE"),
		yamlCall("no repository", strings.Replace(manifestYAML, "repository: {url: acme/app}\n", "", 1), 400, "USAGE"),
		yamlCall("no agent", strings.Replace(manifestYAML, "agent: {kind: command, command: [make, test]}\n", "", 1), 400, "USAGE"),
		yamlCall("two agents", with("claude: {prompt: x}\n"), 400, "USAGE"),
		yamlCall("a list as name", strings.Replace(manifestYAML, "name: try", "name: [a]", 1), 400, "USAGE"),
		yamlCall("a text as CPUs", with("vm: {cpus: many}\n"), 400, "USAGE"),
		yamlCall("CPUs below zero", with("vm: {cpus: -1}\n"), 400, "USAGE"),
		yamlCall("memory without end", with("vm: {memory: 99999999T}\n"), 400, "USAGE"),
		yamlCall("a timeout of nothing", with("lifecycle: {timeout: 0s}\n"), 400, "USAGE"),
		yamlCall("a timeout that is not a duration", with("lifecycle: {timeout: soon}\n"), 400, "USAGE"),
		yamlCall("a network mode of its own", with("vm: {network_mode: everything}\n"), 400, "USAGE"),
		yamlCall("a secret without a source", with("secrets: [{name: A, key: B}]\n"), 400, "USAGE"),
		yamlCall("a secret's source of its own", with("secrets: [{name: A, source: http, key: B}]\n"), 400, "USAGE"),
		yamlCall("a path with dots", strings.Replace(manifestYAML, "acme/app", "../../etc", 1), 400, "USAGE"),
		yamlCall("a subpath with dots", strings.Replace(manifestYAML, "{url: acme/app}", "{url: acme/app, subpath: ../..}", 1), 400, "USAGE"),
		yamlCall("an option as URL", strings.Replace(manifestYAML, "acme/app", "--upload-pack=touch /tmp/x", 1), 400, "USAGE"),
		yamlCall("a program as URL", strings.Replace(manifestYAML, "acme/app", "ext::sh -c id", 1), 400, "USAGE"),
		yamlCall("an option as branch", strings.Replace(manifestYAML, "{url: acme/app}", "{url: acme/app, branch: --force}", 1), 400, "USAGE"),
		yamlCall("a NUL", strings.Replace(manifestYAML, "name: try", "name: \"a\\0b\"", 1), 400, "USAGE"),
		yamlCall("an escape sequence", strings.Replace(manifestYAML, "name: try", "name: \"\\e[2J\"", 1), 400, "USAGE"),
		yamlCall("bytes that are no UTF-8", strings.Replace(manifestYAML, "try", "\xff\xfe", 1), 400, "USAGE"),
		yamlCall("aliases of aliases", bombs, 400, "USAGE"),
		yamlCall("an anchor", with("x: &a 1\n"), 400, "USAGE"),
		yamlCall("a merge key", with("<<: {a: b}\n"), 400, "USAGE"),
		yamlCall("a tag", with("x: !!binary aGVsbG8=\n"), 400, "USAGE"),
		yamlCall("depth", strings.Repeat("[", 5000), 400, "USAGE"),
		yamlCall("depth, closed", "a: "+strings.Repeat("[", 2000)+strings.Repeat("]", 2000), 400, "USAGE"),
		yamlCall("depth by indentation", func() string {
			var b strings.Builder
			for i := range 600 {
				fmt.Fprintf(&b, "%sa:\n", strings.Repeat(" ", i))
			}
			return b.String()
		}(), 400, "USAGE"),
		yamlCall("ten thousand keys", func() string {
			var b strings.Builder
			for i := range 20_000 {
				fmt.Fprintf(&b, "k%d: 1\n", i)
			}
			return b.String()
		}(), 400, "USAGE"),
		yamlCall("a label of 100 kB", strings.Replace(manifestYAML, "platform", strings.Repeat("x", 100_000), 1), 400, "USAGE"),
		yamlCall("over 1 MiB, in the body's bounds", manifestYAML+"# "+strings.Repeat("x", 1<<20), 400, "USAGE"),
		yamlCall("over the body's bounds", manifestYAML+"# "+strings.Repeat("x", maxBody), 413, codeTooLarge),
		yamlCall("far over the body's bounds", manifestYAML+"# "+strings.Repeat("x", maxSpill-1<<10), 413, codeTooLarge), // more than the sockets' buffers hold
		yamlCall("an unknown profile", with("vm: {profile: unknown}\n"), 0, ""),
		jsonCall("not JSON and not YAML", `{"version":`, 400, "USAGE"),
		jsonCall("null", `null`, 400, "USAGE"),
		jsonCall("a number", `1`, 400, "USAGE"),
		jsonCall("depth", strings.Repeat(`{"a":`, 20_000)+"1"+strings.Repeat("}", 20_000), 400, "USAGE"),
		jsonCall("a key twice", `{"version":"1","version":"1","kind":"Task","repository":{"url":"a/b"},"claude":{"prompt":"x"}}`, 400, "USAGE"),
		jsonCall("wrapped number", `{"manifest_yaml": 5}`, 400, "USAGE"),
		jsonCall("wrapped null", `{"manifest_yaml": null}`, 400, "USAGE"),
		jsonCall("wrapped object", `{"manifest_yaml": {"version": "1"}}`, 400, "USAGE"),
		jsonCall("wrapped with company", `{"manifest_yaml": "a: b", "force": true}`, 400, "USAGE"),
		jsonCall("wrapped twice", `{"manifest_yaml": "a: b", "manifest_yaml": "c: d"}`, 400, "USAGE"),
		jsonCall("wrapped and more", `{"manifest_yaml": "a: b"} {}`, 400, "USAGE"),
		jsonCall("wrapped nothing", `{"manifest_yaml": ""}`, 400, "USAGE"),
		jsonCall("wrapped bomb", `{"manifest_yaml": "a: &a [1]\nb: [*a,*a]"}`, 400, "USAGE"),
	}
}

// badMethods returns requests with a wrong body, type or method.
func badMethods(id string) []bad {
	one := ops.TasksPath + "/" + id
	return []bad{
		bodyCall("no body", "POST", ops.TasksPath, "", 400, codeInvalid, "Content-Type", "application/yaml"),
		bodyCall("no Content-Type", "POST", ops.TasksPath, manifestYAML, 415, codeMediaType),
		bodyCall("a form", "POST", ops.TasksPath, "a=b", 415, codeMediaType, "Content-Type", "application/x-www-form-urlencoded"),
		bodyCall("a page's plain text", "POST", ops.TasksPath, manifestYAML, 415, codeMediaType, "Content-Type", "text/plain"),
		bodyCall("a Content-Type that is none", "POST", ops.TasksPath, manifestYAML, 415, codeMediaType, "Content-Type", "yaml;;;"),
		bodyCall("another charset", "POST", ops.TasksPath, manifestYAML, 415, codeMediaType, "Content-Type", "application/yaml; charset=utf-16"),
		bodyCall("a packed body", "POST", ops.TasksPath, manifestYAML, 415, codeMediaType, "Content-Type", "application/yaml", "Content-Encoding", "gzip"),
		bodyCall("two Content-Types", "POST", ops.TasksPath, manifestYAML, 400, codeInvalid, "Content-Type", "application/yaml", "Content-Type", "application/json"),
		bodyCall("a body for GET", "GET", ops.TasksPath, "x", 400, codeInvalid),
		bodyCall("a body for DELETE", "DELETE", one, "x", 400, codeInvalid),
		bodyCall("a body for retry", "POST", one+"/retry", "x", 400, codeInvalid, "Content-Type", "application/json"),
		bodyCall("PUT", "PUT", one, "", 405, codeMethod),
		bodyCall("PATCH", "PATCH", one, "", 405, codeMethod),
		bodyCall("TRACE", "TRACE", one, "", 405, codeMethod),
		bodyCall("OPTIONS", "OPTIONS", one, "", 405, codeMethod),
		bodyCall("a method of its own", "EXPLODE", one, "", 405, codeMethod),
		bodyCall("DELETE of all", "DELETE", ops.TasksPath, "", 405, codeMethod),
		bodyCall("POST of one", "POST", one, "", 405, codeMethod),
		bodyCall("HEAD of what is posted", "HEAD", one+"/retry", "", 405, ""),
	}
}

// badPaths returns requests for paths and ids that do not exist.
func badPaths(id, session string) []bad {
	one := ops.TasksPath + "/" + id
	return []bad{
		getCall("no such path", "/nothing", 404, "NOT_FOUND"),
		getCall("another version of the API", "/api/v2/tasks", 404, "NOT_FOUND"),
		getCall("a slash at the end", ops.TasksPath+"/", 404, "NOT_FOUND"),
		getCall("two slashes", "//api/v1/tasks", 404, "NOT_FOUND"),
		getCall("dots", "/api/v1/x/../tasks", 404, "NOT_FOUND"),
		getCall("dots at the end", ops.TasksPath+"/..", 404, "NOT_FOUND"),
		getCall("a path of 9 kB", "/api/v1/"+strings.Repeat("x", 9000), 414, codeTooLarge),
		getCall("an id that is a path", ops.TasksPath+"/..%2f..%2fetc%2fpasswd", 404, "NOT_FOUND"),
		getCall("an id that is a path, escaped twice", ops.TasksPath+"/..%252f..%252fetc", 404, "NOT_FOUND"),
		getCall("an id with backslashes", ops.TasksPath+"/..%5c..%5cetc", 404, "NOT_FOUND"),
		getCall("an id with a NUL", ops.TasksPath+"/4f2a%00", 404, "NOT_FOUND"),
		getCall("an id with line ends", ops.TasksPath+"/4f2a%0d%0aX:1", 404, "NOT_FOUND"),
		getCall("an id in capitals", ops.TasksPath+"/"+strings.ToUpper("abcdef012345"), 404, "NOT_FOUND"),
		getCall("part of an id", ops.TasksPath+"/"+id[:8], 404, "NOT_FOUND"),
		getCall("an id that does not exist", ops.TasksPath+"/000000000000", 404, "NOT_FOUND"),
		getCall("an id with full-width digits", ops.TasksPath+"/%EF%BC%91%EF%BC%92%EF%BC%93%EF%BC%94", 404, "NOT_FOUND"),
		getCall("an id as SQL", ops.TasksPath+"/'%20OR%201=1--", 404, "NOT_FOUND"),
		getCall("an id of 4 kB", ops.TasksPath+"/"+strings.Repeat("a", 4096), 404, "NOT_FOUND"),
		getCall("a session's id as a task's", ops.TasksPath+"/"+session, 404, "NOT_FOUND"),
		getCall("a task's id as a session's", ops.SessionsPath+"/"+id, 404, "NOT_FOUND"),
		getCall("a session's id that is a path", ops.SessionsPath+"/..%2f"+session, 404, "NOT_FOUND"),
		getCall("the bundle of what has not ended", one+"/bundle", 404, "NOT_FOUND"),
	}
}

// badArtifacts returns requests for artifacts that do not exist.
func badArtifacts(id string) []bad {
	artifacts := ops.TasksPath + "/" + id + "/artifacts"
	return []bad{
		getCall("an artifact that does not exist", artifacts+"/none", 404, "NOT_FOUND"),
		getCall("an artifact without a name", artifacts+"/", 404, "NOT_FOUND"),
		getCall("an artifact above", artifacts+"/../metadata.json", 404, "NOT_FOUND"),
		getCall("an artifact above, escaped", artifacts+"/%2e%2e/metadata.json", 404, "NOT_FOUND"),
		getCall("an artifact above, all escaped", artifacts+"/%2e%2e%2fmetadata.json", 404, "NOT_FOUND"),
		getCall("an artifact above, escaped twice", artifacts+"/%252e%252e%252fmetadata.json", 404, "NOT_FOUND"),
		getCall("an artifact above, with backslashes", artifacts+"/..%5cmetadata.json", 404, "NOT_FOUND"),
		getCall("an artifact above, overlong", artifacts+"/%c0%ae%c0%ae/metadata.json", 404, "NOT_FOUND"),
		getCall("an artifact at the root", artifacts+"/%2fetc%2fpasswd", 404, "NOT_FOUND"),
		getCall("an artifact below a name", artifacts+"/a/%2e%2e/%2e%2e/%2e%2e/etc/passwd", 404, "NOT_FOUND"),
		getCall("an artifact with a NUL", artifacts+"/a%00.patch", 404, "NOT_FOUND"),
		getCall("an artifact with line ends", artifacts+"/a%0d%0aSet-Cookie:x", 404, "NOT_FOUND"),
		getCall("an artifact of 4 kB", artifacts+"/"+strings.Repeat("a/", 2000)+"b", 404, "NOT_FOUND"),
		getCall("half received artifacts", artifacts+"/.part/x", 404, "NOT_FOUND"),
		getCall("a link out of the artifacts", artifacts+"/link", 404, "NOT_FOUND"),
	}
}

// badParameters returns lists with invalid parameters.
func badParameters() []bad {
	return []bad{
		getCall("an unknown parameter", ops.TasksPath+"?colour=blue", 422, codeInvalid),
		getCall("a parameter twice", ops.TasksPath+"?limit=1&limit=2", 400, codeInvalid),
		getCall("a parameter without a value", ops.TasksPath+"?limit=", 400, codeInvalid),
		getCall("a query that is none", ops.TasksPath+"?a=%zz", 400, ""),
		getCall("a query with semicolons", ops.TasksPath+"?limit=1;state=x", 400, codeInvalid),
		getCall("a limit of 0", ops.TasksPath+"?limit=0", 422, codeInvalid),
		getCall("a limit below 0", ops.TasksPath+"?limit=-1", 422, codeInvalid),
		getCall("a limit over all", ops.TasksPath+"?limit=1000000", 422, codeInvalid),
		getCall("a limit over 64 bits", ops.TasksPath+"?limit=99999999999999999999", 422, codeInvalid),
		getCall("a limit in words", ops.TasksPath+"?limit=many", 422, codeInvalid),
		getCall("a limit in hex", ops.TasksPath+"?limit=0x10", 422, codeInvalid),
		getCall("a state that is none", ops.TasksPath+"?state=DONE", 400, "USAGE"),
		getCall("a state and nothing", ops.TasksPath+"?state=RUNNING,", 400, "USAGE"),
		getCall("a label without a key", ops.TasksPath+"?label==x", 400, "USAGE"),
		getCall("a label without a value", ops.TasksPath+"?label=x", 400, "USAGE"),
		getCall("a page after an unknown id", ops.TasksPath+"?after=000000000000", 404, "NOT_FOUND"),
		getCall("a page after an invalid id", ops.TasksPath+"?after=../..", 400, "USAGE"),
	}
}

// badAnchors returns event requests with invalid anchors.
func badAnchors(id, session, gone string) []bad {
	events := ops.TasksPath + "/" + id + "/events"
	return []bad{
		getCall("an anchor in words", events+"?after=now", 400, codeAnchor),
		getCall("an anchor below 0", events+"?after=-1", 400, codeAnchor),
		getCall("an anchor with a sign", events+"?after=%2b1", 400, codeAnchor),
		getCall("an anchor with zeros", events+"?after=01", 400, codeAnchor),
		getCall("an anchor over 64 bits", events+"?after=9223372036854775808", 400, codeAnchor),
		getCall("an anchor with a fraction", events+"?after=1.5", 400, codeAnchor),
		getCall("an anchor with a space", events+"?after=1%20", 400, codeAnchor),
		getCall("an anchor from the future", events+"?after=999", 400, codeAnchorFuture),
		getCall("an anchor from the far future", events+"?after=999999999999999999", 400, codeAnchorFuture),
		getCall("an anchor of another task", events+"?after=000000000000/1", 400, codeAnchorForeign),
		getCall("an anchor of a session", events+"?after="+session+"/1", 400, codeAnchorForeign),
		getCall("an anchor of a path", events+"?after=../1", 400, codeAnchor),
		getCall("an anchor without a sequence", events+"?after="+id+"/", 400, codeAnchor),
		getCall("an anchor with two", events+"?after="+id+"/1/2", 400, codeAnchor),
		getCall("an anchor that expired", ops.TasksPath+"/"+gone+"/events?after=1", 410, codeExpired),
		getCall("the beginning, which expired", ops.TasksPath+"/"+gone+"/events", 410, codeExpired),
		getCall("a stream after what expired", ops.TasksPath+"/"+gone+"/events", 410, codeExpired, "Accept", "text/event-stream", "Last-Event-ID", gone+"/1"),
		getCall("a stream after the future", events, 400, codeAnchorFuture, "Accept", "text/event-stream", "Last-Event-ID", id+"/77"),
		getCall("a stream after another's", events, 400, codeAnchorForeign, "Accept", "text/event-stream", "Last-Event-ID", gone+"/1"),
		getCall("two anchors in headers", events, 400, codeInvalid, "Last-Event-ID", "1", "Last-Event-ID", "2"),
		getCall("events of an unknown task", ops.TasksPath+"/000000000000/events", 404, "NOT_FOUND"),
		getCall("a page of too many events", events+"?limit=5000", 422, codeInvalid),
	}
}

// badLogs returns log requests with invalid ranges.
func badLogs(id string) []bad {
	one := ops.TasksPath + "/" + id
	return []bad{
		getCall("a log that is none", one+"/logs?stream=keeper", 422, codeInvalid),
		getCall("a log's path", one+"/logs?stream=../keeper.log", 422, codeInvalid),
		getCall("an offset below 0", one+"/logs?offset=-1", 422, codeInvalid),
		getCall("an offset behind the end", one+"/logs?offset=1000", 416, codeRange),
		getCall("a range behind the end", one+"/logs", 416, codeRange, "Range", "bytes=1000-"),
		getCall("a range that is none", one+"/logs", 416, codeRange, "Range", "bytes=x-y"),
		getCall("follow, perhaps", one+"/logs?follow=perhaps", 422, codeInvalid),
		getCall("a range of what is followed", one+"/logs?follow=true", 400, "USAGE", "Range", "bytes=0-1"),
	}
}

// badWebSockets returns WebSocket requests that fail.
func badWebSockets(id string) []bad {
	return []bad{
		getCall("a WebSocket without one", "/ws/tasks/"+id+"/stream", 426, codeUpgrade),
		getCall("a WebSocket of another version", "/ws/tasks/"+id+"/stream", 400, "", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "12", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
		getCall("a WebSocket without a key", "/ws/tasks/"+id+"/stream", 400, "", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13"),
		getCall("a WebSocket of an unknown task", "/ws/tasks/000000000000/stream", 404, "NOT_FOUND"),
		getCall("a WebSocket after the future", "/ws/tasks/"+id+"/stream?after=99", 400, codeAnchorFuture),
		getCall("a WebSocket behind the log", "/ws/tasks/"+id+"/stream?stdout=99", 416, codeRange),
		getCall("a WebSocket of a page", "/ws/tasks/"+id+"/stream", 403, codeForbidden, "Origin", "https://evil.example", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
	}
}

// badHeaders returns requests with forbidden or invalid headers.
func badHeaders() []bad {
	return []bad{
		getCall("another name for us", ops.TasksPath, 403, codeForbidden, "Host", "evil.example"),
		getCall("another name for us, with the port", ops.TasksPath, 403, codeForbidden, "Host", "evil.example:80"),
		getCall("the right name, another port", ops.TasksPath, 403, codeForbidden, "Host", "localhost:1"),
		getCall("a name that begins like ours", ops.TasksPath, 403, codeForbidden, "Host", "127.0.0.1.evil.example"),
		getCall("another site's page", ops.TasksPath, 403, codeForbidden, "Origin", "https://evil.example"),
		getCall("a page of a file", ops.TasksPath, 403, codeForbidden, "Origin", "null"),
		getCall("a page of another port", ops.TasksPath, 403, codeForbidden, "Origin", "http://127.0.0.1:1"),
		getCall("two origins", ops.TasksPath, 400, codeInvalid, "Origin", "null", "Origin", "null"),
		getCall("what a browser says of a page", ops.TasksPath, 403, codeForbidden, "Sec-Fetch-Site", "cross-site"),
		getCall("what a browser says of a neighbour", ops.TasksPath, 403, codeForbidden, "Sec-Fetch-Site", "same-site"),
		bodyCall("a key of 300 bytes", "POST", ops.TasksPath, manifestYAML, 422, codeInvalid, "Content-Type", "application/yaml", "Idempotency-Key", strings.Repeat("k", 300)),
		bodyCall("a key with a space", "POST", ops.TasksPath, manifestYAML, 422, codeInvalid, "Content-Type", "application/yaml", "Idempotency-Key", "a b"),
		bodyCall("two keys", "POST", ops.TasksPath, manifestYAML, 400, codeInvalid, "Content-Type", "application/yaml", "Idempotency-Key", "a", "Idempotency-Key", "b"),
		getCall("two trace ids", ops.TasksPath, 400, codeInvalid, "X-Trace-Id", "a", "X-Trace-Id", "b"),
	}
}

// badTokens returns requests without a token or beyond its scope.
func badTokens(id, session string) []bad {
	one := ops.TasksPath + "/" + id
	exec := ops.SessionsPath + "/" + session + "/exec"
	return []bad{
		{"no token", call{path: ops.TasksPath, as: "-"}, 401, codeUnauthorized},
		{"an unknown token", call{path: ops.TasksPath, as: "-", header: []string{"Authorization", "Bearer asz_unknown"}}, 401, codeUnauthorized},
		{"a token of another kind", call{path: ops.TasksPath, as: "-", header: []string{"Authorization", "Basic YTpi"}}, 401, codeUnauthorized},
		{"a token of nothing", call{path: ops.TasksPath, as: "-", header: []string{"Authorization", "Bearer "}}, 401, codeUnauthorized},
		{"a token of 10 kB", call{path: ops.TasksPath, as: "-", header: []string{"Authorization", "Bearer " + strings.Repeat("a", 10_000)}}, 401, codeUnauthorized},
		{"two tokens", call{path: ops.TasksPath, header: []string{"Authorization", "Bearer asz_unknown", "Authorization", "Bearer asz_unknown"}, as: "-"}, 400, codeInvalid},
		{"a token in the query", call{path: ops.TasksPath + "?access_token=x", as: "-"}, 401, codeUnauthorized},
		{"a token in a cookie", call{path: ops.TasksPath, as: "-", header: []string{"Cookie", "token=x"}}, 401, codeUnauthorized},
		{"submit with read", call{method: http.MethodPost, path: ops.TasksPath, body: manifestYAML, header: []string{"Content-Type", "application/yaml"}, as: ops.Read}, 403, codeForbidden},
		{"cancel with read", call{method: http.MethodDelete, path: one, as: ops.Read}, 403, codeForbidden},
		{"exec with submit", call{method: http.MethodPost, path: exec, body: `{"argv":["id"]}`, header: []string{"Content-Type", "application/json"}, as: ops.Submit}, 403, codeForbidden},
	}
}

// badExecs returns invalid commands for a session.
func badExecs(session string) (all []bad) {
	exec := ops.SessionsPath + "/" + session + "/exec"
	for name, body := range map[string]string{
		"nothing": `{}`, "both": `{"argv":["a"],"command":"b"}`, "a text as argv": `{"argv":"id"}`, "no argv": `{"argv":[]}`, "an empty program": `{"argv":[""]}`,
		"numbers as argv": `{"argv":[1]}`, "a NUL": `{"argv":["a\u0000b"]}`, "an unknown key": `{"argv":["a"],"sudo":true}`, "a time that is none": `{"argv":["a"],"timeout":"soon"}`,
		"a time below 0": `{"argv":["a"],"timeout":"-1s"}`, "a week": `{"argv":["a"],"timeout":"168h"}`, "a variable with a command": `{"argv":["a"],"env":{"A;id;B":"x"}}`,
		"a variable of nothing": `{"argv":["a"],"env":{"":"x"}}`, "a number as a variable": `{"argv":["a"],"env":{"A":1}}`, "not JSON": `{"argv":`, "a list": `["id"]`,
		"300 arguments": `{"argv":["a"` + strings.Repeat(`,"a"`, 300) + `]}`, "70 variables": `{"argv":["a"],"env":{` + strings.TrimSuffix(func() (s string) {
			for i := range 70 {
				s += fmt.Sprintf(`"A%d":"",`, i)
			}
			return s
		}(), ",") + `}}`,
		"depth": `{"argv":` + strings.Repeat("[", 30_000) + strings.Repeat("]", 30_000) + `}`,
	} {
		all = append(all, bodyCall("exec: "+name, "POST", exec, body, 0, "", "Content-Type", "application/json"))
	}
	return append(all,
		bodyCall("exec: YAML", "POST", exec, "argv: [id]", 415, codeMediaType, "Content-Type", "application/yaml"),
		bodyCall("exec: in an unknown session", "POST", ops.SessionsPath+"/000000000000/exec", `{"argv":["id"]}`, 404, "NOT_FOUND", "Content-Type", "application/json"),
		getCall("exec: another's id", exec+"/..%2f..%2f", 404, "NOT_FOUND"),
		getCall("exec: no such", exec+"/000000000000", 404, "NOT_FOUND"),
		getCall("exec: logs of no such", exec+"/000000000000/logs", 404, "NOT_FOUND"),
	)
}

// Each request is refused with the right status, as a problem with a hint, and
// changes nothing in the store or on the disk.
func TestBadCalls(t *testing.T) {
	r := newRig(t, Limits{Failures: 1000})
	id, session, gone := r.submit().ID, r.session("aaaa11112222"), r.submit().ID
	r.append(gone, 50)
	r.expire(gone)
	outside := t.TempDir() + "/outside"
	if err := errors.Join(
		os.WriteFile(outside, []byte("not yours"), 0o600),
		os.Symlink(outside, string(r.tasks.Dir(id))+"/outbox/artifacts/link"),
		os.WriteFile(r.tasks.Dir(id).Stdout(), []byte("hello"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	r.move(id, task.Staging, func(f *task.Status) {
		f.Artifacts = []task.Artifact{{Name: "link", Size: 9, SHA256: "x"}} // as if a guest had created it
	})
	before := r.snapshot()
	calls := badCalls(id, session, gone)
	if len(calls) < 150 {
		t.Fatalf("bad calls = %d, want at least 150", len(calls))
	}
	for _, c := range calls {
		t.Run(c.name, func(t *testing.T) {
			resp, body := (&rig{Server: r.Server, t: t, addr: r.addr, socket: r.socket, token: r.token}).do(c.call)
			if c.want != 0 && resp.StatusCode != c.want || resp.StatusCode < 400 || resp.StatusCode >= 500 {
				t.Fatalf("status = %s, want %d (0: any client error): %s", resp.Status, c.want, body)
			}
			if c.method == http.MethodHead {
				return
			}
			var p Problem
			if err := json.Unmarshal(body, &p); err != nil {
				t.Fatal(err)
			}
			if resp.Header.Get("Content-Type") != problemType || p.Status != resp.StatusCode || p.Hint == "" || p.Detail == "" || p.Title == "" || p.TraceID != resp.Header.Get("X-Trace-Id") {
				t.Errorf("problem = %s as %s, want all members, status %d, the trace id of the header", body, resp.Header.Get("Content-Type"), resp.StatusCode)
			}
			if c.code != "" && p.Code != c.code {
				t.Errorf("code = %s, want %s: %s", p.Code, c.code, p.Detail)
			}
			if strings.ContainsAny(string(body), "\x1b\x00") || len(body) > 4*maxDetail {
				t.Errorf("answer = %q (%d bytes), want no control characters, at most %d bytes", body, len(body), 4*maxDetail)
			}
			for name := range resp.Header {
				if name == "Set-Cookie" || strings.HasPrefix(name, "Access-Control-") {
					t.Errorf("header %s is set, want neither cookies nor CORS", name)
				}
			}
		})
	}
	if after := r.snapshot(); after != before {
		t.Errorf("store and files after bad calls:\n%s\nwant\n%s", after, before)
	}
	for line := range strings.Lines(r.log.String()) {
		if strings.Contains(line, "panicked") {
			t.Errorf("log = %s, want no panic", line)
		}
	}
}

// snapshot returns the current tasks and commands.
func (r *rig) snapshot() string {
	r.t.Helper()
	rows, err1 := r.store.Tasks(r.t.Context(), store.TaskFilter{})
	dirs, err2 := os.ReadDir(filepath.Dir(r.tasks.Sessions.Config.Paths.TaskDir("x")))
	if err := errors.Join(err1, err2); err != nil {
		r.t.Fatal(err)
	}
	var b strings.Builder
	for _, t := range rows {
		_, newest, err := r.store.EventRange(r.t.Context(), t.ID)
		if err != nil {
			r.t.Fatal(err)
		}
		fmt.Fprintln(&b, t.ID, t.Phase, t.Desired, newest)
	}
	for _, d := range dirs {
		fmt.Fprintln(&b, d.Name())
	}
	execs, err := os.ReadDir(r.execs.sessionDir("aaaa11112222"))
	return b.String() + fmt.Sprint(execs, err)
}

// expire lets all events of a subject except the newest expire.
func (r *rig) expire(subject string) {
	r.t.Helper()
	if _, _, err := r.store.PruneEvents(r.t.Context(), time.Now().Add(time.Hour), func(s string) bool { return s != subject }, false); err != nil {
		r.t.Fatal(err)
	}
}

// Requests that no client library would send.
func TestBadBytes(t *testing.T) {
	r := newRig(t, Limits{Header: 2 * time.Second, Body: 2 * time.Second, Failures: 1000})
	r.submit()
	before := r.snapshot()
	auth := "Host: " + r.addr + "\r\nAuthorization: Bearer " + r.token[ops.Admin] + "\r\n"
	post := "POST " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "Content-Type: application/yaml\r\n"
	for _, c := range []struct {
		name, bytes string
		want        []int // 0 means that the connection is closed without a response
	}{
		{"not HTTP", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", []int{400}},
		{"an empty line and no end", "\r\n", []int{0, 400}},
		{"a version of its own", "GET / HTTP/9.9\r\n" + auth + "\r\n", []int{505}},
		{"no Host", "GET " + ops.TasksPath + " HTTP/1.1\r\n\r\n", []int{400}},
		{"two Hosts", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "Host: evil.example\r\n\r\n", []int{400}},
		{"a proxy's request", "GET http://evil.example/api/v1/tasks HTTP/1.1\r\n" + auth + "\r\n", []int{400}},
		{"CONNECT", "CONNECT evil.example:443 HTTP/1.1\r\n" + auth + "\r\n", []int{400, 403}},
		{"a star", "OPTIONS * HTTP/1.1\r\n" + auth + "\r\n", []int{200, 400, 405}},
		{"a header with a space in its name", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X Y: z\r\n\r\n", []int{400}},
		{"a header over lines", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X-Y: z\r\n continued\r\n\r\n", []int{200, 400}},
		{"a header with a NUL", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X-Y: a\x00b\r\n\r\n", []int{400}},
		{"a header with a bare CR", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X-Y: a\rSet-Cookie: b\r\n\r\n", []int{400}},
		{"a huge header", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X-Y: " + strings.Repeat("a", 64<<10) + "\r\n\r\n", []int{431}},
		{"a thousand headers", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + strings.Repeat("X-Y: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n", 1000) + "\r\n", []int{431}},
		{"two lengths", post + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", []int{400}},
		{"a length below 0", post + "Content-Length: -1\r\n\r\n", []int{400}},
		{"a length in words", post + "Content-Length: many\r\n\r\n", []int{400}},
		{"a length over all", post + "Content-Length: 99999999999\r\n\r\n", []int{413}},
		{"a length and chunks", post + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", []int{400}},
		{"another transfer coding", post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", []int{400, 501}},
		{"chunks twice", post + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", []int{400, 501}},
		{"a chunk that is none", post + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n", []int{400}},
		{"a chunk of 2^64", post + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc\r\n", []int{400, 408}},
		{"a chunk longer than it says", post + "Transfer-Encoding: chunked\r\n\r\n1\r\nabcdef\r\n0\r\n\r\n", []int{400}},
		{"a chunk with a long extension", post + "Transfer-Encoding: chunked\r\n\r\n1;" + strings.Repeat("x", 64<<10) + "\r\na\r\n0\r\n\r\n", []int{400}},
		{"chunks over the bounds", post + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("10000\r\n"+strings.Repeat("#", 0x10000)+"\r\n", 20) + "0\r\n\r\n", []int{413}},
		{"one-byte chunks", post + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("1\r\n#\r\n", 20_000) + "0\r\n\r\n", []int{400}},
		{"a slow header", "GET " + ops.TasksPath + " HTTP/1.1\r\n" + auth + "X-Y: ", []int{0, 408}},
		{"a slow body", post + "Content-Length: 100\r\n\r\nversion:", []int{408}},
		{"a slow chunk", post + "Transfer-Encoding: chunked\r\n\r\n5\r\nabc", []int{408}},
		{"what is expected and is none", post + "Content-Length: 4\r\nExpect: the-unexpected\r\n\r\nabcd", []int{417}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := conn.SetDeadline(time.Now().Add(deadline)); err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = io.WriteString(conn, c.bytes) }() // the server need not read all of it
			status := 0
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err == nil {
				status = resp.StatusCode
				_ = resp.Body.Close()
			} else if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
				t.Fatalf("no answer within %v, want one", deadline)
			}
			for _, want := range c.want {
				if status == want {
					return
				}
			}
			t.Errorf("status = %d, want one of %v", status, c.want)
		})
	}
	if after := r.snapshot(); after != before {
		t.Errorf("store and files after bad bytes:\n%s\nwant\n%s", after, before)
	}
	// The server still works.
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	resp, err := r.client(call{}).Do(r.request(ctx, call{path: ops.TasksPath}))
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET after bad bytes = %v, %v, want status %d", resp, err, http.StatusOK)
	}
	_ = resp.Body.Close()
}

// Clients that write the whole body before they read, as many do, get the response
// to a body that is too long, or that comes with an unknown token.
func TestAnswerToABodyThatIsNotRead(t *testing.T) {
	r := newRig(t, Limits{Failures: 1000})
	head := func(token string) string {
		return "POST " + ops.TasksPath + " HTTP/1.1\r\nHost: " + r.addr + "\r\nAuthorization: Bearer " + token + "\r\nContent-Type: application/yaml\r\n"
	}
	const piece = 1 << 20
	block := []byte(strings.Repeat("#", piece))
	sized := func(n int, token string) func(io.Writer) error {
		return func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%sContent-Length: %d\r\n\r\n", head(token), n*piece)
			for i := 0; i < n && err == nil; i++ {
				_, err = w.Write(block)
			}
			return err
		}
	}
	chunked := func(n int) func(io.Writer) error {
		return func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "%sTransfer-Encoding: chunked\r\n\r\n", head(r.token[ops.Submit]))
			for i := 0; i < n && err == nil; i++ {
				_, err = fmt.Fprintf(w, "%x\r\n%s\r\n", piece, block)
			}
			if err == nil {
				_, err = io.WriteString(w, "0\r\n\r\n")
			}
			return err
		}
	}
	for name, c := range map[string]struct {
		write func(io.Writer) error
		want  int
	}{
		"2 MiB": {sized(2, r.token[ops.Submit]), 413}, "20 MiB": {sized(20, r.token[ops.Submit]), 413}, "100 MiB": {sized(100, r.token[ops.Submit]), 413},
		"20 MiB in chunks": {chunked(20), 413}, "a wrong token": {sized(1, "unknown"), 401},
	} {
		for _, network := range []string{"tcp", "unix"} {
			if network == "unix" && c.want == http.StatusUnauthorized {
				continue // the socket requires no token
			}
			t.Run(name+", "+network, func(t *testing.T) {
				addr := map[string]string{"tcp": r.addr, "unix": r.socket}[network]
				conn, err := (&net.Dialer{}).DialContext(t.Context(), network, addr)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				if err := conn.SetDeadline(time.Now().Add(deadline)); err != nil {
					t.Fatal(err)
				}
				if err := c.write(conn); err != nil {
					t.Fatalf("write the request: %v", err)
				}
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					t.Fatalf("read the response: %v", err)
				}
				defer resp.Body.Close()
				var p Problem
				if err := json.NewDecoder(resp.Body).Decode(&p); err != nil || resp.StatusCode != c.want || p.Status != c.want || p.Hint == "" {
					t.Errorf("answer = %s, %+v, %v, want %d with a hint", resp.Status, p, err, c.want)
				}
			})
		}
	}
	// A client that sends Expect is answered immediately, and sends no body.
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "%sContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", head(r.token[ops.Submit]), 20*piece); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Fatalf("answer to Expect = %v, %v, want status %d", resp, err, http.StatusRequestEntityTooLarge)
	}
	_ = resp.Body.Close()
}
