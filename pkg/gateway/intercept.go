package gateway

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/atomicfile"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/gateway/intercept"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/login"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
)

const (
	handshakeTime = 30 * time.Second
	// Connections of one guest connection to a server that speaks no HTTP/2.
	maxUpstream    = 64
	upstreamBuffer = 64 << 10 // bytes
	// Bytes of the answers on an HTTP/2 connection that the guest has not read yet.
	maxReceived = 2 << 20
	// Hosts of which a guest can make the gateway remember the secrets.
	maxExchanges = 1000
)

// Secret is a secret that the gateway puts into requests to some hosts, in the place of a text
// that the guest has.
type Secret struct {
	Name    string // of the variable
	Like    string // what the placeholder begins with
	Value   secret.Value
	Hosts   []string // canonical names, or *.ZONE
	Body    bool     // whether the placeholder is also replaced in bodies
	Problem string   // why there is no value; "" if there is one
	// The login whose access token is the value; the gateway reads it when a request needs it.
	Login *login.Login

	token loginToken
}

// Interception is what the guest needs for the gateway's secrets.
type Interception struct {
	Certificate  []byte            `json:"certificate"`  // to trust, PEM; nil without secrets
	Placeholders map[string]string `json:"placeholders"` // by the secret's name
}

// These are the messages of Process.SetSecrets. Their types are not exported, because they
// contain values that can be printed.
type (
	secretsRequest struct {
		Secrets []secretRequest `json:"secrets"`
	}
	secretRequest struct {
		Name    string   `json:"name"`
		Like    string   `json:"like,omitempty"`
		Value   string   `json:"value"`
		Hosts   []string `json:"hosts"`
		Body    bool     `json:"body,omitempty"`
		Problem string   `json:"problem,omitempty"`

		Login *login.Login `json:"login,omitempty"`
	}
)

// maxSecretsBody limits a secretsRequest, in bytes.
const maxSecretsBody = secret.MaxSecrets * (2*secret.MaxBytes + 64<<10)

func (r secretsRequest) secrets() (all []Secret) {
	for _, s := range r.Secrets {
		all = append(all, Secret{Name: s.Name, Like: s.Like, Value: secret.NewValue(s.Value), Hosts: s.Hosts, Body: s.Body, Problem: s.Problem, Login: s.Login})
	}
	return all
}

// interception is what the gateway needs to read the requests to some hosts.
type interception struct {
	authority    *intercept.Authority
	secrets      []Secret
	bound        map[string][]intercept.Bound // by host or *.ZONE
	placeholders map[string]string            // by the secret's name
	ruled        []string                     // hosts and *.ZONE with request rules or a budget

	mu       sync.Mutex
	exchange map[string]*intercept.Exchange // by host
}

// SetSecrets makes the gateway read the requests to the hosts of the secrets, and replace their
// placeholders. A secret that the gateway had before under that name keeps its placeholder.
// Connections to these hosts that the gateway does not read are cut.
func (g *Gateway) SetSecrets(secrets []Secret) (Interception, error) {
	g.interceptMu.Lock()
	defer g.interceptMu.Unlock()
	return g.intercept(secrets, g.readHosts())
}

// RestrictSecrets takes from the secrets the hosts, and the use in bodies, that their bindings in
// bound do not have: what allowed these has been removed from the settings, and with it the
// request rules.
func (g *Gateway) RestrictSecrets(bound []Secret) (Interception, error) {
	g.interceptMu.Lock()
	defer g.interceptMu.Unlock()
	was := g.intercepted.Load()
	if was == nil {
		return Interception{}, nil
	}
	now := slices.Clone(was.secrets)
	for i, s := range now {
		var to Secret
		if j := slices.IndexFunc(bound, func(b Secret) bool { return b.Name == s.Name }); j >= 0 {
			to = bound[j]
		}
		hosts := slices.DeleteFunc(slices.Clone(s.Hosts), func(h string) bool { return !slices.Contains(to.Hosts, h) })
		if len(hosts) > 0 {
			now[i].Hosts, now[i].Body = hosts, s.Body && to.Body
		} else { // the hosts stay, so that requests get an explanation
			now[i] = Secret{Name: s.Name, Like: s.Like, Hosts: s.Hosts, Problem: "the settings have changed; on the host: agent-sessionizer secrets refresh SESSION"}
		}
	}
	return g.intercept(now, was.ruled)
}

