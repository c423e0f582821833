package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/pipe"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/store"
)

// maxPorts limits the number of published ports of a session.
const maxPorts = 64

// PublishedPort is a port of the guest on the host's loopback address. A port is
// published only because a user on the host asked for it.
type PublishedPort struct {
	Guest uint16 `json:"guest"`
	Host  uint16 `json:"host,omitempty"` // 0 until the keeper listens; then kept across restarts
	Error string `json:"error,omitempty"`
	Close bool   `json:"close,omitempty"` // requested by the user; the keeper removes the port once it is closed
}

// URL returns where a browser on the host finds the port: every name below localhost
// resolves to the host's loopback address (RFC 6761).
func (p PublishedPort) URL(session string) string { return "http://" + p.host(session) }

// host returns the Host header of a browser that uses the URL.
func (p PublishedPort) host(session string) string {
	return fmt.Sprintf("%d.%s.localhost:%d", p.Guest, session, p.Host)
}

// Ports publishes ports of guests on this host.
type Ports struct{ Sessions *Manager }

// Publish requests guest ports on the host's loopback address. It returns once the
// keeper listens on them or fails to.
func (o Ports) Publish(ctx context.Context, s Session, ports ...uint16) (Session, error) {
	if s.Phase != Ready {
		return s, fail.New(fail.Conflict, "session %s is %s, not ready", s.Name, s.Phase).WithHint("agent-sessionizer start %s", s.Name)
	}
	full := false
	s, err := o.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		for _, port := range ports {
			i := slices.IndexFunc(f.Ports, func(p PublishedPort) bool { return p.Guest == port })
			switch {
			case i >= 0:
				f.Ports[i].Error, f.Ports[i].Close = "", false // try again
			case len(f.Ports) >= maxPorts:
				full = true
			default:
				f.Ports = append(f.Ports, PublishedPort{Guest: port})
			}
		}
	})
	if err != nil {
		return s, err
	}
	if full {
		return s, fail.New(fail.Usage, "session %s already has %d published ports", s.Name, maxPorts).WithHint("agent-sessionizer ports %s", s.Name)
	}
	return o.await(ctx, s, func(p PublishedPort) (bool, error) {
		if slices.Contains(ports, p.Guest) && p.Error != "" {
			return false, fail.New(fail.Host, "publish port %d: %s", p.Guest, p.Error)
		}
		return p.Host != 0 || !slices.Contains(ports, p.Guest), nil
	})
}

