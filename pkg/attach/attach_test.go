package attach

import (
	"bytes"
	"cmp"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	xssh "golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/ssh"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/termtext"
	"github.com/agent-sessionizer/agent-sessionizer/test/termtexttest"
)

// guest is an SSH server with a terminal. It echoes input in brackets, prints the name and
// size of its terminal, and obeys a few one-letter commands.
type guest struct {
	t      *testing.T
	target ssh.Target
	ln     net.Listener
	all    sync.WaitGroup

	prints string // the output of command P

	mu     sync.Mutex
	conns  []net.Conn
	frozen bool // accept connections, but do not answer keep-alives
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

// cut closes all connections.
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
		case "Y": // exit 0
			_, _ = ch.SendRequest("exit-status", false, xssh.Marshal(struct{ Code uint32 }{0}))
			_ = ch.Close()
			return
		case "C": // copy, and try to read the clipboard
			fmt.Fprint(ch, "\x1b]52;c;aGVsbG8=\x07\x1b]52;c;?\x07copied\r\n")
		case "P":
			fmt.Fprint(ch, g.prints)
		case "D":
			g.cut()
			return
		default:
			fmt.Fprintf(ch, "[%q]\r\n", typed)
		}
	}
}

// user simulates a person at a terminal.
type user struct {
	t           *testing.T
	master, tty *os.File
	mu          sync.Mutex
	seen, all   bytes.Buffer
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
			u.all.Write(buf[:n])
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

// sees waits until want appears, and discards everything up to it.
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
			u.t.Fatalf("the terminal shows %q after two minutes, want %q in it", all, want)
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
	o.In, o.Out, o.Command = u.tty, u.tty, "tmux attach"
	o.Title = cmp.Or(o.Title, "owner/repo")
	o.keepEvery, o.retryMin = 50*time.Millisecond, cmp.Or(o.retryMin, 20*time.Millisecond)
	if o.keepWait == 0 {
		o.keepWait = time.Minute // a slow guest must not count as lost
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
		t.Fatal("Run is running after two minutes, want that it ends")
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
	u.types("a\x03") // Ctrl-C goes to the guest
	u.sees(`["a\x03"]`)
	if err := pty.Setsize(u.tty, &pty.Winsize{Rows: 20, Cols: 70}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil { // the kernel does not signal this process, because the terminal is not its own
		t.Fatal(err)
	}
	u.sees("size=70x20")
	u.types("C")
	u.sees("copied")
	u.types("X")
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v, want 7, nil", r.code, r.err)
	}
	u.sees("\x1b[?1000l")
	u.sees("\x1b[?2004l")
	if got := copied.String(); got != "hello" {
		t.Errorf("copied %q, want %q", got, "hello")
	}
	if got := u.everything(); strings.Contains(got, "aGVsbG8=") {
		t.Errorf("the terminal received %q, want it without the copied text", got)
	}
	after, err := term.GetState(int(u.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if *after != *before {
		t.Errorf("mode of the terminal after Run = %+v, want %+v", *after, *before)
	}
}

func TestReconnect(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	ended := start(t, u, Options{Dial: g.dial, Term: "tmux-256color"})
	u.sees("term=tmux-256color")
	for range 3 {
		u.types("D")
		u.sees("owner/repo: connection lost, reconnecting (1); press q or Ctrl-C to give up")
		u.sees("command=tmux attach")
		u.types("b")
		u.sees(`["b"]`)
	}
	u.types("X")
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v, want 7, nil", r.code, r.err)
	}
}

// TestFrozenGuest checks that a guest that stops answering on an open connection is
// detected.
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
	for _, key := range []string{"q", "Q", "\x03"} {
		u := newUser(t)
		unreachable := func(ctx context.Context) (*ssh.Client, error) {
			return nil, fmt.Errorf("dial: %w", ssh.ErrUnreachable)
		}
		ended := start(t, u, Options{Dial: unreachable})
		u.sees("reconnecting (2)")
		u.types("x" + key)
		if r := ends(t, ended); fail.CodeOf(r.err) != fail.Interrupted {
			t.Errorf("key %q: Run: error %v, want code %v", key, r.err, fail.Interrupted)
		}
		u.sees("\x1b[?1049l")
	}
	// Giving up also works while a dial hangs.
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
		t.Errorf("key q during a dial: Run: error %v, want code %v", r.err, fail.Interrupted)
	}
}