// intercept replaces the interception. The caller holds interceptMu.
func (g *Gateway) intercept(secrets []Secret, ruled []string) (Interception, error) {
	was := g.intercepted.Load()
	known := was
	if known == nil {
		known = g.recall()
	}
	x, err := known.next(secrets, ruled)
	if err == nil && (x == nil || known == nil || x.authority != known.authority || !maps.Equal(x.placeholders, known.placeholders)) {
		err = g.remember(x)
	}
	if err != nil {
		return Interception{}, err
	}
	g.intercepted.Store(x)
	g.conns.each(func(c *conn) {
		if c.to.Port() == portHTTPS && was.find(c.name) == nil && x.find(c.name) != nil {
			c.abort("its requests are read from now on")
		}
	})
	return x.view(), nil
}

// remembered is the content of the file Options.Remember.
type remembered struct {
	Authority    *intercept.Authority `json:"authority"`
	Placeholders map[string]string    `json:"placeholders"`
}

// recall returns an interception of nothing that knows what the guest may know, nil for nothing. A
// damaged file is as good as none: the guest then gets another certificate, and new placeholders.
func (g *Gateway) recall() *interception {
	var r remembered
	b, err := os.ReadFile(g.rememberFile)
	if err != nil || json.Unmarshal(b, &r) != nil || r.Authority == nil {
		return nil
	}
	return &interception{authority: r.Authority, placeholders: r.Placeholders}
}

// remember writes what the guest is about to know.
func (g *Gateway) remember(x *interception) error {
	if g.rememberFile == "" || x == nil {
		return nil
	}
	b, err := json.Marshal(remembered{x.authority, x.placeholders})
	if err == nil {
		err = atomicfile.Write(g.rememberFile, b, 0o600)
	}
	if err != nil {
		return fail.New(fail.Host, "record the gateway's certificate: %w", err)
	}
	return nil
}

// readRuledHosts makes the gateway read the requests to the hosts that the policy has request
// rules for, and that a budget is about.
func (g *Gateway) readRuledHosts() error {
	g.interceptMu.Lock()
	defer g.interceptMu.Unlock()
	ruled := g.readHosts()
	var secrets []Secret
	if was := g.intercepted.Load(); was != nil {
		if slices.Equal(was.ruled, ruled) {
			return nil
		}
		secrets = was.secrets
	}
	_, err := g.intercept(secrets, ruled)
	return err
}

// Interception returns what the guest needs at present.
func (g *Gateway) Interception() Interception { return g.intercepted.Load().view() }

func (x *interception) view() Interception {
	if x == nil {
		return Interception{}
	}
	return Interception{x.authority.PEM(), x.placeholders}
}

// next returns the interception for secrets and hosts with request rules that replace those of
// x. It is nil without any.
func (x *interception) next(secrets []Secret, ruled []string) (*interception, error) {
	if len(secrets) == 0 && len(ruled) == 0 {
		return nil, nil
	}
	now := &interception{
		secrets: secrets, ruled: ruled,
		bound: map[string][]intercept.Bound{}, placeholders: map[string]string{}, exchange: map[string]*intercept.Exchange{},
	}
	if x != nil { // also of secrets that are not bound at present: they may be again
		now.placeholders = maps.Clone(x.placeholders)
	}
	for _, s := range secrets {
		text := placeholder(s.Like)
		if x != nil && strings.HasPrefix(x.placeholders[s.Name], s.Like) && x.placeholders[s.Name] != "" {
			text = x.placeholders[s.Name]
		}
		now.placeholders[s.Name] = text
		for _, host := range s.Hosts {
			now.bound[host] = append(now.bound[host], intercept.Bound{Name: s.Name, Placeholder: text, Value: s.Value, Body: s.Body, Problem: s.Problem})
		}
		if s.Login != nil {
			now.addRefresh(x, s)
		}
	}
	hosts := slices.AppendSeq(slices.Clone(ruled), maps.Keys(now.bound))
	slices.Sort(hosts)
	hosts = slices.Compact(hosts)
	if x != nil && !slices.ContainsFunc(hosts, func(h string) bool { return !x.authority.Covers(h) }) {
		now.authority = x.authority
		return now, nil
	}
	var err error
	now.authority, err = intercept.NewAuthority(hosts)
	return now, err
}

