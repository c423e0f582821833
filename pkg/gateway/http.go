package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	maxRequestHeader  = 128 << 10
	maxResponseHeader = 1 << 20
	headerTime        = 60 * time.Second
	httpIdle          = 10 * time.Minute
	// How long the proxy delays a part of an answer, except for events (text/event-stream).
	flushTime = time.Millisecond
	// ContentLength of an answer whose length is unknown. With -1 the proxy would ignore flushTime and
	// flush after each read, and each flush costs a chunk and a tiny TLS record.
	unknownLength = -2
	// Memory for the bodies of intercepted requests. Each counts, while it is answered, with its length, but
	// with at most maxBody: no more of one body is in memory.
	maxBodies = 64 << 20
	maxBody   = max(maxParsed, maxGraphQL)
)

// web is a real proxy for plain HTTP: it parses, checks and rewrites every request, so
// that the server reads exactly what was checked.
type web struct {
	g       *Gateway
	plain   webServer // HTTP/1.1, unencrypted
	secure  webServer // HTTP/1.1 and HTTP/2 from intercepted TLS connections
	forward *httputil.ReverseProxy
	objects objects
	bodies  *semaphore.Weighted // bytes of requests that may be in memory
}

// webServer serves connections that are given to it one by one.
type webServer struct {
	*http.Server
	conns chan *webConn
}

// dialled is an upstream connection that is already established.
type dialled struct {
	conn *upstream
	decision
	addr netip.Addr
}

// webConn is the guest's side of an HTTP connection.
type webConn struct {
	net.Conn
	c         *conn
	transport *http.Transport
	// Whether the requests came over TLS, which the gateway ended. They get the secrets that
	// are bound to the host when they arrive.
	intercepted bool
	done        chan struct{}
	once        sync.Once
}

// Close closes the connection and done. The server calls it, or the proxy after an upgrade.
func (w *webConn) Close() error {
	err := w.Conn.Close()
	w.once.Do(func() { close(w.done) })
	return err
}

// CloseWrite passes on the end of an upgraded stream.
func (w *webConn) CloseWrite() error { return pipe.CloseWrite(w.Conn) }

type (
	webConnKey  struct{}
	exchangeKey struct{}
)

func newWeb(g *Gateway) *web {
	w := &web{g: g, bodies: semaphore.NewWeighted(maxBodies)}
	quiet := log.New(io.Discard, "", 0) // a guest's broken requests are not worth a log line
	w.forward = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			c := webConnOf(p.In)
			p.Out.URL.Scheme, p.Out.URL.Host = c.scheme(), c.authority()
			p.Out.URL.RawQuery = p.In.URL.RawQuery
			p.Out.Host = c.authority()
			if !isWebSocket(p.In) {
				p.Out.Header.Del("Upgrade")
				p.Out.Header.Del("Connection")
				p.Out.Header.Del("Http2-Settings")
			}
			if _, hasAgent := p.In.Header["User-Agent"]; !hasAgent {
				p.Out.Header["User-Agent"] = nil
				p.Out.Header.Set("User-Agent", "") // sends no User-Agent instead of Go's default
			}
		},
		Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			transport, e, u := webConnOf(r).transport, exchangeOf(r), useOf(r)
			if e == nil {
				return transport.RoundTrip(r)
			}
			// Without the values of the context, the proxy's trace does not see informational
			// responses. It would pass on their headers, with what the server reflects.
			response, err := transport.RoundTrip(r.WithContext(withoutValues{r.Context()}))
			if err != nil {
				if _, unsent := errors.AsType[*dialError](err); u != nil && unsent {
					u.unsent()
				}
				return nil, err
			}
			response.Request = r
			if err := e.Response(response); err != nil {
				response.Body.Close() //nolint:errcheck // the error above is what matters
				return nil, err
			}
			if u != nil {
				u.read(response)
			}
			if response.StatusCode == http.StatusUnauthorized && w.g.intercepted.Load().find(connOf(r).name) == e {
				w.g.loginRefused(connOf(r).name)
			}
			return response, nil
		}),
		ModifyResponse: func(r *http.Response) error {
			if r.ContentLength == -1 {
				r.ContentLength = unknownLength
			}
			return nil
		},
		FlushInterval: flushTime,
		BufferPool:    &copyBuffers{size: 32 << 10},
		ErrorLog:      quiet,
		ErrorHandler:  w.failed,
	}
	w.plain, w.secure = w.serve(quiet, false), w.serve(quiet, true)
	return w
}

// serve starts a server. Its connections are decrypted already, so HTTP/2 is recognised by its
// first bytes (RFC 9113, 3.3).
func (w *web) serve(quiet *log.Logger, http2 bool) webServer {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(http2)
	s := webServer{conns: make(chan *webConn), Server: &http.Server{
		Handler:           w,
		Protocols:         &protocols,
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       httpIdle,
		MaxHeaderBytes:    maxRequestHeader,
		ErrorLog:          quiet,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, webConnKey{}, c)
		},
	}}
	w.g.run(nil, func() { _ = s.Serve(listener{w.g, s.conns}) }) // ends with close and never returns any other error
	return s
}

