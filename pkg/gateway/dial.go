package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

const (
	dialTime  = 30 * time.Second       // for all addresses of a name
	tryTime   = 15 * time.Second       // for one address
	nextAfter = 250 * time.Millisecond // delay before the next address is tried in parallel
	keepAlive = 60 * time.Second
)

// deniedError reports a connection that the policy or the gateway does not allow.
type deniedError struct {
	decision
	addr netip.Addr
}

func (e *deniedError) Error() string { return e.Reason }

// connect opens a socket. The caller has already checked the address; allowed checks it
// once more when the kernel is about to connect.
func connect(ctx context.Context, to netip.AddrPort, allowed func(netip.AddrPort) error) (net.Conn, error) {
	d := net.Dialer{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: keepAlive},
		Control: func(_, address string, _ syscall.RawConn) error {
			at, err := netip.ParseAddrPort(address)
			if err != nil {
				return err
			}
			return allowed(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
		},
	}
	return d.DialContext(ctx, "tcp", to.String())
}

// dial connects to the name that the guest dialled. It goes through the host's proxy if one
// applies to the name, and otherwise to one of the name's allowed addresses.
func (c *conn) dial() (*upstream, decision, netip.Addr, error) {
	ctx, cancel := context.WithTimeout(c.ctx, dialTime)
	defer cancel()
	port := c.to.Port()
	q := question{Name: c.name, Port: port}
	via, err := c.g.proxy.forName("https", c.name, port)
	if err != nil {
		return nil, decision{}, netip.Addr{}, err
	}
	if via != nil {
		conn, err := tunnel(ctx, via, net.JoinHostPort(c.name, strconv.Itoa(int(port))))
		if err == nil {
			return c.track(conn), c.g.policy.decide(q), netip.Addr{}, nil
		}
		// Corporate proxies often allow only port 443. SSH then bypasses the proxy, as it
		// does on the host itself.
		if port == 443 || !errors.Is(err, errProxyRefused) {
			return nil, decision{}, netip.Addr{}, err
		}
	}
	addrs, err := c.g.resolver.lookup(ctx, c.name)
	if err != nil {
		return nil, decision{}, netip.Addr{}, err
	}
	var to []netip.AddrPort
	var refused error
	for _, a := range addrs {
		at := netip.AddrPortFrom(a, port)
		if err := c.checkAddr(at); err != nil {
			refused = err
			continue
		}
		to = append(to, at)
	}
	if len(to) == 0 {
		return nil, decision{}, netip.Addr{}, refused
	}
	conn, at, err := c.dialFirst(ctx, to)
	if err != nil {
		return nil, decision{}, netip.Addr{}, err
	}
	up := c.track(conn)
	q.Addr = at.Addr()
	d := c.ask(q) // from now on, a new policy is asked about this address
	if !d.Allowed {
		return nil, d, q.Addr, &deniedError{d, q.Addr}
	}
	return up, d, q.Addr, nil
}

// dialAddr connects to an address that does not stand for a name.
func (c *conn) dialAddr(to netip.AddrPort) (*upstream, error) {
	ctx, cancel := context.WithTimeout(c.ctx, dialTime)
	defer cancel()
	conn, err := c.g.connect(ctx, to, c.checkAddr)
	if err != nil {
		return nil, err
	}
	return c.track(conn), nil
}

// track registers conn to be aborted when c is cut or ends.
func (c *conn) track(conn net.Conn) *upstream {
	up := &upstream{Conn: conn}
	up.forget = c.onClose(up.abort)
	return up
}

// checkAddr decides about an address that the name resolved to, or that the guest dialled
// without a name.
func (c *conn) checkAddr(to netip.AddrPort) error {
	d := c.g.policy.decide(question{Name: c.name, Addr: to.Addr(), Port: to.Port()})
	if d.Allowed && !slices.Contains(c.g.policy.services(), to) {
		if reason := c.g.networks.find(to.Addr()); reason != "" {
			d.Allowed, d.Reason = false, reason
		}
	}
	if !d.Allowed {
		return &deniedError{d, to.Addr()}
	}
	return nil
}

type attempt struct {
	conn net.Conn
	to   netip.AddrPort
	err  error
}

