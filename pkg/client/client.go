// Package client performs operations on another host, over the HTTP API that serve offers
// there. It is the remote implementation of ops.Host.
//
// The other host authenticates this user by a token, by the user of a UNIX socket, or by an
// SSH login. Its answers are not trusted with more than the terminal shows: they are bounded,
// and errors are made printable.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

const (
	maxAnswer  = 64 << 20 // of one response; a diff is at most 16 MiB
	maxProblem = 64 << 10
	maxEvent   = 256 << 10 // a line of an event stream; events have at most 64 KiB
)

// Client sends operations to one host.
type Client struct {
	name string // of the host, for errors
	base string
	http *http.Client
	auth string // value of the header Authorization; "" for none

	through bool // serve of this host passes requests on

	logins logins
}

// Perform implements ops.Host.
func (c *Client) Perform(ctx context.Context, call ops.Call) error {
	req, err := c.request(ctx, call)
	if err != nil {
		return err
	}
	resp, err := c.send(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return c.unreachable(err)
	case len(text) > maxAnswer:
		return fail.New(fail.Failure, "the answer of %s is longer than %d bytes", c.name, maxAnswer)
	}
	if err := json.Unmarshal(text, call.Result); err != nil {
		return fail.New(fail.Failure, "%s does not answer as this version of the program expects: %w", c.name, err).
			WithHint("agent-sessionizer version, on both hosts")
	}
	return c.checkAnswer(call.Result)
}

// request encodes a call by the tags of its request.
func (c *Client) request(ctx context.Context, call ops.Call) (*http.Request, error) {
	e := encoder{path: call.Path, query: url.Values{}, header: http.Header{}}
	if err := e.fields(reflect.ValueOf(call.Request).Elem()); err != nil {
		return nil, err
	}
	target := c.base + e.path
	if len(e.query) > 0 {
		target += "?" + e.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, call.Method, target, bytes.NewReader(e.body))
	if err != nil {
		return nil, err
	}
	req.Header = e.header
	return req, nil
}

type encoder struct {
	path   string
	query  url.Values
	header http.Header
	body   []byte
}

func (e *encoder) fields(v reflect.Value) error {
	for i := range v.NumField() {
		f, value := v.Type().Field(i), v.Field(i)
		switch {
		case f.Anonymous:
			if err := e.fields(value); err != nil {
				return err
			}
		case f.Name == "Body":
			text, err := json.Marshal(value.Interface())
			if err != nil {
				return err
			}
			e.body = text
			e.header.Set("Content-Type", "application/json")
		case f.Name == "RawBody":
			if e.body == nil {
				e.body = value.Bytes()
			}
		case f.Tag.Get("path") != "":
			e.path = strings.Replace(e.path, "{"+f.Tag.Get("path")+"}", url.PathEscape(text(value)), 1)
		case value.IsZero(): // parameters have the server's defaults
		case f.Tag.Get("query") != "":
			e.query.Set(f.Tag.Get("query"), text(value))
		case f.Tag.Get("header") != "":
			e.header.Set(f.Tag.Get("header"), text(value))
		}
	}
	return nil
}

// text returns a parameter as the API reads it.
func text(v reflect.Value) string {
	if t, ok := v.Interface().(time.Time); ok {
		return t.Format(time.RFC3339Nano)
	}
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		if text, err := m.MarshalText(); err == nil {
			return string(text)
		}
	}
	return fmt.Sprint(v.Interface())
}

// send sends a request, and returns the response if it is a success.
func (c *Client) send(req *http.Request) (*http.Response, error) {
	if c.auth != "" {
		req.Header.Set("Authorization", c.auth)
	}
	if id := traceid.ID(req.Context()); id != "" {
		req.Header.Set(traceid.Header, id)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(err)
	}
	if resp.StatusCode < http.StatusBadRequest {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, c.problem(resp)
}

// unreachable returns the error for a host that does not answer.
func (c *Client) unreachable(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err // without the URL, which c.name names better
	}
	if c.through {
		return fail.New(fail.Host, "reach %s through serve of this host: %s", c.name, termtext.Line(err.Error())).WithHint("agent-sessionizer serve")
	}
	return fail.New(fail.Host, "reach %s: %s", c.name, termtext.Line(err.Error())).
		WithHint("is serve running there? Start it with: agent-sessionizer serve")
}

