package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"path"
	"runtime/debug"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// middleware runs before every route. It authenticates the client, rejects malformed
// requests, bounds the size of requests and the duration of writes, and turns every
// error into a Problem.
type middleware struct {
	server *Server
	endpoint
}

// principal is the authenticated client.
type principal struct {
	ops.Caller
	token string // digest of the token; "" for the socket
	login string // digest of the key of a login to the dashboard; "" for none
}

// request gives handlers access to the underlying HTTP request.
type request struct {
	w     *response
	r     *http.Request
	who   principal
	trace string
	at    endpoint
}

type requestKey struct{}

// requestOf returns the request that ctx belongs to.
func requestOf(ctx context.Context) *request {
	return ctx.Value(requestKey{}).(*request) // middleware has stored it
}

const healthPath = "/api/health"

func (g *middleware) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	id := traceid.FromHeader(r.Header.Get)
	req := &request{w: &response{ResponseWriter: w, control: http.NewResponseController(w), patience: g.server.limits.Write, trace: id}, trace: id, at: g.endpoint}
	req.r = r.WithContext(traceid.With(context.WithValue(r.Context(), requestKey{}, req), id))
	defer func() {
		err := recover()
		if err != nil && err != http.ErrAbortHandler { //nolint:errorlint // net/http's own value, by identity
			g.server.log.ErrorContext(req.r.Context(), "handler panicked", "panic", fmt.Sprint(err), "stack", string(debug.Stack()))
			req.w.fail(problem(http.StatusInternalServerError, codeInternal, "see the log of serve, under the trace_id", "internal error of serve"))
		}
		g.logRequest(req, time.Since(began))
		if err == http.ErrAbortHandler { //nolint:errorlint // as above
			panic(err)
		}
	}()
	if p := g.admit(req); p != nil {
		_ = req.w.control.EnableFullDuplex() // where it is unsupported, there is nothing left to read
		req.w.fail(p)
		if p.Status != http.StatusRequestTimeout {
			g.drain(req)
		}
		return
	}
	g.server.mux.ServeHTTP(req.w, req.r)
}

// admit checks a request before it reaches a handler.
func (g *middleware) admit(req *request) *Problem {
	h := req.w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; sandbox")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set(traceid.Header, req.trace)
	for _, check := range []func(*request) *Problem{g.checkForm, g.origin, g.login, g.body} {
		if p := check(req); p != nil {
			return p
		}
	}
	return nil
}

// once lists headers that must not be repeated, because different readers of the
// request could use different values.
var once = []string{"Authorization", "Content-Type", "Content-Length", "Content-Encoding", "Origin", "Range", "If-Range", "Last-Event-Id", traceid.Header, "Accept", "Idempotency-Key", "Sec-Websocket-Key", "Sec-Websocket-Version", "Sec-Websocket-Protocol", "Cookie", keyHeader}

// checkForm checks the form of the request.
func (g *middleware) checkForm(req *request) *Problem {
	r := req.r
	bad := func(hint, format string, args ...any) *Problem {
		return problem(http.StatusBadRequest, codeInvalid, hint, format, args...)
	}
	for _, name := range once {
		if len(r.Header.Values(name)) > 1 {
			return bad("send it once", "header %s was sent more than once", name)
		}
	}
	if r.URL.IsAbs() || r.URL.Host != "" || r.URL.Opaque != "" || !strings.HasPrefix(r.URL.Path, "/") {
		return bad("request a path", "this server is not a proxy")
	}
	if len(r.RequestURI) > maxURI {
		return problem(http.StatusRequestURITooLong, codeTooLarge, "request less at once", "the request path is longer than %d bytes", maxURI)
	}
	if r.Header.Get("Content-Encoding") != "" {
		return problem(http.StatusUnsupportedMediaType, codeMediaType, "send the body without encoding", "content encodings are not supported")
	}
	if _, err := url.ParseQuery(r.URL.RawQuery); err != nil {
		return bad("escape everything except letters and digits, such as %20 for a space", "parse query: %v", err)
	}
	// Neither the router nor a handler may clean a path: an unclean path does not
	// exist. Escaped dots are part of a name, which is looked up.
	if p := r.URL.EscapedPath(); p != "/" && p != dashboardPath && path.Clean(p) != p || strings.Contains(r.URL.Path, "\x00") {
		return problem(http.StatusNotFound, "NOT_FOUND", seeDocs, "no such path")
	}
	return nil
}

