package ssh_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	xssh "golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/test/testenv"
)

// relayed is a relay of a connection to s.
type relayed struct {
	*server
	socket string
	guest  *ssh.Client // the relayed connection
	stop   context.CancelFunc
	ended  <-chan error
}

func (s *server) relay(t *testing.T) *relayed {
	t.Helper()
	dir, err := os.MkdirTemp("", "r") // t.TempDir is too long for a socket on macOS
	if err != nil {
		t.Fatal(err)
	}
	r := &relayed{server: s, socket: filepath.Join(dir, "sock")}
	target := s.target
	target.Relay = ""
	if r.guest, err = ssh.Dial(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	l, err := ssh.ListenRelay(r.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	r.stop, r.ended = stop, ended
	var serving sync.WaitGroup
	serving.Go(func() { ended <- r.guest.Relay(ctx, l) })
	t.Cleanup(func() {
		stop()
		serving.Wait()
		if _, err := os.Lstat(r.socket); err == nil {
			t.Error("socket after the end of the relay exists, want it removed")
		}
		os.RemoveAll(dir)
	})
	return r
}

// through dials the guest with the relay set, which it uses if the relay accepts.
func (r *relayed) through(t *testing.T) *ssh.Client {
	t.Helper()
	target := r.target
	target.Relay = r.socket
	c, err := ssh.Dial(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func (r *relayed) dial(t *testing.T) *ssh.Client {
	t.Helper()
	was := r.connections()
	c := r.through(t)
	if r.connections() != was {
		t.Fatalf("connections to the guest = %d, want %d: the client must use the relay", r.connections(), was)
	}
	return c
}

// random returns an endless stream that is the same for the same seed.
func random(seed byte) io.Reader { return rand.NewChaCha8([32]byte{seed}) }

// A command gets every byte, on every stream, in order.
func TestRelayCarriesEveryByte(t *testing.T) {
	const size = 48 << 20
	sum := func(r io.Reader) string {
		h := sha256.New()
		_, _ = io.Copy(h, io.LimitReader(r, size))
		return fmt.Sprintf("%x", h.Sum(nil))
	}
	r := serve(t, func(c channel) {
		h := sha256.New()
		n, _ := io.Copy(h, c)
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.Copy(c, io.LimitReader(random(2), size)) })
		both.Go(func() { _, _ = io.Copy(c.Stderr(), io.LimitReader(random(3), size)) })
		both.Wait()
		_, _ = fmt.Fprintf(c, "%d %x", n, h.Sum(nil))
		c.exit(7)
	}, nil).relay(t)
	out, stderr := sha256.New(), sha256.New()
	tail := &last{w: out, keep: len(fmt.Sprint(size)) + 1 + 64}
	err := r.dial(t).Run(t.Context(), "", ssh.IO{Stdin: io.LimitReader(random(1), size), Stdout: tail, Stderr: stderr})
	if exit, ok := errors.AsType[*ssh.ExitError](err); !ok || exit.Code != 7 {
		t.Errorf("Run = %v, want exit status 7", err)
	}
	if want := fmt.Sprintf("%d %s", size, sum(random(1))); string(tail.held) != want {
		t.Errorf("stdin: %s, want %s", tail.held, want)
	}
	if got := fmt.Sprintf("%x", out.Sum(nil)); got != sum(random(2)) {
		t.Errorf("stdout has digest %s, want %s", got, sum(random(2)))
	}
	if got := fmt.Sprintf("%x", stderr.Sum(nil)); got != sum(random(3)) {
		t.Errorf("stderr has digest %s, want %s", got, sum(random(3)))
	}
}

// last discards all but the last bytes.
type last struct {
	w    io.Writer
	keep int
	held []byte
}

func (l *last) Write(p []byte) (int, error) {
	l.held = append(l.held, p...)
	if over := len(l.held) - l.keep; over > 0 {
		_, _ = l.w.Write(l.held[:over])
		l.held = append([]byte(nil), l.held[over:]...)
	}
	return len(p), nil
}

// For a command that ends immediately, the reply to its start always comes before
// its exit status.
func TestRelayWithShortCommands(t *testing.T) {
	r := serve(t, func(c channel) { c.exit(0) }, nil).relay(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			c := r.dial(t)
			for range 250 {
				if err := c.Run(t.Context(), "", ssh.IO{}); err != nil {
					t.Errorf("Run of an empty command = %v, want nil", err)
					return
				}
			}
		})
	}
	all.Wait()
}

