package ssh_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// server is a guest's sshd with the behaviour that a test needs.
type server struct {
	target ssh.Target
	ln     net.Listener
	conns  sync.WaitGroup

	manners
	standby  func(*channel) bool // handles a standby shell, and reports whether it runs a command
	sessions atomic.Int64

	mu    sync.Mutex
	open  []net.Conn
	deafs []*deafened
}

// manners selects misbehaviour.
type manners struct {
	greet func(xssh.Conn) // called after the login
	mute  bool            // never answers a channel
	deaf  chan struct{}   // when closed, the server stops reading
}

// channel is one session. Its requests have been read up to "exec".
type channel struct {
	xssh.Channel
	cmd     string
	term    string // type and size of the requested terminal
	signals chan string
	resizes chan ssh.Size
}

func (c channel) exit(code int) {
	_, _ = c.SendRequest("exit-status", false, xssh.Marshal(struct{ Code uint32 }{uint32(code)}))
	_ = c.Close()
}

// readCommand reads a command line as a standby shell does.
func (c *channel) readCommand() bool {
	c.cmd = ""
	for b := make([]byte, 1); ; c.cmd += string(b) {
		if _, err := io.ReadFull(c, b); err != nil {
			_ = c.Close()
			return false
		}
		if b[0] == '\n' {
			return true
		}
	}
}

func (c channel) died(signal string) {
	_, _ = c.SendRequest("exit-signal", false, xssh.Marshal(struct {
		Signal      string
		Core        bool
		Error, Lang string
	}{Signal: signal}))
	_ = c.Close()
}

// serve starts a server whose sessions are handled by exec; subsystem may be nil.
func serve(t *testing.T, exec func(channel), subsystem func(xssh.Channel), m ...manners) *server {
	t.Helper()
	private, authorized, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	_, hostSecret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	host, err := xssh.NewSignerFromKey(hostSecret)
	if err != nil {
		t.Fatal(err)
	}
	// The rules of an authorized_keys file with the key, and with the key as cert-authority.
	isAuthorized := func(key xssh.PublicKey) bool {
		return strings.TrimSpace(string(xssh.MarshalAuthorizedKey(key))) == authorized
	}
	rules := &xssh.CertChecker{IsUserAuthority: isAuthorized, UserKeyFallback: func(_ xssh.ConnMetadata, key xssh.PublicKey) (*xssh.Permissions, error) {
		if !isAuthorized(key) {
			return nil, errors.New("not the key")
		}
		return nil, nil
	}}
	cfg := &xssh.ServerConfig{PublicKeyCallback: rules.Authenticate}
	cfg.AddHostKey(host)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{ln: ln, standby: (*channel).readCommand, target: ssh.Target{
		Addr: ln.Addr().String(), User: "agent", Key: private,
		HostKey: string(xssh.MarshalAuthorizedKey(host.PublicKey())),
	}}
	for _, s.manners = range m {
	}
	s.conns.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.open = append(s.open, conn)
			s.mu.Unlock()
			s.conns.Go(func() { s.handle(conn, cfg, exec, subsystem) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		s.cut()
		s.conns.Wait()
	})
	return s
}

// cut drops every connection, like a VM that dies.
func (s *server) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.open {
		_ = c.Close()
	}
	for _, d := range s.deafs {
		_ = d.Close()
	}
}

func (s *server) handle(conn net.Conn, cfg *xssh.ServerConfig, exec func(channel), subsystem func(xssh.Channel)) {
	defer conn.Close()
	if s.deaf != nil {
		d := &deafened{Conn: conn, deaf: s.deaf, closed: make(chan struct{})}
		defer d.Close()
		conn = d
		s.mu.Lock()
		s.deafs = append(s.deafs, d)
		s.mu.Unlock()
	}
	c, chans, reqs, err := xssh.NewServerConn(conn, cfg)
	if err != nil {
		return
	}
	s.conns.Go(func() { xssh.DiscardRequests(reqs) })
	if s.greet != nil {
		s.conns.Go(func() { s.greet(c) })
	}
	for n := range chans {
		if s.mute {
			continue
		}
		switch n.ChannelType() {
		case "session":
			ch, reqs, err := n.Accept()
			if err != nil {
				return
			}
			s.sessions.Add(1)
			s.conns.Go(func() { s.session(ch, reqs, exec, subsystem) })
		case "direct-tcpip": // to a program that answers once it has read all input
			ch, reqs, err := n.Accept()
			if err != nil {
				return
			}
			s.conns.Go(func() { xssh.DiscardRequests(reqs) })
			s.conns.Go(func() {
				heard, _ := io.ReadAll(ch)
				_, _ = ch.Write(heard)
				_ = ch.Close()
			})
		default:
			_ = n.Reject(xssh.UnknownChannelType, "no")
		}
	}
}

func (s *server) session(ch xssh.Channel, reqs <-chan *xssh.Request, exec func(channel), subsystem func(xssh.Channel)) {
	c := channel{Channel: ch, signals: make(chan string, 8), resizes: make(chan ssh.Size, 8)}
	for r := range reqs {
		switch r.Type {
		case "exec":
			var m struct{ Command string }
			_ = xssh.Unmarshal(r.Payload, &m)
			c.cmd = m.Command
			_ = r.Reply(exec != nil, nil)
			if exec != nil {
				s.conns.Go(func() {
					if c.cmd == ssh.StandbyCommand && !s.standby(&c) {
						return
					}
					exec(c)
				})
			}
		case "pty-req":
			var m struct {
				Term         string
				W, H, PW, PH uint32
				Modes        string
			}
			_ = xssh.Unmarshal(r.Payload, &m)
			c.term = fmt.Sprintf("%s %dx%d", m.Term, m.W, m.H)
			_ = r.Reply(true, nil)
		case "subsystem":
			_ = r.Reply(subsystem != nil, nil)
			if subsystem != nil {
				s.conns.Go(func() { subsystem(ch) })
			}
		case "signal":
			var m struct{ Signal string }
			_ = xssh.Unmarshal(r.Payload, &m)
			c.signals <- m.Signal
		case "window-change":
			var m struct{ W, H, PW, PH uint32 }
			_ = xssh.Unmarshal(r.Payload, &m)
			c.resizes <- ssh.Size{Width: int(m.W), Height: int(m.H)}
		default:
			_ = r.Reply(true, nil)
		}
	}
	close(c.signals)
}

func (s *server) dial(t *testing.T) *ssh.Client {
	t.Helper()
	c, err := ssh.Dial(t.Context(), s.target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// deafened is a connection that is not read once deaf is closed.
type deafened struct {
	net.Conn
	deaf   <-chan struct{}
	once   sync.Once
	closed chan struct{}
}

func (d *deafened) Read(p []byte) (int, error) {
	n, err := d.Conn.Read(p)
	select {
	case <-d.deaf:
		if err == nil {
			<-d.closed
			return 0, net.ErrClosed
		}
	default:
	}
	return n, err
}

func (d *deafened) Close() error {
	d.once.Do(func() { close(d.closed) })
	return d.Conn.Close()
}

// connections counts all connections ever made.
func (s *server) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// ways runs f over a direct connection, and over a relay.
func (s *server) ways(t *testing.T, f func(*testing.T, *ssh.Client)) {
	t.Run("direct", func(t *testing.T) { f(t, s.dial(t)) })
	t.Run("relayed", func(t *testing.T) {
		c := s.relay(t).dial(t)
		was := s.connections()
		f(t, c)
		if n := s.connections(); n != was {
			t.Errorf("connections to the guest = %d, want %d: the client must use the relay", n, was)
		}
	})
}