// origin rejects requests from web pages, so that no page can use its user's
// access. It detects them by the Host header, in case the page uses another name
// for this host, and by the headers about the page's origin.
func (g *middleware) origin(req *request) *Problem {
	r := req.r
	if !g.isOwnHost(r.Host) {
		return problem(http.StatusForbidden, codeForbidden, "use the address that serve listens on", "the Host header does not name this server").with("Connection", "close")
	}
	if o := r.Header.Get("Origin"); o != "" && (g.own || g.peer || o != g.scheme()+r.Host) || len(r.Header.Values("Origin")) > 0 && o == "" {
		return problem(http.StatusForbidden, codeForbidden, "call the API from a program, not from a web page", "requests from web pages of other sites are refused")
	}
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" && !opensPage(r) {
		return problem(http.StatusForbidden, codeForbidden, "call the API from a program, not from a web page", "requests from web pages of other sites are refused")
	}
	return nil
}

// login authenticates the client.
func (g *middleware) login(req *request) *Problem {
	if g.own {
		req.who = principal{Caller: ops.Caller{Name: g.server.user, Scope: ops.Admin}}
		return nil
	}
	if g.peer {
		return loginPeer(req)
	}
	if req.r.URL.Path == healthPath || isPage(req.r) || req.r.URL.Path == loginPath {
		req.who = principal{Caller: ops.Caller{Name: "anonymous"}}
		return nil
	}
	header := req.r.Header.Get("Authorization")
	if header == "" {
		return g.server.dashboardLogin(req)
	}
	token, err := bearer(header)
	if err != nil {
		return g.server.denied(req, err.Error())
	}
	t, ok, err := g.server.tokens.find(token)
	if err != nil {
		return g.server.tokensUnreadable(req, err)
	}
	if !ok {
		return g.server.denied(req, "unknown token")
	}
	req.who = principalOf(t)
	return nil
}

// principalOf returns the client that has a token.
func principalOf(t Token) principal {
	who := principal{Caller: ops.Caller{Name: "token:" + t.Name, Scope: t.Scope}, token: t.SHA256}
	if !t.Scope.Allows(ops.Admin) {
		who.Permission = &t.Permission
	}
	return who
}

const tokenHint = "send Authorization: Bearer TOKEN; agent-sessionizer serve token add NAME --scope read creates one"

// denied returns the response to a client that has not authenticated itself, and counts it.
func (s *Server) denied(req *request, why string) *Problem {
	addr, _, err := net.SplitHostPort(req.r.RemoteAddr)
	if err != nil {
		addr = req.r.RemoteAddr
	}
	// A valid token is accepted after any number of wrong ones. On a loopback
	// address all users of this host share one address, and none may lock out
	// the others.
	s.metrics.wrong.Inc()
	ok, wait := s.wrong.allow(addr, time.Now())
	if !ok {
		return problem(http.StatusTooManyRequests, codeTooMany, "wait, and "+tokenHint, "too many requests without a valid token").
			with("Retry-After", fmt.Sprint(int(wait/time.Second)+1)).with("Connection", "close")
	}
	s.log.WarnContext(req.r.Context(), "request refused", "address", addr, "reason", why)
	return unauthorized(why)
}

func unauthorized(why string) *Problem {
	return problem(http.StatusUnauthorized, codeUnauthorized, tokenHint, "%s", why).with("WWW-Authenticate", `Bearer realm="agent-sessionizer"`)
}

func (s *Server) tokensUnreadable(req *request, err error) *Problem {
	s.log.ErrorContext(req.r.Context(), "failed to read tokens", "error", err)
	return problem(http.StatusServiceUnavailable, codeUnavailable, "agent-sessionizer serve token list, on the host", "tokens cannot be checked now").with("Retry-After", "5")
}

// stillAllowed reports whether who may still perform operations that need that scope:
// tokens may have been removed, and a dashboard's user may have logged out.
func (s *Server) stillAllowed(who principal, need ops.Scope) bool {
	if who.login != "" && !s.logins.active(who.login) {
		return false
	}
	if who.token == "" {
		return who.Scope.Allows(need)
	}
	t, ok, err := s.tokens.withDigest(who.token)
	return err == nil && ok && t.Scope.Allows(need)
}

