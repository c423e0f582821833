package session

import (
	"context"
	"errors"
	"io"
	"log/slog"
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

// connection is the one connection that a watching keeper holds to its guest and
// shares over a socket. After a loss it reconnects, for as long as the keeper
// watches.
type connection struct {
	dial   func(context.Context) (*ssh.Client, error)
	socket string
	log    *slog.Logger

	mu     sync.Mutex
	client *ssh.Client
	change chan struct{} // closed and replaced whenever client changes
}

// start maintains the connection until stop is called; stop waits for its end.
func (c *connection) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	c.change = make(chan struct{})
	var tasks sync.WaitGroup
	tasks.Go(func() { c.maintain(ctx) })
	return func() {
		cancel()
		tasks.Wait()
	}
}

func (c *connection) maintain(ctx context.Context) {
	again(ctx, c.log, "guest connection failed", redialMin, redialMax, c.connectOnce)
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

// connectOnce makes one connection and serves it until it is lost.
func (c *connection) connectOnce(ctx context.Context) error {
	client, err := c.dial(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	client.KeepAlive(ctx, aliveEvery, aliveWait)
	c.set(client)
	defer c.set(nil)
	l, err := ssh.ListenRelay(c.socket)
	if err != nil {
		// The keeper's own use of the connection does not need the socket, and
		// commands can log in to the guest themselves.
		c.log.WarnContext(ctx, "guest connection not shared", "error", err)
		select {
		case <-client.Done():
			return ssh.ErrUnreachable
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return client.Relay(ctx, l)
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
