package server

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// overviews returns a function that reads the next overview of a stream.
func (r *rig) overviews(ctx context.Context, c call) (next func() (o ops.Overview, other string)) {
	r.t.Helper()
	c.path = ops.GetOverview.Path
	resp, read := r.sse(ctx, c)
	if resp == nil || resp.StatusCode != http.StatusOK || resp.Header.Get("Content-Type") != "text/event-stream" {
		r.t.Fatalf("stream of overviews = %+v, want a stream", resp)
	}
	r.t.Cleanup(func() { _ = resp.Body.Close() })
	return func() (o ops.Overview, other string) {
		r.t.Helper()
		ev, ok := read()
		if !ok || ev.name != "overview" {
			return o, ev.name + ev.data
		}
		if err := json.Unmarshal([]byte(ev.data), &o); err != nil {
			r.t.Fatal(err)
		}
		return o, ""
	}
}

// A stream has the overview at once, and after each change, but at most one a second.
func TestOverviewStream(t *testing.T) {
	r := newRig(t, Limits{Beat: 50 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	next := r.overviews(ctx, call{as: ops.Read})
	first, other := next()
	if other != "" || len(first.Sessions) != 0 || len(first.Tasks) != 0 || first.At.IsZero() {
		t.Fatalf("first overview = %+v %s, want an empty one", first, other)
	}
	began, read := time.Now(), 0
	id := r.session("abcdef012345")
	made := r.submit()
	last := first
	for len(last.Sessions) == 0 || len(last.Tasks) == 0 {
		o, other := next()
		if other != "" || o.Seq <= last.Seq {
			t.Fatalf("overview = %+v %s after %+v, want a later one", o, other, last)
		}
		last = o
		read++
	}
	if last.Sessions[0].ID != id || last.Tasks[0].ID != made.ID {
		t.Errorf("overview = %+v, want session %s and task %s", last, id, made.ID)
	}
	// Many changes within a second are one.
	for range 50 {
		r.append(made.ID, 1) // changes nothing that an overview shows
	}
	b := r.logIn()
	second := r.overviews(ctx, b.as(call{}))
	if o, other := second(); other != "" || len(o.Sessions) != 1 {
		t.Fatalf("overview of a second stream = %+v %s, want the session", o, other)
	}
	for range 5 {
		r.submit()
		time.Sleep(100 * time.Millisecond) // each is seen on its own unless they are joined
	}
	for len(last.Tasks) < 6 {
		if last, other = next(); other != "" {
			t.Fatalf("message = %s, want an overview", other)
		}
		read++
	}
	if most := 1 + int(time.Since(began)/overviewPause); read > most {
		t.Errorf("overviews in %v = %d, want at most %d", time.Since(began), read, most)
	}
	// A login and a token end their streams by the next heartbeat.
	b.do(call{method: http.MethodPost, path: logoutPath})
	for {
		if _, other := second(); other != "" {
			if !strings.Contains(other, "UNAUTHORIZED") {
				t.Errorf("end after the logout = %s, want a problem", other)
			}
			break
		}
	}
	if err := r.tokens.Remove("read"); err != nil {
		t.Fatal(err)
	}
	for {
		if _, other := next(); other != "" {
			if !strings.Contains(other, "UNAUTHORIZED") {
				t.Errorf("end after the removal = %s, want a problem", other)
			}
			break
		}
	}
	r.views.mu.Lock()
	done := r.views.done
	r.views.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		t.Error("the computation continues without a stream, want it ended")
	}
}

// A store that fails ends the streams with a problem that tells nothing of it.
func TestOverviewFails(t *testing.T) {
	r := newRig(t, Limits{})
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	next := r.overviews(ctx, call{})
	if _, other := next(); other != "" {
		t.Fatalf("message = %s, want an overview", other)
	}
	if err := r.store.Close(); err != nil {
		t.Fatal(err)
	}
	if _, other := next(); !strings.HasPrefix(other, messageProblem) || strings.Contains(other, "sql") {
		t.Errorf("message without a store = %s, want a problem without details", other)
	}
}