// dialFirst connects to the first address that answers. A dead address costs little time,
// because the next one is tried in parallel.
func (c *conn) dialFirst(ctx context.Context, to []netip.AddrPort) (net.Conn, netip.AddrPort, error) {
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan attempt, len(to))
	running := 0
	defer func() {
		cancel()
		// Close the connections that lose the race. Only Close waits for this.
		if running > 0 {
			left := running
			c.g.tasks.Go(func() {
				for range left {
					if a := <-results; a.conn != nil {
						a.conn.Close()
					}
				}
			})
		}
	}()
	next := time.NewTimer(nextAfter)
	defer next.Stop()
	var first error
	for {
		if len(to) > 0 {
			at := to[0]
			to = to[1:]
			running++
			c.g.tasks.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, tryTime)
				defer cancel()
				conn, err := c.g.connect(ctx, at, c.checkAddr)
				results <- attempt{conn, at, err}
			})
			next.Reset(nextAfter)
		}
		if running == 0 {
			return nil, netip.AddrPort{}, first
		}
		select {
		case <-next.C:
		case a := <-results:
			running--
			if a.err == nil {
				return a.conn, a.to, nil
			}
			if first == nil {
				first = a.err
			}
		}
	}
}

// hostProxy returns the host's own proxy for a URL, or nil if there is none.
type hostProxy func(*url.URL) (*url.URL, error)

// forName returns the proxy for a name, or nil if there is none.
func (p hostProxy) forName(scheme, name string, port uint16) (*url.URL, error) {
	host := net.JoinHostPort(name, strconv.Itoa(int(port)))
	if scheme == "http" && port == portHTTP || scheme == "https" && port == portHTTPS {
		host = name
	}
	via, err := p(&url.URL{Scheme: scheme, Host: host})
	if err != nil {
		return nil, fmt.Errorf("the host's proxy: %w", err)
	}
	if via != nil && via.Scheme != "http" && via.Scheme != "https" {
		return nil, fmt.Errorf("the host's proxy must be http or https, got %q", via.Scheme)
	}
	return via, nil
}

var errProxyRefused = errors.New("the host's proxy refused")

// servesPlain reports whether the host reaches plain HTTP on a name through a proxy.
func (p hostProxy) servesPlain(name string) bool {
	via, err := p.forName("http", name, portHTTP)
	return err == nil && via != nil
}

// dialProxy connects to the host's own proxy, wherever the proxy is. Its address comes from
// the host's configuration, not from the guest.
func dialProxy(ctx context.Context, via *url.URL) (net.Conn, error) {
	d := net.Dialer{Timeout: tryTime, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: keepAlive, Interval: keepAlive}}
	conn, err := d.DialContext(ctx, "tcp", proxyHost(via))
	if err != nil {
		return nil, fmt.Errorf("the host's proxy: %w", err)
	}
	if via.Scheme == "https" {
		secure := tls.Client(conn, &tls.Config{ServerName: via.Hostname(), MinVersion: tls.VersionTLS12})
		if err := secure.HandshakeContext(ctx); err != nil {
			conn.Close()
			return nil, fmt.Errorf("the host's proxy: %w", err)
		}
		return secure, nil
	}
	return conn, nil
}

// proxyHost returns the proxy's address with its port.
func proxyHost(via *url.URL) string {
	switch {
	case via.Port() != "":
		return via.Host
	case via.Scheme == "https":
		return net.JoinHostPort(via.Hostname(), "443")
	default:
		return net.JoinHostPort(via.Hostname(), "80")
	}
}

// tunnel asks the host's proxy for a connection. The proxy chooses the address behind the
// name, so the gateway cannot check it.
func tunnel(ctx context.Context, via *url.URL, to string) (net.Conn, error) {
	conn, err := dialProxy(ctx, via)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	ask := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: to}, Host: to, Header: http.Header{}}
	ask.Header.Set("User-Agent", "") // reveals nothing about the client
	if via.User != nil {
		password, _ := via.User.Password()
		token := base64.StdEncoding.EncodeToString([]byte(via.User.Username() + ":" + password))
		ask.Header.Set("Proxy-Authorization", "Basic "+token)
	}
	r := bufio.NewReader(conn)
	answer, err := func() (*http.Response, error) {
		if err := ask.Write(conn); err != nil {
			return nil, err
		}
		return http.ReadResponse(r, ask)
	}()
	switch {
	case err != nil:
		conn.Close()
		return nil, fmt.Errorf("the host's proxy: %w", err)
	case answer.StatusCode != http.StatusOK:
		answer.Body.Close()
		conn.Close()
		return nil, fmt.Errorf("%w: %s", errProxyRefused, clean(answer.Status))
	case !stop():
		return nil, ctx.Err()
	}
	return &replayed{Conn: conn, first: io.LimitReader(r, int64(r.Buffered()))}, nil
}

// replayed is a connection that first returns bytes which were already read from it.
type replayed struct {
	net.Conn
	first io.Reader
}

func (r *replayed) Read(b []byte) (int, error) {
	if r.first != nil {
		n, err := r.first.Read(b)
		if n > 0 || len(b) == 0 {
			return n, nil
		}
		if err != nil {
			r.first = nil
		}
	}
	return r.Conn.Read(b)
}

// CloseWrite passes on the end of the stream.
func (r *replayed) CloseWrite() error { return pipe.CloseWrite(r.Conn) }