func (w *web) close() {
	w.plain.Close()  //nolint:errcheck // the connections are closed separately
	w.secure.Close() //nolint:errcheck // likewise
}

// listener is the net.Listener of a webServer.
type listener struct {
	g     *Gateway
	conns chan *webConn
}

func (l listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.g.ctx.Done():
		return nil, net.ErrClosed
	}
}

func (l listener) Close() error { return nil }

func (l listener) Addr() net.Addr { return &net.UnixAddr{Name: "gateway", Net: "unix"} }

func webConnOf(r *http.Request) *webConn {
	c, ok := r.Context().Value(webConnKey{}).(*webConn)
	if !ok {
		panic("request without its connection") // cannot happen: ConnContext sets it above
	}
	return c
}

// exchangeOf returns what replaced the placeholders of r, or nil if nothing did.
func exchangeOf(r *http.Request) *intercept.Exchange {
	e, _ := r.Context().Value(exchangeKey{}).(*intercept.Exchange)
	return e
}

// withoutValues is a context without its values.
type withoutValues struct{ context.Context }

func (withoutValues) Value(any) any { return nil }

func connOf(r *http.Request) *conn { return webConnOf(r).c }

// scheme returns the scheme of the requests.
func (w *webConn) scheme() string {
	if w.intercepted {
		return "https"
	}
	return "http"
}

// authority returns the Host header for the name that was dialled.
func (w *webConn) authority() string {
	if w.c.to.Port() == portHTTP && !w.intercepted || w.c.to.Port() == portHTTPS && w.intercepted {
		return w.c.name
	}
	return net.JoinHostPort(w.c.name, strconv.Itoa(int(w.c.to.Port())))
}

// serveHTTP serves a connection on which the guest speaks HTTP, until it ends. It uses
// one upstream connection at a time, starting with first if that is not nil.
func (c *conn) serveHTTP(guest net.Conn, first *dialled) {
	via, err := c.g.proxy.forName("http", c.name, c.to.Port())
	if err != nil {
		c.fail(protoHTTP, err)
		return
	}
	var http1 http.Protocols
	http1.SetHTTP1(true)
	wc := &webConn{Conn: guest, c: c, done: make(chan struct{})}
	wc.transport = &http.Transport{
		Protocols:              &http1,
		DisableCompression:     true, // the guest gets the encoding that it asks for
		MaxConnsPerHost:        1,
		MaxIdleConns:           1,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			if via != nil {
				conn, err := dialProxy(c.ctx, &url.URL{Scheme: "http", Host: proxyHost(via)})
				if err != nil {
					return nil, err
				}
				c.open(protoHTTP, c.g.policy.decide(question{Name: c.name, Port: c.to.Port()}), netip.Addr{})
				return c.track(conn), nil
			}
			d := first
			if first = nil; d == nil {
				up, by, addr, err := c.dial()
				if err != nil {
					return nil, err
				}
				d = &dialled{up, by, addr}
			}
			c.open(protoHTTP, d.decision, d.addr)
			return d.conn, nil
		},
	}
	if via != nil {
		wc.transport.Proxy = http.ProxyURL(via)
	}
	c.serveWeb(wc, c.g.web.plain)
}

// serveWeb serves the requests of a connection until it ends.
func (c *conn) serveWeb(wc *webConn, s webServer) {
	defer wc.transport.CloseIdleConnections()
	select {
	case s.conns <- wc:
		<-wc.done
	case <-c.ctx.Done():
	}
}

