package repo

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/http/httpproxy"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/hostnet"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ids"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// DialCommand is the hidden command that ssh runs to connect to a public host:
// DialCommand HOST PORT.
const DialCommand = "dial-public"

const (
	lookupTime = 5 * time.Second
	dialTime   = 30 * time.Second
)

// ErrNotPublic reports that a host is this host, or on its network, or a metadata
// service. It is always wrapped.
var ErrNotPublic = errors.New("not a public address")

// dialer connects only to public addresses. Its fields are functions so that tests
// can replace them.
type dialer struct {
	resolve func(ctx context.Context, host string) ([]netip.Addr, error)
	blocked func(netip.Addr) string
}

var public = dialer{
	resolve: func(ctx context.Context, host string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	},
	blocked: notPublic,
}

// notPublic returns why an address is not a public one, or "" if it is.
func notPublic(addr netip.Addr) string {
	addr = addr.Unmap()
	if reason := policy.BlockedReason(addr); reason != "" {
		return reason
	}
	own, err := hostnet.Read()
	if err != nil {
		return "the networks of this host are unknown"
	}
	return own.Find(addr)
}

// lookup returns the addresses of a host. It fails if any of them is not public,
// because a connection could go to any of them.
func (d dialer) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	addrs, err := d.resolve(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("resolve %s: %w", host, err)
	}
	for _, a := range addrs {
		if reason := d.blocked(a); reason != "" {
			return nil, fmt.Errorf("%s resolves to %s, %w: %s", host, a, ErrNotPublic, reason)
		}
	}
	return addrs, nil
}

// dial connects to a public host. It dials only the addresses that it has checked,
// and checks each again when the kernel connects.
func (d dialer) dial(ctx context.Context, host, port string) (net.Conn, error) {
	addrs, err := d.lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	nd := net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		if reason := d.blocked(at.Addr()); reason != "" {
			return fmt.Errorf("%s is %w: %s", at.Addr(), ErrNotPublic, reason)
		}
		return nil
	}}
	err = fmt.Errorf("%s has no address", host)
	for _, a := range addrs {
		var conn net.Conn
		if conn, err = nd.DialContext(ctx, "tcp", net.JoinHostPort(a.Unmap().String(), port)); err == nil {
			return conn, nil
		}
	}
	return nil, err
}

// CheckPublic rejects a repository whose host is this host, or on its network, and
// one that git would not fetch through our dialer. It accepts a name that does not
// resolve now, because the name is checked again when git connects.
func CheckPublic(ctx context.Context, ref Ref) error { return public.check(ctx, ref) }

func (d dialer) check(ctx context.Context, ref Ref) error {
	scheme, _, isURL := strings.Cut(ref.URL, "://")
	if ref.Path != "" || ref.URL == "" || isURL && scheme != "https" && scheme != "ssh" {
		return fail.New(fail.Policy, "repository %s: only https and ssh URLs of public hosts are allowed here", ref.Slug)
	}
	if _, err := d.lookup(ctx, remoteHost(ref.URL)); errors.Is(err, ErrNotPublic) {
		return fail.New(fail.Policy, "repository %s: its host must have only public addresses: %w", ref.Slug, ErrNotPublic)
	}
	return nil
}

// DialMain connects standard input and output to a public host, as ssh's
// ProxyCommand.
func DialMain(ctx context.Context, host, port string, in io.Reader, out io.Writer) error {
	return public.pipe(ctx, host, port, in, out)
}

func (d dialer) pipe(ctx context.Context, host, port string, in io.Reader, out io.Writer) error {
	if !portNum.MatchString(port) || !validHost(host) && net.ParseIP(host) == nil {
		return fail.New(fail.Usage, "must be a host and a port, got %q and %q", host, port)
	}
	conn, err := d.dial(ctx, host, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() {
		_ = pipe.Copy(conn, in) // the other direction detects its end
	}()
	_, err = io.Copy(out, conn)
	return err
}

// publicRoute restricts a git process to public hosts: https goes through a proxy
// in this process, ssh through DialCommand. Redirects and other protocols are
// disabled.
type publicRoute struct {
	server *http.Server
	proxy  string // URL, with a password
	args   []string
	env    []string
}

// proxyVar is the environment variable that passes the proxy's URL to git. All
// users of the host could read it in an argument.
const proxyVar = "AGENT_SESSIONIZER_GIT_PROXY"

// route starts the proxy; close stops it. self is the path of this program.
func (d dialer) route(ctx context.Context, ref Ref, self string) (*publicRoute, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fail.New(fail.Host, "listen for git: %w", err)
	}
	secret := ids.New()
	r := &publicRoute{
		proxy: (&url.URL{Scheme: "http", User: url.UserPassword("git", secret), Host: l.Addr().String()}).String(),
		server: &http.Server{
			Handler:           connectProxy{d, "Basic " + base64.StdEncoding.EncodeToString([]byte("git:"+secret)), httpproxy.FromEnvironment().ProxyFunc()},
			ReadHeaderTimeout: lookupTime, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
		},
	}
	go func() { _ = r.server.Serve(l) }() // ends with close
	// git prefers the longest matching URL, so this setting overrides the user's
	// configuration for other URLs.
	keys := []string{"http."}
	if strings.HasPrefix(ref.URL, "https://") {
		keys = append(keys, "http."+ref.URL+".")
	}
	for _, key := range keys {
		r.args = append(
			r.args, "--config-env="+key+"proxy="+proxyVar,
			"-c", key+"proxyAuthMethod=basic", "-c", key+"followRedirects=false",
		)
	}
	r.args = append(r.args, "-c", "transfer.bundleURI=false", "-c", "fetch.uriProtocols=")
	command := ssh.Quote(self, DialCommand)
	r.env = []string{
		proxyVar + "=" + r.proxy, "NO_PROXY=", "no_proxy=", "GIT_ALLOW_PROTOCOL=https:ssh", "GIT_SSH_VARIANT=ssh",
		"GIT_SSH_COMMAND=" + ssh.Quote(
			"ssh", "-o", "ProxyCommand="+strings.ReplaceAll(command, "%", "%%")+" %h %p", "-o", "ControlMaster=no", "-o", "ControlPath=none",
			"-o", "BatchMode=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no",
		),
	}
	return r, nil
}

