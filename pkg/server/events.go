package server

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
)

func anchor(subject string, seq int64) string { return subject + "/" + strconv.FormatInt(seq, 10) }

// parseAnchor parses the position after which to read: a sequence, SUBJECT/SEQ, or
// one of the words oldest and newest. An empty text means the beginning. It is
// strict: it rejects an anchor of another subject, and one that could be read in
// two ways.
func parseAnchor(subject, text string) (seq int64, newest bool, err error) {
	const hint = "after must be a sequence, SUBJECT/SEQ from an event's id, oldest or newest"
	switch text {
	case "":
		return 0, false, nil
	case "oldest":
		return store.Oldest, false, nil
	case "newest":
		return 0, true, nil
	}
	if of, number, ok := strings.Cut(text, "/"); ok {
		if !ids.Valid(of) {
			return 0, false, problem(http.StatusBadRequest, codeAnchor, hint, "the anchor must be SUBJECT/SEQ")
		}
		if of != subject {
			return 0, false, problem(http.StatusBadRequest, codeAnchorForeign, "use the id of an event of "+subject, "the anchor belongs to %s, but these are the events of %s", of, subject)
		}
		text = number
	}
	if len(text) == 0 || len(text) > 18 || strings.Trim(text, "0123456789") != "" || len(text) > 1 && text[0] == '0' {
		return 0, false, problem(http.StatusBadRequest, codeAnchor, hint, "the anchor's sequence must be a whole number")
	}
	seq, err = strconv.ParseInt(text, 10, 64)
	return seq, false, err
}

// subject is the task or session whose events are read.
type subject struct {
	id   string
	over func(context.Context) (bool, error) // reports whether nothing more will happen
}

// eventFeed offers the events and logs of tasks and sessions: as pages, as server-sent events
// and over a WebSocket.
type eventFeed struct{ s *Server }

func (feed eventFeed) taskSubject(ctx context.Context, id string) (subject, error) {
	over := func(ctx context.Context) (bool, error) {
		t, err := feed.s.engine.Task(ctx, id)
		return t.Phase.Over() && task.AtRest(t.Phase), err
	}
	_, err := over(ctx)
	return subject{id, over}, err
}

func (feed eventFeed) sessionSubject(ctx context.Context, id string) (subject, error) {
	over := func(ctx context.Context) (bool, error) {
		v, err := feed.s.engine.Session(ctx, id)
		return v.Phase == session.Gone, err
	}
	_, err := over(ctx)
	return subject{id, over}, err
}

// start returns the sequence after which reading begins. It checks the anchor, so
// that a bad one yields an error response instead of a stream that starts with a
// problem.
func (feed eventFeed) start(ctx context.Context, of subject, text string) (int64, error) {
	seq, newest, err := parseAnchor(of.id, text)
	if err != nil {
		return 0, err
	}
	oldest, last, err := feed.s.store.EventRange(ctx, of.id)
	switch {
	case err != nil:
		return 0, err
	case newest:
		return last, nil
	case seq == store.Oldest:
		return max(oldest-1, 0), nil
	}
	_, err = feed.s.store.Events(ctx, of.id, seq, 1)
	return seq, err
}

type (
	bodyOutput struct{ Body func(huma.Context) }
)