// await waits until done returns true for every port.
func (o Ports) await(ctx context.Context, s Session, done func(PublishedPort) (bool, error)) (Session, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 20*time.Second, fail.New(fail.Timeout, "the keeper of session %s did not update its ports", s.Name).
		WithHint("agent-sessionizer logs %s", s.Name))
	defer cancel()
	for {
		var err error
		if s, err = o.Sessions.Get(ctx, s.ID); err != nil {
			return s, errors.Join(err, context.Cause(ctx))
		}
		all := true
		for _, p := range s.Status.Ports {
			ok, err := done(p)
			if err != nil {
				return s, err
			}
			all = all && ok
		}
		if all {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return s, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Unpublish withdraws ports. It returns once they and the connections over them are
// closed.
func (o Ports) Unpublish(ctx context.Context, s Session, ports ...uint16) (Session, error) {
	of := func(p PublishedPort) bool { return slices.Contains(ports, p.Guest) }
	watched := s.Phase == Ready
	s, err := o.Sessions.updateStatus(ctx, s.ID, store.Event{}, func(f *Status) {
		if !watched {
			f.Ports = slices.DeleteFunc(f.Ports, of)
		}
		for i := range f.Ports {
			f.Ports[i].Close = f.Ports[i].Close || of(f.Ports[i])
		}
	})
	if err != nil || !watched {
		return s, err
	}
	return o.await(ctx, s, func(p PublishedPort) (bool, error) { return !of(p), nil })
}

// publisher listens on the host's loopback address for the ports in the row. It
// belongs to a watching keeper, and reaches the guest over the keeper's SSH
// connection.
type publisher struct {
	guest func(context.Context) (*ssh.Client, error) // the keeper's connection
	log   *slog.Logger
	name  string // of the session
	use   func() // called when data flows

	open  map[uint16]*publication
	tasks sync.WaitGroup
}

type publication struct {
	listener net.Listener
	end      context.CancelFunc
}

func (p *publisher) close() {
	for port := range p.open {
		p.unlisten(port)
	}
	p.tasks.Wait()
}

func (p *publisher) unlisten(port uint16) {
	p.open[port].end()
	_ = p.open[port].listener.Close()
	delete(p.open, port)
}

// sync opens and closes listeners until they match asked. It returns their new state
// and whether anything changed.
func (p *publisher) sync(ctx context.Context, asked []PublishedPort) (is []PublishedPort, news bool) {
	want := slices.DeleteFunc(slices.Clone(asked), func(p PublishedPort) bool { return p.Close })
	news = len(want) < len(asked)
	for port := range p.open {
		if !slices.ContainsFunc(want, func(w PublishedPort) bool { return w.Guest == port }) {
			p.unlisten(port)
		}
	}
	for _, w := range want {
		if _, ok := p.open[w.Guest]; !ok && w.Error == "" {
			was := w
			l, err := listenNear(ctx, w.Host)
			if err != nil {
				w.Error = err.Error()
			} else {
				w.Host = netip.MustParseAddrPort(l.Addr().String()).Port()
				p.accept(ctx, w, l)
			}
			news = news || w != was
		}
		is = append(is, w)
	}
	return is, news
}

// lowPorts are the ports from which a new one is chosen, with an exclusive end. The
// system gives none of them to outgoing connections (Linux uses those from 32768,
// macOS from 49152), so the port is usually free when the session starts again.
var lowPorts = [2]uint16{20000, 32768}

// listenNear listens on the loopback port that was used before, or on any other if
// that is taken or 0.
func listenNear(ctx context.Context, port uint16) (l net.Listener, err error) {
	listen := func(port uint16) bool {
		l, err = (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
		return err == nil
	}
	if port != 0 && listen(port) {
		return l, nil
	}
	for range 16 {
		if listen(lowPorts[0] + rand.N(lowPorts[1]-lowPorts[0])) {
			return l, nil
		}
	}
	listen(0)
	return l, err
}

func (p *publisher) accept(ctx context.Context, port PublishedPort, l net.Listener) {
	ctx, cancel := context.WithCancel(ctx)
	if p.open == nil {
		p.open = map[uint16]*publication{}
	}
	p.open[port.Guest] = &publication{listener: l, end: cancel}
	p.tasks.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.tasks.Go(func() { p.carry(ctx, port, c) })
		}
	})
}

// carry connects one connection on the host with the guest's port, on whichever
// loopback address the guest's program listens.
func (p *publisher) carry(ctx context.Context, published PublishedPort, local net.Conn) {
	defer local.Close()
	port := published.Guest
	client, err := p.connected(ctx)
	if err != nil {
		p.log.WarnContext(ctx, "failed to reach guest for published port", "port", port, "error", err)
		return
	}
	remote, err := client.Connect(ctx, net.JoinHostPort("localhost", strconv.Itoa(int(port))))
	if err != nil {
		p.log.InfoContext(ctx, "published port does not answer", "port", port, "error", err)
		return
	}
	defer remote.Close()
	stop := context.AfterFunc(ctx, func() { _, _ = local.Close(), remote.Close() })
	defer stop()
	var both sync.WaitGroup
	check := &browserCheck{Conn: countingConn{local, p.use}, guest: remote, session: p.name, port: published, decided: make(chan struct{})}
	both.Go(func() { _ = pipe.Copy(remote, check) }) // either end may close at any time
	both.Go(func() { _ = pipe.Copy(countingConn{local, p.use}, &answerCheck{Conn: remote, request: check}) })
	both.Wait()
}

// countingConn calls use when data flows in either direction.
type countingConn struct {
	net.Conn
	use func()
}

func (c countingConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.use()
	}
	return n, err
}

func (c countingConn) Write(p []byte) (int, error) {
	c.use()
	return c.Conn.Write(p)
}

// CloseWrite closes one direction, as pipe.Copy does.
func (c countingConn) CloseWrite() error { return pipe.CloseWrite(c.Conn) }

// connected returns the connection to the guest. It gives up after a while, so that a
// browser does not wait forever.
func (p *publisher) connected(ctx context.Context) (*ssh.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	return p.guest(ctx)
}
