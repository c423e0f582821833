//go:build bench

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// reader follows tasks as a client does, and checks what it receives: every event
// once, in order, without gaps.
type reader struct {
	farm   *farm
	socket bool          // over WebSocket instead of server-sent events
	pause  time.Duration // a slow reader pauses this long after every so many events
	every  int
	breaks int // the reader disconnects after this many events and comes back; 0 means never

	mu   sync.Mutex
	live series // delays of events that happened while the reader was connected, in ms
	seen int
}

// event is an event as the API reports it.
type event struct {
	Subject string
	Seq     int64
	At      time.Time
	Kind    string
	Data    struct{ To string }
}

// errBroken marks the reader's own disconnection.
var errBroken = errors.New("broken off")

// follow reads until the task has ended, or until it has this many events, and
// returns them. It calls ready when it has read the first event.
func (r *reader) follow(ctx context.Context, id string, until int64, ready func()) (events []event, err error) {
	told := false
	for {
		began := time.Now()
		n := 0
		take := func(ev event) error {
			now := time.Now()
			if want := int64(len(events)) + 1; ev.Subject != id || ev.Seq != want {
				return fmt.Errorf("event %d of %s came in place of event %d of %s", ev.Seq, ev.Subject, want, id)
			}
			events = append(events, ev)
			if !told {
				ready()
				told = true
			}
			r.mu.Lock()
			r.seen++
			if ev.At.After(began) {
				r.live = append(r.live, float64(now.Sub(ev.At))/float64(time.Millisecond))
			}
			r.mu.Unlock()
			if n++; r.breaks > 0 && n == r.breaks || ev.Seq == until {
				return errBroken
			}
			if r.every > 0 && n%r.every == 0 {
				time.Sleep(r.pause) // this makes the reader slow
			}
			return nil
		}
		read := r.sent
		if r.socket {
			read = r.messages
		}
		err := read(ctx, id, int64(len(events)), take)
		if errors.Is(err, errBroken) && int64(len(events)) != until {
			continue
		}
		if err != nil && !errors.Is(err, errBroken) {
			return events, fmt.Errorf("follow task %s after event %d: %w", id, len(events), err)
		}
		return events, nil
	}
}

// sent reads server-sent events until the final one.
func (r *reader) sent(ctx context.Context, id string, after int64, take func(event) error) error {
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/api/v1/tasks/"+id+"/events", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "text/event-stream")
	if after > 0 {
		req.Header.Set("Last-Event-ID", fmt.Sprintf("%s/%d", id, after))
	}
	resp, err := r.farm.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNoContent: // no events follow
		return nil
	default:
		return errors.New(resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	kind := ""
	for lines.Scan() {
		switch key, value, _ := strings.Cut(lines.Text(), ": "); {
		case key == "":
			kind = ""
		case key == "event":
			kind = value
		case key == "data" && kind == "end":
			return nil
		case key == "data" && kind != "":
			return errors.New(kind + ": " + value)
		case key == "data":
			var ev event
			if err := json.Unmarshal([]byte(value), &ev); err != nil {
				return err
			}
			if err := take(ev); err != nil {
				return err
			}
		}
	}
	return errors.Join(lines.Err(), io.ErrUnexpectedEOF)
}

// messages reads the messages of a WebSocket until the final one.
func (r *reader) messages(ctx context.Context, id string, after int64, take func(event) error) error {
	c, _, err := websocket.Dial(ctx, fmt.Sprintf("ws://localhost/ws/tasks/%s/stream?after=%d&stdout=-1&stderr=-1", id, after), &websocket.DialOptions{HTTPClient: r.farm.client}) //nolint:bodyclose // the connection owns the body
	if err != nil {
		return err
	}
	defer func() { _ = c.CloseNow() }()
	c.SetReadLimit(1 << 20)
	for {
		_, text, err := c.Read(ctx)
		if err != nil {
			return err
		}
		var m struct {
			Type  string
			Event event
		}
		if err := json.Unmarshal(text, &m); err != nil {
			return err
		}
		switch m.Type {
		case "event":
			if err := take(m.Event); err != nil {
				return err
			}
		case "end":
			return nil
		case "heartbeat":
		default:
			return errors.New(string(text))
		}
	}
}

// crowd returns fifty readers. Every second one keeps up. Half of the others are
// slow, and pause after every so many events; the other half disconnect after so many
// and come back. Half of each kind read server-sent events, the others WebSockets.
func crowd(f *farm, pause time.Duration, every, breaks int) (all []*reader) {
	for i := range readers {
		r := &reader{farm: f, socket: i/4%2 == 1}
		switch i % 4 {
		case 1:
			r.pause, r.every = pause, every
		case 3:
			r.breaks = breaks
		}
		all = append(all, r)
	}
	return all
}

// keepsUp reports whether the delays of this reader's events are measured.
func (r *reader) keepsUp() bool { return r.every == 0 && r.breaks == 0 }

// live returns the delays of the readers that keep up.
func live(all []*reader) (took series) {
	for _, r := range all {
		if r.keepsUp() {
			r.mu.Lock()
			took = append(took, r.live...)
			r.mu.Unlock()
		}
	}
	slices.Sort(took)
	return took
}
