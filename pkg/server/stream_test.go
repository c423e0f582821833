package server

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// sent is a server-sent event.
type sent struct{ id, name, data string }

// sse opens a stream; next returns its events, and false after the last.
func (r *rig) sse(ctx context.Context, c call) (resp *http.Response, next func() (sent, bool)) {
	r.t.Helper()
	c.header = append(c.header, "Accept", "text/event-stream")
	resp, err := r.client(c).Do(r.request(ctx, c))
	if err != nil {
		r.t.Error(err)
		return nil, func() (sent, bool) { return sent{}, false }
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	return resp, func() (ev sent, ok bool) {
		for lines.Scan() {
			key, value, _ := strings.Cut(lines.Text(), ": ")
			switch key {
			case "id":
				ev.id = value
			case "event":
				ev.name = value
			case "data":
				ev.data = value
			case "":
				if ev != (sent{}) {
					return ev, true
				}
			}
		}
		return ev, false
	}
}

func TestEventPages(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.append(id, 249)
	var seen []int64
	for after := ""; ; {
		path := ops.TasksPath + "/" + id + "/events?limit=70"
		if after != "" {
			path += "&after=" + strings.ReplaceAll(after, "/", "%2F")
		}
		var p ops.EventPage
		r.get(call{path: path, as: ops.Read}, &p)
		if p.Oldest != 1 || p.Newest != 250 {
			t.Fatalf("page = oldest %d, newest %d, want 1, 250", p.Oldest, p.Newest)
		}
		for _, ev := range p.Events {
			if ev.ID != anchor(id, ev.Seq) || ev.Subject != id {
				t.Errorf("event = %+v, want id %s, subject %s", ev, anchor(id, ev.Seq), id)
			}
			seen = append(seen, ev.Seq)
		}
		if after = p.Next; len(p.Events) == 0 {
			break
		}
	}
	if !gapless(seen, 1, 250) {
		t.Errorf("events of all pages = %v, want 1 to 250", seen)
	}

	// Remaining events can be read, expired ones are reported, and every sequence
	// is one or the other.
	r.expire(id)
	r.append(id, 3)
	for after, want := range map[string]int{"oldest": 4, "newest": 0, "249": 4, "250": 3, id + "/252": 1, "253": 0} {
		var p ops.EventPage
		r.get(call{path: ops.TasksPath + "/" + id + "/events?after=" + after}, &p)
		if len(p.Events) != want {
			t.Errorf("events after %s = %d, want %d", after, len(p.Events), want)
		}
	}
	_, body := r.do(call{path: ops.TasksPath + "/" + id + "/events?after=248"})
	var p Problem
	if err := json.Unmarshal(body, &p); err != nil || p.Code != codeExpired || p.Oldest == nil || *p.Oldest != 250 || *p.Newest != 253 || !strings.Contains(p.Hint, "after=249") {
		t.Errorf("page after an expired event = %s, %v, want %s with oldest 250, newest 253", body, err, codeExpired)
	}
}

func gapless(seen []int64, first, last int64) bool {
	if int64(len(seen)) != last-first+1 {
		return false
	}
	for i, seq := range seen {
		if seq != first+int64(i) {
			return false
		}
	}
	return true
}

// Fifty readers start at different times while several writers append events. Some
// readers are slow, and some disconnect and reconnect. Each sees each event once.
func TestStreamsHaveNoGap(t *testing.T) {
	const readers, writers, each = 50, 4, 100
	const all = writers * each
	r := newRig(t, Limits{Streams: 60, Each: 60})
	id := r.submit().ID
	ctx, cancel := context.WithTimeout(t.Context(), 3*deadline)
	defer cancel()
	var written atomic.Int64
	var begin [readers]chan struct{} // each reader's start, after a number of events
	for i := range begin {
		begin[i] = make(chan struct{})
	}
	close(begin[0])
	var writing sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			for i := range each {
				if err := r.store.Append(ctx, id, store.Event{Kind: "message", Data: json.RawMessage(fmt.Sprintf(`{"writer":%d,"n":%d}`, w, i))}); err != nil {
					t.Error(err)
					return
				}
				if n := written.Add(1); n%(all/readers) == 0 && n < all {
					close(begin[n/(all/readers)])
				}
			}
		})
	}
	var reading sync.WaitGroup
	for i := range readers {
		reading.Go(func() {
			select {
			case <-begin[i]:
			case <-ctx.Done():
				t.Errorf("reader %d: no event was written before the deadline, want some", i)
				return
			}
			var seen []int64
			if i%2 == 0 {
				seen = r.readSSE(ctx, id, i)
			} else {
				seen = r.readWS(ctx, id, i)
			}
			if !gapless(seen, 1, all+2) {
				t.Errorf("events of reader %d = %d (%v), want 1 to %d", i, len(seen), seen[:min(len(seen), 20)], all+2)
			}
		})
	}
	writing.Wait()
	r.move(id, task.Cancelled, nil) // ends the streams
	reading.Wait()
	if _, newest, err := r.store.EventRange(t.Context(), id); err != nil || newest != all+2 {
		t.Errorf("newest event = %d, %v, want %d", newest, err, all+2)
	}
	waitFor(ctx, &r.open)
	r.streams.mu.Lock()
	defer r.streams.mu.Unlock()
	if r.streams.sum != 0 || len(r.streams.taken) != 0 {
		t.Errorf("streams after the end = %d (%v), want none", r.streams.sum, r.streams.taken)
	}
}

