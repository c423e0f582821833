package server

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
)

// overviewPause is the least time between two overviews on a stream.
const overviewPause = time.Second

// overviews computes the overview for all streams: once after each change, and only while a
// stream is open.
type overviews struct {
	server *Server

	mu      sync.Mutex
	streams int
	stop    context.CancelFunc
	done    chan struct{}
	last    *overview
	changed chan struct{} // closed and replaced when last changes
}

// overview is a computed overview, or the error that prevented it.
type overview struct {
	event []byte // as sent
	err   error
}

// join starts the computation for a stream, which must call leave.
func (o *overviews) join() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.streams++; o.streams > 1 {
		return
	}
	var ctx context.Context
	ctx, o.stop = context.WithCancel(context.Background()) // serves all streams, and ends with the last one
	o.last, o.changed, o.done = nil, make(chan struct{}), make(chan struct{})
	go o.run(ctx, o.done)
}

func (o *overviews) leave() {
	o.mu.Lock()
	o.streams--
	last, stop, done := o.streams == 0, o.stop, o.done
	o.mu.Unlock()
	if last {
		stop()
		<-done
	}
}

// latest returns the latest overview, nil before the first, and a channel that is closed when
// there is another.
func (o *overviews) latest() (*overview, <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last, o.changed
}

func (o *overviews) run(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	watch := o.server.store.Watch()
	defer watch.Close()
	beat := time.NewTicker(o.server.limits.Beat) // some of it, such as failed builds, is not in the store
	defer beat.Stop()
	var before []byte
	for {
		changed := watch.Changed() // before the read
		next, content := o.compute(ctx)
		if ctx.Err() != nil {
			return
		}
		if next.err != nil || before == nil || !bytes.Equal(content, before) {
			before = content
			o.mu.Lock()
			o.last = next
			close(o.changed)
			o.changed = make(chan struct{})
			o.mu.Unlock()
		}
		pause := time.NewTimer(overviewPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
		select {
		case <-changed:
		case <-beat.C:
		case <-ctx.Done():
			return
		}
	}
}

// compute returns an overview, and its content without the time.
func (o *overviews) compute(ctx context.Context) (next *overview, content []byte) {
	v, err := ops.GetOverview.On(ctx, o.server.engine.As(ops.Caller{Name: "serve", Scope: ops.Read}), struct{}{})
	if err != nil {
		return &overview{err: err}, nil
	}
	var event bytes.Buffer
	if err := sendEvent(&event, "", "overview", v); err != nil {
		return &overview{err: err}, nil
	}
	v.Seq, v.At = 0, time.Time{}
	content, err = json.Marshal(v)
	return &overview{event: event.Bytes(), err: err}, content
}

type overviewInput struct {
	Accept string `header:"Accept" hidden:"true"`
}

func (s *Server) overviewRoute(api huma.API) {
	register(s, api, route{Spec: ops.GetOverview.Spec}, func(ctx context.Context, in *overviewInput) (*bodyOutput, error) {
		if wantsStream(in.Accept) && requestOf(ctx).r.Method != http.MethodHead { // for HEAD the stream would never end
			return s.streamOverview(ctx)
		}
		v, err := perform(ctx, s, ops.GetOverview, &struct{}{})
		if err != nil {
			return nil, err
		}
		return &bodyOutput{func(ctx huma.Context) {
			ctx.SetHeader("Content-Type", "application/json")
			ctx.SetStatus(http.StatusOK)
			_ = huma.DefaultJSONFormat.Marshal(ctx.BodyWriter(), v) // the client is gone if this fails
		}}, nil
	})
	resp := api.OpenAPI().Paths[ops.GetOverview.Path].Get.Responses["200"]
	resp.Content = map[string]*huma.MediaType{
		"application/json":  {Schema: schemaOf[ops.Overview](api)},
		"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}},
	}
}

// streamOverview responds with a stream of overviews. It buffers nothing for the client: after
// a slow write it continues with the latest overview.
func (s *Server) streamOverview(ctx context.Context) (*bodyOutput, error) {
	req := requestOf(ctx)
	st, err := eventFeed{s}.newStream(req, "overview", subject{}, 0)
	if err != nil {
		return nil, err
	}
	return &bodyOutput{func(huma.Context) {
		defer st.close()
		s.views.join()
		defer s.views.leave()
		h := req.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("X-Accel-Buffering", "no") // disables a proxy's buffering
		req.w.WriteHeader(http.StatusOK)
		if req.w.Flush() != nil {
			return
		}
		s.sendOverviews(ctx, req)
	}}, nil
}

func (s *Server) sendOverviews(ctx context.Context, req *request) {
	send := func(text []byte) bool {
		_, err := req.w.Write(text)
		return err == nil && req.w.Flush() == nil
	}
	beat := time.NewTicker(s.limits.Beat)
	defer beat.Stop()
	var sent *overview
	for {
		next, changed := s.views.latest()
		var err error
		switch {
		case next == nil || next == sent:
		case next.err != nil:
			err = next.err
		default:
			if !send(next.event) {
				return
			}
			sent = next
			continue // another one may have come during the write
		}
		if err == nil {
			select {
			case <-changed:
			case <-beat.C:
				if !s.stillAllowed(req.who, ops.Read) {
					err = problem(http.StatusUnauthorized, codeUnauthorized, "log in again", "the token was removed, or the login has ended")
				} else if !send([]byte(": \n\n")) {
					return
				}
			case <-s.closing:
				err = problem(http.StatusServiceUnavailable, codeShutdown, "reconnect", "serve is shutting down")
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			_ = sendEvent(req.w, "", messageProblem, s.problemOf(ctx, err)) // the last message, whether or not it arrives
			return
		}
	}
}
