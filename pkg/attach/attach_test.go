package attach

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	xssh "golang.org/x/crypto/ssh"
	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
)

// guest is an SSH server with a terminal: it echoes what is typed in brackets,
// tells its terminal's name and size, and obeys a few words.
type guest struct {
	t      *testing.T
	target ssh.Target
	ln     net.Listener
	all    sync.WaitGroup

	mu     sync.Mutex
	conns  []net.Conn
	frozen bool // accepts, and says nothing
}

func newGuest(t *testing.T) *guest {
	t.Helper()
	private, _, err := ssh.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	_, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	host, err := xssh.NewSignerFromKey(secret)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &xssh.ServerConfig{PublicKeyCallback: func(xssh.ConnMetadata, xssh.PublicKey) (*xssh.Permissions, error) { return nil, nil }}
	cfg.AddHostKey(host)
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, ln: ln, target: ssh.Target{Addr: ln.Addr().String(), User: "agent", Key: private, HostKey: string(xssh.MarshalAuthorizedKey(host.PublicKey()))}}
	g.all.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			g.mu.Lock()
			g.conns = append(g.conns, conn)
			g.mu.Unlock()
			g.all.Go(func() { g.serve(conn, cfg) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		g.cut()
		g.all.Wait()
	})
	return g
}

// cut drops all connections; freeze keeps them and lets nothing more through.
func (g *guest) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
}

func (g *guest) freeze(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.frozen = on
}

func (g *guest) serve(conn net.Conn, cfg *xssh.ServerConfig) {
	defer conn.Close()
	_, chans, reqs, err := xssh.NewServerConn(conn, cfg)
	if err != nil {
		return
	}
	g.all.Go(func() {
		for r := range reqs {
			g.mu.Lock()
			frozen := g.frozen
			g.mu.Unlock()
			if r.WantReply && !frozen {
				_ = r.Reply(false, nil)
			}
		}
	})
	for n := range chans {
		ch, reqs, err := n.Accept()
		if err != nil {
			return
		}
		g.all.Go(func() { g.session(ch, reqs) })
	}
}

func (g *guest) session(ch xssh.Channel, reqs <-chan *xssh.Request) {
	for r := range reqs {
		switch r.Type {
		case "pty-req":
			var m struct {
				Term       string
				W, H, X, Y uint32
				Modes      string
			}
			_ = xssh.Unmarshal(r.Payload, &m)
			fmt.Fprintf(ch, "term=%s size=%dx%d\r\n", m.Term, m.W, m.H)
		case "window-change":
			var m struct{ W, H, X, Y uint32 }
			_ = xssh.Unmarshal(r.Payload, &m)
			fmt.Fprintf(ch, "size=%dx%d\r\n", m.W, m.H)
		case "exec":
			var m struct{ Command string }
			_ = xssh.Unmarshal(r.Payload, &m)
			fmt.Fprintf(ch, "command=%s\r\n", m.Command)
			g.all.Go(func() { g.type1(ch) })
		}
		if r.WantReply {
			_ = r.Reply(true, nil)
		}
	}
}

func (g *guest) type1(ch xssh.Channel) {
	buf := make([]byte, 256)
	for {
		n, err := ch.Read(buf)
		if err != nil {
			return
		}
		switch typed := string(buf[:n]); typed {
		case "X": // exit 7
			_, _ = ch.SendRequest("exit-status", false, xssh.Marshal(struct{ Code uint32 }{7}))
			_ = ch.Close()
			return
		case "C": // copy, and try to read
			fmt.Fprint(ch, "\x1b]52;c;aGVsbG8=\x07\x1b]52;c;?\x07copied\r\n")
		case "D":
			g.cut()
			return
		default:
			fmt.Fprintf(ch, "[%q]\r\n", typed)
		}
	}
}

// user is a person at a terminal.
type user struct {
	t           *testing.T
	master, tty *os.File
	mu          sync.Mutex
	seen        bytes.Buffer
	news        chan struct{}
}

func newUser(t *testing.T) *user {
	t.Helper()
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 30, Cols: 90}); err != nil {
		t.Fatal(err)
	}
	u := &user{t: t, master: master, tty: tty, news: make(chan struct{}, 1)}
	var done sync.WaitGroup
	done.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			u.mu.Lock()
			u.seen.Write(buf[:n])
			u.mu.Unlock()
			select {
			case u.news <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	})
	t.Cleanup(func() {
		_, _ = tty.Close(), master.Close()
		done.Wait()
	})
	return u
}

// sees waits for want, and forgets everything up to it.
func (u *user) sees(want string) {
	u.t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	for {
		u.mu.Lock()
		all := u.seen.String()
		if i := strings.Index(all, want); i >= 0 {
			u.seen.Next(i + len(want))
			u.mu.Unlock()
			return
		}
		u.mu.Unlock()
		select {
		case <-u.news:
		case <-deadline.C:
			u.t.Fatalf("no %q on the terminal, which shows %q", want, all)
		}
	}
}

func (u *user) types(s string) {
	u.t.Helper()
	if _, err := u.master.WriteString(s); err != nil {
		u.t.Fatal(err)
	}
}

type result struct {
	code int
	err  error
}

func (g *guest) dial(ctx context.Context) (*ssh.Client, error) { return ssh.Dial(ctx, g.target) }