// readSSE reads to the end. One reader in three is slow; one in five disconnects at
// times, and reconnects with the last id it saw.
func (r *rig) readSSE(ctx context.Context, id string, i int) (seen []int64) {
	last := ""
	for ctx.Err() == nil {
		some, cancel := context.WithCancel(ctx)
		c := call{path: ops.TasksPath + "/" + id + "/events", as: ops.Read}
		if last != "" {
			c.header = []string{"Last-Event-ID", last}
		}
		resp, next := r.sse(some, c)
		if resp == nil || resp.StatusCode == http.StatusNoContent {
			cancel()
			return seen
		}
		for n := 0; ; n++ {
			ev, ok := next()
			if !ok {
				break
			}
			if ev.name == messageEnd {
				cancel()
				return seen
			}
			var e ops.Event
			if err := json.Unmarshal([]byte(ev.data), &e); err != nil || ev.name != "" || e.ID != ev.id {
				r.t.Errorf("event = %+v, %v, want one with its own id", ev, err)
				cancel()
				return seen
			}
			seen, last = append(seen, e.Seq), ev.id
			if i%3 == 0 && n%50 == 0 {
				select { // a pause to be slow, not to wait for something
				case <-time.After(10 * time.Millisecond):
				case <-ctx.Done():
				}
			}
			if i%5 == 0 && rand.IntN(100) == 0 {
				break
			}
		}
		cancel()
		_ = resp.Body.Close()
	}
	return seen
}

func (r *rig) dial(ctx context.Context, path string, as ops.Scope) (*websocket.Conn, *http.Response, error) {
	c, resp, err := websocket.Dial(ctx, "ws://"+r.addr+path, &websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + r.token[as]}}})
	if c != nil {
		c.SetReadLimit(1 << 20)
	}
	return c, resp, err
}

