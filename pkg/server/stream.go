package server

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"sync"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/logfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// Types of a StreamMessage.
const (
	messageEvent   = "event"
	messageOutput  = "output"
	messageBeat    = "heartbeat"
	messageEnd     = "end"
	messageProblem = "problem"
)

// StreamMessage is one message of a stream.
type StreamMessage struct {
	Type   string     `json:"type" enum:"event,output,heartbeat,end,problem"`
	Event  *ops.Event `json:"event,omitempty"`
	Stream string     `json:"stream,omitempty" enum:"stdout,stderr" doc:"For output: the stream."`
	Offset *int64     `json:"offset,omitempty" doc:"For output: position of its first byte in the log."`
	Data   []byte     `json:"data,omitempty" doc:"For output: the bytes, in base64."`
	Last   *int64     `json:"last,omitempty" doc:"Sequence of the last event that was sent."`

	Problem *Problem `json:"problem,omitempty"`
}

// stream sends the changes of a subject to one client. It buffers nothing for the
// client: it reads events from the store, and output from the logs, after the
// client has received the previous message. Slow clients receive everything, but
// late. A client that reads nothing for a while is disconnected, and may reconnect
// with the last anchor it saw.
type stream struct {
	server *Server
	of     subject
	last   int64 // sequence of the last event sent
	logs   []logTail
	who    principal
	back   func()
}

// logTail is a log that a stream follows from an offset on.
type logTail struct {
	name, path string
	offset     int64
}

// newStream reserves a slot for a stream; close releases it.
func (feed eventFeed) newStream(req *request, kind string, of subject, after int64) (*stream, error) {
	free, ok := feed.s.streams.acquire(req.who.Name)
	if !ok {
		return nil, problem(http.StatusTooManyRequests, codeTooMany, "close a stream, or read pages", "too many streams").with("Retry-After", "5")
	}
	feed.s.ending.Lock()
	defer feed.s.ending.Unlock()
	select {
	case <-feed.s.closing:
		free()
		return nil, problem(http.StatusServiceUnavailable, codeShutdown, "try again", "serve is shutting down").with("Retry-After", "5")
	default:
	}
	feed.s.open.Add(1)
	gone := feed.s.metrics.stream(kind)
	return &stream{server: feed.s, of: of, last: after, who: req.who, back: sync.OnceFunc(func() { gone(); free(); feed.s.open.Done() })}, nil
}

func (st *stream) close() { st.back() }

type streamItem struct {
	ev  store.Event
	err error
}

type chunk struct {
	name   string
	offset int64
	data   []byte
	err    error
}

