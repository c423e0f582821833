// Package ssh is the host's only way into a guest: dial with a pinned host
// key, run commands, hold a terminal, copy files.
//
// The guest is taken to be hostile. Whatever it sends is bounded, cleaned
// before it enters an error, and never becomes a path on the host unchecked;
// every wait ends with its context or with the connection. The package never
// learns a host key, reads no ssh configuration or agent, and never puts a
// command line, which may name secrets, into an error.
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

// Sentinels that callers branch on; both come wrapped.
var (
	// ErrHostKey: whoever answered does not hold the pinned key. Never retried.
	ErrHostKey = errors.New("the VM's host key is not the pinned one")
	// ErrUnreachable: nothing answers, or the connection was lost. Worth a retry.
	ErrUnreachable = errors.New("the VM does not answer over SSH")
)

// dialBound is how long a dial may take, handshake and login included: a login
// is a second's work for an emulated guest, and it may be one of ten.
const dialBound = 30 * time.Second

// The same for the first login after a boot: all tries, one of them, and the
// pause between two. One long try: short ones that are broken off cost a loaded
// host the most.
const (
	bootedBound = 5 * time.Minute
	bootedTry   = time.Minute
	bootedPause = 200 * time.Millisecond
)

// Target says where to log in, as whom, and who must answer.
type Target struct {
	Addr    string // "127.0.0.1:PORT"
	User    string
	Key     []byte // private key, PEM
	HostKey string // the only key accepted, authorized_keys form

	// Relay is the socket of a relay, which is asked first; "" asks none.
	Relay string

	// Patience is how long a login may take, 30 s if it is 0. A guest that has
	// just booted, among others that do, is slow.
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
	opened *ssh.Session // by the dial, for the first that needs one
	tasks  sync.WaitGroup
}

// DialBooted dials a guest that has just said that its sshd listens, for up to
// five minutes: its network may come up after that. Whenever it does not answer,
// waiting is called, and may end it with an error.
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

// Dial connects and logs in within half a minute, or t.Patience, or joins a
// connection that stands already when there is a relay.
func Dial(ctx context.Context, t Target) (*Client, error) {
	if t.Relay != "" {
		c, err := dialRelay(ctx, t)
		if err == nil || ctx.Err() != nil {
			return c, err
		}
		slog.Debug("no relay", "error", err) // there need not be one
	}
	signer, err := ssh.ParsePrivateKey(t.Key)
	if err != nil {
		return nil, errors.New("read the login key: not an unencrypted private key in PEM form")
	}
	pinned, err := parsePinned(t.HostKey)
	if err != nil {
		return nil, err
	}
	bound := cmp.Or(t.Patience, dialBound)
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", t.Addr)
	if err != nil {
		return nil, dialError(ctx, t.Addr, bound, err)
	}
	// The handshake knows no context: closing the connection is what ends it.
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()

	var verified, mismatch atomic.Bool // set by a goroutine of the library's
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
			// The library has no type for it; a test holds the text.
			return nil, fmt.Errorf("log in at %s as %s: the VM refuses our key", t.Addr, t.User)
		}
		return nil, dialError(ctx, t.Addr, bound, err)
	}
	if !stop() { // the context ended between the login and here
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

// session opens one, or hands out the one that the dial has opened.
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
	// Nobody waits for it: asked just as the connection ends, the library
	// sometimes never returns.
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

// Connect opens a TCP connection from inside the guest to an address as the
// guest sees it, "localhost:3000". It ends with the client.
func (c *Client) Connect(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := c.ssh.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("connect to %s in the guest: %s", addr, brief(err.Error()))
	}
	return conn, nil
}

func parsePinned(line string) (ssh.PublicKey, error) {
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
	if err != nil {
		return nil, errors.New("read the pinned host key: not a public key in authorized_keys form")
	}
	switch key.Type() {
	case ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521:
		return key, nil
	default:
		return nil, fmt.Errorf("pinned host key of type %s: only ed25519 and ecdsa are accepted", key.Type())
	}
}

// dialError keeps the caller's cancellation apart from a guest that is silent.
func dialError(ctx context.Context, addr string, bound time.Duration, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.DeadlineExceeded) {
		return fmt.Errorf("connect to %s: %w", addr, cause)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("connect to %s: %w within %s", addr, ErrUnreachable, bound)
	}
	return fmt.Errorf("connect to %s: %w: %s", addr, ErrUnreachable, brief(err.Error()))
}

// Done is closed when the connection is gone, for whatever reason.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close ends the connection and everything that runs over it, and waits for
// it. It must not be called from inside a writer that was given to Run.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	_ = c.conn.Close() // a second Close is no error of the caller's
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

// wait runs f, which blocks for as long as the guest likes, until it returns
// or ctx is done; in the latter case f goes on until the connection closes.
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

// KeepAlive asks the guest for a sign of life every interval and closes the
// connection when none comes within timeout. It returns at once; the watching
// ends with ctx or the connection.
func (c *Client) KeepAlive(ctx context.Context, interval, timeout time.Duration) {
	_ = c.spawn(func() { // closed already: nothing to keep alive
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
			// Any answer counts, a refusal too.
			_, err := wait(bound, c, func() (struct{}, error) {
				_, _, err := c.ssh.SendRequest("keepalive@openssh.com", true, nil)
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