// ServeHTTP checks one request and passes it on.
func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	wc := webConnOf(r)
	c := wc.c
	refuse := func(status int, d decision) {
		c.deny(protoHTTP, d)
		rw.Header().Set("Connection", "close")
		http.Error(rw, "agent-sessionizer: "+clean(d.Reason), status)
	}
	if d := c.g.policy.decide(question{Name: c.name, Port: c.to.Port()}); !d.Allowed {
		refuse(http.StatusForbidden, d)
		return
	}
	switch {
	case !wc.intercepted && r.ProtoMajor != 1 || r.Method == "PRI":
		refuse(http.StatusHTTPVersionNotSupported, decision{Reason: "HTTP/2 without TLS"})
		return
	case wc.intercepted && r.Method == http.MethodTrace:
		refuse(http.StatusMethodNotAllowed, decision{Reason: "TRACE: the answer would contain the request's secrets"})
		return
	case r.Method == http.MethodConnect:
		refuse(http.StatusMethodNotAllowed, decision{Reason: "CONNECT: the gateway is not a proxy"})
		return
	case r.URL.IsAbs() && r.URL.Scheme != wc.scheme():
		refuse(http.StatusMisdirectedRequest, decision{Reason: fmt.Sprintf("HTTP request for a %q URL", r.URL.Scheme)})
		return
	}
	if err := wc.checkHost(r.Host); err != nil {
		refuse(http.StatusMisdirectedRequest, decision{Reason: err.Error()})
		return
	}
	asked := policy.Request{Host: c.name, Method: r.Method, Path: r.URL.EscapedPath(), Query: r.URL.RawQuery}
	if c.g.policy.Load().ReadsRequests(c.name) {
		for name := range r.Header {
			if slices.Contains(methodOverrides, http.CanonicalHeaderKey(strings.ReplaceAll(name, "_", "-"))) {
				delete(r.Header, name)
			}
		}
		if d := c.g.policy.decideRequest(asked); !d.Allowed {
			c.denyRequest(r, d)
			http.Error(rw, fmt.Sprintf("agent-sessionizer: %s %s: %s", clean(r.Method), clean(r.URL.EscapedPath()), clean(d.Reason)), http.StatusForbidden)
			return
		}
	}
	if wc.intercepted {
		size := r.ContentLength
		if size < 0 || size > maxBody {
			size = maxBody
		}
		if err := w.bodies.Acquire(r.Context(), size); err != nil {
			panic(http.ErrAbortHandler) // the guest is gone
		}
		defer w.bodies.Release(size)
		if c.g.answerRefresh(rw, r, c.name) {
			return
		}
		c.g.freshen(r.Context(), c.name)
	}
	if e := c.g.intercepted.Load().find(c.name); e != nil && wc.intercepted {
		r = r.WithContext(context.WithValue(r.Context(), exchangeKey{}, e))
		if err := e.Request(r); err != nil {
			status := http.StatusForbidden
			if missing, ok := errors.AsType[*intercept.MissingError](err); ok {
				if no := c.g.loginRefusal(c.name, missing); no != nil {
					c.denyRequest(r, decision{Reason: err.Error()})
					no.write(rw)
					return
				}
				status = http.StatusBadGateway
			}
			refuse(status, decision{Reason: err.Error()})
			return
		}
		r.Header.Del("Accept-Encoding") // the transport asks for what Exchange.Response can read
	}
	if rules := c.g.policy.graphQL(asked); len(rules) > 0 {
		if err := w.checkGraphQL(r, rules); err != nil {
			c.denyRequest(r, decision{Reason: err.Error()})
			http.Error(rw, "agent-sessionizer: "+clean(err.Error()), http.StatusForbidden)
			return
		}
	}
	if wc.intercepted {
		u, err := c.meter(r)
		if no, ok := errors.AsType[*refusal](err); ok {
			c.denyRequest(r, decision{Reason: no.text})
			no.write(rw)
			return
		}
		if u != nil {
			defer u.lost() // without effect once it is settled
			r = r.WithContext(context.WithValue(r.Context(), useKey{}, u))
		}
	}
	// Do not add headers that the server did not send, except the length of a short answer.
	rw.Header()["Date"], rw.Header()["Content-Type"] = nil, nil
	defer flushCut(rw, r)
	w.forward.ServeHTTP(rw, r)
}

// flushCut passes on what has arrived of an answer that the server cut off. The proxy then ends the
// connection by a panic, and without a flush the guest might not even get the status.
func flushCut(rw http.ResponseWriter, r *http.Request) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler && r.Context().Err() == nil { //nolint:errorlint // net/http's own value, by identity
		_ = http.NewResponseController(rw).Flush() // the answer is incomplete in any case
	}
	panic(p)
}

// methodOverrides are headers with which some servers let a client replace the method, which was
// checked. Some take "_" for "-" in their names.
var methodOverrides = []string{"X-Http-Method-Override", "X-Http-Method", "X-Method-Override"}

// checkHost returns an error if host is not the name and port that were dialled.
func (w *webConn) checkHost(host string) error {
	w.c.mu.Lock()
	lax := w.c.unchecked && !w.intercepted
	w.c.mu.Unlock()
	if lax {
		return nil
	}
	name := host
	if h, port, err := net.SplitHostPort(host); err == nil {
		if port != strconv.Itoa(int(w.c.to.Port())) {
			return fmt.Errorf("HTTP Host %q differs from the dialled port", host)
		}
		name = h
	}
	if got, err := policy.Canonical(name); err != nil || got != w.c.name {
		return fmt.Errorf("HTTP Host %q differs from the dialled name", host)
	}
	return nil
}

// isWebSocket reports whether r asks for the only upgrade that is passed on. Any other
// upgrade, such as to HTTP/2 or TLS, would escape the checks.
func isWebSocket(r *http.Request) bool {
	return strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && len(r.Header["Upgrade"]) == 1
}

// failed answers a request that could not be passed on.
func (w *web) failed(rw http.ResponseWriter, r *http.Request, err error) {
	c := connOf(r)
	if errors.Is(err, context.Canceled) && r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // the guest is gone
	}
	c.fail(protoHTTP, err)
	status := http.StatusBadGateway
	var no *deniedError
	if errors.As(err, &no) {
		status = http.StatusForbidden
	}
	rw.Header().Set("Connection", "close")
	http.Error(rw, "agent-sessionizer: "+clean(err.Error()), status)
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// copyBuffers is a pool of buffers for copying bodies.
type copyBuffers struct {
	size int // of each, in bytes
	pool sync.Pool
}

func (b *copyBuffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, b.size)
}

func (b *copyBuffers) Put(p []byte) { b.pool.Put(&p) }