func start(t *testing.T, u *user, o Options) <-chan result {
	t.Helper()
	o.In, o.Out, o.Command, o.Title = u.tty, u.tty, "tmux attach", "owner/repo"
	o.keepEvery, o.retryMin = 50*time.Millisecond, 20*time.Millisecond
	if o.keepWait == 0 {
		o.keepWait = time.Minute // a slow guest is no lost one
	}
	ended, done := make(chan result, 1), make(chan struct{})
	t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		code, err := Run(t.Context(), o)
		ended <- result{code, err}
	}()
	return ended
}

func ends(t *testing.T, c <-chan result) result {
	t.Helper()
	select {
	case r := <-c:
		return r
	case <-time.After(2 * time.Minute):
		t.Fatal("Run does not end")
		return result{}
	}
}

func TestAttach(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	before, err := term.GetState(int(u.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	var copied bytes.Buffer
	ended := start(t, u, Options{Dial: g.dial, Term: "xterm-ghostty", OnCopy: func(b []byte) { copied.Write(b) }})
	u.sees("\x1b]2;owner/repo\x07")
	u.sees("term=xterm-256color size=90x30")
	u.sees("command=tmux attach")
	u.types("a\x03") // Ctrl-C is the guest's
	u.sees(`["a\x03"]`)
	if err := pty.Setsize(u.tty, &pty.Winsize{Rows: 20, Cols: 70}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil { // the terminal is not this process's own
		t.Fatal(err)
	}
	u.sees("size=70x20")
	u.types("C")
	u.sees("copied")
	u.types("X")
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v; want the command's exit code", r.code, r.err)
	}
	u.sees("\x1b[?1000l")
	u.sees("\x1b[?2004l")
	if copied.String() != "hello" {
		t.Errorf("copied %q", copied.String())
	}
	after, err := term.GetState(int(u.tty.Fd()))
	if err != nil || *after != *before {
		t.Errorf("the terminal's mode was not restored: %v", err)
	}
}

func TestReconnect(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	ended := start(t, u, Options{Dial: g.dial, Term: "tmux-256color"})
	u.sees("term=tmux-256color")
	for range 3 {
		u.types("D")
		u.sees("owner/repo: connection lost, trying again (1); q or Ctrl-C gives up")
		u.sees("command=tmux attach")
		u.types("b")
		u.sees(`["b"]`)
	}
	u.types("X")
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v", r.code, r.err)
	}
}

// A guest that is there and does not answer is noticed too.
func TestFrozenGuest(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	start(t, u, Options{Dial: g.dial, keepWait: 200 * time.Millisecond})
	u.sees("command=tmux attach")
	g.freeze(true)
	u.sees("connection lost")
	g.freeze(false)
	u.sees("command=tmux attach")
}

func TestGiveUp(t *testing.T) {
	for _, key := range []string{"q", "\x03"} {
		u := newUser(t)
		unreachable := func(ctx context.Context) (*ssh.Client, error) {
			return nil, fmt.Errorf("dial: %w", ssh.ErrUnreachable)
		}
		ended := start(t, u, Options{Dial: unreachable})
		u.sees("trying again (2)")
		u.types("x" + key)
		if r := ends(t, ended); fail.CodeOf(r.err) != fail.Interrupted {
			t.Errorf("%q: %v", key, r.err)
		}
		u.sees("\x1b[?1049l")
	}
	// Also while a dial hangs.
	u := newUser(t)
	dialling := make(chan struct{})
	hangs := func(ctx context.Context) (*ssh.Client, error) {
		close(dialling)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	ended := start(t, u, Options{Dial: hangs})
	<-dialling
	u.types("q")
	if r := ends(t, ended); fail.CodeOf(r.err) != fail.Interrupted {
		t.Errorf("during a dial: %v", r.err)
	}
}

func TestHopelessErrorsEndIt(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	other := newGuest(t)
	g.target.HostKey = other.target.HostKey
	if r := ends(t, start(t, u, Options{Dial: g.dial})); !errors.Is(r.err, ssh.ErrHostKey) {
		t.Errorf("another host key: %v", r.err)
	}
	gone := fail.New(fail.NotFound, "no such session")
	if r := ends(t, start(t, newUser(t), Options{Dial: func(context.Context) (*ssh.Client, error) { return nil, gone }})); !errors.Is(r.err, gone) {
		t.Errorf("no such session: %v", r.err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Options{Dial: g.dial, In: u.tty, Out: u.tty}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// Without a terminal it is a pipe, and no escape sequences are added.
func TestPipes(t *testing.T) {
	g := newGuest(t)
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer inR.Close()
	defer outR.Close()
	if _, err := inW.WriteString("X"); err != nil {
		t.Fatal(err)
	}
	code, err := Run(t.Context(), Options{Dial: g.dial, In: inR, Out: outW, Command: "c"})
	_, _ = inW.Close(), outW.Close()
	got, _ := io.ReadAll(outR)
	if code != 7 || err != nil || string(got) != "term=xterm-256color size=80x24\r\ncommand=c\r\n" {
		t.Errorf("Run = %d, %v; output %q", code, err, got)
	}
}

func TestCopierKeepsTheLast(t *testing.T) {
	started, release := make(chan struct{}), make(chan struct{})
	var got []string
	c := newCopier(func(b []byte) {
		if len(got) == 0 {
			close(started)
			<-release
		}
		got = append(got, string(b))
	})
	offer := c.offer()
	offer([]byte("first"))
	<-started
	for i := range 1000 {
		offer(fmt.Append(nil, i))
	}
	close(release)
	c.stop()
	if strings.Join(got, " ") != "first 999" {
		t.Errorf("copied %q", got)
	}
}
