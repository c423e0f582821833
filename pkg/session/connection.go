package session

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/secret"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// Connections are SSH connections to sessions' guests.
type Connections struct{ Paths config.Paths }

// relaySocket returns the socket on which a ready session's keeper shares its
// connection to the guest with other commands.
func (c Connections) relaySocket(id string) string {
	return filepath.Join(c.Paths.SessionDir(id), "ssh.sock")
}

const (
	aliveEvery = 15 * time.Second
	aliveWait  = 30 * time.Second

	redialMin = 250 * time.Millisecond
	redialMax = 15 * time.Second
	steady    = time.Minute // a connection that lasted this long resets the backoff
)

// connection is the one connection that a keeper holds to the guest of a ready session and
// shares over a socket. After a loss it reconnects.
type connection struct {
	dial   func(context.Context) (*ssh.Client, error)
	socket string
	log    *slog.Logger
	cancel func() // ends the connection
	ended  sync.WaitGroup

	mu     sync.Mutex
	client *ssh.Client
	change chan struct{} // closed and replaced whenever client changes
}

// connect shares a connection to the guest of s until stop is called. It begins with client, whose
// socket exists when connect returns, or logs in if client is nil. It closes client.
func (w *Worker) connect(ctx context.Context, s Session, client *ssh.Client) *connection {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	connections := Connections{Paths: w.Sessions.Config.Paths}
	c := &connection{log: w.Log, socket: connections.relaySocket(s.ID), change: make(chan struct{})}
	c.dial = func(ctx context.Context) (*ssh.Client, error) {
		cur, err := w.Sessions.Get(ctx, s.ID)
		if err != nil {
			return nil, err
		}
		return connections.DialOwn(ctx, cur)
	}
	var l *net.UnixListener
	if client != nil {
		l = c.listen(ctx)
	}
	c.cancel = cancel
	c.ended.Go(func() { c.maintain(ctx, client, l) })
	return c
}

// stop ends the connection, and waits for its end.
func (c *connection) stop() {
	c.cancel()
	c.ended.Wait()
}

// maintain serves client, and after its loss other connections, until ctx ends.
func (c *connection) maintain(ctx context.Context, client *ssh.Client, l *net.UnixListener) {
	again(ctx, c.log, "guest connection failed", redialMin, redialMax, func(ctx context.Context) (err error) {
		if client == nil {
			if client, err = c.dial(ctx); err != nil {
				return err
			}
			l = c.listen(ctx)
		}
		defer func() { client = nil }()
		return c.serve(ctx, client, l)
	})
}

// again repeats f, which holds a connection until it is lost, until ctx ends. The pauses
// between grow from least to most, and are short again after a connection that was steady.
func again(ctx context.Context, log *slog.Logger, failure string, least, most time.Duration, f func(context.Context) error) {
	pauses := &backoff.ExponentialBackOff{InitialInterval: least, Multiplier: 2, MaxInterval: most}
	lastError := ""
	for {
		began := time.Now()
		err := f(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > steady {
			pauses.Reset()
			lastError = ""
		}
		if text := err.Error(); text != lastError { // logged once, not on every attempt
			log.WarnContext(ctx, failure, "error", err)
			lastError = text
		}
		select {
		case <-time.After(pauses.NextBackOff()):
		case <-ctx.Done():
			return
		}
	}
}

// listen creates the socket. It returns nil after a failure: the keeper's own use of the connection
// does not need the socket, and commands can log in to the guest themselves.
func (c *connection) listen(ctx context.Context) *net.UnixListener {
	l, err := ssh.ListenRelay(c.socket)
	if err != nil {
		c.log.WarnContext(ctx, "guest connection not shared", "error", err)
		return nil
	}
	return l
}

// serve shares client over l, unless l is nil, until client is lost. Then it closes both.
func (c *connection) serve(ctx context.Context, client *ssh.Client, l *net.UnixListener) error {
	defer client.Close()
	client.KeepAlive(ctx, aliveEvery, aliveWait)
	c.set(client)
	defer c.set(nil)
	if l != nil {
		return client.Relay(ctx, l)
	}
	select {
	case <-client.Done():
		return ssh.ErrUnreachable
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *connection) set(client *ssh.Client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.client = client
	close(c.change)
	c.change = make(chan struct{})
}

// current returns the connection, or nil.
func (c *connection) current() *ssh.Client {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.client
}

// get waits until a connection exists. The connection belongs to the keeper; callers
// must not close it.
func (c *connection) get(ctx context.Context) (*ssh.Client, error) {
	for {
		c.mu.Lock()
		client, change := c.client, c.change
		c.mu.Unlock()
		if client != nil {
			select {
			case <-client.Done(): // maintain will notice
			default:
				return client, nil
			}
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, errors.Join(ssh.ErrUnreachable, context.Cause(ctx))
		}
	}
}

// RunMasked runs a command line in a guest. It masks the guest's secrets in the output, as in
// the logs of tasks, because others than the host's user may see it.
func (c Connections) RunMasked(ctx context.Context, s Session, line string, stdout, stderr io.Writer) error {
	conn, err := c.Dial(ctx, s)
	if err != nil {
		return err
	}
	defer conn.Close()
	values, err := s.Guest(conn).Secrets(ctx)
	if err != nil {
		return err
	}
	redact := secret.NewRedactor(values...)
	out, errOut := redact.Mask(stdout), redact.Mask(stderr)
	err = conn.Run(ctx, line, ssh.IO{Stdout: out, Stderr: errOut})
	return errors.Join(err, out.Close(), errOut.Close())
}