// Each direction of a forwarded connection ends independently.
func TestRelayHalfCloses(t *testing.T) {
	r := serve(t, guest, nil).relay(t)
	conn, err := r.dial(t).Connect(t.Context(), "localhost:7")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.Copy(conn, io.LimitReader(random(1), 3<<20)); err != nil {
		t.Fatal(err)
	}
	if err := conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	want, _ := io.ReadAll(io.LimitReader(random(1), 3<<20))
	if err != nil || !bytes.Equal(answer, want) {
		t.Fatalf("answer = %d bytes, %v, want the %d bytes sent", len(answer), err, len(want))
	}
}

// A client that finds the relay full, or gone, dials the guest.
func TestRelayHasRoomForSome(t *testing.T) {
	s := serve(t, guest, nil)
	r := s.relay(t)
	var clients []*ssh.Client
	for s.connections() == 1 {
		clients = append(clients, r.through(t))
		if len(clients) > 60 {
			t.Fatalf("clients of the relay = %d, want at most 60: an sshd has 64 sessions for one connection", len(clients))
		}
	}
	if len(clients) < 10 {
		t.Fatalf("clients of the relay = %d, want at least 10", len(clients))
	}
	var all sync.WaitGroup
	for i, c := range clients {
		for j := range 4 { // concurrent commands
			all.Go(func() {
				in := strings.Repeat(fmt.Sprint(i, j, " "), 100_000)
				if out, err := c.Output(t.Context(), "cat", strings.NewReader(in), 4<<20); err != nil || string(out) != in {
					t.Errorf("client %d, command %d: output = %d bytes, %v, want %d", i, j, len(out), err, len(in))
				}
			})
		}
	}
	all.Wait()
	for _, c := range clients {
		_ = c.Close()
	}
	testenv.WaitFor(t, "the relay has a free slot again", func() bool {
		was := s.connections()
		_ = r.through(t).Close()
		return s.connections() == was
	})
}

// A lost connection ends the relay and everything that used it; the next command
// gets its own connection.
func TestRelayEndsWithItsConnection(t *testing.T) {
	s := serve(t, guest, nil)
	r := s.relay(t)
	c := r.dial(t)
	var once sync.Once
	started := make(chan struct{})
	go func() {
		<-started
		s.cut()
	}()
	err := c.Run(t.Context(), "flood", ssh.IO{Stdout: writer(func(p []byte) (int, error) {
		once.Do(func() { close(started) })
		return len(p), nil
	})})
	if !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("Run on a cut connection = %v, want %v", err, ssh.ErrUnreachable)
	}
	if err := <-r.ended; !errors.Is(err, ssh.ErrUnreachable) {
		t.Errorf("end of the relay = %v, want %v", err, ssh.ErrUnreachable)
	}
	if err := r.through(t).Run(t.Context(), "true", ssh.IO{}); err != nil {
		t.Errorf("Run over a connection of its own = %v, want nil", err)
	}
}

