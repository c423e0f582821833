package resolver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// Bound is one address that is served over UDP and TCP.
type Bound struct {
	udp net.PacketConn
	tcp net.Listener
}

// Bind listens on an address for both protocols. family is "4" or "6". With port 0
// both get the same free port.
func Bind(ctx context.Context, family, addr string) (*Bound, error) {
	var lc net.ListenConfig
	for range 8 {
		tcp, err := lc.Listen(ctx, "tcp"+family, addr)
		if err != nil {
			return nil, fmt.Errorf("listen for DNS: %w", err)
		}
		udp, err := lc.ListenPacket(ctx, "udp"+family, tcp.Addr().String())
		if err == nil {
			return &Bound{udp: udp, tcp: newBounded(tcp)}, nil
		}
		err = errors.Join(err, tcp.Close())
		if _, port, _ := net.SplitHostPort(addr); port != "0" {
			return nil, fmt.Errorf("listen for DNS: %w", err)
		}
	}
	return nil, errors.New("listen for DNS: no port is free for both UDP and TCP")
}

// Addr returns ADDRESS:PORT.
func (b *Bound) Addr() string { return b.tcp.Addr().String() }

// Serve answers until ctx ends, and returns once its goroutines have ended.
func (b *Bound) Serve(ctx context.Context, p *Proxy) error {
	servers := []*dns.Server{
		{
			PacketConn: b.udp, Handler: p, UDPSize: maxDatagram,
			DecorateReader: func(r dns.Reader) dns.Reader {
				return &reader{Reader: r, proxy: p, datagram: make([]byte, maxDatagram)}
			},
		},
		{
			Listener: b.tcp, Handler: p, MaxTCPQueries: 128, ReadTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second,
			IdleTimeout: func() time.Duration { return 10 * time.Second },
		},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, s := range servers {
		started, ended := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		wg.Go(func() {
			defer close(ended)
			errs[i] = s.ActivateAndServe()
			cancel() // if one server ends, stop the other
		})
		wg.Go(func() {
			<-ctx.Done()
			select {
			case <-started:
				done, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
				defer stop()
				// It closes the sockets even when it fails.
				_ = s.ShutdownContext(done)
			case <-ended:
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

const maxDatagram = 4096

// reader answers queries that need no waiting as soon as they are read, because
// starting a goroutine would take longer. It passes the rest to the server.
type reader struct {
	dns.Reader
	proxy    *Proxy
	datagram []byte
}

// ReadUDP returns the next query that must wait. One goroutine calls it. The server ends it
// by setting a deadline on conn.
func (r *reader) ReadUDP(conn *net.UDPConn, _ time.Duration) ([]byte, *dns.SessionUDP, error) {
	for {
		n, session, err := dns.ReadFromSessionUDP(conn, r.datagram)
		if err != nil {
			return nil, nil, err
		}
		reply := r.proxy.atOnce(r.datagram[:n], source(session.RemoteAddr()))
		if reply == nil {
			return bytes.Clone(r.datagram[:n]), session, nil
		}
		// As in ServeDNS, an error needs no handling.
		_, _ = dns.WriteToSessionUDP(conn, reply, session)
	}
}

// bounded limits the number of open connections.
type bounded struct {
	net.Listener
	slots chan struct{}
}

func newBounded(l net.Listener) net.Listener {
	return &bounded{Listener: l, slots: make(chan struct{}, sockets)}
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case b.slots <- struct{}{}:
			return &boundedConn{Conn: c, release: sync.OnceFunc(func() { <-b.slots })}, nil
		default:
			// The connection is refused; the client may try again.
			_ = c.Close()
		}
	}
}

type boundedConn struct {
	net.Conn
	release func()
}

func (c *boundedConn) Close() error {
	c.release()
	return c.Conn.Close()
}