func (feed eventFeed) eventRoutes(api huma.API) {
	const about = "Returns a page, or with `Accept: text/event-stream` a stream of server-sent events: first the past events, then new ones, without a gap. " +
		"To continue after an event, use its `id`. An expired anchor is answered with 410, a foreign or future one with 400. " +
		"A stream ends with an event `end`, or with an event `problem`, whose `last` is the last sequence that was sent; " +
		"a client that reconnects to an ended stream receives 204."
	for _, r := range []struct {
		route
		of func(context.Context, string) (subject, error)
	}{
		{route{Spec: ops.Spec{ID: "getTaskEvents", Path: ops.TasksPath + "/{id}/events", Tag: "tasks", Summary: "List or stream the events of a task"}}, feed.taskSubject},
		{route{Spec: ops.Spec{ID: "getSessionEvents", Path: ops.SessionsPath + "/{id}/events", Tag: "sessions", Summary: "List or stream the events of a session"}}, feed.sessionSubject},
	} {
		r.Method, r.Need, r.About, r.Errors = http.MethodGet, ops.Read, about, []int{204, 404, 410}
		register(feed.s, api, r.route, func(ctx context.Context, in *ops.EventQuery) (*bodyOutput, error) {
			return feed.events(ctx, in, r.of)
		})
		resp := api.OpenAPI().Paths[r.Path].Get.Responses["200"]
		resp.Content = map[string]*huma.MediaType{
			"application/json":  {Schema: schemaOf[ops.EventPage](api)},
			"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}},
		}
	}
	register(feed.s, api, route{Spec: ops.Spec{
		ID: "streamTask", Method: http.MethodGet, Path: "/ws/tasks/{id}/stream", Tag: "tasks", Need: ops.Read, Status: http.StatusSwitchingProtocols, Errors: []int{404, 405, 410, 416, 426},
		Summary: "Stream the events and output of a task over WebSocket",
		About: "Each message is one JSON object, a StreamMessage: first the past events, then new ones, without a gap. Output is sent as it is in the logs, in base64, " +
			"with its offset. The last message is `end` or `problem`.",
	}}, feed.webSocket)
	schemaOf[StreamMessage](api)
}

func (feed eventFeed) events(ctx context.Context, in *ops.EventQuery, of func(context.Context, string) (subject, error)) (*bodyOutput, error) {
	sub, err := of(ctx, in.ID)
	if err != nil {
		return nil, err
	}
	text := in.After
	if text == "" {
		text = in.Last
	}
	after, err := feed.start(ctx, sub, text)
	if err != nil {
		return nil, err
	}
	if wantsStream(in.Accept) && requestOf(ctx).r.Method != http.MethodHead { // for HEAD the stream would never end
		return feed.serverSent(ctx, sub, after, text != "")
	}
	evs, err := feed.s.store.Events(ctx, sub.id, after, in.Limit)
	if err != nil {
		return nil, err
	}
	page := ops.EventPage{Events: []ops.Event{}, Next: anchor(sub.id, after)}
	for _, ev := range evs {
		page.Events = append(page.Events, ops.Event{ID: anchor(sub.id, ev.Seq), Event: ev})
		page.Next = anchor(sub.id, ev.Seq)
	}
	if page.Oldest, page.Newest, err = feed.s.store.EventRange(ctx, sub.id); err != nil {
		return nil, err
	}
	return &bodyOutput{func(ctx huma.Context) {
		ctx.SetHeader("Content-Type", "application/json")
		ctx.SetStatus(http.StatusOK)
		_ = huma.DefaultJSONFormat.Marshal(ctx.BodyWriter(), page) // the client is gone if this fails
	}}, nil
}

// wantsStream reports whether a client's first choice is a stream.
func wantsStream(accept string) bool {
	first, _, _ := strings.Cut(accept, ",")
	kind, _, _ := strings.Cut(first, ";")
	return strings.EqualFold(strings.TrimSpace(kind), "text/event-stream")
}

// serverSent responds with a stream of server-sent events.
func (feed eventFeed) serverSent(ctx context.Context, sub subject, after int64, back bool) (*bodyOutput, error) {
	if back {
		// 204 is the only response that makes an EventSource stop reconnecting.
		over, err := feed.ended(ctx, sub, after)
		if err != nil {
			return nil, err
		}
		if over {
			return &bodyOutput{func(ctx huma.Context) { ctx.SetStatus(http.StatusNoContent) }}, nil
		}
	}
	req := requestOf(ctx)
	st, err := feed.newStream(req, "sse", sub, after)
	if err != nil {
		return nil, err
	}
	return &bodyOutput{func(huma.Context) {
		defer st.close()
		h := req.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("X-Accel-Buffering", "no") // disables a proxy's buffering
		req.w.WriteHeader(http.StatusOK)
		if req.w.Flush() != nil {
			return
		}
		st.run(ctx, func(m StreamMessage) error {
			var err error
			switch m.Type {
			case messageEvent:
				err = sendEvent(req.w, m.Event.ID, "", m.Event)
			case messageBeat:
				_, err = fmt.Fprint(req.w, ": \n\n")
			case messageProblem:
				err = sendEvent(req.w, "", m.Type, m.Problem)
			default:
				err = sendEvent(req.w, "", m.Type, m)
			}
			if err != nil {
				return err
			}
			return req.w.Flush()
		})
	}}, nil
}