func TestHopelessErrorsEndIt(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	other := newGuest(t)
	g.target.HostKey = other.target.HostKey
	if r := ends(t, start(t, u, Options{Dial: g.dial})); !errors.Is(r.err, ssh.ErrHostKey) {
		t.Errorf("Run with another host key: error %v, want %v", r.err, ssh.ErrHostKey)
	}
	gone := fail.New(fail.NotFound, "no such session")
	if r := ends(t, start(t, newUser(t), Options{Dial: func(context.Context) (*ssh.Client, error) { return nil, gone }})); !errors.Is(r.err, gone) {
		t.Errorf("Run without a session: error %v, want %v", r.err, gone)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Options{Dial: g.dial, In: u.tty, Out: u.tty}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Run: error %v, want %v", err, context.Canceled)
	}
}

// TestPipes checks that, without a terminal, no escape sequences are added to the output.
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
	const want = "term=xterm-256color size=80x24\r\ncommand=c\r\n"
	if code != 7 || err != nil || string(got) != want {
		t.Errorf("Run = %d, %v with output %q, want 7, nil, %q", code, err, got, want)
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
	if got := strings.Join(got, " "); got != "first 999" {
		t.Errorf("copied %q, want %q", got, "first 999")
	}
}

// everything returns all output to the terminal since it was opened.
func (u *user) everything() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.all.String()
}

// unread returns the input that a shell would read next.
func (u *user) unread() string {
	u.t.Helper()
	fd := int(u.tty.Fd())
	saved, err := term.MakeRaw(fd) // to read incomplete lines as well
	if err != nil {
		u.t.Fatal(err)
	}
	defer func() { _ = term.Restore(fd, saved) }()
	const end = "END"
	u.types(end)
	var all []byte
	for buf := make([]byte, 256); !bytes.HasSuffix(all, []byte(end)); {
		n, err := u.tty.Read(buf)
		if err != nil {
			u.t.Fatal(err)
		}
		all = append(all, buf[:n]...)
	}
	return strings.TrimSuffix(string(all), end)
}

// TestHostileGuest checks that a hostile guest can draw, but has no other effect on the
// terminal.
func TestHostileGuest(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	g.prints = "drawn\x1b[21t\x1b[5i\x1bP$qm\x1b\\\x1b_Gf=100;AAAA\x1b\\\x1b]50;?\x07\x1b]11;red\x07\x1b[?2l\x1b%@\x05\u009b21t\x1b]0;cut off"
	ended := start(t, u, Options{Dial: g.dial})
	u.sees("command=")
	u.types("P")
	u.sees("drawn")
	u.types("D")
	u.sees("connection lost")
	u.sees("command=") // printed as text, not swallowed by the unfinished title
	u.types("X")
	ends(t, ended)
	u.sees("\x1b[?2004l")
	if got := termtexttest.ScreenEffects(u.everything()); len(got) > 0 {
		t.Errorf("effects on the terminal = %q, want none", got)
	}
}

// TestNothingIsLeftTyped checks that neither late answers of the terminal nor unread input
// reach the user's shell.
func TestNothingIsLeftTyped(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	g.prints = "\x1b[c\x1b[>c\x1b]11;?\x07asked"
	ended := start(t, u, Options{Dial: g.dial, answerWait: time.Minute})
	u.sees("command=")
	u.types("P")
	u.sees("asked")
	u.types("X")
	u.sees(question) // a distant terminal answers late, but in order
	u.types("\x1b[?62;22c\x1b[>1;4402;0c")
	u.types("\x1b]11;rgb:0000/0000/0000\x07typed\n" + answer)
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v, want 7, nil", r.code, r.err)
	}
	if left := u.unread(); left != "" {
		t.Errorf("the shell reads %q, want nothing", left)
	}
}

// TestTerminalThatDoesNotAnswer checks that a terminal that is silent or gone does not
// delay the exit.
func TestTerminalThatDoesNotAnswer(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	g.prints = "\x1b[casked"
	ended := start(t, u, Options{Dial: g.dial, answerWait: time.Millisecond})
	u.sees("command=")
	u.types("P")
	u.sees("asked")
	u.types("X")
	u.sees(question)
	if r := ends(t, ended); r.code != 7 || r.err != nil {
		t.Errorf("Run = %d, %v, want 7, nil", r.code, r.err)
	}
	if left := u.unread(); left != "" {
		t.Errorf("the shell reads %q, want nothing", left)
	}
}

