package client

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
)

// Target says where a host's API is, and who asks.
type Target struct {
	// URL is https://HOST:PORT, http://LOOPBACK:PORT, unix:///PATH of a socket, or
	// ssh://[USER@]HOST[:PORT].
	URL   string
	Token string // for https and http
	// Host is another host of the cluster, which is reached through that one; "" for none.
	Host string
}

// connectCommand runs on the other host of an ssh:// target. It connects its standard
// streams to the socket of serve.
var connectCommand = []string{"agent-sessionizer", "serve", "connect"}

// New returns a client of the host that t names. It does not connect yet.
func New(t Target) (*Client, error) {
	u, err := url.Parse(t.URL)
	if err != nil {
		return nil, badTarget(t.URL)
	}
	c := &Client{name: t.URL, base: "http://localhost"}
	transport := &http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute, TLSHandshakeTimeout: 10 * time.Second}
	switch {
	case u.User != nil && u.Scheme != "ssh", u.RawQuery != "", u.Fragment != "":
		return nil, badTarget(u.Redacted())
	case u.Scheme == "unix" && u.Host == "" && strings.HasPrefix(u.Path, "/"):
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", u.Path)
		}
	case u.Scheme == "ssh" && u.Host != "" && strings.Trim(u.Path, "/") == "":
		argv, err := sshCommand(u)
		if err != nil {
			return nil, err
		}
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return startConn(ctx, argv) }
	case (u.Scheme == "https" || u.Scheme == "http") && u.Host != "" && strings.Trim(u.Path, "/") == "":
		if t.Token == "" {
			return nil, fail.New(fail.Secret, "%s needs a token", u.Redacted()).WithHint("on that host: agent-sessionizer serve token add NAME --scope admin")
		}
		if ip := net.ParseIP(u.Hostname()); u.Scheme == "http" && u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return nil, fail.New(fail.Usage, "%s would send the token unencrypted", u.Redacted()).WithHint("use https://%s or ssh://%s", u.Host, u.Hostname())
		}
		c.base, c.auth = u.Scheme+"://"+u.Host, "Bearer "+t.Token
	default:
		return nil, badTarget(u.Redacted())
	}
	if t.Host != "" {
		c.name, c.base, c.through = "host "+t.Host, c.base+ops.HostsPath+"/"+url.PathEscape(t.Host), true
	}
	c.http = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return c, nil
}

func badTarget(text string) error {
	return fail.New(fail.Usage, "host must be https://HOST:PORT, ssh://[USER@]HOST or unix:///PATH, got %q", text)
}

// sshCommand returns the command that reaches the API over SSH. The user's SSH configuration
// decides how to log in.
func sshCommand(u *url.URL) ([]string, error) {
	argv := []string{"ssh", "-T", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no"}
	if _, set := u.User.Password(); set {
		return nil, fail.New(fail.Usage, "a password must not be part of %s", u.Redacted())
	}
	if u.Port() != "" {
		argv = append(argv, "-p", u.Port())
	}
	to := u.Hostname()
	if name := u.User.Username(); name != "" {
		to = name + "@" + to
	}
	return append(append(argv, "--", to), connectCommand...), nil
}

// startConn starts a command, and returns its standard streams as a connection.
func startConn(ctx context.Context, argv []string) (net.Conn, error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), argv[0], argv[1:]...) // it outlives the request that needs it first
	near, far := net.Pipe()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = far, far, os.Stderr // ssh may ask for a passphrase
	cmd.WaitDelay = time.Second                             // its standard input stays open if it ends first
	if err := cmd.Start(); err != nil {
		return nil, fail.New(fail.Host, "start %s: %w", argv[0], errors.Join(err, near.Close(), far.Close()))
	}
	go func() {
		_ = cmd.Wait() // its message is on stderr
		_ = far.Close()
	}()
	return &commandConn{near, cmd}, nil
}

// commandConn is a connection to a command, which ends with it.
type commandConn struct {
	net.Conn
	cmd *exec.Cmd
}

func (c *commandConn) Close() error {
	err := c.Conn.Close()
	if kerr := c.cmd.Process.Kill(); !errors.Is(kerr, os.ErrProcessDone) {
		err = errors.Join(err, kerr)
	}
	return err
}

// Connect copies between two streams and the socket of serve, until either ends.
func Connect(ctx context.Context, socket string, in io.Reader, out io.Writer) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return fail.New(fail.Host, "connect to serve: %w", err).WithHint("on this host: agent-sessionizer serve")
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	ended := make(chan error, 2)
	go func() { ended <- pipe.Copy(conn, in) }()
	go func() { ended <- pipe.Copy(out, conn) }()
	return <-ended
}
