package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/task"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

// Problem is the form of every error response: RFC 9457, with the product's code
// and hint. It implements error, so that any function can return one.
type Problem struct {
	Type    string   `json:"type" enum:"about:blank" doc:"Always about:blank; code identifies the problem."`
	Title   string   `json:"title" doc:"The status in words."`
	Status  int      `json:"status" minimum:"400" maximum:"599"`
	Detail  string   `json:"detail" doc:"What went wrong in this case."`
	Code    string   `json:"code" doc:"Stable, for programs: USAGE, NOT_FOUND, EVENT_SEQUENCE_EXPIRED …"`
	Hint    string   `json:"hint" doc:"What to do about it."`
	TraceID string   `json:"trace_id,omitempty" doc:"Trace id of the request, as in the log."`
	Errors  []string `json:"errors,omitempty" doc:"All errors, if there are several."`

	// Only for events.
	Oldest *int64 `json:"oldest,omitempty" doc:"Sequence of the oldest remaining event."`
	Newest *int64 `json:"newest,omitempty" doc:"Sequence of the newest event."`
	Last   *int64 `json:"last,omitempty" doc:"Sequence of the last event that a stream sent before it ended."`

	header http.Header // additional headers of the response
}

// Codes in addition to those of package fail.
const (
	codeInternal      = "INTERNAL"
	codeUnauthorized  = "UNAUTHORIZED"
	codeForbidden     = "FORBIDDEN"
	codeMethod        = "METHOD_NOT_ALLOWED"
	codeTooLarge      = "TOO_LARGE"
	codeSlow          = "TOO_SLOW"
	codeMediaType     = "UNSUPPORTED_MEDIA_TYPE"
	codeInvalid       = "INVALID"
	codeTooMany       = "TOO_MANY"
	codeRange         = "RANGE_NOT_SATISFIABLE"
	codeShutdown      = "SHUTTING_DOWN"
	codeUnavailable   = "UNAVAILABLE"
	codeUpgrade       = "UPGRADE_REQUIRED"
	codeAnchor        = "EVENT_ANCHOR_MALFORMED"
	codeAnchorForeign = "EVENT_ANCHOR_FOREIGN"
	codeAnchorFuture  = "EVENT_ANCHOR_FUTURE"
	codeExpired       = "EVENT_SEQUENCE_EXPIRED"
	codePruned        = "FILES_REMOVED"
	codeKeyReused     = "IDEMPOTENCY_KEY_REUSED"
)

const (
	maxDetail = 8 << 10
	seeDocs   = ops.SeeDocs
)

func problem(status int, code, hint, format string, args ...any) *Problem {
	return &Problem{
		Type: "about:blank", Title: http.StatusText(status), Status: status,
		Detail: bounded(fmt.Sprintf(format, args...)), Code: code, Hint: bounded(hint),
	}
}

// bounded makes text printable and limits its length. The text may contain input
// from outside.
func bounded(text string) string { return termtext.Brief(termtext.Lines(text), maxDetail) }

// Error returns the detail.
func (p *Problem) Error() string { return p.Detail }

// GetStatus returns the status for huma's response.
func (p *Problem) GetStatus() int { return p.Status }

// GetHeaders returns the headers for huma's response.
func (p *Problem) GetHeaders() http.Header { return p.header }

// ContentType returns the content type for huma's response.
func (p *Problem) ContentType(string) string { return problemType }

const problemType = "application/problem+json"

func (p *Problem) with(key, value string) *Problem {
	if p.header == nil {
		p.header = http.Header{}
	}
	p.header.Set(key, value)
	return p
}

func (p *Problem) withHint(hint string) *Problem {
	p.Hint = hint
	return p
}

// statuses maps package fail's codes to HTTP statuses. Codes that are missing here
// are server errors: 500.
var statuses = map[fail.Code]int{
	fail.Usage:       http.StatusBadRequest,
	fail.NotFound:    http.StatusNotFound,
	fail.Conflict:    http.StatusConflict,
	fail.Host:        http.StatusServiceUnavailable,
	fail.Secret:      http.StatusUnprocessableEntity,
	fail.Policy:      http.StatusUnprocessableEntity,
	fail.Preserved:   http.StatusConflict,
	fail.Timeout:     http.StatusGatewayTimeout,
	fail.Interrupted: http.StatusServiceUnavailable,
}