// TestModesAreReset checks that every mode that a guest can turn on is off again at the
// end, after a clean exit and after a lost connection.
func TestModesAreReset(t *testing.T) {
	var modes []string
	for mode := range 9000 {
		modes = append(modes, fmt.Sprintf("\x1b[?%dh", mode), fmt.Sprintf("\x1b[%dh", mode))
	}
	on := "\x1b[?25l\x1b[?7l\x1b[>7u\x1b[=5;1u\x1b[>4;2m\x1b[2;5r\x1b[1;31;8m\x1b=\x1b(0\x1b)0\x0e\x1b[5 qon"
	for name, key := range map[string]string{"exit": "X", "a lost connection": "D"} {
		t.Run(name, func(t *testing.T) {
			g, u := newGuest(t), newUser(t)
			g.prints = strings.Join(modes, "") + on
			ended := start(t, u, Options{Dial: g.dial})
			u.sees("command=")
			u.types("P")
			u.sees("on")
			if key == "D" {
				_ = g.ln.Close()
			}
			u.types(key)
			if key == "D" {
				u.sees("connection lost")
				u.types("q")
			}
			ends(t, ended)
			u.sees("\x1b[?1049l")
			u.types("end")
			u.sees("end") // echoed after everything else
			state := map[string]string{}
			for _, m := range regexp.MustCompile(`\x1b\[(\??)([0-9;]+)([hl])`).FindAllStringSubmatch(u.everything(), -1) {
				for mode := range strings.SplitSeq(m[2], ";") {
					state[m[1]+mode] = m[3]
				}
			}
			normal := map[string]string{"?25": "h", "?7": "h", "34": "h", "?1048": "h"} // ?1048 saves the cursor
			// Leaving the alternate screen under one name leaves it under its other names,
			// too.
			if state["?47"] == "l" && state["?1049"] == "l" {
				state["?1047"] = "l"
			}
			if len(state) < 20 {
				t.Errorf("the terminal received %d modes, %v, want at least 20", len(state), state)
			}
			for mode, last := range state {
				if want := cmp.Or(normal[mode], "l"); last != want {
					t.Errorf("mode %s at the end = %q, want %q", mode, last, want)
				}
			}
			rest := u.everything()[strings.LastIndex(u.everything(), "on"):]
			for _, want := range []string{"\x1b[<99u", "\x1b[>4m", "\x1b[r", "\x1b[0m", "\x1b>", "\x1b(B", "\x1b)B", "\x0f", "\x1b[0 q"} {
				if !strings.Contains(rest, want) {
					t.Errorf("output at the end = %q, want %q in it", rest, want)
				}
			}
		})
	}
}

// TestSuccess checks that, without OnCopy, a copy goes to the user's terminal, and that a
// command that exits with 0 ends the attach.
func TestSuccess(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	ended := start(t, u, Options{Dial: g.dial, Title: "a\x1b]0;evil"})
	u.sees("\x1b]2;a\x07")
	u.sees("command=")
	u.types("C")
	u.sees("\x1b]52;c;aGVsbG8=")
	u.types("Y")
	if r := ends(t, ended); r.code != 0 || r.err != nil {
		t.Errorf("Run = %d, %v, want 0, nil", r.code, r.err)
	}
	u.sees("\x1b7" + modes + "\x1b8\x1b[0m") // the cursor stays where the guest's tmux left it
	if got := u.everything(); strings.Contains(got, mainScreen) || strings.Contains(got, question) {
		t.Errorf("the terminal received %q, want neither %q nor %q", got, mainScreen, question)
	}
}

// TestRestore checks what is written at the end. It depends on whether the end was clean,
// and on the modes that the guest left on.
func TestRestore(t *testing.T) {
	whole := modes + mainScreen + keys + "\r\n"
	for _, c := range []struct {
		name, guest string
		clean       bool
		want        string
	}{
		{"a clean end", "text", true, "\x1b7" + modes + "\x1b8\x1b[0m"},
		{"a clean end on the other screen", "\x1b[?1049h", true, whole},
		{"a lost connection", "text", false, whole},
	} {
		u := newUser(t)
		s, err := prepare(Options{In: u.tty, Out: u.tty})
		if err != nil {
			t.Fatal(err)
		}
		s.filter = termtext.NewScreenFilter(s, nil)
		if _, err := io.WriteString(s.filter, c.guest); err != nil {
			t.Fatal(err)
		}
		u.types("typed")
		readable(t, u.tty)
		s.restore(c.clean)
		if left := u.unread(); left != "" {
			t.Errorf("%s: the shell reads %q, want nothing", c.name, left)
		}
		u.types("end\n")
		u.sees("end") // echoed: the terminal has left raw mode
		if got, want := u.everything(), c.guest+c.want+"end"; !strings.HasPrefix(got, want) {
			t.Errorf("%s: the terminal received %q, want prefix %q", c.name, got, want)
		}
	}
}

