package ssh

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/peer"
)

// A relay lets other processes of this user run commands over a connection that
// stands: they speak SSH to it over a UNIX socket, and every channel of theirs
// is one of the connection's. The kernel says who they are; the keys and the
// ciphers between them and the relay protect nothing and are the cheapest.

const (
	// An sshd lets a connection have 64 sessions at once (our sshd_config). What
	// finds no room here dials the guest itself.
	relayClients  = 15
	relayChannels = 4 // of one client

	relayOpen  = 10 * time.Second // for the guest to answer that it opens a channel: a login would take longer
	relayHello = 5 * time.Second  // for a relay to answer; then one dials the guest
	relayGreet = 10 * time.Second // for a client to say who it is
	relayDrain = 5 * time.Second  // for the guest to take what a client that left had sent

	requestBound = 4 << 10 // of what a guest says about how a command ended

	// socketBound is the longest path of a UNIX socket that every system takes:
	// 104 bytes on macOS, its NUL included.
	socketBound = 103
)

// What a relay passes on; everything else it refuses, in both directions.
var (
	relayedChannels = []string{"session", "direct-tcpip", "direct-streamlocal@openssh.com"}
	relayedRequests = []string{"env", "pty-req", "window-change", "exec", "shell", "subsystem", "signal"}
	relayedOutcomes = []string{"exit-status", "exit-signal"}
)

// ListenRelay makes the socket for a relay, in place of what a dead process has
// left there. The caller sees to it that no living one listens, and that the
// directory is its user's only.
func ListenRelay(path string) (*net.UnixListener, error) {
	if len(path) > socketBound {
		return nil, fmt.Errorf("listen on %s: the path of a socket has at most %d bytes", path, socketBound)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// dialRelay connects to a guest through a relay. It returns once the guest has
// opened a session, so that a relay which has no room, or whose connection is
// not what it was, is an error here, where another way can still be taken.
func dialRelay(ctx context.Context, t Target) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, relayHello+relayOpen)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", t.Relay)
	if err != nil {
		return nil, fmt.Errorf("connect to the relay: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := peer.Own(conn.(*net.UnixConn)); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	// A relay that is stopped takes connections and says nothing.
	_ = conn.SetDeadline(time.Now().Add(relayHello))
	c, chans, reqs, err := ssh.NewClientConn(conn, t.Relay, &ssh.ClientConfig{
		Config:            relayConfig(),
		HostKeyCallback:   ssh.InsecureIgnoreHostKey(), // peer.Own knows who it is
		HostKeyAlgorithms: []string{ssh.KeyAlgoED25519},
	})
	if err != nil {
		return nil, fmt.Errorf("connect to the relay: %w", errors.Join(err, conn.Close()))
	}
	_ = conn.SetDeadline(time.Time{})
	cl := newClient(t, conn, c, chans, reqs)
	session, err := cl.session() // bound by the connection, which ctx closes
	if err == nil && !stop() {
		err = ctx.Err()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect through the relay: %w: %s", ErrUnreachable, brief(err.Error())), cl.Close())
	}
	cl.opened = session
	return cl, nil
}

func relayConfig() ssh.Config {
	return ssh.Config{
		KeyExchanges: []string{ssh.KeyExchangeCurve25519},
		Ciphers:      []string{ssh.CipherAES128GCM},
	}
}

// relay is the serving side.
type relay struct {
	guest  *Client
	config *ssh.ServerConfig
}

// Relay serves the connection to this user's other processes on l until ctx is
// done, the connection is lost or l fails. Then both are closed, and what ran
// over them has ended. Nothing else that uses the connection should need it longer.
func (c *Client) Relay(ctx context.Context, l *net.UnixListener) error {
	defer l.Close()
	_, secret, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return fmt.Errorf("make the relay's key: %w", err)
	}
	key, err := ssh.NewSignerFromKey(secret)
	if err != nil {
		return fmt.Errorf("make the relay's key: %w", err)
	}
	r := &relay{guest: c, config: &ssh.ServerConfig{Config: relayConfig(), NoClientAuth: true}}
	r.config.AddHostKey(key)

	ctx, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	defer func() {
		cancel()
		_ = c.Close() // wakes whoever waits for the guest
		clients.Wait()
	}()
	clients.Go(func() {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
		_ = l.Close()
	})
	room := make(chan struct{}, relayClients)
	for {
		conn, err := l.AcceptUnix()
		select {
		case <-c.done:
			err = fmt.Errorf("%w: the connection was lost", ErrUnreachable)
		case <-ctx.Done():
			err = context.Cause(ctx)
		default:
		}
		if err != nil {
			if conn != nil {
				_ = conn.Close()
			}
			return err
		}
		if peer.Own(conn) != nil {
			_ = conn.Close()
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = conn.Close()
			continue
		}
		clients.Go(func() {
			defer func() { <-room }()
			r.serve(ctx, conn)
		})
	}
}

// serve is one client. It returns when all that the client opened is closed in
// the guest too, which is when its place is free again.
func (r *relay) serve(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(relayGreet))
	_, chans, reqs, err := ssh.NewServerConn(conn, r.config)
	if err != nil {
		return
	}
	_ = conn.SetDeadline(time.Time{})
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { ssh.DiscardRequests(reqs) }) // its keep-alives are for us, the guest gets ours
	room := make(chan struct{}, relayChannels)
	for n := range chans {
		if !slices.Contains(relayedChannels, n.ChannelType()) {
			_ = n.Reject(ssh.UnknownChannelType, "not relayed")
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			_ = n.Reject(ssh.ResourceShortage, "too many channels")
			continue
		}
		tasks.Go(func() {
			defer func() { <-room }()
			r.channel(n)
		})
	}
}