func (r *rig) readWS(ctx context.Context, id string, i int) (seen []int64) {
	c, _, err := r.dial(ctx, "/ws/tasks/"+id+"/stream", ops.Read)
	if err != nil {
		r.t.Error(err)
		return nil
	}
	defer func() { _ = c.CloseNow() }()
	for n := 0; ; n++ {
		m, err := nextMessage(ctx, c)
		if err != nil {
			r.t.Error(err)
			return seen
		}
		switch m.Type {
		case messageEvent:
			seen = append(seen, m.Event.Seq)
		case messageEnd:
			if _, _, err := c.Read(ctx); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
				r.t.Errorf("end of the WebSocket = %v, want status %d", err, websocket.StatusNormalClosure)
			}
			return seen
		case messageProblem:
			r.t.Errorf("problem = %+v, want none", m.Problem)
			return seen
		}
		if i%3 == 0 && n%50 == 0 {
			select { // a pause to be slow, not to wait for something
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	}
}

func nextMessage(ctx context.Context, c *websocket.Conn) (m StreamMessage, err error) {
	kind, text, err := c.Read(ctx)
	if err == nil && kind != websocket.MessageText {
		err = errors.New("not a text")
	}
	if err == nil {
		err = json.Unmarshal(text, &m)
	}
	return m, err
}

// Output arrives complete, in order and once, whether it was written before or
// during the read, including bytes that are not text.
func TestWebSocketOutput(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.move(id, task.Running, nil)
	want := map[string][]byte{}
	random := rand.NewChaCha8([32]byte{7})
	write := func(name, path string, n int) {
		b := make([]byte, n)
		_, _ = random.Read(b)
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = f.Write(b)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			t.Error(err)
		}
		want[name] = append(want[name], b...)
	}
	dir := r.tasks.Dir(id)
	write("stdout", dir.Stdout(), 100_000)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	from := 12_345
	c, _, err := r.dial(ctx, fmt.Sprintf("/ws/tasks/%s/stream?stdout=%d&after=newest", id, from), ops.Read)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.CloseNow() }()
	got := map[string][]byte{"stdout": make([]byte, from)}
	s := r.schemas()
	read := func(until func(StreamMessage) bool) {
		t.Helper()
		for {
			_, text, err := c.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			s.check(t, "/components/schemas/StreamMessage", text)
			var m StreamMessage
			if err := json.Unmarshal(text, &m); err != nil {
				t.Fatal(err)
			}
			if m.Type == messageOutput {
				if *m.Offset != int64(len(got[m.Stream])) {
					t.Fatalf("offset of %s = %d, want %d", m.Stream, *m.Offset, len(got[m.Stream]))
				}
				got[m.Stream] = append(got[m.Stream], m.Data...)
			}
			if until(m) {
				return
			}
		}
	}
	read(func(StreamMessage) bool { return len(got["stdout"]) == len(want["stdout"]) })
	for range 5 {
		write("stderr", dir.Stderr(), 40_000)
		write("stdout", dir.Stdout(), 3)
		read(func(StreamMessage) bool {
			return len(got["stdout"]) == len(want["stdout"]) && len(got["stderr"]) == len(want["stderr"])
		})
	}
	write("stdout", dir.Stdout(), 70_000) // and the end directly after it
	r.move(id, task.Completed, nil)
	read(func(m StreamMessage) bool { return m.Type == messageEnd })
	copy(got["stdout"], want["stdout"][:from])
	for name := range want {
		if !bytes.Equal(got[name], want[name]) {
			t.Errorf("%s = %d bytes, want the %d that were written", name, len(got[name]), len(want[name]))
		}
	}
}