// TestSizeAndNotice checks that a terminal without a size counts as 80 by 24, and that a
// notice fits on one line.
func TestSizeAndNotice(t *testing.T) {
	u := newUser(t)
	s := &screen{out: u.tty, tty: true, in: u.tty}
	for size, want := range map[pty.Winsize][2]int{
		{Rows: 30, Cols: 90}: {90, 30}, {}: {80, 24}, {Rows: 30}: {80, 24}, {Cols: 90}: {80, 24}, {Rows: 1, Cols: 1}: {1, 1},
	} {
		if err := pty.Setsize(u.tty, &size); err != nil {
			t.Fatal(err)
		}
		if w, h := s.size(); w != want[0] || h != want[1] {
			t.Errorf("size() of %+v = %d, %d, want %d, %d", size, w, h, want[0], want[1])
		}
	}
	if err := pty.Setsize(u.tty, &pty.Winsize{Rows: 12, Cols: 10}); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{"12345678": " 12345678 ", "123456789": " 123456789", "äöüäöüäöüä": " äöüäöüäöü"} {
		s.notice(text)
		u.sees(modes + "\x1b[12;1H\x1b[2K\x1b[7m" + want + "\x1b[0m")
	}
}

// TestGuestTerm checks that a guest gets a TERM that it knows.
func TestGuestTerm(t *testing.T) {
	for _, name := range []string{
		"linux", "rxvt", "rxvt-unicode", "rxvt-unicode-256color", "screen", "screen-256color", "screen.xterm-256color",
		"tmux", "tmux-256color", "vt100", "vt220", "xterm", "xterm-256color", "xterm-color",
	} {
		if got := GuestTerm(name); got != name {
			t.Errorf("GuestTerm(%q) = %q, want the same", name, got)
		}
	}
	for _, name := range []string{"", "xterm-kitty", "alacritty", "foot", "x\ny"} {
		if got := GuestTerm(name); got != "xterm-256color" {
			t.Errorf("GuestTerm(%q) = %q, want %q", name, got, "xterm-256color")
		}
	}
}

