package server

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

// A scope that does not exist allows nothing, including itself.
func TestUnknownScopesAllowNothing(t *testing.T) {
	for _, s := range []ops.Scope{"", "root"} {
		for _, need := range []ops.Scope{"", "root", ops.Read, ops.Submit, ops.Admin} {
			if s.Allows(need) {
				t.Errorf("Scope(%q).allows(%q) = true, want false", s, need)
			}
		}
	}
}

func TestTokensAreBounded(t *testing.T) {
	r := newRig(t, Limits{})
	all := make([]Token, maxTokens)
	for i := range all {
		all[i] = Token{Name: fmt.Sprint("t", i), Scope: ops.Read, SHA256: digest(fmt.Sprint(i))}
	}
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.tokens.Path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.tokens.Add("more", ops.Read, task.Permission{}); fail.CodeOf(err) != fail.Conflict {
		t.Errorf("Add over the limit = %v, want code %v", err, fail.Conflict)
	}
}

// Streams check at intervals whether their client may still read.
func TestStillAllowed(t *testing.T) {
	r := newRig(t, Limits{})
	reader := principal{Caller: ops.Caller{Scope: ops.Read}, token: digest(r.token[ops.Read])}
	still := func(who principal, need ops.Scope, want bool) {
		t.Helper()
		if got := r.stillAllowed(who, need); got != want {
			t.Errorf("stillAllowed(%+v, %s) = %t, want %t", who, need, got, want)
		}
	}
	still(reader, ops.Read, true)
	still(reader, ops.Admin, false)
	still(principal{}, ops.Read, false)
	still(principal{Caller: ops.Caller{Scope: ops.Admin}}, ops.Admin, true)
	if err := os.Chmod(r.tokens.Path, 0o666); err != nil {
		t.Fatal(err)
	}
	still(reader, ops.Read, false)
}

// The server reads only a little of a body without a known token.
func TestStrangersBodyIsNotRead(t *testing.T) {
	r := newRig(t, Limits{})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(deadline)); err != nil {
		t.Fatal(err)
	}
	const pieces = 64
	block := []byte(strings.Repeat("#", 1<<20))
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer unknown\r\nContent-Length: %d\r\n\r\n", ops.TasksPath, r.addr, pieces<<20)
	for i := 0; i < pieces && err == nil; i++ {
		_, err = conn.Write(block)
	}
	if err == nil {
		t.Errorf("body of an unknown client: %d MiB were read, want the connection closed before", pieces)
	}
}

// A key names one request: not the same one on another path.
func TestIdempotencyKeyOnAnotherPath(t *testing.T) {
	r := newRig(t, Limits{})
	retry := func() *http.Response {
		t.Helper()
		id := r.submit().ID
		r.move(id, task.Failed, nil)
		resp, _ := r.do(call{method: http.MethodPost, path: ops.TasksPath + "/" + id + "/retry", header: []string{"Idempotency-Key", "k"}})
		return resp
	}
	if resp := retry(); resp.StatusCode != http.StatusAccepted {
		t.Fatalf("retry = %s, want %d", resp.Status, http.StatusAccepted)
	}
	if resp := retry(); resp.StatusCode != http.StatusUnprocessableEntity {
		t.Errorf("retry of another task with the same key = %s, want %d", resp.Status, http.StatusUnprocessableEntity)
	}
}