// A client that reads nothing is disconnected after a while, uses no memory
// meanwhile, and gets everything when it reconnects.
func TestAReaderThatDoesNotRead(t *testing.T) {
	r := newRig(t, Limits{Write: 500 * time.Millisecond})
	id := r.submit().ID
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	resp, next := r.sse(ctx, call{path: ops.TasksPath + "/" + id + "/events"})
	defer resp.Body.Close()
	first, _ := next()
	filler := json.RawMessage(`{"x":"` + strings.Repeat("x", 60_000) + `"}`)
	evs := make([]store.Event, 20)
	for i := range evs {
		evs[i] = store.Event{Kind: "message", Data: filler}
	}
	for range 100 { // 120 MB exceed the buffers of both ends
		if err := r.store.AppendAll(ctx, id, evs); err != nil {
			t.Fatal(err)
		}
		if r.cutOff() {
			break
		}
	}
	testenv.WaitFor(t, "it is cut off", r.cutOff)
	_, newest, err := r.store.EventRange(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	r.move(id, task.Cancelled, nil)
	last, seen := first.id, []int64{1}
	for { // the events that did arrive
		ev, ok := next()
		if !ok {
			break
		}
		var e ops.Event
		if json.Unmarshal([]byte(ev.data), &e) != nil {
			break
		}
		last, seen = ev.id, append(seen, e.Seq)
	}
	if int64(len(seen)) >= newest {
		t.Fatalf("events sent to a reader that does not read = %d, want fewer than %d", len(seen), newest)
	}
	again, next := r.sse(ctx, call{path: ops.TasksPath + "/" + id + "/events", header: []string{"Last-Event-ID", last}})
	defer again.Body.Close()
	for {
		ev, ok := next()
		if !ok || ev.name == messageEnd {
			break
		}
		var e ops.Event
		if err := json.Unmarshal([]byte(ev.data), &e); err != nil {
			t.Fatal(err)
		}
		seen = append(seen, e.Seq)
	}
	if !gapless(seen, 1, newest+1) {
		t.Errorf("events after reading again = %d, want 1 to %d", len(seen), newest+1)
	}
}

// cutOff reports whether no stream is open any more.
func (r *rig) cutOff() bool {
	r.streams.mu.Lock()
	defer r.streams.mu.Unlock()
	return r.streams.sum == 0
}

// A client that is so slow that the next event has expired gets a problem with the
// last sequence that it received.
func TestAStreamThatIsOvertaken(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.append(id, 10)
	st, err := eventFeed{r.Server}.newStream(&request{who: principal{Caller: ops.Caller{Name: "x", Scope: ops.Read}}}, "sse", subject{id, func(context.Context) (bool, error) { return false, nil }}, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer st.close()
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), requestKey{}, &request{}), deadline)
	defer cancel()
	var seen []int64
	var end *Problem
	st.run(ctx, func(m StreamMessage) error {
		switch m.Type {
		case messageEvent:
			seen = append(seen, m.Event.Seq)
			if m.Event.Seq == 3 {
				r.append(id, 1000) // more than one read returns
				r.expire(id)
			}
		case messageProblem:
			end = m.Problem
		}
		return nil
	})
	if end == nil || end.Code != codeExpired || end.Last == nil || *end.Last != seen[len(seen)-1] || *end.Oldest != 1011 {
		t.Fatalf("end = %+v after %v, want %s after the last event, oldest 1011", end, seen, codeExpired)
	}
	if !gapless(seen, 1, *end.Last) {
		t.Errorf("events = %v, want 1 to %d", seen, *end.Last)
	}
}