// problemOf converts any error into a problem. For an unexpected error, the client
// only learns where to look, because the text may contain anything.
func problemOf(err error) *Problem {
	if p, ok := errors.AsType[*Problem](err); ok {
		return p
	}
	if a, ok := errors.AsType[*store.AnchorError](err); ok {
		return anchorProblem(a)
	}
	switch {
	case errors.Is(err, context.Canceled):
		return problem(http.StatusServiceUnavailable, codeShutdown, "try again", "the request was interrupted")
	case errors.Is(err, context.DeadlineExceeded) && fail.CodeOf(err) == fail.Failure: // an error with a code says what timed out
		return problem(http.StatusGatewayTimeout, fail.Timeout.String(), "try again", "the request timed out")
	case errors.Is(err, ops.ErrScope):
		return problem(http.StatusForbidden, codeForbidden, fail.HintOf(err), "%v", err)
	case errors.Is(err, ops.ErrBusy):
		return problem(http.StatusTooManyRequests, codeTooMany, fail.HintOf(err), "%v", err).with("Retry-After", "5")
	case errors.Is(err, ops.ErrContent):
		return problem(http.StatusUnprocessableEntity, fail.CodeOf(err).String(), cmp.Or(fail.HintOf(err), seeDocs), "%v", err)
	case errors.Is(err, task.ErrPruned):
		return problem(http.StatusGone, codePruned, "GET "+ops.TasksPath+"/{id} still shows the task; POST "+ops.TasksPath+"/{id}/retry runs it again", "%v", err)
	case errors.Is(err, task.ErrKeyReused):
		return problem(http.StatusUnprocessableEntity, codeKeyReused, fail.HintOf(err), "%v", err)
	case errors.Is(err, task.ErrNotPermitted):
		return problem(http.StatusForbidden, codeForbidden, fail.HintOf(err), "%v", err)
	case errors.Is(err, ssh.ErrUnreachable):
		return problem(http.StatusServiceUnavailable, codeUnavailable, "agent-sessionizer list", "%v", err)
	}
	code := fail.CodeOf(err)
	status, ok := statuses[code]
	if !ok {
		return problem(http.StatusInternalServerError, codeInternal, "see the log of serve, under the trace_id", "internal error of serve")
	}
	hint := fail.HintOf(err)
	if hint == "" {
		hint = seeDocs
	}
	p := problem(status, code.String(), hint, "%v", err)
	if lines := strings.Split(p.Detail, "\n"); len(lines) > 1 {
		p.Errors = lines // a manifest's errors are all reported at once
	}
	if status == http.StatusServiceUnavailable {
		return p.with("Retry-After", "5")
	}
	return p
}

func anchorProblem(a *store.AnchorError) *Problem {
	var p *Problem
	if errors.Is(a, store.ErrExpired) {
		p = problem(http.StatusGone, codeExpired, fmt.Sprintf("continue with after=%d or after=oldest; earlier events are lost", max(a.Oldest-1, 0)),
			"events after %d were removed; the oldest remaining event is %d", a.After, a.Oldest)
	} else {
		p = problem(http.StatusBadRequest, codeAnchorFuture, "continue with after=newest", "event %d does not exist yet; the newest is %d", a.After, a.Newest)
	}
	p.Oldest, p.Newest = &a.Oldest, &a.Newest
	return p
}

// problemFor returns the problem for an error status that net/http or a library has
// set.
func problemFor(status int) *Problem {
	code, hint := codeInvalid, seeDocs
	switch status {
	case http.StatusNotFound:
		code = fail.NotFound.String()
	case http.StatusMethodNotAllowed:
		code = codeMethod
	case http.StatusRequestedRangeNotSatisfiable:
		code, hint = codeRange, "request existing bytes; Content-Range gives the size"
	case http.StatusUpgradeRequired:
		code, hint = codeUpgrade, "use WebSocket (RFC 6455, version 13) on this path"
	case http.StatusPreconditionFailed:
		code, hint = fail.Conflict.String(), "leave out If-Match, or send the current ETag"
	}
	if status >= http.StatusInternalServerError {
		code, hint = codeInternal, "see the log of serve, under the trace_id"
	}
	return problem(status, code, hint, "%s", strings.ToLower(http.StatusText(status)))
}

// write responds with the problem.
func (p *Problem) write(w http.ResponseWriter) {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and numbers can always be encoded
	}
	h := w.Header()
	for key, values := range p.header {
		h[key] = values
	}
	h.Set("Content-Type", problemType)
	h.Del("Content-Length")
	h.Del("Content-Encoding")
	h.Del("Content-Disposition")
	h.Del("ETag")
	w.WriteHeader(p.Status)
	_, _ = w.Write(append(body, '\n')) // the client is gone if this fails
}
