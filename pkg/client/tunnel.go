package client

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ops"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
)

const (
	maxSkew    = time.Hour        // between the clocks of two hosts
	loginBound = 30 * time.Second // for the other host to certify a key
)

// login is a key that exists in this process only, and what its owner needs to log in to a guest.
type login struct {
	session.GuestLogin
	key []byte // private, PEM
}

// logins are the logins of a client, by session. A connection that is made again needs no other.
type logins struct {
	mu sync.Mutex
	of map[string]login
}

// Dial implements ops.Host: it logs in to a guest through the other host, which can read nothing of
// the connection.
func (c *Client) Dial(ctx context.Context, id string, _ bool) (*ssh.Client, error) {
	for {
		l, used, err := c.login(ctx, id)
		if err != nil {
			return nil, err
		}
		conn, err := ssh.Dial(ctx, ssh.Target{
			Addr: id, User: l.User, Key: l.key, Certificate: l.Certificate, HostKey: l.HostKey,
			Connect: func(ctx context.Context) (net.Conn, error) { return c.tunnel(ctx, id) },
		})
		if err == nil || errors.Is(err, ssh.ErrUnreachable) {
			return conn, err
		}
		c.logins.forget(id)
		switch {
		case used && (errors.Is(err, ssh.ErrRejected) || errors.Is(err, ssh.ErrHostKey)): // the VM has changed since
			continue
		case errors.Is(err, ssh.ErrRejected):
			return nil, fail.New(fail.Conflict, "%w: session %s was last started by an earlier version of the program", err, id).
				WithHint("agent-sessionizer stop %s, and then: agent-sessionizer start %s", id, id)
		}
		return nil, err
	}
}

// login returns a login to a guest. used says that it was returned before.
func (c *Client) login(ctx context.Context, id string) (l login, used bool, err error) {
	if l, used = c.logins.valid(id); used {
		return l, true, nil
	}
	private, public, err := ssh.NewKey()
	if err != nil {
		return l, false, err
	}
	ctx, cancel := context.WithTimeout(ctx, loginBound)
	defer cancel()
	request := ops.LoginRequest{SessionPath: ops.SessionPath{ID: id}}
	request.Body.PublicKey = public
	l.key = private
	if l.GuestLogin, err = ops.LoginSession.On(ctx, c, request); err != nil {
		if fail.CodeOf(err) == fail.Host || errors.Is(err, context.DeadlineExceeded) {
			err = lost{err}
		}
		return l, false, err
	}
	l.User = termtext.Line(l.User) // errors show it
	c.logins.add(id, l)
	return l, false, nil
}

func (l *logins) valid(id string) (login, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.of, func(_ string, l login) bool { return time.Until(l.Expires) < maxSkew })
	found, ok := l.of[id]
	return found, ok
}

func (l *logins) add(id string, is login) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[string]login{}
	}
	l.of[id] = is
}

func (l *logins) forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.of, id)
}

// tunnel connects to the SSH port of a guest.
func (c *Client) tunnel(ctx context.Context, id string) (net.Conn, error) {
	path := strings.Replace(ops.Tunnel.Path, "{id}", url.PathEscape(id), 1)
	o := &websocket.DialOptions{HTTPClient: c.http, HTTPHeader: http.Header{}, CompressionMode: websocket.CompressionDisabled}
	if c.auth != "" {
		o.HTTPHeader.Set("Authorization", c.auth)
	}
	conn, resp, err := websocket.Dial(ctx, c.base+path, o) //nolint:bodyclose // Dial has read the body
	if err != nil {
		if resp != nil && resp.StatusCode >= http.StatusInternalServerError {
			return nil, lost{c.problem(resp)}
		}
		if resp != nil && resp.StatusCode >= http.StatusBadRequest {
			return nil, c.problem(resp)
		}
		return nil, lost{c.unreachable(err)}
	}
	return websocket.NetConn(context.WithoutCancel(ctx), conn, websocket.MessageBinary), nil
}

// lost is the error of a host or a guest that does not answer now. A terminal tries again.
type lost struct{ error }

func (e lost) Unwrap() error { return e.error }

// Is makes the error one of a guest that does not answer.
func (lost) Is(target error) bool { return target == ssh.ErrUnreachable }