func TestStreamEnds(t *testing.T) {
	r := newRig(t, Limits{Beat: 20 * time.Millisecond, Each: 2})
	id := r.submit().ID
	path := ops.TasksPath + "/" + id + "/events"
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()

	// When its token is removed.
	resp, next := r.sse(ctx, call{path: path, as: ops.Submit})
	defer resp.Body.Close()
	if ev, ok := next(); !ok || ev.id != anchor(id, 1) {
		t.Fatalf("first event = %v, %t, want %s", ev, ok, anchor(id, 1))
	}
	if err := r.tokens.Remove(string(ops.Submit)); err != nil {
		t.Fatal(err)
	}
	problemCode := func(next func() (sent, bool)) string {
		t.Helper()
		ev, ok := next()
		var p Problem
		if err := json.Unmarshal([]byte(ev.data), &p); !ok || err != nil || ev.name != messageProblem || p.Last == nil || *p.Last != 1 {
			t.Fatalf("last event = %v, %t, %v, want a problem after event 1", ev, ok, err)
		}
		return p.Code
	}
	if code := problemCode(next); code != codeUnauthorized {
		t.Errorf("code after removing the token = %s, want %s", code, codeUnauthorized)
	}
	if resp, _ := r.do(call{path: path, as: ops.Submit}); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("request with a removed token = %s, want %d", resp.Status, http.StatusUnauthorized)
	}

	// A client may have two streams.
	first, next1 := r.sse(ctx, call{path: path, as: ops.Read})
	defer first.Body.Close()
	second, next2 := r.sse(ctx, call{path: path, as: ops.Read})
	defer second.Body.Close()
	_, _ = next1()
	_, _ = next2()
	third, body := r.do(call{path: path, as: ops.Read, header: []string{"Accept", "text/event-stream"}})
	if third.StatusCode != http.StatusTooManyRequests || third.Header.Get("Retry-After") == "" {
		t.Errorf("third stream of a client = %s %s, want %d with Retry-After", third.Status, body, http.StatusTooManyRequests)
	}
	other, _ := r.sse(ctx, call{path: path, as: ops.Admin})
	_ = other.Body.Close()
	if other.StatusCode != http.StatusOK {
		t.Errorf("stream of another client = %s, want %d", other.Status, http.StatusOK)
	}

	// When serve ends.
	ws, _, err := r.dial(ctx, "/ws/tasks/"+id+"/stream", ops.Admin)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.CloseNow() }()
	for m := (StreamMessage{}); m.Type != messageEvent; {
		if m, err = nextMessage(ctx, ws); err != nil {
			t.Fatal(err)
		}
	}
	r.shutdown()
	for _, next := range []func() (sent, bool){next1, next2} {
		if code := problemCode(next); code != codeShutdown {
			t.Errorf("code at the end of the server = %s, want %s", code, codeShutdown)
		}
	}
	for {
		m, err := nextMessage(ctx, ws)
		if err != nil {
			t.Fatal(err)
		}
		if m.Type == messageProblem {
			if m.Problem.Code != codeShutdown || *m.Last != 1 {
				t.Errorf("problem = %+v, want %s after event 1", m.Problem, codeShutdown)
			}
			break
		}
	}
	if _, _, err := ws.Read(ctx); websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("end of the WebSocket = %v, want status %d", err, websocket.StatusGoingAway)
	}
	waitFor(ctx, &r.open)
}

// The stream of an ended task is sent and closed, and an EventSource that
// reconnects is sent away.
func TestStreamOfAnEndedTask(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.move(id, task.Failed, nil)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	resp, next := r.sse(ctx, call{path: ops.TasksPath + "/" + id + "/events"})
	defer resp.Body.Close()
	var names []string
	for {
		ev, ok := next()
		if !ok {
			break
		}
		names = append(names, ev.id+ev.name)
	}
	if !slices.Equal(names, []string{anchor(id, 1), anchor(id, 2), messageEnd}) {
		t.Errorf("stream of an ended task = %q, want events 1 and 2, %s", names, messageEnd)
	}
	again, _ := r.do(call{path: ops.TasksPath + "/" + id + "/events", header: []string{"Accept", "text/event-stream", "Last-Event-ID", anchor(id, 2)}})
	if again.StatusCode != http.StatusNoContent {
		t.Errorf("stream after the last event = %s, want %d", again.Status, http.StatusNoContent)
	}
}