// The owner's context ends the relay, with its own error.
func TestRelayEndsWithItsContext(t *testing.T) {
	r := serve(t, guest, nil).relay(t)
	r.stop()
	if err := <-r.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("end of the relay = %v, want %v", err, context.Canceled)
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// Neither a command with unread output nor a stopped client delays the others, and
// a client that floods the relay leaves capacity for them.
func TestRelayIsFair(t *testing.T) {
	s := serve(t, guest, nil)
	r := s.relay(t)
	ctx, cancel := context.WithCancel(t.Context())
	var floods sync.WaitGroup
	defer floods.Wait()
	defer cancel()
	stuck, flowing := make(chan struct{}), make(chan struct{})
	slow, fast, other, stopped := r.dial(t), r.dial(t), r.dial(t), r.stopped(t)
	floods.Go(func() {
		var once sync.Once
		_ = slow.Run(ctx, "flood", ssh.IO{Stdout: writer(func(p []byte) (int, error) {
			once.Do(func() { close(stuck) })
			<-ctx.Done()
			return len(p), nil
		})})
	})
	floods.Go(func() {
		var once sync.Once
		_ = fast.Run(ctx, "flood", ssh.IO{Stdout: writer(func(p []byte) (int, error) {
			once.Do(func() { close(flowing) })
			return len(p), nil
		})})
	})
	<-stuck
	<-flowing
	stopped()
	in := strings.Repeat("x", 4<<20)
	for range 20 {
		if out, err := other.Output(t.Context(), "cat", strings.NewReader(in), 8<<20); err != nil || string(out) != in {
			t.Fatalf("output = %d bytes, %v, want %d", len(out), err, len(in))
		}
	}
}

// stopped returns a function. The client floods itself with output and, once the
// function is called, reads nothing more from the relay.
func (r *relayed) stopped(t *testing.T) func() {
	t.Helper()
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	g := &gated{Conn: conn, open: make(chan struct{})}
	close(g.open)
	c, chans, reqs, err := xssh.NewClientConn(g, "", &xssh.ClientConfig{HostKeyCallback: xssh.InsecureIgnoreHostKey()})
	if err != nil {
		t.Fatal(err)
	}
	session, err := xssh.NewClient(c, chans, reqs).NewSession()
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	flowing := make(chan struct{})
	session.Stdout = writer(func(p []byte) (int, error) {
		once.Do(func() { close(flowing) })
		return len(p), nil
	})
	if err := session.Start("flood"); err != nil {
		t.Fatal(err)
	}
	<-flowing
	return func() {
		g.mu.Lock()
		g.open = make(chan struct{})
		g.mu.Unlock()
		t.Cleanup(func() { close(g.open) })
	}
}

// A guest may report the end of a command any number of times; the relay keeps two.
func TestRelayLimitsOutcomes(t *testing.T) {
	r := serve(t, func(c channel) {
		for range 100 {
			_, _ = c.SendRequest("exit-status", false, xssh.Marshal(struct{ Code uint32 }{7}))
		}
		_ = c.Close()
	}, nil).relay(t)
	conn, err := net.Dial("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	c, chans, reqs, err := xssh.NewClientConn(conn, "", &xssh.ClientConfig{HostKeyCallback: xssh.InsecureIgnoreHostKey()})
	if err != nil {
		t.Fatal(err)
	}
	ch, requests, err := xssh.NewClient(c, chans, reqs).OpenChannel("session", nil)
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := ch.SendRequest("exec", true, xssh.Marshal(struct{ Command string }{"end"})); !ok || err != nil {
		t.Fatalf("exec = %v, %v, want true, nil", ok, err)
	}
	var got []string
	for req := range requests { // ends when the relay closes the channel
		got = append(got, req.Type)
	}
	if want := []string{"exit-status", "exit-status"}; !slices.Equal(got, want) {
		t.Errorf("requests about the end = %q, want %q", got, want)
	}
}

// gated is a connection that is not read while it is shut.
type gated struct {
	net.Conn
	mu   sync.Mutex
	open chan struct{}
}

func (g *gated) Read(p []byte) (int, error) {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	<-open
	return g.Conn.Read(p)
}

// A guest may send anything.
func TestRelayWithAHostileGuest(t *testing.T) {
	t.Run("requests without end", func(t *testing.T) {
		s := serve(t, func(c channel) {
			if c.cmd == "cat" {
				guest(c)
				return
			}
			for range 500 {
				_, _ = c.SendRequest("exit-status", false, make([]byte, 200<<10))
				_, _ = c.SendRequest("exit-signal", false, nil)
				_, _ = c.SendRequest("shell", true, nil)
			}
			_, _ = io.WriteString(c, "out")
			c.exit(0)
		}, nil)
		r := s.relay(t)
		first := r.dial(t)
		var out bytes.Buffer
		// The exit status depends on the guest; only the end and the output matter
		// here.
		_ = first.Run(t.Context(), "", ssh.IO{Stdout: &out})
		if out.String() != "out" {
			t.Errorf("output = %q, want \"out\"", out.String())
		}
		if out, err := r.dial(t).Output(t.Context(), "cat", strings.NewReader("in"), 10); err != nil || string(out) != "in" {
			t.Errorf("Output(cat) = %q, %v, want \"in\"", out, err)
		}
	})
	t.Run("channels and requests towards us", func(t *testing.T) {
		opened := make(chan error, 100)
		s := serve(t, guest, nil, manners{greet: func(c xssh.Conn) {
			for _, kind := range []string{"session", "x11", "forwarded-tcpip", "auth-agent@openssh.com", "direct-tcpip", "direct-streamlocal@openssh.com"} {
				_, _, err := c.OpenChannel(kind, make([]byte, 64))
				if err == nil {
					err = fmt.Errorf("a channel %q was opened", kind)
				} else {
					err = nil
				}
				opened <- err
			}
			for _, kind := range []string{"tcpip-forward", "streamlocal-forward@openssh.com", "hostkeys-00@openssh.com"} {
				ok, _, err := c.SendRequest(kind, true, make([]byte, 64))
				if ok && err == nil {
					opened <- fmt.Errorf("a request %q was granted", kind)
				} else {
					opened <- nil
				}
			}
			close(opened)
		}})
		r := s.relay(t)
		for err := range opened {
			if err != nil {
				t.Error(err)
			}
		}
		if err := r.dial(t).Run(t.Context(), "true", ssh.IO{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("deaf from now on", func(t *testing.T) {
		deaf := make(chan struct{})
		r := serve(t, func(c channel) { close(deaf) }, nil, manners{deaf: deaf}).relay(t)
		c := r.dial(t)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-deaf
			cancel()
		}()
		if err := c.Run(ctx, "", ssh.IO{}); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled Run = %v, want %v", err, context.Canceled)
		}
		c.KeepAlive(t.Context(), 10*time.Millisecond, 300*time.Millisecond)
		<-c.Done()    // the relay does not answer in the guest's place
		_ = c.Close() // the guest never sees it
		r.stop()
		<-r.ended
	})
	t.Run("no channel is ever opened", func(t *testing.T) {
		t.Parallel()
		s := serve(t, guest, nil, manners{mute: true})
		r := s.relay(t)
		was := s.connections()
		c := r.through(t) // the relay gives up, and the client dials
		if s.connections() != was+1 {
			t.Errorf("connections to the guest = %d, want %d", s.connections(), was+1)
		}
		_ = c.Close()
		r.stop()
		<-r.ended
	})
}

// Dial ignores a socket that is not a relay, or not one of this user's.
func TestDialWithoutARelay(t *testing.T) {
	s := serve(t, guest, nil)
	dir := testenv.ShortDir(t)
	socket := filepath.Join(dir, "sock")
	try := func(what string) {
		t.Helper()
		target := s.target
		target.Relay = socket
		c, err := ssh.Dial(t.Context(), target)
		if err != nil {
			t.Fatalf("Dial with %s = %v, want nil", what, err)
		}
		defer c.Close()
		if err := c.Run(t.Context(), "true", ssh.IO{}); err != nil {
			t.Errorf("Run with %s = %v, want nil", what, err)
		}
	}
	try("no socket")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	try("a process that is stopped") // the kernel accepts the connection, but no process does
	_ = l.Close()
	try("a socket that a dead process left")
	fresh, err := ssh.ListenRelay(socket)
	if err != nil {
		t.Fatalf("ListenRelay in place of an old socket = %v, want nil", err)
	}
	if fi, err := os.Stat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode of the socket = %v, %v, want 0600", fi.Mode(), err)
	}
	_ = fresh.Close()
	if _, err := ssh.ListenRelay(filepath.Join(dir, strings.Repeat("x", 104))); err == nil {
		t.Error("ListenRelay on a path too long for macOS = nil, want an error")
	}
	socket = filepath.Join(dir, strings.Repeat("x", 200))
	try("a path that is too long")
}

// A relay leaves no goroutines behind, whatever it carried.
func TestRelayLeavesNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Run("", func(t *testing.T) {
		r := serve(t, guest, nil).relay(t)
		for _, cmd := range []string{"true", "vanish", "signal"} {
			_ = r.dial(t).Run(t.Context(), cmd, ssh.IO{})
		}
		for _, cmd := range []string{"hang", "flood", "stubborn"} {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			_ = r.dial(t).Run(ctx, cmd, ssh.IO{Stdout: io.Discard})
			cancel()
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		running := make(chan struct{})
		c := r.dial(t)
		var once sync.Once
		var left sync.WaitGroup
		left.Go(func() {
			_ = c.Run(ctx, "flood", ssh.IO{Stdout: writer(func(p []byte) (int, error) {
				once.Do(func() { close(running) })
				return len(p), nil
			})})
		})
		<-running
		r.stop()
		<-r.ended
		left.Wait()
	})
	testenv.WaitFor(t, "all goroutines have ended", func() bool { return runtime.NumGoroutine() <= before })
}

// TestRelayed checks that the relay counts what others do over the connection, except for terminals.
func TestRelayed(t *testing.T) {
	r := serve(t, func(c channel) { c.exit(0) }, nil).relay(t)
	if opened, open := r.guest.Relayed(); opened != 0 || open != 0 {
		t.Errorf("Relayed before any client = %d, %d, want 0, 0", opened, open)
	}
	c := r.through(t)
	if err := c.Terminal(t.Context(), "", ssh.Terminal{}); err != nil {
		t.Fatal(err)
	}
	if opened, _ := r.guest.Relayed(); opened != 0 {
		t.Errorf("Relayed after a terminal = %d, want 0", opened)
	}
	if err := c.Run(t.Context(), "", ssh.IO{}); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	testenv.WaitFor(t, "the end of the channel", func() bool {
		opened, open := r.guest.Relayed()
		return opened > 0 && open == 0
	})
}
