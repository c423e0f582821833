package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/cluster"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/traceid"
)

// The hosts of a cluster reach each other's API through tunnels. This host's user asks its own serve
// (hostHandler), which asks the serve of the other host (servePeers). Each end proves with its
// certificate who it is.

// peerKey is the key of a request's connection in its context.
type peerKey struct{}

// servePeers serves the API to other hosts of the cluster, once this host is connected to it, until
// ctx ends. base is the context of the requests.
func (s *Server) servePeers(ctx, base context.Context) {
	if s.engine.Cluster == nil {
		return
	}
	select {
	case <-s.engine.Cluster.Ready():
	case <-ctx.Done():
		return
	}
	n, err := s.engine.Cluster.Node(ctx)
	if err != nil {
		return // ctx has ended
	}
	srv := s.server(base, endpoint{peer: true})
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, peerKey{}, c) }
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	// What limits the connections is the node: each host may open some, and all together too.
	if err := srv.Serve(n.Listen()); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
		s.log.Error("failed to serve other hosts of the cluster", "error", err)
	}
}

// loginPeer authenticates another host of the cluster by its certificate.
func loginPeer(req *request) *Problem {
	c, _ := req.r.Context().Value(peerKey{}).(net.Conn)
	i, ok := cluster.PeerOf(c)
	if !ok {
		return problem(http.StatusForbidden, codeForbidden, "agent-sessionizer cluster list", "the host has not proved who it is")
	}
	req.who = principal{Caller: ops.Peer(i.Name)}
	if !isOfAPI(req.r.URL.Path) {
		return problem(http.StatusForbidden, codeForbidden, seeDocs, "hosts of the cluster may use only the operations")
	}
	return nil
}

// isOfAPI reports whether a path is that of an operation or of a stream.
func isOfAPI(path string) bool {
	return strings.HasPrefix(path, "/api/v1/") || strings.HasPrefix(path, "/ws/")
}

// answerLimit is how long another host may take until its answer begins: an operation may create a
// checkpoint of a large session, for example.
const answerLimit = 11 * time.Minute

// hostHandler passes requests below ops.HostsPath on to other hosts of the cluster. A request counts
// as a stream while it runs, because it may be one.
func (s *Server) hostHandler() http.Handler {
	transport := &http.Transport{
		DialTLSContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			n, err := s.engine.Cluster.Node(ctx)
			if err != nil {
				return nil, err
			}
			return n.Dial(ctx, host)
		},
		MaxIdleConnsPerHost: 4, IdleConnTimeout: 30 * time.Second, ResponseHeaderTimeout: answerLimit,
		MaxResponseHeaderBytes: 2 * maxHeader, DisableCompression: true,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req := requestOf(r.Context())
		host, to, err := s.toHost(req)
		if err != nil {
			req.w.fail(s.problemOf(r.Context(), err))
			return
		}
		st, err := eventFeed{s}.newStream(req, "host", subject{}, 0)
		if err != nil {
			req.w.fail(s.problemOf(r.Context(), err))
			return
		}
		defer st.close()
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		go s.watchAccess(ctx, cancel, req.who, ops.Admin)
		upgraded := false
		(&httputil.ReverseProxy{
			Transport: transport, FlushInterval: -1, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
			Rewrite: func(p *httputil.ProxyRequest) {
				p.Out.URL, p.Out.Host = to, host
				for _, name := range []string{"Authorization", "Cookie", keyHeader} { // they are for this host
					p.Out.Header.Del(name)
				}
				p.Out.Header.Set(traceid.Header, req.trace)
			},
			ModifyResponse: func(resp *http.Response) error {
				upgraded = resp.StatusCode == http.StatusSwitchingProtocols
				resp.Header.Del("Set-Cookie")
				for name := range req.w.Header() { // this host's own, such as those about the content's safety
					resp.Header.Del(name)
				}
				return nil
			},
			ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) {
				if r.Context().Err() == nil {
					err = hostError(host, err)
				}
				req.w.fail(s.problemOf(r.Context(), err))
			},
		}).ServeHTTP(w, r.WithContext(ctx))
		if upgraded && req.w.status == 0 {
			req.w.status = http.StatusSwitchingProtocols
		}
	})
}

// hostError returns the error for a host that did not answer.
func hostError(host string, err error) error {
	if fail.CodeOf(err) == fail.Host {
		return err // it names the host
	}
	// Not wrapped: a timeout of the other host is not one of this request.
	return fail.New(fail.Host, "reach host %s: %v", host, err).WithHint("agent-sessionizer cluster show %s", host)
}

// toHost returns the host that a request is for, and what it asks of it. Only this host's own user may
// use other hosts: they know the host, and not who else has a token of it.
func (s *Server) toHost(req *request) (host string, to *url.URL, err error) {
	if !req.at.own {
		return "", nil, problem(http.StatusForbidden, codeForbidden, "use the socket of serve, on its host", "other hosts can be reached only through the socket")
	}
	host = req.r.PathValue("name")
	if err := cluster.CheckName(host); err != nil {
		return "", nil, err
	}
	path, ok := strings.CutPrefix(req.r.URL.EscapedPath(), ops.HostsPath+"/"+host)
	if !ok {
		return "", nil, problem(http.StatusNotFound, fail.NotFound.String(), seeDocs, "no such path")
	}
	if to, err = url.ParseRequestURI(path); err != nil || !isOfAPI(to.Path) {
		return "", nil, problem(http.StatusNotFound, fail.NotFound.String(), seeDocs, "no such path")
	}
	to.Scheme, to.Host, to.RawQuery = "https", host, req.r.URL.RawQuery
	p := s.engine.Cluster
	if p == nil {
		return "", nil, fail.New(fail.Conflict, "this host belongs to no cluster").WithHint("agent-sessionizer serve --help # --cluster and --join")
	}
	if !p.State.Role.Allows(cluster.Member) {
		return "", nil, fail.New(fail.Policy, "this host is a %s, which may not use other hosts of the cluster", p.State.Role).WithHint("agent-sessionizer cluster show")
	}
	n, err := p.Node(req.r.Context())
	if err != nil {
		return "", nil, err
	}
	m, ok := n.Member(host)
	switch {
	case !ok:
		return "", nil, fail.New(fail.NotFound, "no host %q in the cluster", host).WithHint("agent-sessionizer cluster list")
	case !m.Removed.IsZero():
		return "", nil, fail.New(fail.Host, "host %s was removed from the cluster", host).WithHint("agent-sessionizer cluster show %s", host)
	}
	return host, to, nil
}