// A followed log of a running task is complete, and ends with the task.
func TestFollowLog(t *testing.T) {
	r := newRig(t, Limits{})
	id := r.submit().ID
	r.move(id, task.Running, nil)
	path := r.tasks.Dir(id).Stdout()
	if err := os.WriteFile(path, []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	c := call{path: ops.TasksPath + "/" + id + "/logs?follow=true&offset=2", as: ops.Read}
	resp, err := r.client(c).Do(r.request(ctx, c))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	if line, err := in.ReadString('\n'); err != nil || line != "e\n" {
		t.Fatalf("line = %q, %v, want \"e\\n\"", line, err)
	}
	if err := os.WriteFile(path, []byte("one\ntwo\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if line, err := in.ReadString('\n'); err != nil || line != "two\n" {
		t.Fatalf("line = %q, %v, want \"two\\n\"", line, err)
	}
	r.move(id, task.Completed, nil)
	if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
		t.Fatalf("rest of the log = %q, %v, want none, nil", rest, err)
	}

	// An interrupted one does not look complete.
	running := r.submit().ID
	r.move(running, task.Running, nil)
	c.path = ops.TasksPath + "/" + running + "/logs?follow=true"
	resp, err = r.client(c).Do(r.request(ctx, c))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r.shutdown()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("end of an interrupted log = nil, want an error")
	}
}

// FuzzAnchor checks that every accepted anchor is exact, and that every other text
// is a problem with its own code.
func FuzzAnchor(f *testing.F) {
	const subject = "4f2a81c0d9e3"
	for _, seed := range []string{"", "0", "1", "17", "00", "01", "-1", "+1", " 1", "1 ", "1e3", "0x1", "١", "9223372036854775807", "9223372036854775808", "oldest", "newest", "OLDEST", "/", "/1", subject + "/1", subject + "/", subject + "//1", "000000000000/1", subject + "/1/2", "\x00", "1\n", subject + "/0"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		seq, newest, err := parseAnchor(subject, text)
		if err != nil {
			p, ok := errors.AsType[*Problem](err)
			if !ok || p.Status != http.StatusBadRequest || p.Code != codeAnchor && p.Code != codeAnchorForeign || p.Hint == "" {
				t.Fatalf("parseAnchor(%q) = %v, want a problem with code %s or %s and a hint", text, err, codeAnchor, codeAnchorForeign)
			}
			if seq != 0 || newest {
				t.Fatalf("parseAnchor(%q) = %d, %t with an error, want 0, false", text, seq, newest)
			}
			return
		}
		switch text {
		case "":
			if seq != 0 || newest {
				t.Fatalf("parseAnchor of no anchor = %d, %t, want 0, false", seq, newest)
			}
		case "oldest":
			if seq != store.Oldest {
				t.Fatalf("parseAnchor(oldest) = %d, want %d", seq, store.Oldest)
			}
		case "newest":
			if !newest {
				t.Fatalf("parseAnchor(newest) = %d, false, want true", seq)
			}
		default: // each has only one spelling
			if newest || seq < 0 || text != fmt.Sprint(seq) && text != anchor(subject, seq) {
				t.Fatalf("parseAnchor(%q) = %d, %t, want only the exact spelling accepted", text, seq, newest)
			}
		}
	})
}

func TestProblemOfErrors(t *testing.T) {
	for code := range statuses {
		p := problemOf(fail.New(code, "x").WithHint("do it"))
		if p.Code != code.String() || p.Hint != "do it" || p.Status != statuses[code] {
			t.Errorf("problemOf(%v) = %+v, want status %d, code %s, hint \"do it\"", code, p, statuses[code], code)
		}
	}
	timeout := fail.New(fail.Host, "open a tunnel to host three: %w", context.DeadlineExceeded)
	if p := problemOf(timeout); p.Code != fail.Host.String() || p.Detail != timeout.Error() {
		t.Errorf("problemOf(%v) = %+v, want it as it is", timeout, p)
	}
	if p := problemOf(fmt.Errorf("list: %w", context.DeadlineExceeded)); p.Code != fail.Timeout.String() {
		t.Errorf("problemOf of a timeout = %+v, want code %s", p, fail.Timeout)
	}
	if p := problemOf(errors.New("/secret/path: token=123")); p.Status != 500 || strings.Contains(p.Detail, "secret") {
		t.Errorf("problemOf of another error = %+v, want status 500 without its text", p)
	}
}