// TestPauseEnds checks that a key, the end of the terminal and the end of the context each
// end a pause, however long it is.
func TestPauseEnds(t *testing.T) {
	var dials atomic.Int32
	unreachable := func(context.Context) (*ssh.Client, error) {
		dials.Add(1)
		return nil, ssh.ErrUnreachable
	}
	typing := newUser(t)
	keyed := start(t, typing, Options{Dial: unreachable, retryMin: time.Hour})
	typing.sees("reconnecting (1)")
	typing.types("q")
	if r := ends(t, keyed); fail.CodeOf(r.err) != fail.Interrupted {
		t.Errorf("key q in a pause: Run: error %v, want code %v", r.err, fail.Interrupted)
	}
	master, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	hangUp := func(ctx context.Context) (*ssh.Client, error) {
		if err := master.Close(); err != nil {
			return nil, err
		}
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if _, err := Run(t.Context(), Options{Dial: hangUp, In: tty, Out: tty}); fail.CodeOf(err) != fail.Interrupted {
		t.Errorf("Run on a terminal that is gone: error %v, want code %v", err, fail.Interrupted)
	}
	u := newUser(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := Run(ctx, Options{Dial: unreachable, In: u.tty, Out: u.tty, keepEvery: time.Hour, retryMin: time.Hour})
		ended <- err
	}()
	u.sees("VM: connection lost, reconnecting (1)")
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || !strings.HasPrefix(err.Error(), "attach: ") {
		t.Errorf("Run cancelled in a pause: error %v, want %v with prefix %q", err, context.Canceled, "attach: ")
	}
	if n := dials.Load(); n != 2 {
		t.Errorf("%d dials in two pauses of an hour, want 2", n)
	}
}

// TestGiveUpClosesTheConnection checks that a connection that is established just as the
// user gives up is closed.
func TestGiveUpClosesTheConnection(t *testing.T) {
	g, u := newGuest(t), newUser(t)
	clients := make(chan *ssh.Client, 1)
	ended := start(t, u, Options{Dial: func(ctx context.Context) (*ssh.Client, error) {
		c, err := ssh.Dial(context.WithoutCancel(ctx), g.target)
		if err != nil {
			return nil, err
		}
		u.types("q")
		<-ctx.Done()
		clients <- c
		return c, nil
	}})
	if r := ends(t, ended); fail.CodeOf(r.err) != fail.Interrupted {
		t.Errorf("Run: error %v, want code %v", r.err, fail.Interrupted)
	}
	select {
	case <-(<-clients).Done():
	default:
		t.Error("the connection is open after the user gave up, want it closed")
	}
}

// raw puts the terminal into raw mode, and returns it as a file whose descriptor is at
// least low.
func (u *user) raw(low int) *os.File {
	u.t.Helper()
	fd, err := unix.FcntlInt(u.tty.Fd(), unix.F_DUPFD_CLOEXEC, low)
	if err != nil {
		u.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "tty")
	u.t.Cleanup(func() { _ = f.Close() })
	if _, err := term.MakeRaw(fd); err != nil {
		u.t.Fatal(err)
	}
	return f
}

// readable waits until f has input to read.
func readable(t *testing.T, f *os.File) {
	t.Helper()
	poll := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, -1)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 || err != nil {
			t.Fatalf("Poll = %d, %v, want 1", n, err)
		}
		return
	}
}

// TestWatchKeys checks that keys are watched on every descriptor that select(2) supports,
// and are not consumed after stop.
func TestWatchKeys(t *testing.T) {
	for _, low := range []int{3, 900} {
		u := newUser(t)
		tty := u.raw(low)
		pressed := make(chan struct{})
		stop, err := watchKeys(tty, func() { close(pressed) })
		if err != nil {
			t.Fatal(err)
		}
		u.types("q")
		<-pressed
		stop()
		if stop, err = watchKeys(tty, func() { t.Error("watchKeys took a key after stop, want none taken") }); err != nil {
			t.Fatal(err)
		}
		stop()
		if left := func() string { u.types("q"); return u.unread() }(); left != "q" {
			t.Errorf("input after stop = %q, want %q", left, "q")
		}
	}
	u := newUser(t)
	tty := u.raw(unix.FD_SETSIZE)
	stop, err := watchKeys(tty, func() { t.Error("watchKeys took a key from a high descriptor, want none taken") })
	if err != nil {
		t.Fatal(err)
	}
	u.types("q")
	stop()
	if left := u.unread(); left != "q" {
		t.Errorf("input of a high descriptor = %q, want %q", left, "q")
	}
	(&screen{in: tty, out: u.tty}).drain() // does not read from it, either
	u.sees(question)
}

// TestDrainFindsACutAnswer checks that the answer is found wherever a read splits it.
func TestDrainFindsACutAnswer(t *testing.T) {
	for junk := 4086; junk <= 4098; junk++ {
		u := newUser(t)
		tty := u.raw(3)
		done := make(chan struct{})
		go func() {
			defer close(done)
			(&screen{in: tty, out: tty, answerWait: time.Hour}).drain()
		}()
		u.sees(question)
		u.types(strings.Repeat("x", junk) + answer)
		<-done
		if left := u.unread(); left != "" {
			t.Errorf("input left after %d bytes and the answer = %q, want none", junk, left)
		}
	}
}

// TestDiscardInput checks that unread input is discarded, and that the mode of the terminal
// does not change.
func TestDiscardInput(t *testing.T) {
	u := newUser(t)
	tty := u.raw(3)
	before, err := term.GetState(int(tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	u.types("typed")
	readable(t, tty)
	discardInput(int(tty.Fd()))
	after, err := term.GetState(int(tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if *after != *before {
		t.Errorf("mode of the terminal after discardInput = %+v, want %+v", *after, *before)
	}
	if left := u.unread(); left != "" {
		t.Errorf("input after discardInput = %q, want none", left)
	}
	pipe, _, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	discardInput(int(pipe.Fd())) // not a terminal
}
