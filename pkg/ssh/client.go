// Package ssh is the host's only access to a guest: it dials with a pinned host
// key, runs commands, connects terminals and copies files.
//
// It treats the guest as hostile. Everything a guest sends is bounded, cleaned
// before it becomes part of an error, and checked before it becomes a path on the
// host. Every wait ends with its context or with the connection. The package never
// learns a host key, and reads no ssh configuration or agent. It never puts a
// command line, which may contain secrets, into an error.
package ssh

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"
)

// Sentinel errors for callers; they are always wrapped.
var (
	// ErrHostKey reports that the server does not hold the pinned key. Callers must
	// not retry.
	ErrHostKey = errors.New("the VM's host key differs from the pinned key")
	// ErrUnreachable reports that nothing answers, or that the connection was lost.
	// Callers may retry.
	ErrUnreachable = errors.New("the VM does not answer over SSH")
	// ErrRejected reports that the server holds the pinned key, but does not accept the login.
	ErrRejected = errors.New("the VM rejected the key")
)

// dialBound is how long a dial may take, including handshake and login. A login
// takes an emulated guest about a second, and ten of them may happen at once.
const dialBound = 30 * time.Second

// Bounds of the first login after a boot: for all attempts, for one attempt, and
// the pause between two. One attempt may be long, because short attempts that are
// aborted cost a loaded host the most.
const (
	bootedBound = 5 * time.Minute
	bootedTry   = time.Minute
	bootedPause = 200 * time.Millisecond
)

// Target holds the address and user of a login, and the key that the server must
// have.
type Target struct {
	Addr    string // "127.0.0.1:PORT"; with Connect, only a name for errors
	User    string
	Key     []byte // private key, PEM
	HostKey string // the only accepted key, in authorized_keys format

	// Certificate is for Key, in authorized_keys format; "" if the server knows Key itself.
	Certificate string

	// Relay is the socket of a relay, which Dial tries first; "" for none.
	Relay string

	// Connect opens the connection to the server, instead of dialling Addr; nil for none. The
	// connection need not be private.
	Connect func(context.Context) (net.Conn, error)

	// Patience bounds a login, 30 s if 0. A guest that has just booted is slow,
	// especially if others boot at the same time.
	Patience time.Duration
}

// Client is one connection. Its methods may be called concurrently.
type Client struct {
	target Target
	conn   net.Conn
	ssh    *ssh.Client
	done   chan struct{}

	mu     sync.Mutex
	closed bool
	opened *ssh.Session // opened by the dial, for the first caller that needs a session
	tasks  sync.WaitGroup

	relayed, relaying atomic.Int64 // channels that Relay opened, and those that are open
}

// DialBooted dials a guest that has just reported that its sshd listens. It tries
// for up to five minutes, because the guest's network may come up later. It calls
// waiting after each attempt without an answer; an error from waiting ends the
// dial.
func DialBooted(ctx context.Context, t Target, waiting func() error) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, bootedBound)
	defer cancel()
	t.Patience = bootedTry
	for {
		c, err := Dial(ctx, t)
		if !errors.Is(err, ErrUnreachable) {
			return c, err
		}
		if err := waiting(); err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(bootedPause):
		}
	}
}

// Dial connects and logs in within half a minute, or within t.Patience if set. If
// there is a relay, Dial uses its existing connection instead.
func Dial(ctx context.Context, t Target) (*Client, error) {
	if t.Relay != "" {
		c, err := dialRelay(ctx, t)
		if err == nil || ctx.Err() != nil {
			return c, err
		}
		slog.Debug("relay unavailable", "error", err) // a relay is optional
	}
	signer, err := t.signer()
	if err != nil {
		return nil, err
	}
	pinned, err := parsePinned(t.HostKey)
	if err != nil {
		return nil, err
	}
	bound := cmp.Or(t.Patience, dialBound)
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	var conn net.Conn
	if t.Connect != nil {
		if conn, err = t.Connect(ctx); err != nil {
			return nil, err
		}
	} else if conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", t.Addr); err != nil {
		return nil, dialError(ctx, t.Addr, bound, err)
	}
	// The handshake does not take a context: closing the connection ends it.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	var verified, mismatch atomic.Bool // set by a goroutine of the library
	c, chans, reqs, err := ssh.NewClientConn(conn, t.Addr, &ssh.ClientConfig{
		Config: ssh.Config{
			KeyExchanges: []string{ssh.KeyExchangeMLKEM768X25519, ssh.KeyExchangeCurve25519},
			Ciphers:      []string{ssh.CipherAES256GCM, ssh.CipherAES128GCM, ssh.CipherChaCha20Poly1305},
			MACs:         []string{ssh.HMACSHA256ETM, ssh.HMACSHA512ETM},
		},
		User: t.User,
		Auth: []ssh.AuthMethod{ssh.PublicKeys(signer)},
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			if slices.Equal(key.Marshal(), pinned.Marshal()) {
				verified.Store(true)
				return nil
			}
			mismatch.Store(true)
			return ErrHostKey
		},
		HostKeyAlgorithms: []string{pinned.Type()},
	})
	if err != nil {
		_ = conn.Close()
		negotiation, ok := errors.AsType[*ssh.AlgorithmNegotiationError](err)
		switch {
		case mismatch.Load(), ok && negotiation.What == "host key":
			return nil, fmt.Errorf("log in at %s: %w", t.Addr, ErrHostKey)
		case verified.Load() && ctx.Err() == nil && strings.Contains(err.Error(), "unable to authenticate"):
			// The library has no error type for this; a test checks the text.
			return nil, fmt.Errorf("log in at %s as %s: %w", t.Addr, t.User, ErrRejected)
		}
		return nil, dialError(ctx, t.Addr, bound, err)
	}
	if !stop() { // the context ended after the login
		_ = c.Close()
		return nil, dialError(ctx, t.Addr, bound, ctx.Err())
	}
	return newClient(t, conn, c, chans, reqs), nil
}

