//go:build e2e

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The package registries are the only places in the real internet that a test needs.
// They are reached through the host's own proxy, as in a company. The proxy listens
// on loopback in the namespace, and a socket leads from it to this program's other
// process, which is outside.
//
//	guest ── gateway ── proxy ══ unix socket ══ relayRegistries ── registry

const (
	envRelay  = "E2E_RELAY"
	relayTime = time.Minute // to connect
)

// relayRegistries connects clients of its socket to the target that they name in the
// first line. proxy.dial decides which targets are registries.
func relayRegistries(ctx context.Context, dir string) ([]string, error) {
	path := filepath.Join(dir, "relay")
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go relay(c)
		}
	}()
	return []string{envRelay + "=" + path}, nil
}

func relay(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	target, err := r.ReadString('\n')
	if err != nil {
		return
	}
	to, err := net.DialTimeout("tcp", strings.TrimSpace(target), relayTime)
	if err != nil {
		fmt.Fprintf(c, "%s\n", strings.ReplaceAll(err.Error(), "\n", " "))
		return
	}
	defer to.Close()
	if _, err := io.WriteString(c, "\n"); err == nil {
		splice(c, r, to, to)
	}
}

// dialRelay asks the process outside for a connection.
func dialRelay(ctx context.Context, target string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", os.Getenv(envRelay))
	if err != nil {
		return nil, err
	}
	if _, err := io.WriteString(c, target+"\n"); err != nil {
		c.Close()
		return nil, err
	}
	// Byte by byte, because the rest comes from the registry.
	var said []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(c, b); err != nil {
			c.Close()
			return nil, err
		}
		if b[0] == '\n' {
			break
		}
		said = append(said, b[0])
	}
	if len(said) > 0 {
		c.Close()
		return nil, errors.New(string(said))
	}
	return c, nil
}

// splice copies both ways until both sides have ended.
func splice(a io.Writer, fromA io.Reader, b io.Writer, fromB io.Reader) {
	var wg sync.WaitGroup
	pass := func(to io.Writer, from io.Reader) {
		_, _ = io.Copy(to, from)
		if h, ok := to.(interface{ CloseWrite() error }); ok {
			_ = h.CloseWrite()
		}
	}
	wg.Go(func() { pass(a, fromB) })
	wg.Go(func() { pass(b, fromA) })
	wg.Wait()
}

// proxy is the host's HTTP proxy. It counts requests as "proxy HOST:PORT", and
// refuses hosts that it cannot reach.
type proxy struct {
	url     string
	forward httputil.ReverseProxy

	mu  sync.Mutex
	way map[string]func(ctx context.Context, port string) (net.Conn, error) // by host
}

func newProxy(t *testing.T) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{url: "http://" + l.Addr().String(), way: map[string]func(context.Context, string) (net.Conn, error){}}
	p.forward = httputil.ReverseProxy{
		Rewrite:       func(*httputil.ProxyRequest) {},
		Transport:     &http.Transport{DialContext: p.dial, DisableCompression: true},
		FlushInterval: -1,
	}
	server := &http.Server{Handler: p}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	return p
}

// leads lets the proxy reach a name at an address of the pretend internet.
func (p *proxy) leads(name, addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.way[name] = func(ctx context.Context, port string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(addr, port))
	}
}

// leadsOut lets the proxy reach a name in the real internet, which must be a
// registry. It fails the test when the registry cannot be reached.
func (p *proxy) leadsOut(t *testing.T, name, port string) {
	t.Helper()
	c, err := dialRelay(t.Context(), net.JoinHostPort(name, port))
	if err != nil {
		t.Fatalf("dial the package registry from this machine: %v", err)
	}
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.way[name] = func(ctx context.Context, port string) (net.Conn, error) {
		return dialRelay(ctx, net.JoinHostPort(name, port))
	}
}

func (p *proxy) dial(ctx context.Context, _, target string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return nil, err
	}
	hit("proxy " + target)
	p.mu.Lock()
	way := p.way[host]
	p.mu.Unlock()
	if way == nil {
		return nil, fmt.Errorf("the proxy knows no way to %s", host)
	}
	return way(ctx, port)
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method == http.MethodConnect:
		p.connect(w, r)
	case r.URL.IsAbs():
		p.forward.ServeHTTP(w, r)
	default:
		http.Error(w, "not a request for a proxy", http.StatusBadRequest)
	}
}

func (p *proxy) connect(w http.ResponseWriter, r *http.Request) {
	to, err := p.dial(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	c, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	if _, err := io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n"); err == nil {
		splice(c, buffered, to, to)
	}
}