// problem returns the error that a response reports.
func (c *Client) problem(resp *http.Response) error {
	var p struct {
		Detail string `json:"detail"`
		Code   string `json:"code"`
		Hint   string `json:"hint"`
	}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type")) // an invalid type is none of ours
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	if err == nil && strings.HasSuffix(kind, "json") {
		err = json.Unmarshal(text, &p)
	}
	if err != nil || p.Detail == "" {
		return fail.New(fail.Host, "%s answered %s, not as agent-sessionizer does", c.name, termtext.Line(resp.Status))
	}
	code := fail.ParseCode(p.Code)
	if c, ok := codes[resp.StatusCode]; ok && code == fail.Failure {
		code = c
	}
	if p.Hint == ops.SeeDocs { // for those who write requests
		p.Hint = ""
	}
	return fail.New(code, "%s", termtext.Lines(p.Detail)).WithHint("%s", termtext.Line(p.Hint))
}

// codes are those of problems that only the API has, by their status.
var codes = map[int]fail.Code{
	http.StatusBadRequest:          fail.Usage,
	http.StatusUnauthorized:        fail.Policy,
	http.StatusForbidden:           fail.Policy,
	http.StatusConflict:            fail.Conflict,
	http.StatusGone:                fail.Conflict,
	http.StatusUnprocessableEntity: fail.Conflict,
	http.StatusTooManyRequests:     fail.Conflict,
	http.StatusServiceUnavailable:  fail.Host,
}

// Events implements ops.Host. It reconnects when the connection is lost.
func (c *Client) Events(ctx context.Context, subject ops.Subject, after int64, follow bool) iter.Seq2[store.Event, error] {
	if !follow {
		return c.pastEvents(ctx, subject, after)
	}
	return func(yield func(store.Event, error) bool) {
		wait := backoff.NewExponentialBackOff()
		wait.InitialInterval, wait.MaxInterval = 100*time.Millisecond, 5*time.Second
		position := position(after)
		for lost := 0; ; lost++ {
			more, err := c.events(ctx, subject, position, func(ev store.Event) bool {
				position, lost = fmt.Sprint(ev.Seq), 0
				wait.Reset()
				return yield(ev, nil)
			})
			switch {
			case !more && err == nil:
				return
			case ctx.Err() != nil:
				yield(store.Event{}, ctx.Err())
				return
			case !more, lost >= 10:
				yield(store.Event{}, err)
				return
			}
			select {
			case <-time.After(wait.NextBackOff()):
			case <-ctx.Done():
			}
		}
	}
}

// pastEvents yields the events up to now, page by page.
func (c *Client) pastEvents(ctx context.Context, subject ops.Subject, after int64) iter.Seq2[store.Event, error] {
	return func(yield func(store.Event, error) bool) {
		for {
			var page ops.EventPage
			err := c.Perform(ctx, ops.Call{
				Spec:    ops.Spec{Method: http.MethodGet, Path: subject.Path() + "/events"},
				Request: &ops.EventQuery{After: position(after), Limit: 1000}, Result: &page,
			})
			if err != nil {
				yield(store.Event{}, err)
			}
			if err != nil || len(page.Events) == 0 {
				return
			}
			for _, ev := range page.Events {
				if after = ev.Seq; !yield(ev.Event, nil) {
					return
				}
			}
		}
	}
}

// position returns the parameter after for a sequence.
func position(after int64) string {
	if after == store.Oldest {
		return "oldest"
	}
	return fmt.Sprint(after)
}

// events reads one stream. more reports whether to connect again: the connection was lost.
func (c *Client) events(ctx context.Context, subject ops.Subject, after string, f func(store.Event) bool) (more bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+subject.Path()+"/events?after="+url.QueryEscape(after), http.NoBody)
	if err != nil {
		return false, err
	}
	req.Header.Set("Accept", "text/event-stream")
	resp, err := c.send(req)
	if err != nil {
		return fail.CodeOf(err) == fail.Host, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	name := ""
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case key == "": // the end of a message, or a heartbeat
			name = ""
		case key == "event":
			name = value
		case key == "data" && name == "end":
			return false, nil
		case key == "data" && name == "problem":
			resp.Header.Set("Content-Type", "application/json")
			resp.Body = io.NopCloser(strings.NewReader(value))
			return false, c.problem(resp)
		case key == "data":
			var ev store.Event
			if err := json.Unmarshal([]byte(value), &ev); err != nil {
				return false, fail.New(fail.Failure, "%s sent an event that this program cannot read: %w", c.name, err)
			}
			if !f(ev) {
				return false, nil
			}
		}
	}
	if resp.StatusCode == http.StatusNoContent {
		return false, nil
	}
	return true, c.unreachable(errors.Join(lines.Err(), io.ErrUnexpectedEOF))
}

// Read implements ops.Host.
func (c *Client) Read(ctx context.Context, f ops.File) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+f.Path(), http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := c.send(req)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}