func newClient(t Target, conn net.Conn, c ssh.Conn, chans <-chan ssh.NewChannel, reqs <-chan *ssh.Request) *Client {
	cl := &Client{target: t, conn: conn, ssh: ssh.NewClient(c, chans, reqs), done: make(chan struct{})}
	cl.tasks.Go(func() {
		_ = cl.ssh.Wait()
		close(cl.done)
	})
	return cl
}

// session returns a new session, or the one that the dial has opened.
func (c *Client) session() (*ssh.Session, error) {
	c.mu.Lock()
	s := c.opened
	c.opened = nil
	c.mu.Unlock()
	if s != nil {
		return s, nil
	}
	type result struct {
		s   *ssh.Session
		err error
	}
	done := make(chan result, 1)
	// This goroutine is not awaited: if the connection ends at the wrong moment,
	// the library sometimes never returns.
	go func() {
		s, err := c.ssh.NewSession()
		done <- result{s, err}
	}()
	select {
	case r := <-done:
		return r.s, r.err
	case <-c.done:
		return nil, io.EOF
	}
}

// Connect opens a TCP connection from inside the guest to an address as the guest
// sees it, for example "localhost:3000". The connection ends with the client.
func (c *Client) Connect(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := c.ssh.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("connect to %s in the guest: %s", addr, brief(err.Error()))
	}
	return conn, nil
}

// Listen makes the guest's sshd listen on a UNIX socket, which only the user of the login can use.
// The listener ends with the client.
func (c *Client) Listen(path string) (net.Listener, error) {
	l, err := c.ssh.ListenUnix(path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s in the guest: %s", path, brief(err.Error()))
	}
	return l, nil
}

func parsePinned(line string) (ssh.PublicKey, error) {
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		return nil, errors.New("read the pinned host key: must be a public key in authorized_keys format")
	}
	switch key.Type() {
	case ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521:
		return key, nil
	default:
		return nil, fmt.Errorf("pinned host key: type must be ed25519 or ecdsa, got %s", key.Type())
	}
}

// dialError distinguishes the caller's cancellation from a guest that does not
// answer.
func dialError(ctx context.Context, addr string, bound time.Duration, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("connect to %s: %w", addr, cause)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("connect to %s: %w within %s", addr, ErrUnreachable, bound)
	}
	return fmt.Errorf("connect to %s: %w: %s", addr, ErrUnreachable, brief(err.Error()))
}

// Done returns a channel that is closed when the connection ends for any reason.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the connection and everything that uses it, and waits for both. It
// must not be called from inside a writer that was passed to Run.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	_ = c.conn.Close() // a second Close is harmless
	c.tasks.Wait()
	return nil
}

// spawn runs f in a goroutine that Close waits for.
func (c *Client) spawn(f func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("%w: the connection is closed", ErrUnreachable)
	}
	c.tasks.Go(f)
	return nil
}

// wait runs f, which may block as long as the guest likes, until f returns or ctx
// is done. In the latter case f continues until the connection closes.
func wait[T any](ctx context.Context, c *Client, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	var zero T
	if err := c.spawn(func() {
		v, err := f()
		done <- result{v, err}
	}); err != nil {
		return zero, err
	}
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		return zero, context.Cause(ctx)
	}
}

// keepAlive is OpenSSH's request that checks a connection. Any answer counts, even a refusal.
const keepAlive = "keepalive@openssh.com"

// KeepAlive sends the guest a request at every interval and closes the connection
// if no reply arrives within timeout. It returns immediately; its goroutine ends
// with ctx or the connection.
func (c *Client) KeepAlive(ctx context.Context, interval, timeout time.Duration) {
	_ = c.spawn(func() { // fails only if the connection is already closed
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-c.done:
				return
			case <-tick.C:
			}
			bound, cancel := context.WithTimeout(ctx, timeout)
			_, err := wait(bound, c, func() (struct{}, error) {
				_, _, err := c.ssh.SendRequest(keepAlive, true, nil)
				return struct{}{}, err
			})
			cancel()
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				_ = c.conn.Close()
				return
			}
		}
	})
}