// half is one side of a relayed channel.
type half struct {
	ssh.Channel
	reqs <-chan *ssh.Request
}

// channel opens in the guest what the client asks for, and carries it.
func (r *relay) channel(n ssh.NewChannel) {
	type result struct {
		half
		err error
	}
	opened := make(chan result, 1)
	go func() { // nobody waits for it, as in Client.session
		ch, reqs, err := r.guest.ssh.OpenChannel(n.ChannelType(), n.ExtraData())
		opened <- result{half{ch, reqs}, err}
	}()
	timer := time.NewTimer(relayOpen)
	defer timer.Stop()
	var guest result
	select {
	case guest = <-opened:
	case <-r.guest.done:
		return
	case <-timer.C:
		_ = n.Reject(ssh.ConnectionFailed, "the VM does not answer")
		select {
		case guest = <-opened:
			if guest.err == nil {
				guest.abandon()
			}
		case <-r.guest.done:
		}
		return
	}
	if guest.err != nil {
		reason, text := ssh.ConnectionFailed, guest.err.Error()
		if e, ok := errors.AsType[*ssh.OpenChannelError](guest.err); ok {
			reason, text = e.Reason, e.Message
		}
		_ = n.Reject(reason, brief(text))
		return
	}
	ch, reqs, err := n.Accept()
	if err != nil { // the client has left
		guest.abandon()
		return
	}
	carry(half{ch, reqs}, guest.half)
}

// abandon closes a channel and waits until the guest has too.
func (h half) abandon() {
	_ = h.Close()
	ssh.DiscardRequests(h.reqs)
}

// carry passes everything between the two ends of a channel until both are closed.
func carry(client, guest half) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	sent, said := make(chan struct{}), make(chan struct{})
	tasks.Go(func() {
		defer close(sent)
		_, _ = io.Copy(guest, client) // either may go at any time
		_ = guest.CloseWrite()
	})
	tasks.Go(func() {
		defer close(said)
		var streams sync.WaitGroup
		streams.Go(func() { _, _ = io.Copy(client, guest) })
		streams.Go(func() { _, _ = io.Copy(client.Stderr(), guest.Stderr()) })
		streams.Wait()
		_ = client.CloseWrite()
	})
	// A command may end before it was said that it began.
	var answering sync.Mutex
	tasks.Go(func() { requests(client, guest, sent, &answering) })
	outcome(client, guest, said, &answering)
}

// requests passes on what the client asks for, in order, and closes the
// guest's end once the client has closed its own. It never waits for the guest
// while it listens to the client, whose leaving must not go unheard.
func requests(client, guest half, sent <-chan struct{}, answering *sync.Mutex) {
	queue, passed := make(chan *ssh.Request, 64), make(chan struct{})
	go func() {
		defer close(passed)
		for req := range queue {
			answering.Lock() // a closed channel ends SendRequest, so not for long after that
			ok, err := guest.SendRequest(req.Type, req.WantReply, req.Payload)
			if req.WantReply {
				_ = req.Reply(ok && err == nil, nil)
			}
			answering.Unlock()
		}
	}()
	for req := range client.reqs {
		if !slices.Contains(relayedRequests, req.Type) {
			_ = req.Reply(false, nil)
			continue
		}
		select {
		case queue <- req:
		default: // the guest does not answer, and the client does not care
			_ = client.Close()
		}
	}
	close(queue)
	// What it asked and wrote before it left is still meant, but not for long.
	timer := time.NewTimer(relayDrain)
	defer timer.Stop()
	for _, done := range []<-chan struct{}{passed, sent} {
		select {
		case <-done:
		case <-timer.C:
			_ = guest.Close() // which ends both, once the guest closes too
			<-passed
			return
		}
	}
	_ = guest.Close()
}

// outcome takes what the guest says of the channel until it closes it, then
// tells the client how it ended, after all that it wrote. It never waits for
// the client while it listens to the guest: the library would stop reading the
// connection for everybody.
func outcome(client, guest half, said <-chan struct{}, answering *sync.Mutex) {
	var last []*ssh.Request
	for req := range guest.reqs {
		if slices.Contains(relayedOutcomes, req.Type) && len(req.Payload) <= requestBound && len(last) < len(relayedOutcomes) {
			last = append(last, req)
		}
		if req.WantReply {
			_ = req.Reply(false, nil)
		}
	}
	<-said
	answering.Lock()
	defer answering.Unlock()
	for _, req := range last {
		_, _ = client.SendRequest(req.Type, false, req.Payload)
	}
	_ = client.Close()
}