// run sends messages until the subject has ended, the client is gone, or an error
// occurs. Except when the client is gone, it reports the reason in a last message.
func (st *stream) run(ctx context.Context, send func(StreamMessage) error) {
	ctx, cancel := context.WithCancel(ctx)
	var sources sync.WaitGroup
	defer sources.Wait()
	defer cancel()

	events, chunks := make(chan streamItem), make(chan chunk)
	sources.Go(func() {
		for ev, err := range st.server.store.Follow(ctx, st.of.id, st.last) {
			select {
			case events <- streamItem{ev, err}:
			case <-ctx.Done():
				return
			}
		}
	})
	over, drained := make(chan struct{}), make(chan struct{})
	var tails sync.WaitGroup
	for _, l := range st.logs {
		tails.Go(func() {
			err := logfile.Tail(ctx, l.path, l.offset, over, func(offset int64, data []byte) error {
				select {
				case chunks <- chunk{name: l.name, offset: offset, data: data}:
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			if err != nil {
				select {
				case chunks <- chunk{err: err}:
				case <-ctx.Done():
				}
			}
		})
	}
	sources.Go(func() { tails.Wait(); close(drained) })

	var ending, ended bool
	var end <-chan struct{} // set to drained once only output can follow
	look := func() error {
		if end != nil {
			return nil
		}
		var err error
		if !ending {
			if ending, err = st.of.over(ctx); err != nil || !ending {
				return err
			}
		}
		if ended, err = (eventFeed{st.server}).ended(ctx, st.of, st.last); err == nil && ended {
			close(over)
			end = drained
		}
		return err
	}
	fail := func(err error) {
		p := *st.server.problemOf(ctx, err)
		p.Last = &st.last
		_ = send(StreamMessage{Type: messageProblem, Last: &st.last, Problem: &p}) // the last message, whether or not it arrives
	}
	beat := time.NewTicker(st.server.limits.Beat)
	defer beat.Stop()
	if err := look(); err != nil {
		fail(err)
		return
	}
	for {
		var err, sent error
		select {
		case n := <-events:
			if err = n.err; err != nil {
				break
			}
			sent = send(StreamMessage{Type: messageEvent, Event: &ops.Event{ID: anchor(st.of.id, n.ev.Seq), Event: n.ev}})
			st.last = n.ev.Seq
			if sent == nil && (ending || n.ev.Kind == "phase") {
				err = look()
			}
		case c := <-chunks:
			if err = c.err; err == nil {
				sent = send(StreamMessage{Type: messageOutput, Stream: c.name, Offset: &c.offset, Data: c.data})
			}
		case <-end:
			_ = send(StreamMessage{Type: messageEnd, Last: &st.last}) // the last message, whether or not it arrives
			return
		case <-beat.C:
			if !st.server.stillAllowed(st.who, ops.Read) {
				err = problem(http.StatusUnauthorized, codeUnauthorized, "use another token", "the token was removed")
				break
			}
			if err = look(); err == nil {
				sent = send(StreamMessage{Type: messageBeat, Last: &st.last})
			}
		case <-st.server.closing:
			err = problem(http.StatusServiceUnavailable, codeShutdown, "reconnect with after=the last event's id", "serve is shutting down")
		case <-ctx.Done():
			return
		}
		if sent != nil || ctx.Err() != nil {
			return
		}
		if err != nil {
			fail(err)
			return
		}
	}
}

// ended reports whether nothing will come after that sequence.
func (feed eventFeed) ended(ctx context.Context, of subject, after int64) (bool, error) {
	over, err := of.over(ctx) // before the range, which then includes the last event
	if err != nil || !over {
		return false, err
	}
	_, newest, err := feed.s.store.EventRange(ctx, of.id)
	return newest <= after, err
}

// sendEvent writes one server-sent event. Encoded JSON contains no newlines.
func sendEvent(w io.Writer, id, name string, data any) error {
	text, err := json.Marshal(data)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if id != "" {
		fmt.Fprintf(&b, "id: %s\n", id)
	}
	if name != "" {
		fmt.Fprintf(&b, "event: %s\n", name)
	}
	fmt.Fprintf(&b, "data: %s\n\n", text)
	_, err = w.Write(b.Bytes())
	return err
}

type socketInput struct {
	ops.TaskPath
	After  string `query:"after" doc:"As for getTaskEvents."`
	Stdout int64  `query:"stdout" default:"0" minimum:"-1" doc:"Offset at which the output starts; -1 omits it."`
	Stderr int64  `query:"stderr" default:"0" minimum:"-1"`
}

func (feed eventFeed) webSocket(ctx context.Context, in *socketInput) (*bodyOutput, error) {
	sub, err := feed.taskSubject(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	after, err := feed.start(ctx, sub, in.After)
	if err != nil {
		return nil, err
	}
	req := requestOf(ctx)
	dir := feed.s.tasks.Dir(in.ID)
	var logs []logTail
	for _, l := range []logTail{{"stdout", dir.Stdout(), in.Stdout}, {"stderr", dir.Stderr(), in.Stderr}} {
		if l.offset < 0 {
			continue
		}
		if _, err := feed.s.engine.TaskWithFiles(ctx, in.ID); err != nil {
			return nil, err
		}
		if _, err := sizeFrom(l.path, l.offset); err != nil {
			return nil, err
		}
		logs = append(logs, l)
	}
	st, err := feed.newStream(req, "ws", sub, after)
	if err != nil {
		return nil, err
	}
	st.logs = logs
	return &bodyOutput{func(huma.Context) {
		defer st.close()
		c, err := websocket.Accept(req.w, req.r, &websocket.AcceptOptions{Subprotocols: []string{socketProtocol}})
		if err != nil {
			return // Accept has sent a response
		}
		req.w.status = http.StatusSwitchingProtocols
		defer func() { _ = c.CloseNow() }() // if anything is left open
		c.SetReadLimit(1 << 10)
		ctx := c.CloseRead(ctx) // a client that sends a message is disconnected
		code, why := websocket.StatusNormalClosure, ""
		st.run(ctx, func(m StreamMessage) error {
			text, err := json.Marshal(m)
			if err != nil {
				return err
			}
			if m.Type == messageProblem {
				code, why = websocket.StatusGoingAway, m.Problem.Code
			}
			ctx, cancel := context.WithTimeout(ctx, feed.s.limits.Write)
			defer cancel()
			return c.Write(ctx, websocket.MessageText, text)
		})
		_ = c.Close(code, why) // waits briefly for the client's close
	}}, nil
}

func schemaOf[T any](api huma.API) *huma.Schema {
	return api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
}