// body reads the request body into memory, so that handlers never wait for the
// client.
func (g *middleware) body(req *request) *Problem {
	r := req.r
	if r.ContentLength == 0 {
		r.Body = http.NoBody
		return nil
	}
	if r.Method != http.MethodPost {
		return problem(http.StatusBadRequest, codeInvalid, "leave the body out", "a %s request must not have a body here", short(r.Method)).with("Connection", "close")
	}
	most := int64(maxBody)
	if req.who.Scope == "" {
		most = maxLoginBody
	}
	if r.ContentLength > most {
		return tooLarge(most)
	}
	if err := req.w.control.SetReadDeadline(time.Now().Add(g.server.limits.Body)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return problemOf(err)
	}
	text, err := io.ReadAll(io.LimitReader(r.Body, most+1))
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return problem(http.StatusRequestTimeout, codeSlow, "send the body immediately", "the body did not arrive within %v", g.server.limits.Body).with("Connection", "close")
	}
	if err != nil {
		return problem(http.StatusBadRequest, codeInvalid, "send as many bytes as Content-Length declares, or complete chunks", "the body cannot be read").with("Connection", "close")
	}
	if int64(len(text)) > most {
		return tooLarge(most)
	}
	if err := req.w.control.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return problemOf(err)
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	return nil
}

// drain reads the rest of a request that was already answered. Many clients write
// the whole body before they read. If the server closed the connection with unread
// bytes, the connection would be reset and the response lost. A client that sent
// Expect has its response and sends nothing more.
func (g *middleware) drain(req *request) {
	if req.r.ContentLength == 0 || req.r.Header.Get("Expect") != "" || req.w.Flush() != nil {
		return
	}
	most := int64(maxBody)
	if req.who.Scope != "" {
		most = maxSpill
	}
	if req.w.control.SetReadDeadline(time.Now().Add(g.server.limits.Body)) == nil {
		_, _ = io.CopyN(io.Discard, req.r.Body, most) // the client has its response in any case
	}
}

func tooLarge(most int64) *Problem {
	return problem(http.StatusRequestEntityTooLarge, codeTooLarge, "send less: a manifest has at most 1 MiB", "the body is longer than %d bytes", most).with("Connection", "close")
}

func short(s string) string { return s[:min(len(s), 20)] }

// logRequest logs a completed request and counts it.
func (g *middleware) logRequest(req *request, took time.Duration) {
	route := req.r.Pattern
	if route == "" {
		route = "none"
	}
	g.server.metrics.request(req.r.Method, route, req.w.status, took)
	level := slog.LevelDebug
	if req.r.Method != http.MethodGet && req.r.Method != http.MethodHead || req.w.status >= http.StatusInternalServerError {
		level = slog.LevelInfo // changes and server errors
	}
	g.server.log.Log(req.r.Context(), level, "request", "actor", req.who.Name, "route", route,
		"status", req.w.status, "bytes", req.w.bytes, "ms", took.Milliseconds())
}

// response is a ResponseWriter that bounds the time of each write. It turns every
// error response that is not a Problem into one.
type response struct {
	http.ResponseWriter
	control  *http.ResponseController
	patience time.Duration
	trace    string
	status   int
	bytes    int64
	mute     bool // discard the following body, which another handler wrote for the same error
}

// Unwrap returns the underlying writer for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *response) WriteHeader(status int) {
	if w.status != 0 || w.mute || status < http.StatusOK && status != http.StatusSwitchingProtocols {
		return // an informational status, which another host sent, is not the answer
	}
	if status >= http.StatusBadRequest && w.Header().Get("Content-Type") != problemType {
		p := problemFor(status)
		if w.Header().Get("Allow") != "" {
			p.Hint = "the Allow header lists the methods"
		}
		w.fail(p)
		w.mute = true
		return
	}
	w.status = status
	w.deadline()
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(b []byte) (int, error) {
	if w.mute {
		return len(b), nil
	}
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.deadline()
	n, err := w.ResponseWriter.Write(b)
	w.bytes += int64(n)
	return n, err
}

// Flush sends the written data.
func (w *response) Flush() error {
	w.deadline()
	return w.control.Flush()
}

func (w *response) deadline() {
	// It fails only if the connection is gone, which the write will report.
	_ = w.control.SetWriteDeadline(time.Now().Add(w.patience))
}

// fail responds with a problem, if no response was sent yet.
func (w *response) fail(p *Problem) {
	if w.status != 0 {
		return
	}
	p.TraceID = w.trace
	p.write(w)
}