// placeholder returns a random text that begins as the real values do.
func placeholder(like string) string {
	const length = 40 // of GitHub's tokens
	const random = 26 // characters with 5 bits each: 130 bits
	text := like + rand.Text() + rand.Text()
	return text[:max(length, len(like)+random)]
}

// find returns the exchange of the secrets that are bound to a host, or nil if the requests to
// it are not read.
func (x *interception) find(host string) *intercept.Exchange {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if e, known := x.exchange[host]; known {
		return e
	}
	var all []intercept.Bound
	for pattern, bound := range x.bound {
		if intercept.Matches(pattern, host) {
			all = append(all, bound...)
		}
	}
	if len(all) == 0 && !slices.ContainsFunc(x.ruled, func(pattern string) bool { return intercept.Matches(pattern, host) }) {
		return nil
	}
	e := intercept.NewExchange(all)
	if len(x.exchange) < maxExchanges {
		x.exchange[host] = e
	}
	return e
}

// serveIntercepted reads the requests of a TLS connection, whose ClientHello was checked, and
// passes them on over another one.
func (c *conn) serveIntercepted(guest net.Conn, x *interception) {
	certificate, err := x.authority.Certificate(c.name)
	if err != nil {
		c.fail(protoTLS, err)
		return
	}
	if !c.crowded { // a batchConn's buffers are too large for that many connections
		out := newBatchConn(guest)
		if !c.g.run(nil, out.pass) {
			return
		}
		defer out.stop()
		guest = out
	}
	session := tls.Server(guest, &tls.Config{
		Certificates: []tls.Certificate{*certificate}, NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS12, DynamicRecordSizingDisabled: true,
	})
	ctx, cancel := context.WithTimeout(c.ctx, handshakeTime)
	err = session.HandshakeContext(ctx)
	cancel()
	if err != nil {
		c.fail(protoTLS, fmt.Errorf("the client refused the gateway's certificate or TLS settings: %w", err))
		return
	}
	wc := &webConn{Conn: session, c: c, done: make(chan struct{}), intercepted: true}
	wc.transport = c.secureTransport(session.ConnectionState().NegotiatedProtocol == "h2")
	c.serveWeb(wc, c.g.web.secure)
}

// secureTransport returns a transport that connects to the server of the dialled name, over
// HTTP/2 if the guest speaks that and the server does too.
func (c *conn) secureTransport(http2 bool) *http.Transport {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(http2)
	next := []string{"h2", "http/1.1"}
	if !http2 {
		next = next[1:]
	}
	return &http.Transport{
		Protocols:              &protocols,
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerStream: maxReceived, MaxReceiveBufferPerConnection: maxReceived},
		MaxConnsPerHost:        maxUpstream,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
		DialTLSContext:         func(context.Context, string, string) (net.Conn, error) { return c.dialTLS(next) },
	}
}

// dialTLS connects to the server of the dialled name, verifies its certificate, and agrees on one
// of the protocols.
func (c *conn) dialTLS(protocols []string) (net.Conn, error) {
	up, d, addr, err := c.dial()
	if err != nil {
		return nil, &dialError{err}
	}
	session := tls.Client(bufferedConn{up, bufio.NewReaderSize(up, upstreamBuffer)}, &tls.Config{
		ServerName: c.name, RootCAs: c.g.roots, NextProtos: protocols, MinVersion: tls.VersionTLS12, DynamicRecordSizingDisabled: true,
	})
	ctx, cancel := context.WithTimeout(c.ctx, handshakeTime)
	defer cancel()
	if err := session.HandshakeContext(ctx); err != nil {
		up.abort()
		var bad *tls.CertificateVerificationError
		if errors.As(err, &bad) {
			err = fmt.Errorf("the certificate of %s: %w", c.name, bad.Err)
		}
		return nil, &dialError{err}
	}
	c.open(protoTLS, d, addr)
	return session, nil
}

// bufferedConn reads several TLS records at once.
type bufferedConn struct {
	*upstream
	r *bufio.Reader
}

func (c bufferedConn) Read(p []byte) (int, error) { return c.r.Read(p) }

// dialError is returned when no connection could be made: no request was sent.
type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }
