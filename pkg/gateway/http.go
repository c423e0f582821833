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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

const (
	maxRequestHeader  = 128 << 10
	maxResponseHeader = 1 << 20
	headerTime        = 60 * time.Second
	httpIdle          = 10 * time.Minute
)

// web is a real proxy for plain HTTP: it parses, checks and rewrites every request, so
// that the server reads exactly what was checked.
type web struct {
	g       *Gateway
	server  *http.Server
	conns   chan *webConn
	forward *httputil.ReverseProxy
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
	done      chan struct{}
	once      sync.Once
}

// Close closes the connection and done. The server calls it, or the proxy after an upgrade.
func (w *webConn) Close() error {
	err := w.Conn.Close()
	w.once.Do(func() { close(w.done) })
	return err
}

// CloseWrite passes on the end of an upgraded stream.
func (w *webConn) CloseWrite() error { return pipe.CloseWrite(w.Conn) }

type webConnKey struct{}

func newWeb(g *Gateway) *web {
	w := &web{g: g, conns: make(chan *webConn)}
	quiet := log.New(io.Discard, "", 0) // a guest's broken requests are not worth a log line
	var http1 http.Protocols
	http1.SetHTTP1(true)
	w.forward = &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			c := webConnOf(p.In)
			p.Out.URL.Scheme, p.Out.URL.Host = "http", c.authority()
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
		Transport:     roundTrip(func(r *http.Request) (*http.Response, error) { return webConnOf(r).transport.RoundTrip(r) }),
		FlushInterval: -1,
		BufferPool:    &copyBuffers{},
		ErrorLog:      quiet,
		ErrorHandler:  w.failed,
	}
	w.server = &http.Server{
		Handler:           w,
		Protocols:         &http1,
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       httpIdle,
		MaxHeaderBytes:    maxRequestHeader,
		ErrorLog:          quiet,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, webConnKey{}, c)
		},
	}
	g.run(nil, func() { _ = w.server.Serve(w) }) // ends with close and never returns any other error
	return w
}

func (w *web) close() { w.server.Close() } //nolint:errcheck // the connections are closed separately

// Accept implements net.Listener. web is its own server's listener.
func (w *web) Accept() (net.Conn, error) {
	select {
	case c := <-w.conns:
		return c, nil
	case <-w.g.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (w *web) Close() error { return nil }

// Addr implements net.Listener.
func (w *web) Addr() net.Addr { return &net.UnixAddr{Name: "gateway", Net: "unix"} }

func webConnOf(r *http.Request) *webConn {
	c, ok := r.Context().Value(webConnKey{}).(*webConn)
	if !ok {
		panic("request without its connection") // cannot happen: ConnContext sets it above
	}
	return c
}

func connOf(r *http.Request) *conn { return webConnOf(r).c }

// authority returns the Host header for the name that was dialled.
func (w *webConn) authority() string {
	if w.c.to.Port() == portHTTP {
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
	defer wc.transport.CloseIdleConnections()
	select {
	case c.g.web.conns <- wc:
		<-wc.done
	case <-c.ctx.Done():
	}
}

// ServeHTTP checks one request and passes it on.
func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	c := connOf(r)
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
	case r.ProtoMajor != 1 || r.Method == "PRI":
		refuse(http.StatusHTTPVersionNotSupported, decision{Reason: "HTTP/2 without TLS"})
		return
	case r.Method == http.MethodConnect:
		refuse(http.StatusMethodNotAllowed, decision{Reason: "CONNECT: the gateway is not a proxy"})
		return
	case r.URL.IsAbs() && r.URL.Scheme != "http":
		refuse(http.StatusMisdirectedRequest, decision{Reason: fmt.Sprintf("HTTP request for a %q URL", r.URL.Scheme)})
		return
	}
	if err := webConnOf(r).checkHost(r.Host); err != nil {
		refuse(http.StatusMisdirectedRequest, decision{Reason: err.Error()})
		return
	}
	// Do not add headers that the server did not send.
	rw.Header()["Date"], rw.Header()["Content-Type"] = nil, nil
	w.forward.ServeHTTP(rw, r)
}

// checkHost returns an error if host is not the name and port that were dialled.
func (w *webConn) checkHost(host string) error {
	w.c.mu.Lock()
	lax := w.c.unchecked
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
type copyBuffers struct{ pool sync.Pool }

func (b *copyBuffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *copyBuffers) Put(p []byte) { b.pool.Put(&p) }