func (r *publicRoute) close() { _ = r.server.Close() } // connections that git still has open are no longer needed

// connectProxy is an HTTP proxy that supports only CONNECT.
type connectProxy struct {
	dialer
	authorization string
	own           func(*url.URL) (*url.URL, error) // returns the host's own proxy, or nil
}

func (p connectProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if subtle.ConstantTimeCompare([]byte(r.Header.Get("Proxy-Authorization")), []byte(p.authorization)) == 0 {
		w.Header().Set("Proxy-Authenticate", `Basic realm="git"`)
		w.WriteHeader(http.StatusProxyAuthRequired)
		return
	}
	if r.Method != http.MethodConnect {
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	host, port, err := net.SplitHostPort(r.Host)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	up, answers, err := p.connect(r.Context(), host, port)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer up.Close()
	down, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer down.Close()
	if !answers {
		if _, err := io.WriteString(down, "HTTP/1.1 200 Connected\r\n\r\n"); err != nil {
			return
		}
	}
	go func() {
		_ = pipe.Copy(up, buffered) // the other direction detects its end
	}()
	_, _ = io.Copy(down, up)
}

// connect connects to a public host. If this host has a proxy of its own, connect
// can check only the name, and that proxy answers the client.
func (p connectProxy) connect(ctx context.Context, host, port string) (up net.Conn, answers bool, err error) {
	to := net.JoinHostPort(host, port)
	via, err := p.own(&url.URL{Scheme: "https", Host: to})
	if err != nil || via == nil {
		up, err = p.dial(ctx, host, port)
		return up, false, err
	}
	if _, err := p.lookup(ctx, host); errors.Is(err, ErrNotPublic) {
		return nil, false, err
	}
	if via.Scheme != "http" || via.Port() == "" {
		return nil, false, fmt.Errorf("the proxy of this host, %s, must be http://HOST:PORT", via.Redacted())
	}
	if up, err = (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "tcp", via.Host); err != nil {
		return nil, false, err
	}
	ask := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: to}, Host: to, Header: http.Header{"User-Agent": {""}}}
	if via.User != nil {
		password, _ := via.User.Password()
		ask.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(via.User.Username()+":"+password)))
	}
	if err := ask.Write(up); err != nil {
		return nil, false, errors.Join(err, up.Close())
	}
	return up, true, nil
}

// errHidden returns the error that clients get for every failed fetch. The cause
// would reveal which hosts and ports answer.
func errHidden(ref Ref) error {
	return fail.New(fail.Failure, "%s: the repository could not be fetched", ref.Slug).WithHint("git ls-remote %s # on the host, shows the cause", ref.URL)
}

// ensurePublic does what Ensure does, for a repository that a client chose.
func (m *Mirrors) ensurePublic(ctx context.Context, ref Ref) (Mirror, error) {
	mirror, err := Mirror{}, m.dialer().check(ctx, ref)
	if err == nil {
		mirror, err = m.ensure(ctx, ref, nil) // without progress, which quotes the remote and errors
	}
	cause := cmp.Or(err, mirror.stale)
	if cause == nil || ctx.Err() != nil {
		return mirror, err
	}
	if m.Log != nil {
		m.Log.WarnContext(ctx, "fetch for a client failed", "repository", ref.Key, "error", cause)
	}
	if err != nil {
		return Mirror{}, errHidden(ref)
	}
	mirror.stale, mirror.Warning = nil, "using the history of the last fetch: the repository could not be fetched"
	return mirror, nil
}

func (m *Mirrors) dialer() dialer {
	if m.public != nil {
		return *m.public
	}
	return public
}
